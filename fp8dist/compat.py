"""Transformer Engine's names around delayed scaling, with its meaning.

They take no coordinator, so they act on one process default: set by `coordinator.as_default()`, or made by the
first `autocast(recipe=..., amax_reduction_group=...)`. It is the only state of the library that belongs to the
process.

    with autocast(recipe=recipe):            forward slots are committed when the outermost one closes
        loss = model(x)
    loss.backward()                          gradient slots are committed when the backward ends

Each of these is a collective that all ranks enter, so all ranks must run the same autocasts and backwards. Under a
pipeline they do not: take a step scope there. Inside a step scope everything here only records.

Unlike in Transformer Engine, layers that were converted compute in FP8 outside of `autocast`, too, with the scales
they have; `autocast(enabled=False)` is what turns FP8 off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

from ._header import Part
from ._triggers import in_backward, tracing
from .coordinator import ReductionGroupCoordinator
from .recipe import DelayedScaling, Recipe

__all__ = [
    "activation_recompute_forward",
    "autocast",
    "backward_quantization_update_needed",
    "checkpoint",
    "fp8_autocast",
    "quantization_backward_scope",
    "reduce_and_update_fp8_tensors",
    "reduce_and_update_quantization_state",
    "request_backward_quantization_update",
]

T = TypeVar("T")


class _Process:
    """The process default, and how deep its autocasts are."""

    def __init__(self) -> None:
        self.coordinator: ReductionGroupCoordinator | None = None
        self.group: Any = None
        self.depth = 0
        self.backward_depth = 0
        self.recomputing = 0
        self.lock = threading.RLock()

    def take(self, coordinator: ReductionGroupCoordinator) -> None:
        """Make `coordinator` the default."""
        with self.lock:
            current = self.coordinator
            if current is not None and current is not coordinator and not current.closed:
                raise ValueError(
                    f"coordinator {current.name!r} is the process default already; close() it first, or use several "
                    "coordinators through their own methods"
                )
            self.__init__()  # type: ignore[misc]
            self.coordinator = coordinator

    def find(self, recipe: Recipe | None, group: Any) -> ReductionGroupCoordinator:
        """The default, made if there is none.

        Raises:
            ValueError: it has another recipe or group.
        """
        if not (recipe is None or isinstance(recipe, Recipe)):
            raise ValueError(
                f"autocast expects a recipe of fp8dist or None but got {type(recipe).__name__} {recipe!r}; pass its "
                "arguments by name, since Transformer Engine has them in another order"
            )
        with self.lock:
            if self.coordinator is None or self.coordinator.closed:
                made = ReductionGroupCoordinator(
                    recipe or DelayedScaling(),
                    group,
                    name="default",
                    trigger="backward_end",
                    update_every="microbatch",
                )
                self.take(made)
                self.group = group
                return made
            current = self.coordinator
            if recipe is not None and recipe.digest() != current.recipe.digest():
                raise ValueError(
                    f"autocast expects the recipe of the process default, {current.recipe}, but got {recipe}; one "
                    "process has one recipe here: give other parts a coordinator of their own"
                )
            if group is not None and group is not self.group and not current.spans(group):
                raise ValueError(
                    "autocast expects the amax_reduction_group of the process default but got another one; one process "
                    "has one group here, and all ranks is right for any mix of parallelism"
                )
            return current


_process = _Process()


def set_default(coordinator: ReductionGroupCoordinator) -> None:
    """What `coordinator.as_default()` does."""
    _process.take(coordinator)


def default_coordinator() -> ReductionGroupCoordinator | None:
    """The process default, if there is one."""
    return _process.coordinator


@contextmanager
def autocast(
    enabled: bool = True,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    calibrating: bool = False,
) -> Iterator[None]:
    """Compute in FP8 and record amaxes; commit the forward slots when the outermost one closes.

    The forward update runs if the coordinator has `update_every="microbatch"` (as the one made here has), once,
    and never while a checkpoint recomputes, also where a foreign checkpoint drives the recompute. With
    `trigger="next_autocast"` a top-level training entry commits what the backwards before it recorded.

    Args:
        enabled: False computes in high precision inside.
        recipe: of the process default; None takes its recipe as it is.
        amax_reduction_group: the ranks that take the MAX together; None: all, or as the default has it.
        calibrating: with `enabled=False`, record amaxes although nothing is quantized.

    Raises:
        ValueError: the process default has another recipe or group, or this is no recipe.
    """
    coordinator = _process.find(recipe, amax_reduction_group)
    scope = coordinator.request_handle
    if _process.depth == 0:
        coordinator.drop_lost()
    training = (enabled or calibrating) and torch.is_grad_enabled()
    if _process.depth == 0 and training and _may_commit(coordinator):
        coordinator.enter_training_autocast()
    before = (scope.enabled, scope.calibrating)
    scope.enabled, scope.calibrating = enabled, calibrating and not enabled
    _process.depth += 1
    try:
        yield
    except BaseException as error:
        _leave(scope, before)
        if _process.depth == 0 and coordinator.update_every == "microbatch" and _may_commit(coordinator):
            coordinator.give_up(error, Part.FORWARD, place="an autocast")
        raise
    _leave(scope, before)
    # Grad mode is off in the first phase of a reentrant checkpoint, whose forward records all the same.
    trained = training or ((enabled or calibrating) and scope.recorded)
    if (
        trained
        and _process.depth == 0
        and coordinator.update_every == "microbatch"
        and _may_commit(coordinator)
    ):
        coordinator.commit_now(Part.FORWARD, place="the exit of an autocast")


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> AbstractContextManager[None]:
    """`autocast` under its older name, with the arguments and their order of that time."""
    return autocast(enabled, fp8_recipe, fp8_group, calibrating)


def _leave(scope: Any, before: tuple[bool, bool]) -> None:
    _process.depth -= 1
    scope.enabled, scope.calibrating = before


def _may_commit(coordinator: ReductionGroupCoordinator) -> bool:
    """Not inside a step scope, a recompute, a running backward, a graph capture or a trace."""
    recomputing = _process.recomputing or coordinator.request_handle.replaying
    return not (coordinator.in_scope or recomputing or in_backward() or tracing())


@contextmanager
def quantization_backward_scope() -> Iterator[None]:
    """Commit the gradient slots when the outermost of these scopes closes, also if nothing ran inside.

    Nested ones do nothing; one that is entered inside a running backward leaves the commit to its end; none has an
    effect where there is no delayed state, or inside a step scope.
    """
    coordinator = _process.coordinator
    if coordinator is None or coordinator.recipe.stateless or coordinator.in_scope:
        yield
        return
    if in_backward():
        coordinator.arm_backward_end()
        yield
        return
    _process.backward_depth += 1
    try:
        with coordinator.deferring_requests():
            yield
    except BaseException as error:
        _process.backward_depth -= 1
        if _process.backward_depth == 0:
            coordinator.give_up(error, coordinator.backward_part, place="a backward scope")
        raise
    _process.backward_depth -= 1
    if _process.backward_depth == 0:
        coordinator.commit_now(coordinator.backward_part, place="the exit of a backward scope")


def backward_quantization_update_needed() -> bool:
    """Whether this module's backward shall ask for an update. Ask in forward, keep the answer on `ctx`."""
    coordinator = _process.coordinator
    if coordinator is None or coordinator.recipe.stateless:
        return False  # grad mode tells nothing: it is off inside an autograd.Function's forward
    return coordinator.in_scope or (_process.depth > 0 and coordinator.request_handle.enabled)


