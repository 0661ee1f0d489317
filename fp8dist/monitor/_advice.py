"""What is wrong with slots, found in samples one after the other, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..recipe import Recipe
from ._sampling import NEVER, Columns

SATURATING = 1e-3  # part of the values
ROUNDING = 0.05  # powers of two that lie within half a step above e4m3's largest value
FLUSHING = 0.5
HISTORIES = 2  # lengths of a history that a slot may stay silent
_FP32 = torch.finfo(torch.float32)


class Finding(NamedTuple):
    """One thing that is wrong with one slot."""

    what: str
    slot: str
    message: str


class Episodes:
    """Which slots have trouble of one kind, and which of those have been told.

    Args:
        n: slots.
        patience: samples in a row that make an episode. A sample without it ends the episode; one that knows
            nothing of a slot changes nothing for it.
    """

    def __init__(self, n: int, patience: int = 1) -> None:
        self._patience = patience
        self._streak = np.zeros(n, dtype=np.int64)
        self._told = np.zeros(n, dtype=bool)

    def begin(self, holds: np.ndarray, known: np.ndarray | None = None) -> list[int]:
        """Take one sample, bool [n]; return the slots whose episode begins with it."""
        streak = np.where(holds, self._streak + 1, 0)
        told = self._told & holds
        if known is not None:
            streak, told = np.where(known, streak, self._streak), np.where(known, told, self._told)
        begins = (streak >= self._patience) & ~told
        self._streak, self._told = streak, told | begins
        return [int(i) for i in np.flatnonzero(begins)]


class Adviser:
    """Turns samples into findings, each once per slot and episode.

    Args:
        names: the slots.
        recipe: of their coordinator.
    """

    def __init__(self, names: Sequence[str], recipe: Recipe) -> None:
        self._names, self._recipe = names, recipe
        n = len(names)
        self._silent = Episodes(n)
        self._limit = Episodes(n)
        self._saturating, self._flushing = Episodes(n, patience=2), Episodes(n, patience=2)
        self._broken = Episodes(n)
        self._nonfinite: np.ndarray | None = None

    def findings(self, sample: Columns, headroom: np.ndarray) -> Iterator[Finding]:
        """What begins with this sample, whose `Columns.headroom` is given, too."""
        yield from self._about_contributions(sample)
        yield from self._about_scales(sample)
        yield from self._about_casts(sample, headroom)

    def _about_contributions(self, sample: Columns) -> Iterator[Finding]:
        silent = sample.stale - NEVER
        patience = HISTORIES * max(1, self._recipe.history_len)
        for i in self._silent.begin((sample.stale < 0) & (silent >= patience)):
            yield Finding(
                "never_contributed",
                self._names[i],
                f"{self._names[i]} has recorded no amax in {silent[i]} steps: check that its module runs in training "
                "mode inside the step scope, or leave it out with convert(..., skip=...).",
            )
        before = sample.nonfinite if self._nonfinite is None else self._nonfinite
        new, self._nonfinite = sample.nonfinite - before, sample.nonfinite
        for i in self._broken.begin(new > 0):
            yield Finding(
                "nonfinite",
                self._names[i],
                f"{self._names[i]} had {new[i]} infinite or NaN amaxes since the last sample, and its scale was kept: "
                "lower the learning rate or the loss scale, and look at the first layer that shows it.",
            )

    def _about_scales(self, sample: Columns) -> Iterator[Finding]:
        with np.errstate(invalid="ignore"):
            at_limit = (sample.scale >= _FP32.max) | (sample.scale <= _FP32.tiny)
        for i in self._limit.begin(at_limit, np.isfinite(sample.scale)):
            why = "almost 0" if sample.scale[i] > 1 else "close to the largest float32"
            yield Finding(
                "scale_at_limit",
                self._names[i],
                f"{self._names[i]} has a scale at the limit of float32 ({sample.scale[i]:.3g}), because its amaxes are "
                f"{why} (newest {sample.amax[i]:.3g}): look whether the layer is dead or diverges, or leave it out "
                "with convert(..., skip=...).",
            )

    def _about_casts(self, sample: Columns, headroom: np.ndarray) -> Iterator[Finding]:
        if sample.saturated is None or sample.flushed is None:
            return
        margin = self._recipe.margin
        with np.errstate(invalid="ignore"):
            # What rounding alone would bring back to the largest value loses nothing, but it counts as clamped.
            saturating = (sample.saturated > SATURATING) & ~(headroom > -ROUNDING)
            flushing = sample.flushed > FLUSHING
        known = np.isfinite(sample.saturated)
        for i in self._saturating.begin(saturating, known):
            yield Finding(
                "saturating",
                self._names[i],
                f"{self._names[i]} saturates, {sample.saturated[i]:.2%} of its values were clamped: its amax grows "
                f"faster than its history tells, so {_raise_margin(margin, headroom[i])}, or lower the learning rate.",
            )
        for i in self._flushing.begin(flushing, known):
            yield Finding(
                "flushing",
                self._names[i],
                f"{self._names[i]} loses small values, {sample.flushed[i]:.0%} of its values became 0: lower margin "
                f"(now {margin}), use Format.HYBRID if these are gradients, or leave the layer out with "
                "convert(..., skip=...).",
            )


def _raise_margin(margin: int, headroom: float) -> str:
    if not np.isfinite(headroom):
        return f"raise margin (now {margin})"
    return f"raise margin from {margin} to {margin + math.ceil(-headroom - ROUNDING)}"
