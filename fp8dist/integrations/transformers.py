"""The Trainer of transformers: one scope per optimizer step, and the state beside its checkpoints."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from .. import checkpoints
from ..coordinator import ReductionGroupCoordinator
from ..schedules._window import Window

logger = logging.getLogger("fp8dist")


class _StepScope(TrainerCallback):
    """Opens and closes the scope. An exception is not among what a callback hears of, so `attach` does the rest."""

    def __init__(self, coordinator: ReductionGroupCoordinator, window: Window, folder: str) -> None:
        self._coordinator = coordinator
        self._window = window
        self._folder = folder

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._window.open(state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._window.close()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._window.cancel()  # training was stopped in the middle of an accumulation

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        assert args.output_dir is not None
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        checkpoints.save(self._coordinator, directory / self._folder)


def attach(trainer: Any, coordinator: ReductionGroupCoordinator, *, folder: str = "fp8") -> None:
    """Let each optimizer step of a trainer be one scope.

    The scope spans the accumulation, closes before the optimizer and is left by whatever `train` raises. Evaluation
    runs outside. Every checkpoint gets the coordinator's state, in a folder of its own, and `train` loads it where it
    resumes; a checkpoint without one starts with cold scales, with a warning. The step's tag is `global_step`.

    Args:
        trainer: a `Trainer`, whose `train` is replaced, in this object only, and which gets a callback. Its model is
            converted.
        coordinator: of this process.
        folder: of the state, in the folder of a trainer's checkpoint; one for each coordinator.

    Raises:
        ValueError: the trainer is attached already, or its `auto_find_batch_size` is set, which swallows exceptions.
    """
    if trainer.args.auto_find_batch_size:
        raise ValueError(
            "attach() expects auto_find_batch_size=False but got True: it retries a step that failed without telling "
            "the other ranks; set per_device_train_batch_size"
        )
    if "train" in vars(trainer):
        raise ValueError("this trainer is attached to a coordinator already; attach it once")
    window = Window(coordinator)
    trainer.add_callback(_StepScope(coordinator, window, folder))
    train = trainer.train

    @functools.wraps(train)
    def run(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        place = _checkpoint(trainer.args.output_dir, resume_from_checkpoint)
        if place is not None and place.is_dir():
            _load(coordinator, place / folder)
        with window.failing():
            return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = run


def _checkpoint(directory: str, resume: str | bool | None) -> Path | None:
    """The folder that `train` will resume from, if it does."""
    if resume is True:
        resume = get_last_checkpoint(directory)
    return Path(str(resume)) if resume else None


def _load(coordinator: ReductionGroupCoordinator, path: Path) -> None:
    if path.is_dir() or coordinator.recipe.stateless:
        checkpoints.load(coordinator, path)
    else:
        logger.warning("%s is not there: the checkpoint has no FP8 state, so all scales start cold", path)
