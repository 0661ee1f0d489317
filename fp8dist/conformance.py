"""Replays recorded scale updates and counts where a rule set gives other bits.

A vector file holds `{"source": str, "updates": [setting, ...]}` (`torch.save`, plain tensors). A setting
names a recipe (`fp8_format`, `forward`, `amax_history_len`, `amax_compute_algo`, `margin`), the amaxes of S
steps for n tensors (`amax`, float32 [S, n]) and what each rule made of them after every step:
`fused_history` and `unfused_history` (float32 [S, L, n]), `fused_scale` and `unfused_scale` (float32 [S, n]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .recipe import DelayedScaling, Format

RuleSet = Literal["te_fused", "te_unfused"]
# The Python path divides by way of a reciprocal, which compilers round differently.
ALLOWED_ULP: dict[RuleSet, int] = {"te_fused": 0, "te_unfused": 2}
_RECIPE_KEYS = ("fp8_format", "forward", "amax_history_len", "amax_compute_algo", "margin")


@dataclass
class Report:
    """What the replay of one rule set found.

    Attributes:
        rule_set: the rule set of `DelayedScaling`.
        settings: recorded settings replayed.
        steps: steps replayed, over all settings.
        histories_exact: steps after which all histories had the recorded bits (any NaN equals any NaN).
        scales_exact: steps after which all scales had the recorded bits.
        largest_ulp: largest distance of a scale, in units of the last place.
    """

    rule_set: RuleSet
    settings: int = 0
    steps: int = 0
    histories_exact: int = 0
    scales_exact: int = 0
    largest_ulp: int = 0

    @property
    def conforms(self) -> bool:
        """Histories are exact and scales within what the rule set allows."""
        return self.histories_exact == self.steps and self.largest_ulp <= ALLOWED_ULP[self.rule_set]


def load_updates(path: str | Path) -> list[dict[str, Any]]:
    """The settings of a vector file.

    Raises:
        ValueError: the file is missing, unreadable or holds something else; one line that says which.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by the `with` below
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    with file:
        try:
            content = torch.load(file, weights_only=True, map_location="cpu")
        except Exception:  # a damaged zip and a foreign pickle raise almost anything, OSError too
            raise ValueError(
                f"{path}: expected a file of tensors written by torch.save, got something else or part of one"
            ) from None
    keys = sorted(map(str, content)) if isinstance(content, Mapping) else [type(content).__name__]
    if "updates" not in keys:
        if {"linear", "layernorm_mlp"} & set(keys):
            raise ValueError(
                f"{path}: holds recordings of modules, and this command replays scale updates only"
            )
        raise ValueError(f"{path}: expected the key 'updates' but got {', '.join(keys[:8]) or 'nothing'}")
    updates = content["updates"]
    if not isinstance(updates, list) or not updates:
        raise ValueError(f"{path}: expected 'updates' to be a non-empty list of settings")
    for index, setting in enumerate(updates):
        _check_setting(f"{path}: updates[{index}]", setting)
    return updates


def replay(updates: Sequence[Mapping[str, Any]]) -> list[Report]:
    """Replay settings, as `load_updates` gives them, under both rule sets of Transformer Engine."""
    reports = [Report("te_fused"), Report("te_unfused")]
    for report in reports:
        for setting in updates:
            _replay_setting(setting, report)
    return reports


def _replay_setting(setting: Mapping[str, Any], report: Report) -> None:
    prefix = report.rule_set.removeprefix("te_")
    amax = setting["amax"]
    state = _recipe(setting, report.rule_set).make_state(amax.shape[1], backward=not setting["forward"])
    recorded = zip(amax, setting[f"{prefix}_history"], setting[f"{prefix}_scale"], strict=True)
    for row, history, scale in recorded:
        state.update(row)
        distance = int((_bits(state.scale) - _bits(scale)).abs().amax())
        report.histories_exact += torch.equal(_bits(state.te_history()), _bits(history))
        report.scales_exact += distance == 0
        report.largest_ulp = max(report.largest_ulp, distance)
        report.steps += 1
    report.settings += 1


def _recipe(setting: Mapping[str, Any], rule_set: RuleSet) -> DelayedScaling:
    return DelayedScaling(
        fp8_format=Format[setting["fp8_format"]],
        amax_history_len=setting["amax_history_len"],
        amax_compute_algo=setting["amax_compute_algo"],
        margin=setting["margin"],
        rule_set=rule_set,
    )


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Int64 bit patterns: for values >= 0 their differences count ulps. All NaNs are one."""
    return torch.where(values.isnan(), torch.nan, values).contiguous().view(torch.int32).long()


def _check_setting(place: str, setting: Any) -> None:
    if not isinstance(setting, Mapping):
        raise ValueError(f"{place}: expected a setting with named values but got {type(setting).__name__}")
    tensors = ("amax", "fused_history", "unfused_history", "fused_scale", "unfused_scale")
    missing = [key for key in (*_RECIPE_KEYS, *tensors) if key not in setting]
    if missing:
        raise ValueError(f"{place}: lacks {', '.join(missing)}")
    try:
        length = _recipe(setting, "te_fused").amax_history_len
    except (KeyError, ValueError) as error:
        raise ValueError(f"{place}: names no recipe that exists ({error})") from None
    amax = setting["amax"]
    if not isinstance(amax, torch.Tensor) or amax.dim() != 2 or not amax.numel():
        raise ValueError(f"{place}: expected amax to be a float32 [steps, tensors] tensor that is not empty")
    steps, n = amax.shape
    shapes = [(steps, n), (steps, length, n), (steps, length, n), (steps, n), (steps, n)]
    for key, shape in zip(tensors, shapes, strict=True):
        value = setting[key]
        got = (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
        if got != (torch.float32, shape):
            raise ValueError(f"{place}: expected {key} to be torch.float32 {list(shape)} but got {got}")
