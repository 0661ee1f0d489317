"""Our rule, which turns one step's reduced amaxes into scales: by PyTorch, and faster where it can be.

    AgingState          PyTorch's operations, also with a user's functions
    ├─ HoldingState     windows of idle tensors stand still
    ├─ HostAgingState   a CPU, by NumPy
    └─ DeviceAgingState a GPU, by one kernel

All have the same bits. Transformer Engine's rules are in `_te_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ._amax import ABSENT
from ._recipe_state import DelayedState, RecipeState, bits_of

if TYPE_CHECKING:
    from .recipe import DelayedScaling

_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_ONE = np.float32(1)
Array = np.ndarray[Any, Any]


def aging_rule(recipe: DelayedScaling, device: torch.device) -> type[AgingState]:
    """The class for a recipe whose rule is ours, on a device."""
    if recipe.idle == "hold":
        return HoldingState
    if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
        return AgingState
    return {"cpu": HostAgingState, "cuda": DeviceAgingState}.get(device.type, AgingState)


class AgingState(DelayedState):
    """Our rule: all windows move together, one ring row a step; a tensor that did not run enters -1.

    A slot becomes warm when a scale is first computed for it.
    """

    def __init__(
        self, recipe: DelayedScaling, n: int, *, backward: bool, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(recipe, n, backward=backward, device=device)
        if recipe.first_step == "unit":
            self.warm.fill_(True)
        self._freezes = recipe.non_finite == "freeze"
        self._absent = torch.tensor(ABSENT, device=self.device)
        self._ring_bits = [bits_of(row) for row in self.history]
        self._all_warm = bool(self.warm.all())
        self._clean = True  # the last update met no inf and no NaN
        # Scratch vectors, since an update should not spend its time on allocating them.
        self._window = torch.empty_like(self.scale)
        self._usable, self._finite, self._lost = (
            torch.empty(n, dtype=torch.bool, device=self.device) for _ in range(3)
        )

    def update(self, amax: torch.Tensor) -> None:
        """Enter the row, then recompute the scales of slots whose window has a usable maximum."""
        self._apply(amax)

    def _apply(self, amax: torch.Tensor) -> None:
        self._clean = self._is_clean(amax)
        if not self._clean:
            torch.lt(amax, math.inf, out=self._finite)
            torch.logical_not(self._finite, out=self._lost)
            self.nonfinite.add_(self._lost)
        self._enter(amax)
        window = self._window_amax(amax)
        torch.gt(window, 0, out=self._usable)
        self._restrict(window)
        torch.where(self._usable, self._scales(window, self.scale), self.scale, out=self.scale)
        torch.reciprocal(self.scale, out=self.scale_inv)
        if not self._all_warm:  # reading a GPU's mask waits for it, so only while a slot is cold
            self.warm.logical_or_(self._usable.cpu())
            self._all_warm = bool(self.warm.all())

    def _is_clean(self, amax: torch.Tensor) -> bool:
        """Whether no amax is inf or NaN, the usual case, which saves work. A GPU is not asked: it would wait."""
        return amax.device.type == "cpu" and (amax.numel() == 0 or float(amax.max()) < math.inf)

    def _row_bits(self, ages: Sequence[int]) -> list[Any]:
        return [self._ring_bits[(self.head + age) % len(self._ring_bits)] for age in ages]

    def _enter(self, amax: torch.Tensor) -> None:
        """Put the amaxes into the windows."""
        row = self.history[self.head]
        if self._clean or self._freezes:
            row.copy_(amax)
        else:
            torch.where(self._finite, amax, self._absent, out=row)
        self.head = (self.head + 1) % self.history.shape[0]

    def _window_amax(self, amax: torch.Tensor) -> torch.Tensor:
        algo = self.recipe.amax_compute_algo
        if algo == "max":
            return torch.amax(self.history, 0, out=self._window)
        if algo == "most_recent":
            return amax
        # The newest row is the one that has just been entered.
        return self._call_amax_algo(self.history_rows().roll(1, 0).clamp_(min=0))

    def _restrict(self, window: torch.Tensor) -> None:
        """Clear `_usable` where the scale must be kept though the window has a maximum above 0."""
        if not (self._clean or self._freezes):
            self._usable.logical_and_(self._finite)
        if self._freezes or self.recipe.amax_compute_algo != "max":
            self._usable.logical_and_(torch.lt(window, math.inf))

    def _load_rows(self, rows: torch.Tensor) -> None:
        # Rows of another rule may hold what ours never enters.
        super()._load_rows(rows if self._freezes else torch.where(rows < math.inf, rows, self._absent))

    def load(self, history_rows: torch.Tensor, scale: torch.Tensor, warm: torch.Tensor) -> None:
        """See `RecipeState.load`."""
        super().load(history_rows, scale, warm)
        self._all_warm = bool(self.warm.all())

    # -- taking a commit back ----------------------------------------------------------------------------

    @property
    def _is_extended(self) -> bool:
        """Whether a subclass of somebody else's has an `update` of its own, which may change anything."""
        return type(self).update is not AgingState.update

    def _snapshot(self) -> Any:
        return super()._snapshot() if self._is_extended else self._record()

    def _record(self) -> Any:
        """What one of these rules overwrites, which is a single row of the history."""
        return self._evicted(), self.scale.clone(), self._warm_record(), None

    def _warm_record(self) -> torch.Tensor | None:
        """None where no commit can change it."""
        return None if self._all_warm else self.warm.clone()

    def _restore(self, record: Any) -> None:
        if isinstance(record, dict):
            super()._restore(record)
            self._all_warm = bool(self.warm.all())
            return
        evicted, scale, warm, nonfinite = record
        self._put_back(evicted)
        self.scale.copy_(torch.as_tensor(scale))
        torch.reciprocal(self.scale, out=self.scale_inv)
        if warm is not None:
            self.warm.copy_(warm)
            self._all_warm = False
        if nonfinite is not None:
            self.nonfinite.copy_(nonfinite)
        elif not self._clean:
            self.nonfinite.sub_(self._lost.to(torch.int64))
            self._clean = True

    def _evicted(self) -> Any:
        return self.history[self.head].clone()

    def _put_back(self, evicted: Any) -> None:
        self.history[self.head].copy_(evicted)


