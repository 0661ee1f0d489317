"""The tensors behind a recipe: what holds, saves and undoes. The rules, in `_aging_rules` and `_te_rules`, are its
subclasses and define `update`::

    reduced amaxes [n] ──enter──▶ window of the last L ──max──▶ amax ──scaled_max / amax──▶ scale, scale_inv
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
        """Do what of the next commit does not need its amaxes, before the step that brings them. Changes nothing."""

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
