"""What the fault tests share: a coordinator with short times, and how a step ended on one rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import fp8dist as f8


@dataclass
class Ended:
    """How a step ended on one rank."""

    error: str | None
    text: str
    notes: str
    seconds: float
    before: str
    after: str
    named: int | None = None
    missing: tuple[int, ...] = ()
    refused: str | None = None
    digest: int = 0
    trained_on: str = ""
    history: list[float] = field(default_factory=list)


def make(recipe: f8.Recipe | None = None, **options: Any) -> f8.ReductionGroupCoordinator:
    """A coordinator whose patience fits a test."""
    options = {"timeout": 5.0, "stall_warning": 2.0, **options}
    return f8.ReductionGroupCoordinator(recipe or f8.DelayedScaling(amax_history_len=4), **options)


def record(slot: f8.Slot, value: float) -> None:
    """Record one amax and flag it."""
    slot.record(torch.tensor([value]))
    slot.request()


def attempt(coordinator: f8.ReductionGroupCoordinator, step: Callable[[], None]) -> Ended:
    """Run a step that may fail; tell how, how fast, and what became of the state."""
    names = sorted(coordinator.state_dict()["slots"])
    before, start = frozen(coordinator, names), time.monotonic()
    error: BaseException | None = None
    try:
        step()
    except BaseException as caught:
        error = caught
    seconds = time.monotonic() - start
    ended = Ended(
        error=type(error).__name__ if error else None,
        text=str(error),
        notes="\n".join(getattr(error, "__notes__", [])),
        seconds=seconds,
        before=before,
        after=frozen(coordinator, names),
        named=getattr(error, "rank", None),
        missing=getattr(error, "missing", ()),
    )
    try:
        with coordinator.step("refused"):
            pass
    except f8.Fp8DistError as refusal:
        ended.refused = type(refusal).__name__
    return ended


def frozen(coordinator: f8.ReductionGroupCoordinator, names: Sequence[str] | None = None) -> str:
    """Everything that a failed step must leave alone, as a hash of the exact bits; of all slots, or of some."""
    state = coordinator.state_dict()
    h = hashlib.sha256(str(int(state["generation"])).encode())
    for name, fields in sorted(state["slots"].items()):
        if names is not None and name not in names:
            continue
        h.update(name.encode())
        for tensor in fields.values():
            h.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
