"""Adapter for torch's pipeline schedules: a proxy that opens the scope, and a gate around the chunk methods.

Why a proxy: `schedule.eval()` calls `self.step()`, so a patched `step` would open scopes in evaluation.
Why a gate: from torch 2.12 the first `step()` (and every switch between eval and step) runs a hidden forward
and backward on uninitialised memory to learn shapes. Only the chunk methods are real work.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .._header import Tag
from ..coordinator import ReductionGroupCoordinator
from ..errors import ScheduleMismatch
from ..modules._split import SplitsBackward

_FORWARD, _BACKWARD, _WEIGHT = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
_CHUNK_METHODS = (_FORWARD, _BACKWARD, _WEIGHT)
_SPLIT_ACTIONS = ("I", "W")  # torch's letters for the two halves of a backward


class AttachedSchedule:
    """A schedule whose `step` is one scope of a coordinator. Everything else is the schedule's own."""

    def __init__(
        self,
        schedule: Any,
        coordinator: ReductionGroupCoordinator,
        stages: Sequence[Any],
        tag_fn: Callable[[], Tag] | None,
        may_split: bool,
        overlap: bool,
    ) -> None:
        self._schedule = schedule
        self._coordinator = coordinator
        self._stages = tuple(stages)
        self._tag_fn = tag_fn
        self._may_split = may_split
        self._overlap = overlap
        self._done: Counter[tuple[str, int]] = Counter()
        self._gate_is_for_training = False
        self._gate = ExitStack()
        self._chunks_inside = 0
        self._lock = threading.Lock()
        for stage in self._stages:
            coordinator.label_stage(stage.submod, stage.stage_index)
            for method in _CHUNK_METHODS:
                setattr(stage, method, self._gated(getattr(stage, method), method, stage))
            _let_v_stages_evaluate(stage)

    def _gated(self, chunk: Callable[..., Any], method: str, stage: Any) -> Callable[..., Any]:
        @functools.wraps(chunk)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._gate_is_for_training:
                return chunk(*args, **kwargs)
            halves = self._halves(method, stage, args, kwargs)
            microbatch = args[0] if args and isinstance(args[0], int) else None
            self._coordinator.note_chunk(_letter(method, halves), stage.stage_index, microbatch)
            with self._gate_open():
                result = chunk(*args, **kwargs)
            with self._lock:
                self._done.update((half, stage.stage_index) for half in halves)
            return result

        return run

    def _halves(
        self, method: str, stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, ...]:
        """What a chunk method does: a full backward is a backward and a weight gradient in one."""
        if method != _BACKWARD:
            return (method,)
        if kwargs.get("full_backward", args[2] if len(args) > 2 else True):
            return (_BACKWARD, _WEIGHT)
        if not self._may_split and getattr(stage, "dw_builder", None) is None:
            raise ScheduleMismatch(
                f"stage {stage.stage_index} expects full backwards, as the schedule had when it was attached, but "
                "got one for its inputs only; attach after the actions are loaded, or with split_backward=True"
            )
        return (_BACKWARD,)

    @contextmanager
    def _gate_open(self) -> Iterator[None]:
        """Open the gate with the first chunk that comes in and shut it with the last that leaves.

        torch runs one after the other, but a custom function of a schedule may overlap them on threads.
        """
        with self._lock:
            if self._chunks_inside == 0:
                self._gate.enter_context(self._coordinator.resumed())
            self._chunks_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._chunks_inside -= 1
                if self._chunks_inside == 0:
                    self._gate.close()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's `step`, in a scope of the coordinator.

        Raises:
            ScheduleMismatch: a stage ran other numbers of forwards, backwards and weight gradients; nothing is
                committed.
        """
        tag = self._tag_fn() if self._tag_fn is not None else None
        with self._coordinator.step(tag, overlap=self._overlap):
            self._done.clear()
            for stage in self._stages:
                if getattr(stage, "dw_builder", None) is not None:
                    for layer in _layers(stage.submod):
                        layer.discard_dw()  # what a failed step left
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
            forwards, backwards, weights = (self._done[m, stage.stage_index] for m in _CHUNK_METHODS)
            if not forwards == backwards == weights:
                raise ScheduleMismatch(
                    f"stage {stage.stage_index} expects as many backwards and weight gradients as forwards in one "
                    f"step but ran {forwards} forwards and {backwards} backwards ({abs(forwards - backwards)} of "
                    f"difference) and {weights} weight gradients ({abs(forwards - weights)} of difference); if the "
                    "schedule skips microbatches on purpose, wrap its step with schedules.wrap_step instead"
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)


def attach(
    schedule: Any,
    coordinator: ReductionGroupCoordinator,
    *,
    stages: Sequence[Any],
    tag_fn: Callable[[], Tag] | None = None,
    split_backward: bool | None = None,
    overlap: bool = False,
) -> AttachedSchedule:
    """Let a torch pipeline schedule open one scope per `step`.

    A schedule that splits the backward makes the layers of its stages compute their weight gradients in a node
    of its own (`wgrad = "forked"`), except in stages that have a `dw_builder`. What runs where::

        GPipe, 1F1B, Interleaved1F1B, LoopedBFS       torch >= 2.11
        InterleavedZeroBubble                         torch >= 2.11; splits the backward
        ZBVZeroBubble, DualPipeV                      torch >= 2.12 (on gloo); split the backward
        _PipelineScheduleRuntime, loaded from CSV     as its actions; load them before attaching

    Args:
        schedule: one of these.
        coordinator: of this process.
        stages: the `PipelineStage`s that this rank runs in `schedule`; may hold no FP8 module.
        tag_fn: gives the step's tag, e.g. the optimizer step number.
        split_backward: the schedule computes weight gradients apart from input gradients; None reads it from
            the schedule's actions.
        overlap: `step` does not wait for its reduction, see `coordinator.step`.

    Returns:
        A proxy to use in place of `schedule`.

    Raises:
        ValueError: no stages, not a schedule or stage, a stage attached twice, one slot name in two stages, no
            actions loaded, a V schedule on CPU stages before torch 2.12, or deferred weight gradients that the
            schedule would never ask for.
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
    _check_stages(stages)
    splits = _splits_backward(schedule) if split_backward is None else split_backward
    if splits:
        _fork(stages)
    # An explicit False is believed: the stages then hold other layers than ours, or bear to run twice.
    return AttachedSchedule(schedule, coordinator, stages, tag_fn, splits or split_backward is False, overlap)


