"""Slots for weights that have another name than `weight`, or that are a part of a larger parameter."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import nn

from .._slots import Slot
from .linear import LinearSlots, Registrar, fp8_shape


def declare_slots(
    coordinator: Registrar,
    name: str,
    module: nn.Module,
    weight: str,
    *,
    index: int | None = None,
    sharded: bool = False,
) -> LinearSlots | None:
    """Create the slots of one linear layer inside `module`, or None if FP8 cannot take its features.

    Args:
        coordinator: declares the slots.
        name: global name of the linear layer.
        module: holds the weight; may be dropped later.
        weight: attribute of `module`, a parameter [out_features, in_features].
        index: the weight is this part of a parameter [n, out_features, in_features].
        sharded: ranks hold different parts of this weight under one name.

    Raises:
        ValueError: `name` is empty or taken.
    """
    if not name:
        raise ValueError("an FP8 layer needs a name, expected its global FQN but got ''; pass name=")
    source = _WeightOf(module, weight, index)
    now = source()
    assert now is not None, "the caller holds the module"
    out_features, in_features = now.shape
    if now.numel() == 0 or not fp8_shape(in_features, out_features):
        return None
    slot = coordinator.declare(f"{name}.weight", shape=tuple(now.shape), weight=source, sharded=sharded)
    # The hook knows its slot, so that one module can have several, and a copied module needs no other.
    module.register_load_state_dict_post_hook(partial(_weight_loaded, slot))
    return LinearSlots(
        input=coordinator.declare(f"{name}.input", shape=None),
        weight=slot,
        grad_output=coordinator.declare(f"{name}.grad_output", shape=None),
    )


class _WeightOf:
    """Asks a module for a weight it has now: `to_empty` and `fully_shard` put another one in its place."""

    def __init__(self, module: nn.Module, attribute: str, index: int | None) -> None:
        self._module = weakref.ref(module)  # a module that is dropped must not live on in the coordinator
        self._attribute = attribute
        self._index = index

    def __call__(self) -> torch.Tensor | None:
        module = self._module()
        if module is None:
            return None
        weight: torch.Tensor = getattr(module, self._attribute)
        return weight if self._index is None else weight.detach()[self._index]


def _weight_loaded(slot: Slot, module: nn.Module, incompatible_keys: object) -> None:
    """The history of the old weight says nothing of the new one."""
    slot.scope.reloaded.add(slot.name)
