"""DualPipe."""


def train(stages, coordinator, optimizer, steps, **arguments):
    from dualpipe import DualPipe

    import fp8dist as f8

    model = DualPipe(stages)
    f8.schedules.dualpipe.attach(model, coordinator)
    for inputs, labels in steps:
        model.step(inputs, labels=labels, **arguments)
        optimizer.step()
        optimizer.zero_grad()
    return model
