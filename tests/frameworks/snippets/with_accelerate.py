"""Hugging Face Accelerate."""


def train(accelerator, model, coordinator, optimizer, loader, loss_fn):
    from fp8dist.integrations.accelerate import attach

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attach(accelerator, coordinator, optimizer)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