def _check_stages(stages: Sequence[Any]) -> None:
    if not stages:
        raise ValueError("attach() expects the PipelineStages of this rank in stages= but got none")
    for stage in stages:
        if not all(callable(getattr(stage, method, None)) for method in _CHUNK_METHODS):
            raise ValueError(f"stages= expects PipelineStages but got {type(stage).__name__}")
        if _FORWARD in vars(stage):
            raise ValueError(
                f"stage {stage.stage_index} is attached already; build new PipelineStages for another schedule"
            )
        ranks: dict[int, int] = getattr(stage, "stage_index_to_group_rank", {})
        neighbours = any(ranks.get(index + 1) == rank for index, rank in ranks.items())
        on_cpu = torch.device(getattr(stage, "device", "cpu")).type == "cpu"
        if neighbours and len(set(ranks.values())) > 1 and on_cpu and torch.__version__ < "2.12":
            raise ValueError(
                "expected torch 2.12 or newer for a V schedule on gloo, which connects a rank to itself, but "
                f"got torch {torch.__version__}; update it, or use ScheduleInterleavedZeroBubble"
            )


def _splits_backward(schedule: Any) -> bool:
    """True if any rank's actions hold half a backward. Schedules without a list of actions never do."""
    orders = [getattr(schedule, name, None) for name in ("pipeline_order_with_comms", "pipeline_order")]
    order = next((order for order in orders if order), None)
    if order is None:
        if orders[1] is not None:
            raise ValueError(
                f"expected {type(schedule).__name__} to have its actions but got none; load them before "
                "attach(), or say split_backward=True or False"
            )
        return False
    return any(letter in _SPLIT_ACTIONS for actions in order.values() for letter in _letters(actions))


def _letters(actions: Iterable[Any]) -> Iterator[str]:
    for action in actions:
        if action is not None:  # a bubble
            yield action.computation_type.value
            yield from _letters(action.sub_actions or ())


def _letter(method: str, halves: tuple[str, ...]) -> str:
    if method == _FORWARD:
        return "F"
    if method == _WEIGHT:
        return "W"
    return "B" if _WEIGHT in halves else "I"


def _fork(stages: Sequence[Any]) -> None:
    layers = [
        (stage.stage_index, layer)
        for stage in stages
        if getattr(stage, "dw_builder", None) is None
        for layer in _layers(stage.submod)
    ]
    for index, layer in layers:
        if layer.wgrad == "deferred":
            raise ValueError(
                f"stage {index} expects a dw_builder, since its layers defer their weight gradients, but got none; "
                "pass PipelineStage(..., dw_builder=schedules.dw_builder(module)) or set their wgrad to 'fused'"
            )
    for _, layer in layers:
        layer.wgrad = "forked"


def _let_v_stages_evaluate(stage: Any) -> None:
    """Let two stages of one rank pass each other no gradient in evaluation, where torch raises on that rank alone."""

    def unless_evaluating(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if stage.has_backward else None

        return run

    for name in ("get_local_bwd_output", "set_local_bwd_input"):
        if hasattr(stage, name):
            setattr(stage, name, unless_evaluating(getattr(stage, name)))


def _layers(module: nn.Module) -> list[SplitsBackward]:
    return [part for part in module.modules() if isinstance(part, SplitsBackward)]


def dw_builder(module: nn.Module) -> Callable[[], Callable[[], None]]:
    """Make the `dw_builder` of a `PipelineStage`: its layers keep their weight gradients for the W actions.

    Another way than attach's own for schedules that split the backward: it costs no addition, but weight
    gradients go past autograd, so hooks on them (DDP, FSDP, an optimizer in backward) do not see them.
    Sets `wgrad = "deferred"` on every FP8 layer of `module`; all other layers get their gradients at once.

    Args:
        module: the stage's module, after `convert`; may hold no FP8 layer.

    Returns:
        For `PipelineStage(module, ..., dw_builder=...)`: called behind each backward, it returns what computes that
        backward's weight gradients. The stage belongs into `attach`.

    Raises:
        ValueError: a layer still owes a weight gradient.
    """
    layers = _layers(module)
    for layer in layers:
        layer.wgrad = "deferred"

    def build() -> Callable[[], None]:
        # All that is owed now comes from the backward that just ended.
        owed = deque(gradient for layer in layers for gradient in layer.take_owed())

        def compute() -> None:
            while owed:
                owed.popleft().accumulate()

        return compute

    return build
