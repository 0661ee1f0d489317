"""torchtitan's trainer."""


def train(trainer, coordinator, batches, steps):
    import fp8dist as f8

    f8.schedules.torchtitan.attach(trainer, coordinator)
    for trainer.step in range(1, steps + 1):
        trainer.train_step(batches)