class HoldingState(AgingState):
    """Our rule with `idle="hold"`: a slot's window moves only when its tensor ran.

    Attributes:
        position: int64 [1, n], for each slot the row of `history` that holds its oldest amax.
    """

    def __init__(
        self, recipe: DelayedScaling, n: int, *, backward: bool, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(recipe, n, backward=backward, device=device)
        self.position = torch.zeros((1, n), dtype=torch.int64, device=self.device)
        self._real = torch.empty(n, dtype=torch.bool, device=self.device)

    def _row_bits(self, ages: Sequence[int]) -> list[Any]:
        return RecipeState._row_bits(self, ages)

    def _enter(self, amax: torch.Tensor) -> None:
        torch.ge(amax, 0, out=self._real)
        if not self._clean:
            if self._freezes:
                self._real.logical_or_(self._lost)  # NaN >= 0 is false
            else:
                self._real.logical_and_(self._finite)
        oldest = self.history.gather(0, self.position)
        self.history.scatter_(0, self.position, torch.where(self._real, amax, oldest))
        self.position.add_(self._real).remainder_(self.history.shape[0])

    def _restrict(self, window: torch.Tensor) -> None:
        super()._restrict(window)
        self._usable.logical_and_(self._real)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors that a commit may change, by name."""
        return {**super().tensors(), "position": self.position}

    def history_rows(self) -> torch.Tensor:
        """A float32 [L, n] copy of the history, oldest row first, -1 where a slot has no amax."""
        length = self.history.shape[0]
        order = torch.arange(length, device=self.device).unsqueeze(1) + self.position
        return self.history.gather(0, order.remainder_(length))

    def _load_rows(self, rows: torch.Tensor) -> None:
        super()._load_rows(rows)
        self.position.zero_()

    def _evicted(self) -> Any:
        return self.position.clone(), self.history.gather(0, self.position)

    def _put_back(self, evicted: Any) -> None:
        position, oldest = evicted
        self.history.scatter_(0, position, oldest)
        self.position.copy_(position)


class _Prepared(NamedTuple):
    """What a commit can know before its amaxes."""

    record: Any
    rest: Array | None
    """float32 [n], maximum of the rows that stay in the window; None if it is not wanted."""


class HostAgingState(AgingState):
    """On a CPU, by NumPy where nothing is out of the ordinary: PyTorch's way to an operation costs more than these.

    What of a commit needs no amaxes is done beforehand, in `prepare`.
    """

    def __init__(
        self, recipe: DelayedScaling, n: int, *, backward: bool, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(recipe, n, backward=backward, device=device)
        self._by_window = recipe.amax_compute_algo == "max"
        self._rows: Array = self.history.numpy()
        self._rest, self._top = np.empty(n, np.float32), np.empty(n, np.float32)
        target = recipe.scaled_max(backward)
        self._target = np.float32(target)
        # Between these every quotient is a normal number, whichever way it is rounded. In float64.
        self._lowest, self._highest = 2 * target / _LARGEST, min(0.5 * target / _TINY, _LARGEST)
        self._take_arrays()

    def bind(self, scale: torch.Tensor, scale_inv: torch.Tensor, warm: torch.Tensor) -> None:
        """See `RecipeState.bind`."""
        super().bind(scale, scale_inv, warm)
        self._take_arrays()

    def _take_arrays(self) -> None:
        self._scale_array: Array = self.scale.numpy()
        self._inverse_array: Array = self.scale_inv.numpy()

    def prepare(self) -> None:
        """Take the undo record and the maximum of the rows that stay."""
        if self._is_extended:
            return
        self._prepared = _Prepared(self._snapshot(), self._maximum_of_rest())

    def _maximum_of_rest(self) -> Array | None:
        if not self._by_window or len(self._rows) == 1:
            return None
        older, newer = self._rows[: self.head], self._rows[self.head + 1 :]
        rest = np.maximum.reduce(older if len(older) else newer, axis=0, out=self._rest)
        if len(older) and len(newer):
            np.maximum(rest, np.maximum.reduce(newer, axis=0, out=self._top), out=rest)
        return rest

    def _update_prepared(self, amax: torch.Tensor, prepared: _Prepared) -> None:
        if not self._apply_ordinary(amax.numpy(), prepared.rest):
            super()._apply(amax)

    def _apply(self, amax: torch.Tensor) -> None:
        if not self._apply_ordinary(amax.numpy(), self._maximum_of_rest()):
            super()._apply(amax)

    def _apply_ordinary(self, amax: Array, rest: Array | None) -> bool:
        """Update if every window has a maximum that makes a scale as it is. False: nothing has changed."""
        if not self.n:
            return False
        top = amax if rest is None else np.maximum(rest, amax, out=self._top)
        low, high = float(np.minimum.reduce(top)), float(np.maximum.reduce(top))
        if not (self._lowest <= low and high <= self._highest):  # so that a NaN fails
            return False
        self._clean = True
        self._rows[self.head] = amax
        self.head = (self.head + 1) % len(self._rows)
        np.divide(self._target, top, out=self._scale_array)
        np.divide(_ONE, self._scale_array, out=self._inverse_array)
        # NumPy's writes are unknown to autograd, which shall notice an update between a forward and its backward.
        for tensor in (self.scale, self.scale_inv):
            torch.autograd.graph.increment_version(tensor)
        if not self._all_warm:
            self.warm.fill_(True)
            self._all_warm = True
        return True

    def _record(self) -> Any:
        return self._rows[self.head].copy(), self._scale_array.copy(), self._warm_record(), None

    def _put_back(self, evicted: Any) -> None:
        self._rows[self.head] = evicted


class DeviceAgingState(AgingState):
    """On a GPU, by one kernel, which also keeps what it overwrites."""

    def __init__(
        self, recipe: DelayedScaling, n: int, *, backward: bool, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(recipe, n, backward=backward, device=device)
        self._old = (
            torch.empty_like(self.scale),
            torch.empty_like(self.scale),
            torch.empty_like(self.nonfinite),
        )

    def _apply(self, amax: torch.Tensor) -> None:
        from .kernels.triton import update

        warm = None if self._all_warm else self.warm.to(self.device)
        try:
            update(
                amax.contiguous(),
                self.history,
                self.head,
                self.scale,
                self.scale_inv,
                warm,
                self.nonfinite,
                self.recipe.scaled_max(self.backward),
                freeze=self._freezes,
                most_recent=self.recipe.amax_compute_algo == "most_recent",
                reset=False,
                old=self._old,
            )
        except BaseException:
            self._undo = None  # nothing was written, and `_old` is of the update before
            raise
        # A kernel's writes are unknown to autograd, which shall notice an update between a forward and its backward.
        for tensor in (self.scale, self.scale_inv):
            torch.autograd.graph.increment_version(tensor)
        self.head = (self.head + 1) % self.history.shape[0]
        if warm is not None:
            self.warm.copy_(warm)
            self._all_warm = bool(self.warm.all())

    def _record(self) -> Any:
        # A GPU is not asked whether an amax was finite, so all counts are kept instead of who was not.
        return self._old[0], self._old[1], self._warm_record(), self._old[2]
