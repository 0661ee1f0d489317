"""Megatron-Core: its forward-backward functions, and global names for layers that are numbered per stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from .._header import Tag
from ..coordinator import ReductionGroupCoordinator
from ..modules.convert import WRAPPERS
from .wrap import wrap_step

P = ParamSpec("P")
R = TypeVar("R")


def attach(
    forward_backward: Callable[P, R],
    coordinator: ReductionGroupCoordinator,
    *,
    tag_fn: Callable[[], Tag] | None = None,
) -> Callable[P, R]:
    """Let one call of Megatron's forward-backward function be one scope.

    Calls with `forward_only=True` record nothing. Nor do those with `optimizer=`, by which zero-bubble forks let the
    same function check, a second time in a step, what the optimizer has done.

    Args:
        forward_backward: what `get_forward_backward_func()` gave, with or without pipelining.
        coordinator: of this process.
        tag_fn: gives the step's tag, e.g. the iteration.

    Returns:
        A function of the same signature.
    """

    def training(_: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not kwargs.get("forward_only", False) and kwargs.get("optimizer") is None

    return wrap_step(forward_backward, coordinator, training=training, tag_fn=tag_fn)


def global_names(model: nn.Module) -> Callable[[str], str]:
    """Names for `convert(..., names=)` that number the layers across all stages and chunks of a pipeline.

    Megatron counts `decoder.layers.0` anew in every stage; only `layer_number` of a layer, from 1, is global.

    Args:
        model: the chunk that will be converted, wrapped or not.

    Returns:
        A function from a local to the global FQN; `decoder.layers.0.mlp` of the second stage of two, with two
        layers each, becomes `decoder.layers.2.mlp`.
    """
    numbers: dict[str, int] = {}
    for path, module in model.named_modules():
        number = getattr(module, "layer_number", None)
        local = [part for part in path.split(".") if part not in WRAPPERS]
        # Attention modules carry the number of their layer, too; the layer itself is an entry of a list.
        if isinstance(number, int) and local and local[-1].isdigit():
            numbers[".".join(local)] = number - 1

    def name(local: str) -> str:
        parts = local.split(".")
        return ".".join(
            str(numbers.get(".".join(parts[: depth + 1]), part)) for depth, part in enumerate(parts)
        )

    return name
