"""Adapter for torch's pipeline schedules: a proxy that opens the scope, and a gate around the chunk methods.

Why a proxy: `schedule.eval()` calls `self.step()`, so a patched `step` would open scopes in evaluation.
Why a gate: from torch 2.12 the first `step()` (and every switch between eval and step) runs a hidden forward
and backward on uninitialised memory to learn shapes. Only the chunk methods are real work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .._header import Tag
from ..coordinator import ReductionGroupCoordinator
from ..errors import ScheduleMismatch

_FORWARD, _BACKWARD = "forward_one_chunk", "backward_one_chunk"
_CHUNK_METHODS = (_FORWARD, _BACKWARD, "backward_weight_one_chunk")


class AttachedSchedule:
    """A schedule whose `step` is one scope of a coordinator. Everything else is the schedule's own."""

    def __init__(
        self,
        schedule: Any,
        coordinator: ReductionGroupCoordinator,
        stages: Sequence[Any],
        tag_fn: Callable[[], Tag] | None,
    ) -> None:
        self._schedule = schedule
        self._coordinator = coordinator
        self._stages = tuple(stages)
        self._tag_fn = tag_fn
        self._done: dict[tuple[str, int], int] = {}
        self._gate_is_for_training = False
        for stage in self._stages:
            coordinator.label_stage(stage.submod, stage.stage_index)
            for method in _CHUNK_METHODS:
                setattr(stage, method, self._gated(getattr(stage, method), method, stage.stage_index))

    def _gated(self, chunk: Callable[..., Any], method: str, stage: int) -> Callable[..., Any]:
        @functools.wraps(chunk)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._gate_is_for_training:
                return chunk(*args, **kwargs)
            key = (method, stage)
            self._done[key] = self._done.get(key, 0) + 1
            with self._coordinator.resumed():
                return chunk(*args, **kwargs)

        return run

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's `step`, in a scope of the coordinator.

        Raises:
            ScheduleMismatch: a stage ran other forwards than backwards; nothing is committed.
        """
        tag = self._tag_fn() if self._tag_fn is not None else None
        with self._coordinator.step(tag):
            self._done.clear()
            self._gate_is_for_training = True
            try:
                with self._coordinator.paused():
                    result = self._schedule.step(*args, **kwargs)
            finally:
                self._gate_is_for_training = False
            self._compare_counts()
        return result

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's `eval`: no scope, no collective, nothing recorded."""
        with self._coordinator.paused():
            return self._schedule.eval(*args, **kwargs)

    def _compare_counts(self) -> None:
        if getattr(self._schedule, "_loss_fn", True) is None:  # a forward-only schedule
            return
        for stage in self._stages:
            forwards = self._done.get((_FORWARD, stage.stage_index), 0)
            backwards = self._done.get((_BACKWARD, stage.stage_index), 0)
            if forwards != backwards:
                raise ScheduleMismatch(
                    f"stage {stage.stage_index} expects as many backwards as forwards in one step but ran {forwards} "
                    f"forwards and {backwards} backwards ({abs(forwards - backwards)} of difference); if the schedule "
                    "skips microbatches on purpose, wrap its step with schedules.wrap_step instead"
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)


def attach(
    schedule: Any,
    coordinator: ReductionGroupCoordinator,
    *,
    stages: Sequence[Any],
    tag_fn: Callable[[], Tag] | None = None,
) -> AttachedSchedule:
    """Let a torch pipeline schedule open one scope per `step`.

    Args:
        schedule: `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B` or `ScheduleLoopedBFS`.
        coordinator: of this process.
        stages: the `PipelineStage`s that this rank runs in `schedule`; may hold no FP8 module.
        tag_fn: gives the step's tag, e.g. the optimizer step number.

    Returns:
        A proxy to use in place of `schedule`.

    Raises:
        ValueError: no stages, not a schedule or stage, a stage attached twice, one slot name in two stages.
    """
    if isinstance(schedule, AttachedSchedule):
        raise ValueError(
            "this schedule is attached to a coordinator already; attach the schedule itself, once"
        )
    if not callable(getattr(schedule, "step", None)) or not callable(getattr(schedule, "eval", None)):
        raise ValueError(
            f"attach() expects a torch pipeline schedule with step() and eval() but got {type(schedule).__name__}; "
            "for any other step function use schedules.wrap_step"
        )
    if not stages:
        raise ValueError("attach() expects the PipelineStages of this rank in stages= but got none")
    for stage in stages:
        if not all(callable(getattr(stage, method, None)) for method in _CHUNK_METHODS):
            raise ValueError(f"stages= expects PipelineStages but got {type(stage).__name__}")
        if _FORWARD in vars(stage):
            raise ValueError(
                f"stage {stage.stage_index} is attached already; build new PipelineStages for another schedule"
            )
    return AttachedSchedule(schedule, coordinator, stages, tag_fn)
