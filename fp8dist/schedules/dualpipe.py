"""DualPipe and DualPipeV: two stages per rank, and one `step` of the module for all microbatches."""

from __future__ import annotations

from typing import Any

import torch

from ..coordinator import ReductionGroupCoordinator
from .wrap import wrap_step


def attach(model: Any, coordinator: ReductionGroupCoordinator) -> None:
    """Let one `model.step(...)` be one scope; under `torch.no_grad()` it is none and records nothing.

    Weight gradients of FP8 layers are computed in the backward and not in the schedule's own weight steps.

    Args:
        model: a `DualPipe` or `DualPipeV`. Its two modules were converted with global names, e.g.
            `convert(stage, coordinator, prefix=f"stage{index}")`: both ranks of a mirrored pair then share scales.
        coordinator: of this process.

    Raises:
        ValueError: not such a module, attached already, or one slot name in both stages.
    """
    if not all(hasattr(model, name) for name in ("step", "module", "rank", "num_ranks")):
        raise ValueError(f"dualpipe.attach() expects a DualPipe or DualPipeV but got {type(model).__name__}")
    if "step" in vars(model):
        raise ValueError("this module is attached to a coordinator already; attach it once")
    for stage, index in zip(model.module, _stages(model), strict=True):
        coordinator.label_stage(stage, index)
    model.step = wrap_step(model.step, coordinator, training=lambda *_: torch.is_grad_enabled())


def _stages(model: Any) -> tuple[int, int]:
    """The stages of this rank. DualPipe holds every stage twice, DualPipeV twice as many stages as ranks."""
    count = 2 * model.num_ranks if type(model).__name__ == "DualPipeV" else model.num_ranks
    return model.rank, count - 1 - model.rank
