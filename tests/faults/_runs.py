"""What the fault tests share: a coordinator with short times, and a model with global names."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import fp8dist as f8


def make(recipe: f8.Recipe | None = None, **options: Any) -> f8.ReductionGroupCoordinator:
    """A coordinator whose patience fits a test."""
    options = {"timeout": 3.0, "stall_warning": 0.5, **options}
    return f8.ReductionGroupCoordinator(recipe or f8.DelayedScaling(amax_history_len=4), **options)


def slots(coordinator: f8.ReductionGroupCoordinator, *names: str) -> list[f8.Slot]:
    """Slots of those names."""
    return [coordinator.slot(name) for name in names]


def record(slot: f8.Slot, value: float) -> None:
    """Record one amax and flag it."""
    slot.record(torch.tensor([value]))
    slot.request()


def frozen(coordinator: f8.ReductionGroupCoordinator) -> str:
    """Everything that a failed step must leave alone, as a hash of the exact bits."""
    state = coordinator.state_dict()
    h = hashlib.sha256(str(int(state["generation"])).encode())
    for name, fields in sorted(state["slots"].items()):
        h.update(name.encode())
        for tensor in fields.values():
            h.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
