"""The Trainer of transformers."""


def train(model, coordinator, arguments, dataset, resume_from_checkpoint=None):
    from transformers import Trainer

    from fp8dist.integrations.transformers import attach

    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    attach(trainer, coordinator)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
