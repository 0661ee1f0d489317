"""The tensors behind a recipe, and the rules that turn one step's reduced amaxes into scales.

`RecipeState` holds, saves and undoes; its subclasses own the rule, in `update`::

    reduced amaxes [n] ──enter──▶ window of the last L ──max──▶ amax ──scaled_max / amax──▶ scale, scale_inv
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ._amax import ABSENT, scales_of

if TYPE_CHECKING:
    from .recipe import DelayedScaling, Recipe

_FP32 = torch.finfo(torch.float32)
Bits = torch.Tensor | np.ndarray[Any, Any]


def bits_of(tensor: torch.Tensor) -> Bits:
    """A view of float32 values as int32; a NumPy array if they lie on the CPU."""
    bits = tensor.view(torch.int32)
    return bits.numpy() if bits.device.type == "cpu" else bits


class RecipeState:
    """The tensors behind a recipe, for `n` slots of one direction. Subclass it and override `update`.

    A subclass with tensors of its own adds them to `tensors()`, so that undo covers them too.

    Attributes:
        recipe: where the configuration is.
        n: slots.
        backward: gradients, or activations and weights.
        device: of all tensors but `warm`.
        scale: float32 [n], multiply by it, clamp, cast to FP8.
        scale_inv: float32 [n], `1 / scale`.
        warm: bool [n] on the CPU, True where a scale comes from an amax. Cold slots have no scale to trust.
        history: float32 ring [L, n], -1 where a slot has no amax. Row `head` is the oldest.
        head: the row of `history` that the next amaxes overwrite.
        nonfinite: int64 [n], inf and NaN amaxes seen so far.
    """

    recipe: Recipe

    def __init__(self, recipe: Recipe, n: int, *, backward: bool, device: torch.device | str = "cpu") -> None:
        self.recipe = recipe
        self.n = n
        self.backward = backward
        self.device = torch.device(device)
        self.scale = torch.ones(n, device=self.device)
        self.scale_inv = torch.ones(n, device=self.device)
        self._scale_bits: Any = bits_of(self.scale)
        self.warm = torch.zeros(n, dtype=torch.bool)
        self.history = torch.full((recipe.history_len, n), ABSENT, device=self.device)
        self.head = 0
        self.nonfinite = torch.zeros(n, dtype=torch.int64, device=self.device)
        self._scaled_max = torch.tensor(recipe.scaled_max(backward), device=self.device)
        self._undo: tuple[int, Any] | None = None
        self._prepared: Any = None

    def update(self, amax: torch.Tensor) -> None:
        """Take one step's amaxes into the state, in place. This is the rule; call `commit` instead.

        Args:
            amax: float32 [n], reduced over the group: -1 where nobody ran the tensor, else >= 0, inf or NaN.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(amax)")

    def bind(self, scale: torch.Tensor, scale_inv: torch.Tensor, warm: torch.Tensor) -> None:
        """Move the current values into these tensors (same shapes and dtypes) and use them from now on."""
        for name, target in (("scale", scale), ("scale_inv", scale_inv), ("warm", warm)):
            current = getattr(self, name)
            assert target.shape == current.shape, (name, target.shape, current.shape)
            assert target.dtype == current.dtype, (name, target.dtype, current.dtype)
            target.copy_(current)
            setattr(self, name, target)
        self._scale_bits = bits_of(self.scale)

    def commit(self, amax: torch.Tensor) -> None:
        """`update(amax)`, so that `undo()` can take it back. If the rule raises, nothing has changed."""
        assert amax.shape == (self.n,), (amax.shape, self.n)
        assert amax.dtype == torch.float32, amax.dtype
        prepared, self._prepared = self._prepared, None
        self._undo = (self.head, self._snapshot() if prepared is None else prepared.record)
        try:
            if prepared is None:
                self.update(amax)
            else:
                self._update_prepared(amax, prepared)
        except BaseException:
            self.undo()
            raise

    def prepare(self) -> None:
        """Do what of the next commit does not need its amaxes, while these are being reduced. Changes nothing."""

    def _update_prepared(self, amax: torch.Tensor, prepared: Any) -> None:
        raise AssertionError("a rule that prepares something overrides this")

    @property
    def undoable(self) -> bool:
        """Whether `undo` would take a commit back."""
        return self._undo is not None

    def undo(self) -> bool:
        """Restore, bit for bit, the state before the last commit. False if there is none to take back."""
        if self._undo is None:
            return False
        (self.head, record), self._undo = self._undo, None
        self._prepared = None
        self._restore(record)
        return True

    def _snapshot(self) -> Any:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def _restore(self, record: Any) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(record[name])

    def seed(self, indices: torch.Tensor | Sequence[int], amax: torch.Tensor) -> None:
        """Give slots a scale from amaxes that are known beforehand (weights). Histories stay as they are.

        Args:
            indices: int64 [k], distinct slots.
            amax: float32 [k]. Slots whose amax is 0, negative, inf or NaN are left alone.
        """
        where = torch.as_tensor(indices, dtype=torch.int64, device=self.device)
        amax = amax.to(self.device)
        usable = (amax > 0) & (amax < math.inf)
        where = where[usable]
        self.scale[where] = self._scales(amax[usable], self.scale[where])
        self.scale_inv[where] = self.scale[where].reciprocal()
        self.warm[where.cpu()] = True
        self._undo = self._prepared = None

    def _scales(self, amax: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Scales of usable amaxes."""
        return scales_of(amax, self._scaled_max)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors that a commit may change, by name."""
        names = ("history", "scale", "scale_inv", "warm", "nonfinite")
        return {name: getattr(self, name) for name in names}

    def history_rows(self) -> torch.Tensor:
        """A float32 [L, n] copy of the history, oldest row first, -1 where a slot has no amax."""
        return torch.cat((self.history[self.head :], self.history[: self.head]))

    def te_history(self) -> torch.Tensor:
        """The history in Transformer Engine's layout, a float32 [L, n] copy.

        Row 0 is zero (there the next amaxes gather); then come the last L - 1 steps, oldest first, 0 where
        a slot has no amax.
        """
        rows = self.history_rows().clamp_(min=0)
        rows[:1] = 0
        return rows

    def digests(self, generation: int, n_rows: int, out: Bits) -> None:
        """Of each slot: the bits of its scale and of `n_rows` rows of its history, added modulo 2**32.

        So a change of one value shows. A longer history is taken in turns, since a commit's cost should not grow
        with it; of a shorter one the newest row counts more than once, so that one which lags behind shows, too.

        Args:
            generation: equal on all ranks; says whose turn it is.
            n_rows: equal on all ranks, at least 1.
            out: int32 [n], where it is written to. A NumPy array on the CPU, where PyTorch's way to an operation
                costs more than these, else a tensor.
        """
        length = self.history.shape[0]
        if n_rows < length:
            ages = [(generation * n_rows + i) % length for i in range(n_rows)]
        else:  # odd numbers only: of what counts twice, a sign would be lost
            ages = [*range(length), length - 1, length - 1]
        rows = self._row_bits(ages)
        if isinstance(out, torch.Tensor):  # two launches, however many rows
            torch.add(self._scale_bits, torch.stack(rows).sum(0, dtype=torch.int32), out=out)
            return
        np.add(self._scale_bits, rows[0], out=out)
        for row in rows[1:]:
            np.add(out, row, out=out)

    def _row_bits(self, ages: Sequence[int]) -> list[Any]:
        """Rows of `history_rows()`."""
        rows = self.history_rows()
        return [bits_of(rows[age]) for age in ages]

    def load(self, history_rows: torch.Tensor, scale: torch.Tensor, warm: torch.Tensor) -> None:
        """Go on from a saved state as if never stopped. `nonfinite` goes on counting.

        Args:
            history_rows: float32 [L, n], as `history_rows()` gave it.
            scale: float32 [n].
            warm: bool [n].

        Raises:
            ValueError: a tensor has another shape or dtype; nothing was changed.
        """
        given = {
            "history_rows": (history_rows, self.history),
            "scale": (scale, self.scale),
            "warm": (warm, self.warm),
        }
        for name, (value, own) in given.items():
            if value.shape != own.shape or value.dtype != own.dtype:
                raise ValueError(
                    f"{name}: expected {own.dtype} {list(own.shape)} but got {value.dtype} "
                    f"{list(value.shape)}; load a state of the same slots, and if amax_history_len has "
                    "changed keep the newest rows or put rows of -1 in front"
                )
        self._load_rows(history_rows.to(self.device))
        self.scale.copy_(scale)
        torch.reciprocal(self.scale, out=self.scale_inv)
        self.warm.copy_(warm)
        self._undo = self._prepared = None

    def _load_rows(self, rows: torch.Tensor) -> None:
        self.history.copy_(rows)
        self.head = 0


class StatelessState(RecipeState):
    """What a recipe without state has: cold slots, so that every tensor is scaled by its own amax."""

    def update(self, amax: torch.Tensor) -> None:
        """Nothing moves."""


class DelayedState(RecipeState):
    """Common to the rules of `DelayedScaling`: what its functions get and must return."""

    recipe: DelayedScaling

    def _call_amax_algo(self, history: torch.Tensor) -> torch.Tensor:
        algo = self.recipe.amax_compute_algo
        assert callable(algo), algo
        return self._checked("amax_compute_algo", algo(history), self.n)

    def _call_scale_algo(self, amax: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        algo = self.recipe.scaling_factor_compute_algo
        assert algo is not None
        fp8_max = self.recipe.fp8_format.fp8_max(self.backward)
        # Copies, since a function may well work in place; and it knows 0, not -1, for an empty window.
        result = algo(amax.clamp(min=0), old.clone(), fp8_max, self.recipe)
        return self._checked("scaling_factor_compute_algo", result, amax.numel())

    def _checked(self, field: str, result: object, n: int) -> torch.Tensor:
        expected = f"float32 [{n}] on {self.device}"
        if not isinstance(result, torch.Tensor):
            got = type(result).__name__
        elif (result.dtype, result.shape, result.device.type) != (torch.float32, (n,), self.device.type):
            got = f"{result.dtype} {list(result.shape)} on {result.device}"
        else:
            return result
        raise ValueError(
            f"{field}: expected its result to be {expected} but got {got}; return one value per slot"
        )

    def _scales(self, amax: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if self.recipe.scaling_factor_compute_algo is None:
            return super()._scales(amax, old)
        scales = self._call_scale_algo(amax, old)
        return torch.where(scales > 0, scales.clamp(_FP32.tiny, _FP32.max), old)


class _Prepared(NamedTuple):
    """What a commit can know before its amaxes."""

    record: Any
    rest: torch.Tensor | None
    """float32 [n], maximum of the rows that stay in the window; None if it is not wanted."""


class AgingState(DelayedState):
    """Our rule: all windows move together, one ring row a step; a tensor that did not run enters -1.

    A slot becomes warm when a scale is first computed for it.
    """

    _enter_moves_slots = False  # windows move together, so it is known beforehand which row goes

    def __init__(
        self, recipe: DelayedScaling, n: int, *, backward: bool, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(recipe, n, backward=backward, device=device)
        if recipe.first_step == "unit":
            self.warm.fill_(True)
        self._freezes = recipe.non_finite == "freeze"
        plain = isinstance(recipe.amax_compute_algo, str) and recipe.scaling_factor_compute_algo is None
        self._by_kernel = plain and type(self) is AgingState and self.device.type == "cuda"
        self._absent = torch.tensor(ABSENT, device=self.device)
        self._ring_bits = [bits_of(row) for row in self.history]
        self._all_warm = bool(self.warm.all())
        self._clean = True  # the last update met no inf and no NaN
        # Scratch vectors, since an update should not spend its time on allocating them.
        self._window = torch.empty_like(self.scale)
        self._usable, self._finite, self._lost = (
            torch.empty(n, dtype=torch.bool, device=self.device) for _ in range(3)
        )
        if self._by_kernel:  # which leaves there what it overwrites
            self._old = (
                torch.empty_like(self.scale),
                torch.empty_like(self.scale),
                torch.empty_like(self.nonfinite),
            )

    def update(self, amax: torch.Tensor) -> None:
        """Enter the row, then recompute the scales of slots whose window has a usable maximum."""
        self._apply(amax, None)

    def prepare(self) -> None:
        """Take the undo record and the maximum of the rows that stay."""
        if type(self).update is not AgingState.update or self._enter_moves_slots:
            return
        rest = None
        if self.recipe.amax_compute_algo == "max" and not self._by_kernel and self.history.shape[0] > 1:
            parts = (self.history[: self.head], self.history[self.head + 1 :])
            rest = functools.reduce(torch.maximum, (part.amax(0) for part in parts if len(part)))
        self._prepared = _Prepared(self._snapshot(), rest)

    def _update_prepared(self, amax: torch.Tensor, prepared: _Prepared) -> None:
        self._apply(amax, prepared.rest)

    def _apply(self, amax: torch.Tensor, rest: torch.Tensor | None) -> None:
        if self._by_kernel:
            self._apply_by_kernel(amax)
            return
        self._clean = self._is_clean(amax)
        if not self._clean:
            torch.lt(amax, math.inf, out=self._finite)
            torch.logical_not(self._finite, out=self._lost)
            self.nonfinite.add_(self._lost)
        entered = self._enter(amax)
        window = self._window_amax(amax) if rest is None else torch.maximum(rest, entered)
        torch.gt(window, 0, out=self._usable)
        self._restrict(window)
        torch.where(self._usable, self._scales(window, self.scale), self.scale, out=self.scale)
        torch.reciprocal(self.scale, out=self.scale_inv)
        if not self._all_warm:  # reading a GPU's mask waits for it, so only while a slot is cold
            self.warm.logical_or_(self._usable.cpu())
            self._all_warm = bool(self.warm.all())

    def _apply_by_kernel(self, amax: torch.Tensor) -> None:
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

    def _is_clean(self, amax: torch.Tensor) -> bool:
        """Whether no amax is inf or NaN, the usual case, which saves work. A GPU is not asked: it would wait."""
        return amax.device.type == "cpu" and (amax.numel() == 0 or float(amax.max()) < math.inf)

    def _row_bits(self, ages: Sequence[int]) -> list[Any]:
        return [self._ring_bits[(self.head + age) % len(self._ring_bits)] for age in ages]

    def _enter(self, amax: torch.Tensor) -> torch.Tensor:
        """Put the amaxes into the windows; return the row that holds them."""
        row = self.history[self.head]
        if self._clean or self._freezes:
            row.copy_(amax)
        else:
            torch.where(self._finite, amax, self._absent, out=row)
        self.head = (self.head + 1) % self.history.shape[0]
        return row

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

    _by_kernel = False  # one kernel does the whole update

    def _load_rows(self, rows: torch.Tensor) -> None:
        # Rows of another rule may hold what ours never enters.
        super()._load_rows(rows if self._freezes else torch.where(rows < math.inf, rows, self._absent))

    def load(self, history_rows: torch.Tensor, scale: torch.Tensor, warm: torch.Tensor) -> None:
        """See `RecipeState.load`."""
        super().load(history_rows, scale, warm)
        self._all_warm = bool(self.warm.all())

    def _snapshot(self) -> Any:
        # Only these rules are known to touch a single row; a subclass's may change anything.
        if type(self).update is not AgingState.update:
            return super()._snapshot()
        warm = None if self._all_warm else self.warm.clone()
        if self._by_kernel:
            # A GPU is not asked whether an amax was finite, so all counts are kept instead of who was not.
            return self._old[0], self._old[1], warm, self._old[2]
        return self._evicted(), self.scale.clone(), warm, None

    def _restore(self, record: Any) -> None:
        if isinstance(record, dict):
            super()._restore(record)
            self._all_warm = bool(self.warm.all())
            return
        evicted, scale, warm, nonfinite = record
        self._put_back(evicted)
        self.scale.copy_(scale)
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

    _enter_moves_slots = True

    def _row_bits(self, ages: Sequence[int]) -> list[Any]:
        return RecipeState._row_bits(self, ages)

    def _enter(self, amax: torch.Tensor) -> torch.Tensor:
        torch.ge(amax, 0, out=self._real)
        if not self._clean:
            if self._freezes:
                self._real.logical_or_(self._lost)  # NaN >= 0 is false
            else:
                self._real.logical_and_(self._finite)
        oldest = self.history.gather(0, self.position)
        self.history.scatter_(0, self.position, torch.where(self._real, amax, oldest))
        self.position.add_(self._real).remainder_(self.history.shape[0])
        return amax

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