def request_backward_quantization_update() -> None:
    """Flag, from a backward, that gradients were recorded. Idempotent; never a collective by itself.

    Raises:
        MissingScope: outside of scope and backward, so that nothing would commit.
    """
    if _process.coordinator is not None:
        _process.coordinator.request_handle.request()


def reduce_and_update_quantization_state(forward: bool = True) -> None:
    """Commit now. A collective.

    Args:
        forward: the slots of activations and weights, or those of gradients.
    """
    if _process.coordinator is not None:
        part = Part.FORWARD if forward else Part.BACKWARD
        _process.coordinator.commit_now(part, place="reduce_and_update_quantization_state()")


reduce_and_update_fp8_tensors = reduce_and_update_quantization_state


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Say that this forward is the recompute of a checkpoint: no update runs in it.

    Args:
        activation_recompute: the forward belongs to a checkpointed region.
        recompute_phase: it is the second time.
    """
    recomputing = activation_recompute and recompute_phase
    _process.recomputing += recomputing
    try:
        yield
    finally:
        _process.recomputing -= recomputing


def checkpoint(function: Callable[..., T], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> T:
    """`torch.utils.checkpoint.checkpoint` whose recompute quantizes with the scales of the first forward.

    In a step scope the scales do not move, and any checkpoint does. With an update at every autocast's exit they
    move between forward and recompute; then this one keeps, per region, one float for each quantized tensor.

    Args:
        function: what to recompute in the backward.
        *args: its arguments.
        use_reentrant: as in torch.
        **kwargs: further arguments of `function`, or of torch's checkpoint.
    """
    coordinator = _process.coordinator
    if coordinator is not None:
        function = coordinator.request_handle.replayable(function)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
