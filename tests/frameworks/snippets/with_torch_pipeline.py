"""A schedule of torch.distributed.pipelining."""


def train(stage, coordinator, optimizer, batches, loss_fn):
    from torch.distributed.pipelining import Schedule1F1B

    import fp8dist as f8

    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    schedule = f8.schedules.attach(schedule, coordinator, stages=[stage])
    for x, y in batches:
        if stage.is_first:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()
    return schedule
