"""Replace the linear layers of a model by FP8 ones, named by their place in the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from .._slots import Slot
from .linear import Linear, Registrar, fp8_shape

logger = logging.getLogger("fp8dist")

# Names that wrappers put into an FQN. A slot's name must not depend on how the model is wrapped.
WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})

Names = Mapping[str, str] | Callable[[str], str]


def convert(
    model: nn.Module,
    coordinator: Registrar,
    skip: tuple[str, ...] = (),
    *,
    prefix: str = "",
    names: Names | None = None,
    sharded: bool | tuple[str, ...] = False,
) -> nn.Module:
    """Replace every `nn.Linear` in place by `Linear`, which shares its parameters.

    Subclasses of `nn.Linear`, patched and parametrized ones, and layers converted before are left alone;
    so are those whose features are no multiples of 16, which one warning lists. Tied weights share one
    weight slot, and a layer with two FQNs is converted once; both go by their first FQN.

    A pattern is a global FQN, the last components of one (`"lm_head"`), or a glob (`"layers.0.*"`). One that
    matches nothing is no error, since a pipeline stage holds only a part of the model.

    Args:
        model: may hold meta parameters.
        coordinator: declares the slots.
        skip: patterns of layers to leave alone.
        prefix: for stages built with local names: the global name of `model`, put before every FQN.
        names: the same by a map or function from local to global FQN.
        sharded: True or patterns for the layers of whose weight each rank holds a different part.

    Returns:
        `model`, or its replacement if it is itself a linear layer.

    Raises:
        ValueError: two layers get one name, a layer gets none, the name is taken, or contradicting
            arguments. `model` and coordinator are then unchanged.
    """
    _check_arguments(skip, prefix, names, sharded)
    linears = _find_linears(model, skip, prefix, names)
    weight_slots: dict[torch.Tensor, Slot] = {}
    replacements: dict[nn.Module, nn.Module] = {}
    declared = _Declared(coordinator)
    try:
        for name, linear in linears.items():
            new = Linear.from_linear(
                linear,
                declared,
                name,
                sharded=sharded if isinstance(sharded, bool) else _matches(name, sharded),
                weight_slot=weight_slots.get(linear.weight),
            )
            assert new.slots is not None, "layers that cannot have slots were sorted out before"
            weight_slots[linear.weight] = new.slots.weight
            replacements[linear] = new
    except BaseException:
        declared.take_back()
        raise
    # Only now, with every slot declared, so that an error leaves the model as it was.
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, child_name, replacements[child])
    return replacements.get(model, model)


class _Declared:
    """Declares for one conversion, and takes it all back if the conversion fails."""

    def __init__(self, coordinator: Registrar) -> None:
        self._coordinator = coordinator
        self._names: list[str] = []

    def declare(self, name: str, **what: Any) -> Slot:
        slot = self._coordinator.declare(name, **what)
        self._names.append(name)
        return slot

    def undeclare(self, name: str) -> None:
        self._coordinator.undeclare(name)

    def take_back(self) -> None:
        for name in self._names:
            self.undeclare(name)


def _check_arguments(
    skip: tuple[str, ...], prefix: str, names: Names | None, sharded: bool | tuple[str, ...]
) -> None:
    for argument, value in (("skip", skip), ("sharded", sharded)):
        if isinstance(value, str):
            raise ValueError(
                f"expected {argument} to be a tuple of patterns but got {value!r}; write ({value!r},)"
            )
    if prefix and names is not None:
        raise ValueError(
            f"expected prefix or names but got both (prefix={prefix!r}); let names return the whole FQN"
        )


def _find_linears(
    model: nn.Module, skip: tuple[str, ...], prefix: str, names: Names | None
) -> dict[str, nn.Linear]:
    """The layers to convert by their global names, each once; logs those that FP8 cannot take."""
    found: dict[str, nn.Linear] = {}
    odd: list[str] = []
    for path, module in model.named_modules():
        if not _is_plain(module):
            continue
        assert isinstance(module, nn.Linear)
        name = _global_name(path, prefix, names)
        if _matches(name, skip):
            continue
        if module.weight.numel() == 0 or not fp8_shape(module.in_features, module.out_features):
            odd.append(f"{name} ({module.in_features} to {module.out_features})")
            continue
        if not name:
            raise ValueError(
                "expected a name for the linear layer at the root of the model but got none; pass "
                "prefix= with its global FQN"
            )
        if name in found:
            raise ValueError(
                f"expected one layer per name but got two for {name!r} (the second at {path!r}); pass names= "
                "with a map that keeps them apart"
            )
        found[name] = module
    if odd:
        logger.warning("left in high precision, since features are no multiples of 16: %s", ", ".join(odd))
    return found


def _is_plain(module: nn.Module) -> bool:
    """An `nn.Linear` that computes what its class says, with a weight of its own."""
    return type(module) is nn.Linear and "forward" not in vars(module) and "weight" in module._parameters


def _global_name(path: str, prefix: str, names: Names | None) -> str:
    local = ".".join(part for part in path.split(".") if part not in WRAPPERS)
    if names is None:
        return ".".join(part for part in (prefix, local) if part)
    if not isinstance(names, Mapping):
        return names(local)
    if local not in names:
        raise ValueError(f"expected names to map {local!r} to its global FQN but it has no such key; add it")
    return names[local]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name == p or name.endswith(f".{p}") or fnmatchcase(name, p) for p in patterns)
