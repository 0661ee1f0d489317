"""Gradient accumulation, by hand."""


def train(model, coordinator, optimizer, windows, loss_fn):
    for microbatches in windows:
        with coordinator.step():
            for x, y in microbatches:
                loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
