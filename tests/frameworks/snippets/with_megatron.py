"""Megatron-Core, and forks of it with the same entry."""


def train(stage, coordinator, optimizer, iterations, **arguments):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import fp8dist as f8

    forward_backward = get_forward_backward_func()
    forward_backward = f8.schedules.megatron.attach(forward_backward, coordinator)
    for _ in range(iterations):
        forward_backward(model=stage, forward_only=False, **arguments)
        optimizer.step()
        optimizer.zero_grad()
    return forward_backward
