"""Lightning."""


def train(module, coordinator, loader, ckpt_path=None, **options):
    from lightning.pytorch import Trainer

    from fp8dist.integrations.lightning import StepScope

    trainer = Trainer(callbacks=[StepScope(coordinator)], **options)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
