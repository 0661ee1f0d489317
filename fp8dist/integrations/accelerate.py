"""Hugging Face Accelerate: the scope spans an accumulation window of `accelerator.accumulate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from .. import checkpoints
from ..coordinator import ReductionGroupCoordinator
from ..schedules._window import Window


def attach(
    accelerator: Accelerator,
    coordinator: ReductionGroupCoordinator,
    *optimizers: Optimizer,
    folder: str = "fp8",
) -> None:
    """Let the microbatches between two optimizer steps be one scope.

    It opens at the first `accelerator.accumulate(...)` of a window and commits before the first optimizer steps, or
    at the end of the window's last `accumulate` where none does (a gradient scaler skipped it). An exception inside
    `accumulate` leaves it. `save_state` and `load_state` take the coordinator's state along; every rank calls both.

    Args:
        accelerator: its `accumulate` is replaced, in this object only.
        coordinator: of this process.
        optimizers: those that step inside `accumulate`, prepared or not.
        folder: of the state, in the folder of an accelerator's checkpoint; one for each coordinator.

    Raises:
        ValueError: no optimizer, or an accelerator that is attached already.
    """
    if not optimizers:
        raise ValueError(
            "attach() expects the optimizers that step inside accumulate() but got none; pass them"
        )
    if "accumulate" in vars(accelerator):
        raise ValueError("this accelerator is attached to a coordinator already; attach it once")
    window = Window(coordinator)
    accumulate_inside = accelerator.accumulate

    @contextmanager
    def accumulate(*models: nn.Module) -> Iterator[None]:
        with window.failing():
            window.open()
            with accumulate_inside(*models):
                yield
            if accelerator.sync_gradients:
                window.close()

    def save(models: Any, weights: Any, directory: str) -> None:
        checkpoints.save(coordinator, Path(directory) / folder)

    def load(models: Any, directory: str) -> None:
        checkpoints.load(coordinator, Path(directory) / folder)

    for optimizer in optimizers:
        # Accelerate's own wrapper takes no hooks; torch's optimizer inside it does, and a skipped step calls none.
        getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: window.close())
    accelerator.accumulate = accumulate
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
