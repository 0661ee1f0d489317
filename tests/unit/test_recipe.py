"""Recipes refuse what they cannot honour, and equal configurations have equal digests in every process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from fp8dist.recipe import CurrentScaling, DelayedScaling, Format, Recipe


@pytest.mark.parametrize(
    ("fp8_format", "backward", "dtype", "fp8_max"),
    [
        (Format.HYBRID, False, torch.float8_e4m3fn, 448.0),
        (Format.HYBRID, True, torch.float8_e5m2, 57344.0),
        (Format.E4M3, False, torch.float8_e4m3fn, 448.0),
        (Format.E4M3, True, torch.float8_e4m3fn, 448.0),
    ],
)
@pytest.mark.parametrize("kind", [DelayedScaling, CurrentScaling])
def test_formats_give_each_direction_its_dtype_and_range(
    kind: type[Recipe], fp8_format: Format, backward: bool, dtype: torch.dtype, fp8_max: float
) -> None:
    recipe = kind(fp8_format=fp8_format, margin=2)
    assert recipe.dtype(backward) == fp8_format.dtype(backward) == dtype
    assert fp8_format.fp8_max(backward) == fp8_max
    assert recipe.scaled_max(backward) == fp8_max / 4


def test_the_defaults_are_the_ones_that_are_documented() -> None:
    recipe = DelayedScaling()
    assert (recipe.fp8_format, recipe.amax_history_len, recipe.margin) == (Format.HYBRID, 16, 0)
    assert (recipe.idle, recipe.non_finite, recipe.first_step) == ("age", "absent", "current")
    assert (recipe.rule_set, recipe.reduce_amax, recipe.stateless) == ("fp8dist", True, False)
    assert CurrentScaling().stateless
    with pytest.raises(FrozenInstanceError):
        recipe.margin = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fp8_format", "HYBRID"),
        ("fp8_format", None),
        ("amax_history_len", 0),
        ("amax_history_len", 65537),
        ("amax_history_len", True),
        ("amax_history_len", 16.0),
        ("amax_compute_algo", "min"),
        ("amax_compute_algo", None),
        ("scaling_factor_compute_algo", "max"),
        ("margin", 65),
        ("margin", False),
        ("margin", 0.5),
        ("reduce_amax", 1),
        ("reduce_amax", None),
        ("fp8_dpa", True),
        ("fp8_mha", True),
        ("fp8_mha", 0),
        ("backward_override", "bf16"),
        ("idle", "wait"),
        ("non_finite", True),
        ("first_step", None),
        ("rule_set", "te"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: expected .* but got {value!r}; \w+"):
        DelayedScaling(**{field: value})


@pytest.mark.parametrize("rule_set", ["te_fused", "te_unfused"])
@pytest.mark.parametrize(("field", "value"), [("idle", "hold"), ("non_finite", "freeze")])
def test_te_rules_refuse_options_that_they_fix(rule_set: str, field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected its default .*rule_set='{rule_set}' fixes it"):
        DelayedScaling(rule_set=rule_set, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_functions_are_refused_by_the_fused_rule_only(field: str) -> None:
    DelayedScaling(rule_set="te_unfused", **{field: torch.amax})
    with pytest.raises(ValueError, match=rf"^{field}: expected no function .*te_unfused"):
        DelayedScaling(rule_set="te_fused", **{field: torch.amax})


@pytest.mark.parametrize("bounds", [{"amax_history_len": 1}, {"amax_history_len": 65536}, {"margin": -64}])
def test_the_bounds_themselves_are_allowed(bounds: dict[str, int]) -> None:
    for field, value in bounds.items():
        assert getattr(DelayedScaling(**{field: value}), field) == value


# Digests


def _scaled_by(factor: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda history: history.amax(0) * factor


def _defaulted(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda history, factor=factor: history.amax(0) * factor


def _with_default(history: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return history.amax(0) * factor


class _Percentile:
    def __init__(self, q: float) -> None:
        self.q = q

    def __call__(self, history: torch.Tensor) -> torch.Tensor:
        return history.quantile(self.q, 0)

    def bound(self, history: torch.Tensor) -> torch.Tensor:
        return history.amax(0)


class _Mine(DelayedScaling):
    pass


DISTINCT: list[Callable[[], Recipe]] = [
    CurrentScaling,
    lambda: CurrentScaling(margin=1),
    DelayedScaling,
    _Mine,
    lambda: DelayedScaling(margin=1),
    lambda: DelayedScaling(margin=-1),
    lambda: DelayedScaling(fp8_format=Format.E4M3),
    lambda: DelayedScaling(amax_history_len=17),
    lambda: DelayedScaling(amax_compute_algo="most_recent"),
    lambda: DelayedScaling(reduce_amax=False),
    lambda: DelayedScaling(idle="hold"),
    lambda: DelayedScaling(non_finite="freeze"),
    lambda: DelayedScaling(first_step="unit"),
    lambda: DelayedScaling(rule_set="te_fused"),
    lambda: DelayedScaling(rule_set="te_unfused"),
    lambda: DelayedScaling(amax_compute_algo=lambda h: h.amax(0)),
    lambda: DelayedScaling(amax_compute_algo=lambda h: h.amin(0)),
    lambda: DelayedScaling(amax_compute_algo=lambda h: h.amax(1)),
    lambda: DelayedScaling(scaling_factor_compute_algo=lambda a, s, m, r: m / a),
    lambda: DelayedScaling(scaling_factor_compute_algo=lambda a, s, m, r: (lambda: m / s)()),
    lambda: DelayedScaling(amax_compute_algo=_scaled_by(2.0)),
    lambda: DelayedScaling(amax_compute_algo=_scaled_by(3.0)),
    lambda: DelayedScaling(amax_compute_algo=_scaled_by(3)),
    lambda: DelayedScaling(amax_compute_algo=_defaulted(2.0)),
    lambda: DelayedScaling(amax_compute_algo=_defaulted(3.0)),
    lambda: DelayedScaling(amax_compute_algo=_with_default),
    lambda: DelayedScaling(amax_compute_algo=functools.partial(_with_default, factor=4.0)),
    lambda: DelayedScaling(amax_compute_algo=functools.partial(_with_default, factor=5.0)),
    lambda: DelayedScaling(amax_compute_algo=_Percentile(0.5)),
    lambda: DelayedScaling(amax_compute_algo=_Percentile(0.9)),
    lambda: DelayedScaling(amax_compute_algo=_Percentile(0.9).bound),
    lambda: DelayedScaling(amax_compute_algo=torch.amax),
    lambda: DelayedScaling(amax_compute_algo=torch.amin),
    lambda: DelayedScaling(amax_compute_algo=lambda h: h if h.dim() in {"a", "b", "c", "d"} else h[0]),
]


def test_digests_tell_recipes_apart_and_fit_in_31_bits() -> None:
    digests = [recipe().digest() for recipe in DISTINCT]
    assert len(set(digests)) == len(DISTINCT)
    assert all(0 <= digest < 2**31 for digest in digests)


def test_equal_recipes_have_equal_digests() -> None:
    assert [recipe().digest() for recipe in DISTINCT] == [recipe().digest() for recipe in DISTINCT]


def test_a_digest_does_not_change_when_its_functions_have_run() -> None:
    recipe = DelayedScaling(amax_compute_algo=_scaled_by(2.0))
    before = recipe.digest()
    for _ in range(200):  # the interpreter rewrites hot code in place
        recipe.amax_compute_algo(torch.ones(2, 1))  # type: ignore[operator]
    assert recipe.digest() == before


def test_a_function_that_refers_to_itself_has_a_digest() -> None:
    def again(history: torch.Tensor) -> torch.Tensor:
        return again(history[1:]) if len(history) > 1 else history[0]

    assert DelayedScaling(amax_compute_algo=again).digest() != DelayedScaling().digest()


def test_digests_agree_with_a_process_of_another_hash_seed() -> None:
    code = f"from {__name__} import DISTINCT; print([recipe().digest() for recipe in DISTINCT])"
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert output.strip() == str([recipe().digest() for recipe in DISTINCT])
