"""Transformer Engine's two rules, for trajectories that equal its own; ours are in `_aging_rules`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ._amax import ABSENT
from ._recipe_state import DelayedState

if TYPE_CHECKING:
    from .recipe import DelayedScaling

_FP32 = torch.finfo(torch.float32)


class _TEState(DelayedState):
    """Common to Transformer Engine's two rules: its history layout, a scale of 1 at the start, 0 for -1."""

    def __init__(
        self, recipe: DelayedScaling, n: int, *, backward: bool, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(recipe, n, backward=backward, device=device)
        self.history.zero_()
        self.warm.fill_(True)

    def _count(self, amax: torch.Tensor) -> torch.Tensor:
        self.nonfinite.add_(~(amax < math.inf))
        return amax.clamp(min=0)

    def _shifted(self, amax: torch.Tensor) -> torch.Tensor:
        """The history one step later; its staging row is 0 again."""
        rows = torch.cat((self.history[1:], amax.unsqueeze(0)))
        rows[0] = 0
        return rows

    def history_rows(self) -> torch.Tensor:
        """A float32 [L, n] copy, oldest row first. L - 1 rows count here, so the oldest is -1."""
        rows = self.history.clone()
        rows[0] = ABSENT
        return rows

    def _load_rows(self, rows: torch.Tensor) -> None:
        super()._load_rows(rows.clamp(min=0))
        self.history[0] = 0


class TEFusedState(_TEState):
    """The rule of Transformer Engine's CUDA kernel: idle windows stand still, NaN is no maximum."""

    def update(self, amax: torch.Tensor) -> None:
        """Shift the windows of tensors that ran, and divide by their maximum."""
        amax = self._count(amax)
        ran = amax != 0  # true for NaN
        if self.recipe.amax_compute_algo == "max":
            window = torch.cat((self.history[1:], amax.unsqueeze(0)))
            top = torch.where(ran, window.nan_to_num_(nan=0.0, posinf=math.inf).amax(0), 0.0)
        else:
            top = amax
        self.history.copy_(torch.where(ran, self._shifted(amax), self.history))
        usable = (top > 0) & (top < math.inf)
        quotient = torch.div(self._scaled_max, top).clamp_(max=_FP32.max)
        torch.where(usable, quotient, self.scale, out=self.scale)
        torch.reciprocal(self.scale, out=self.scale_inv)


class TEUnfusedState(_TEState):
    """The rule of Transformer Engine's Python path: all windows move, NaN is the maximum."""

    def update(self, amax: torch.Tensor) -> None:
        """Shift all windows, and multiply by the reciprocal of their maximum."""
        amax = self._count(amax)
        staged = torch.cat((amax.unsqueeze(0), self.history[1:]))
        algo = self.recipe.amax_compute_algo
        top = staged.amax(0) if algo == "max" else amax
        if callable(algo):
            top = self._call_amax_algo(staged)
        self.history.copy_(self._shifted(amax))
        if self.recipe.scaling_factor_compute_algo is None:
            fp8_max = self.recipe.fp8_format.fp8_max(self.backward)
            quotient = (top.reciprocal() * fp8_max) / 2.0**self.recipe.margin
            usable = (top > 0) & (top < math.inf)
            scales = torch.where(usable, quotient, self.scale).clamp_(max=_FP32.max)
        else:
            scales = self._call_scale_algo(top, self.scale)
        self.scale.copy_(scales)
        torch.reciprocal(self.scale, out=self.scale_inv)
