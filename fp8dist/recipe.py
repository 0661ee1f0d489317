"""Recipes: frozen, validated configuration of how FP8 tensors get their scales.

A recipe holds no tensors. `make_state` gives the tensors behind it, and those own the update rule.
"""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Literal

import torch

from ._aging_rules import aging_rule
from ._recipe_state import RecipeState, StatelessState
from ._te_rules import TEFusedState, TEUnfusedState

AmaxAlgo = Callable[[torch.Tensor], torch.Tensor]
ScaleAlgo = Callable[[torch.Tensor, torch.Tensor, float, "DelayedScaling"], torch.Tensor]


class Format(Enum):
    """Which FP8 dtype each direction uses."""

    E4M3 = "e4m3"
    """e4m3 (largest value 448) for activations, weights and gradients."""

    HYBRID = "hybrid"
    """e4m3 forward, e5m2 (largest value 57344, fewer digits) for gradients, which need the range."""

    def dtype(self, backward: bool) -> torch.dtype:
        """The FP8 dtype of gradients (`backward`) or of activations and weights."""
        return torch.float8_e5m2 if backward and self is Format.HYBRID else torch.float8_e4m3fn

    def fp8_max(self, backward: bool) -> float:
        """Largest finite value of that dtype."""
        return torch.finfo(self.dtype(backward)).max


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all recipes share. Frozen, so that one recipe can be handed to many modules.

    Raises:
        ValueError: a field is out of its range.
    """

    stateless: ClassVar[bool] = False
    """No history and no scales between steps: nothing is recorded, nothing is reduced."""

    fp8_format: Format = Format.HYBRID
    """FP8 dtypes of the two directions."""

    margin: int = 0
    """Headroom in powers of two, -64..64: scales aim at `fp8_max * 2**-margin`."""

    def __post_init__(self) -> None:
        if not isinstance(self.fp8_format, Format):
            raise _expected("fp8_format", "a Format", self.fp8_format, "pass Format.HYBRID or Format.E4M3")
        _check_int("margin", self.margin, -64, 64)

    def dtype(self, backward: bool) -> torch.dtype:
        """The FP8 dtype of gradients (`backward`) or of activations and weights."""
        return self.fp8_format.dtype(backward)

    def scaled_max(self, backward: bool) -> float:
        """Largest magnitude that a tensor should have after scaling, `fp8_max * 2**-margin`."""
        return self.fp8_format.fp8_max(backward) * 2.0**-self.margin

    @property
    def history_len(self) -> int:
        """Rows of the amax history that a state of this recipe keeps."""
        return 0

    def make_state(self, n: int, *, backward: bool, device: torch.device | str = "cpu") -> RecipeState:
        """The tensors behind this recipe for `n` slots of one direction."""
        return StatelessState(self, n, backward=backward, device=device)

    def digest(self) -> int:
        """31 bits that are equal where class and fields are equal, in every process and on every run.

        A function counts by module, name, code, defaults and captured plain values, so two lambdas
        differ if they compute differently. Captured tensors count by their type only.
        """
        content = {f.name: _canonical(getattr(self, f.name)) for f in fields(self)}
        text = json.dumps([_name(type(self)), content], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True)
class CurrentScaling(Recipe):
    """Each tensor is scaled by its own amax, at the price of one more pass over it. No state."""

    stateless: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """Tensors are scaled by the amaxes of earlier steps. To change the rule, override `make_state`.

    Raises:
        ValueError: a field is out of its range, or fields contradict each other.
    """

    amax_history_len: int = 16
    """Steps in the window, 1..65536."""

    amax_compute_algo: Literal["max", "most_recent"] | AmaxAlgo = "max"
    """What stands for the window: its maximum, this step's amax, or `f(history) -> amax`. A function gets
    a float32 [L, n] copy, row 0 this step's amaxes, then oldest to newest, 0 where a tensor did not
    run; it returns float32 [n]."""

    scaling_factor_compute_algo: ScaleAlgo | None = None
    """None for `fp8_max * 2**-margin / amax`, or `f(amax, old_scale, fp8_max, recipe) -> scale` on float32
    [n]. Under our own rules a slot without a usable amax keeps its scale whatever `f` returns."""

    reduce_amax: bool = True
    """Take the MAX over the reduction group. False: every rank scales by its own amaxes."""

    fp8_dpa: bool = False
    """FP8 attention; not supported, must stay False."""

    fp8_mha: bool = False
    """FP8 in and out of attention; not supported, must stay False."""

    backward_override: None = None
    """Another precision for the backward; not supported, must stay None."""

    idle: Literal["age", "hold"] = "age"
    """What a step in which no rank ran a tensor does to it: its window moves on without a value (an
    empty window keeps the scale), or its window stands still."""

    non_finite: Literal["absent", "freeze"] = "absent"
    """What an inf or NaN amax does. It never becomes a scale, and in that step the scale is kept. `absent`:
    that is all. `freeze`: it enters the window, and the scale is kept until it has left it."""

    first_step: Literal["current", "unit"] = "current"
    """How a slot without any history quantizes: by its own amax, or with a scale of 1. The `te_*` rule
    sets always start at 1."""

    rule_set: Literal["fp8dist", "te_fused", "te_unfused"] = "fp8dist"
    """Our update rule, or exactly that of Transformer Engine's CUDA kernel or of its Python path. Those two
    fix what idle tensors and non-finite amaxes do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int("amax_history_len", self.amax_history_len, 1, 65536)
        if not callable(self.amax_compute_algo):
            _check_choice(
                "amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"), or_else="a function"
            )
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise _expected(
                "scaling_factor_compute_algo",
                "None or a function",
                self.scaling_factor_compute_algo,
                "pass f(amax, old_scale, fp8_max, recipe) -> scale",
            )
        _check_choice("reduce_amax", self.reduce_amax, (True, False))
        for name in ("fp8_dpa", "fp8_mha"):
            if getattr(self, name) is not False:
                raise _expected(
                    name, "False", getattr(self, name), "FP8 attention is not supported, leave it out"
                )
        if self.backward_override is not None:
            raise _expected(
                "backward_override", "None", self.backward_override, "it is not supported, leave it out"
            )
        _check_choice("idle", self.idle, ("age", "hold"))
        _check_choice("non_finite", self.non_finite, ("absent", "freeze"))
        _check_choice("first_step", self.first_step, ("current", "unit"))
        _check_choice("rule_set", self.rule_set, ("fp8dist", "te_fused", "te_unfused"))
        if self.rule_set != "fp8dist":
            self._check_te_rules()

    def _check_te_rules(self) -> None:
        for name, default in (("idle", "age"), ("non_finite", "absent")):
            if getattr(self, name) != default:
                raise _expected(
                    name, f"its default {default!r}", getattr(self, name),
                    f"rule_set={self.rule_set!r} fixes it, leave it out or take rule_set='fp8dist'",
                )  # fmt: skip
        if self.rule_set == "te_fused":
            for name in ("amax_compute_algo", "scaling_factor_compute_algo"):
                if callable(getattr(self, name)):
                    raise _expected(
                        name, "no function", getattr(self, name),
                        "Transformer Engine runs functions in its Python path, take rule_set='te_unfused'",
                    )  # fmt: skip

    @property
    def history_len(self) -> int:
        """Rows of the amax history, `amax_history_len`."""
        return self.amax_history_len

    def make_state(self, n: int, *, backward: bool, device: torch.device | str = "cpu") -> RecipeState:
        """The tensors behind this recipe for `n` slots of one direction."""
        rule: type[RecipeState]
        if self.rule_set == "te_fused":
            rule = TEFusedState
        elif self.rule_set == "te_unfused":
            rule = TEUnfusedState
        else:
            rule = aging_rule(self, torch.device(device))
        return rule(self, n, backward=backward, device=device)


