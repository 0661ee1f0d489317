"""DeepSpeed's pipeline engine."""


def train(pipeline, coordinator, optimizer, config, batches, steps):
    import deepspeed

    import fp8dist as f8

    engine, _, _, _ = deepspeed.initialize(model=pipeline, optimizer=optimizer, config=config)
    f8.schedules.deepspeed.attach(engine, coordinator)
    for _ in range(steps):
        engine.train_batch(data_iter=batches)
    return engine
