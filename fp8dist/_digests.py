"""Digests of scales and histories, one per slot class: what the header carries so that no drift goes unseen.

    scales, histories ──RecipeState.digests──▶ one int32 per slot ──x odd multiplier──▶ sum over a class ──▶ 31 bits

A step pays for this at its entry, so the steps share it: each covers all scales, and as many rows of the histories as
a bound on the work allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from ._header import INT32_MIN, MASK31
from ._recipe_state import Bits, RecipeState, bits_of

WORDS = 2**14  # of histories, that one step's digests cover at most; but one row at least
MOST_ROWS = 16
MASK32 = 2**32 - 1

Number = TypeVar("Number", int, torch.Tensor)


def rows_a_step(n_union: int) -> int:
    """Rows of the histories that one step covers, equal on all ranks because it follows from the agreed layout."""
    return min(MOST_ROWS, max(1, WORDS // max(1, n_union)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scatter small integers over int64 (the splitmix64 finaliser; multiplication wraps)."""
    x = x * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _fold(total: Number) -> Number:
    """31 bits for the header. Without the fold a sign alone (-1 for absent, and an amax of 1) would not show."""
    return (total ^ (total >> 16)) & MASK31


class ClassDigests:
    """Digests of the slots of one rank.

    Args:
        n_union: slots of the group.
        positions: int64 [n], where each own slot is in the row.
        class_of: the class of each own slot; classes are contiguous within a direction.
        held: of each class of the group, whether this rank holds it.
        n_forward: how many own slots are forward slots; these come first.

    Attributes:
        words: int32 [2 * classes], (x, -x) for each class; neutral where this rank holds none of it.
        of_class: the same by class, for those that this rank holds; empty on a GPU, which is not asked.
    """

    def __init__(
        self,
        n_union: int,
        positions: torch.Tensor,
        class_of: Sequence[int],
        held: Sequence[bool],
        n_forward: int,
    ) -> None:
        n, device = len(class_of), positions.device
        self._rows = rows_a_step(n_union)
        self._class_of = torch.tensor(class_of, dtype=torch.int64, device=device)
        # Odd, and of each position in the row its own, so that no slot can stand in for another.
        self._multipliers = (_mix(positions + 1) | 1).to(torch.int32)
        starts = [i for i in range(n) if i == 0 or class_of[i] != class_of[i - 1]]
        self._runs = [
            (class_of[i], slice(i, end))
            for i, end in zip(starts, [*starts[1:], n][: len(starts)], strict=True)
        ]
        self._held = list(held)
        self._generation = 0
        self.words = torch.full((2 * len(held),), INT32_MIN, dtype=torch.int32, device=device)
        self.of_class: dict[int, int] = {}
        self._slots: Bits = bits_of(torch.zeros(n, device=device))
        self._parts: tuple[Bits, Bits] = self._slots[:n_forward], self._slots[n_forward:]
        self._prepare(device)

    def _prepare(self, device: torch.device) -> None:
        """What `refresh` needs besides."""
        raise NotImplementedError

    def refresh(self, states: Sequence[RecipeState], generation: int) -> None:
        """Recompute `words`."""
        raise NotImplementedError

    def whole(self, bits: torch.Tensor) -> dict[int, int]:
        """31 bits over all rows of `bits` (int32 [rows, n]), by class, for those that this rank holds."""
        row_multipliers = _mix(torch.arange(1, bits.shape[0] + 1, device=bits.device)) | 1
        per_slot = (bits.to(torch.int64) * row_multipliers[:, None]).sum(0) * self._multipliers.to(
            torch.int64
        )
        sums = torch.zeros(len(self._held), dtype=torch.int64, device=bits.device)
        sums.index_add_(0, self._class_of, per_slot)
        return {c: int(sums[c]) & MASK31 for c, mine in enumerate(self._held) if mine}

    def members(self, states: Sequence[RecipeState], c: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Own slots of class `c`, and of each what the last `refresh` has summed up, if no state has changed since.

        Returns:
            Indices, int64 [members], and digests, int32 [members].
        """
        self._fill(states)
        mine = (self._class_of == c).nonzero().reshape(-1)
        return mine, torch.as_tensor(self._slots)[mine]

    def _fill(self, states: Sequence[RecipeState]) -> None:
        for state, out in zip(states, self._parts, strict=True):
            state.digests(self._generation, self._rows, out)


class HostDigests(ClassDigests):
    """By NumPy: with so few values PyTorch's way to an operation costs more than these."""

    def _prepare(self, device: torch.device) -> None:
        assert isinstance(self._slots, np.ndarray)
        self._slot_array, self._word_array = self._slots, self.words.numpy()
        self._multiplier_array = self._multipliers.numpy()
        self._products = [(c, self._slot_array[run]) for c, run in self._runs]
        self._none = {c: 0 for c, mine in enumerate(self._held) if mine}

    def refresh(self, states: Sequence[RecipeState], generation: int) -> None:
        """Recompute `words`."""
        self._generation = generation
        self._fill(states)
        np.multiply(self._slot_array, self._multiplier_array, out=self._slot_array)
        sums = self._none.copy()
        for c, products in self._products:
            sums[c] += int(np.add.reduce(products, dtype=np.int32))
        for c, total in sums.items():
            digest = self.of_class[c] = _fold(total & MASK32)
            self._word_array[2 * c], self._word_array[2 * c + 1] = digest, -digest


class DeviceDigests(ClassDigests):
    """By tensors: nothing is read back, and the number of operations does not grow with that of classes."""

    def _prepare(self, device: torch.device) -> None:
        if not isinstance(self._slots, torch.Tensor):  # a test on the CPU
            self._slots = torch.from_numpy(self._slots)
            self._parts = self._slots[: len(self._parts[0])], self._slots[len(self._parts[0]) :]
        self._run_class = torch.tensor([c for c, _ in self._runs], dtype=torch.int64, device=device)
        ends = [run.stop - 1 for _, run in self._runs]
        self._run_end = torch.tensor(ends, dtype=torch.int64, device=device)
        self._pair_held = torch.tensor(self._held, dtype=torch.bool, device=device).repeat_interleave(2)
        self._pair_class = torch.arange(len(self._held), device=device).repeat_interleave(2)
        self._pair_sign = torch.tensor([1, -1] * len(self._held), dtype=torch.int32, device=device)
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._neutral = torch.tensor(INT32_MIN, dtype=torch.int32, device=device)

    def refresh(self, states: Sequence[RecipeState], generation: int) -> None:
        """Recompute `words`."""
        self._generation = generation
        self._fill(states)
        assert isinstance(self._slots, torch.Tensor)
        products = self._slots.mul_(self._multipliers)
        ends = torch.cumsum(products, 0, dtype=torch.int64)[self._run_end]
        sums = torch.zeros(len(self._held), dtype=torch.int64, device=products.device)
        sums.index_add_(0, self._run_class, torch.diff(ends, prepend=self._zero))
        digests = _fold(sums & MASK32).to(torch.int32)
        pairs = digests[self._pair_class] * self._pair_sign
        self.words = torch.where(self._pair_held, pairs, self._neutral)