def _expected(field: str, expected: str, got: object, todo: str) -> ValueError:
    # A function's text would print an address; its name is what the user knows.
    shown = getattr(got, "__qualname__", None) or repr(got)
    return ValueError(f"{field}: expected {expected} but got {shown}; {todo}")


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _expected(field, f"an int in {low}..{high}", value, "pass a whole number in that range")


def _check_choice(field: str, value: object, choices: Collection[object], or_else: str = "") -> None:
    # 1 == True, so types are compared too.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        listed = ", ".join(map(repr, choices)) + (f" or {or_else}" if or_else else "")
        raise _expected(field, f"one of {listed}", value, "pass one of these")


def _name(named: Any) -> list[str | None]:
    return [getattr(named, "__module__", None), getattr(named, "__qualname__", None)]


def _canonical(value: object, depth: int = 6) -> object:
    """What of a field's value is the same in every process, as JSON data: no addresses, no hash order."""
    if isinstance(value, Enum):
        return {"enum": [*_name(type(value)), value.name]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if depth == 0:  # functions may refer to themselves
        return _name(type(value))
    inner = functools.partial(_canonical, depth=depth - 1)
    if isinstance(value, tuple | list):
        return [inner(v) for v in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted(json.dumps(inner(v), sort_keys=True) for v in value)}
    if isinstance(value, dict):
        return {"dict": sorted(json.dumps([inner(k), inner(v)], sort_keys=True) for k, v in value.items())}
    if isinstance(value, types.CodeType):
        return {"code": [value.co_code.hex(), inner(value.co_consts), value.co_names, value.co_freevars]}
    if isinstance(value, functools.partial):
        return {"partial": [inner(value.func), inner(value.args), inner(value.keywords)]}
    if isinstance(value, types.MethodType):
        return {"method": [inner(value.__func__), inner(value.__self__)]}
    if isinstance(value, types.FunctionType):
        cells = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        code = [inner(value.__code__), inner(value.__defaults__), inner(value.__kwdefaults__)]
        return {"function": [_name(value), code, cells]}
    if getattr(value, "__qualname__", None) is not None:  # a builtin or a class
        return {"named": _name(value)}
    call = inner(getattr(type(value), "__call__", None))  # noqa: B004 - its code is wanted, not whether it has one
    return {"object": [_name(type(value)), call, inner(getattr(value, "__dict__", None))]}
