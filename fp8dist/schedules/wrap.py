"""Adapter for any framework that has one step callable per rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .._header import Tag
from ..coordinator import ReductionGroupCoordinator

P = ParamSpec("P")
R = TypeVar("R")


def wrap_step(
    fn: Callable[P, R],
    coordinator: ReductionGroupCoordinator,
    *,
    training: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None,
    tag_fn: Callable[[], Tag] | None = None,
    overlap: bool = False,
) -> Callable[P, R]:
    """Run `fn` in one scope per call; calls that are no training run without scope and record nothing.

    Args:
        fn: forward and backward of one optimizer step on this rank.
        coordinator: of this process.
        training: tells a training call from its positional and keyword arguments; None: every call is.
        tag_fn: gives the step's tag.
        overlap: do not wait for the reduction at the end of `fn`, see `coordinator.step`.
    """
    if not callable(fn):
        raise ValueError(f"wrap_step() expects a step function but got {type(fn).__name__}")

    @functools.wraps(fn)
    def step(*args: P.args, **kwargs: P.kwargs) -> R:
        if training is not None and not training(args, kwargs):
            with coordinator.paused():
                return fn(*args, **kwargs)
        with coordinator.step(tag_fn() if tag_fn is not None else None, overlap=overlap):
            return fn(*args, **kwargs)

    return step
