"""The contiguous buffers behind all slots of one rank: amax row, scales, history, digests.

The row spans the union of all ranks' slots, because it is what the MAX runs over; scales and history exist
for the rank's own slots only, forward slots before gradient slots, each direction with a recipe state (and so
a ring head) of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ._amax import ABSENT
from ._digests import ClassDigests, DeviceDigests, HostDigests
from ._header import INT32_MIN, Part, header_words
from ._host_words import HostWords
from ._layout import EMPTY, Layout, is_backward
from ._recipe_state import RecipeState
from ._scope import ScopeState
from ._slots import Slot
from .recipe import Recipe

# Gets the names of the own slots (the same list until the layout changes), what a commit took of them (float32 [n],
# reduced, to be copied), and which of them it took.
CommitWatcher = Callable[[Sequence[str], torch.Tensor, Part], None]


@dataclass(frozen=True)
class Columns:
    """State of some slots, as it travels: to another layout, to a rank that newly holds a name, to a checkpoint."""

    names: Sequence[str]
    history: torch.Tensor
    """float32 [L, n], oldest row first, -1 where no rank ran the tensor."""
    scale: torch.Tensor
    """float32 [n]."""
    warm: torch.Tensor
    """bool [n], on the CPU."""


class SlotTable:
    """All slots that one rank declared, and their storage once a layout is agreed.

    Attributes:
        slots: by name, in order of declaration.
        layout: the agreed union; empty before the first `bind`.
        words: int32, the header's words followed by the row's bits. What is reduced.
        row: float32 [len(layout.names)], the amaxes; a view of `words`.
        digests: of the state of each class; None before the first `bind`.
        on_commit: sees the reduced amaxes of every commit; None while nobody watches.
    """

    def __init__(self, recipe: Recipe, scope: ScopeState) -> None:
        self.recipe = recipe
        self.slots: dict[str, Slot] = {}
        self.layout: Layout = EMPTY
        self.device = torch.device("cpu")
        self.nonfinite_before = 0
        self.on_commit: CommitWatcher | None = None
        self._scope = scope
        self._counted: tuple[list[str], torch.Tensor] | None = None  # whose casts, and int64 [n, 3]
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._states: list[RecipeState] = []
        self._committed: list[RecipeState] | None = None  # by the last commit; None before the first
        self._n_forward_union = 0
        self.digests: ClassDigests | None = None
        self._warm_at_birth = {
            backward: not recipe.stateless
            and bool(recipe.make_state(1, backward=backward, device=self.device).warm[0])
            for backward in (False, True)
        }
        self._allocate(0, 0)

    # -- declaring and binding ---------------------------------------------------------------------------

    def declare(self, name: str) -> Slot:
        """A new slot with cells of its own, to be taken over by the next `bind`."""
        backward = is_backward(name)
        slot = Slot(
            name,
            dtype=self.recipe.dtype(backward),
            scaled_max=self.recipe.scaled_max(backward),
            scope=self._scope,
            warm=self._warm_at_birth[backward],
        )
        self.slots[name] = slot
        return slot

    @property
    def has_new_slots(self) -> bool:
        """Whether slots were declared that the agreed layout does not place on this rank yet."""
        return len(self.slots) > len(self._names)

    @property
    def born_warm(self) -> bool:
        """Whether new slots start with a scale of 1 instead of their own amax."""
        return self._warm_at_birth[False]

    def _allocate(self, n_header: int, n_union: int) -> None:
        self.words = torch.full((n_header + n_union,), INT32_MIN, dtype=torch.int32, device=self.device)
        self.row = self.words[n_header:].view(torch.float32)
        self.header = self.words[:n_header]
        # Views made once: slicing costs as much as the copies that go through them.
        n_plain = header_words(0) if n_header else 0
        self.plain, self.compared = self.words[:n_plain], self.words[n_plain:n_header]
        self._host = HostWords(self.header, self.plain)
        split = self._n_forward_union
        self._row_parts = {
            Part.BOTH: self.row,
            Part.FORWARD: self.row[:split],
            Part.BACKWARD: self.row[split:],
        }
        self.reset_row()

    def fill_header(self, plain: Sequence[int], *, compare: bool) -> None:
        """Write the header in front of the row.

        Args:
            plain: flags and fields, `header_words(0)` int32 values.
            compare: send the scale digests; otherwise neutral words.
        """
        self._host.write(plain)
        if compare:
            assert self.digests is not None
            self.compared.copy_(self.digests.words)
        else:
            self.compared.fill_(INT32_MIN)

    def read_header(self) -> list[int]:
        """The header's words, once a reduction over more than this rank has ended."""
        return self._host.read()

    def reset_row(self, part: Part = Part.BOTH) -> None:
        """Forget what was recorded."""
        self._scope.weight_cache.clear()  # a weight that is kept for a scope is recorded by its first use only
        self._row_parts[part].fill_(ABSENT)
        if self.has_new_slots:
            self._reset_new_slots(part)

    def _reset_new_slots(self, part: Part) -> None:
        for name, slot in self.slots.items():
            if name not in self._index and (Part.BACKWARD if slot.backward else Part.FORWARD) in part:
                slot.amax.fill_(ABSENT)

    def replace_words(self) -> None:
        """Take a fresh buffer, because an abandoned reduction may still write into the old one."""
        self._allocate(self.header.numel(), len(self.layout.names))
        self._point_slots()

    def bind(self, layout: Layout, rank: int, device: torch.device) -> None:
        """Lay out all buffers anew for `layout`, keep the state of every slot that had one."""
        kept = self.export() if self._states else None
        self.nonfinite_before = self.nonfinite
        self.layout, self.device = layout, device
        held = [rank in ranks for ranks in layout.holders]
        positions = [i for i, c in enumerate(layout.class_of) if held[c]]
        self._names = [layout.names[i] for i in positions]
        assert set(self._names) == set(self.slots), "the agreed layout does not match the declared slots"
        n = len(positions)
        n_forward = sum(not is_backward(name) for name in self._names)
        self._index = {name: i for i, name in enumerate(self._names)}
        self._whole_row = n == len(layout.names)
        self._positions = torch.tensor(positions, dtype=torch.int64, device=device)
        self._scale = torch.ones(n, device=device)
        # A product on a GPU takes the address of a scale only if it is a multiple of 16 bytes.
        self._scale_inv = torch.ones(4 * n, device=device)[::4] if device.type == "cuda" else torch.ones(n)
        self._warm = torch.zeros(n, dtype=torch.bool)
        self._states = []
        for backward, part in ((False, slice(0, n_forward)), (True, slice(n_forward, n))):
            state = self.recipe.make_state(part.stop - part.start, backward=backward, device=device)
            state.bind(self._scale[part], self._scale_inv[part], self._warm[part])
            self._states.append(state)
        self._columns = (slice(0, n_forward), slice(n_forward, n))
        self._own = torch.empty(n, device=device)
        self._committed = None
        self._n_forward_union = sum(not is_backward(name) for name in layout.names)
        digests = HostDigests if device.type == "cpu" else DeviceDigests
        class_of = [layout.class_of[i] for i in positions]
        self.digests = digests(len(layout.names), self._positions, class_of, held, n_forward)
        self._allocate(header_words(len(layout.holders)), len(layout.names))
        if kept is not None:
            self.load(kept)
        self._fold_and_point(device)

    def _fold_and_point(self, device: torch.device) -> None:
        """Move what the slots recorded in their own cells into the row, then point them at the row."""
        if self._names:
            amaxes = torch.cat([self.slots[name].amax.to(device) for name in self._names])
            bits = torch.maximum(self.row[self._positions].view(torch.int32), amaxes.view(torch.int32))
            self.row[self._positions] = bits.view(torch.float32)
        self._point_slots()

    def _point_slots(self) -> None:
        if self._whole_row:
            self._own = self.row
        self._directions = [
            (state, self._own[columns], flag)
            for state, columns, flag in zip(self._states, self._columns, Part.BOTH, strict=True)
            if state.n > 0
        ]
        cells = self.row.split(1) if len(self.row) else ()
        views = zip(
            self._names, self._positions.tolist(), self._scale.split(1), self._scale_inv.split(1),
            self._warm.split(1), strict=False,
        )  # fmt: skip
        for name, position, scale, scale_inv, warm in views:
            slot = self.slots[name]
            # `.data`: a version counter per cell. A compiled checkpoint keeps the cell for its recomputation,
            # and what other slots record meanwhile is none of its business.
            slot.amax = cells[position].data
            slot.scale, slot.scale_inv, slot.warm = scale, scale_inv, warm

    # -- commit ------------------------------------------------------------------------------------------

    def prepare(self, part: Part = Part.BOTH) -> None:
        """Do what of the commit does not need the reduced row. Changes nothing that anybody sees."""
        for state, _, flag in self._directions:
            if flag in part:
                state.prepare()

    def commit(self, part: Part = Part.BOTH) -> None:
        """History takes the row (reduced by now), scales are recomputed, the row is reset.

        Args:
            part: the slots to commit; what the others recorded stays.
        """
        if not self._whole_row:
            torch.index_select(self.row, 0, self._positions, out=self._own)
        done: list[RecipeState] = []
        try:
            for state, amax, flag in self._directions:
                if flag in part:
                    state.commit(amax)
                    done.append(state)
        except BaseException:
            for state in done:
                state.undo()
            raise
        self._committed = done
        if self.on_commit is not None:
            self.on_commit(self._names, self._own, part)
        self.reset_row(part)

    def undo(self) -> bool:
        """Take the last commit back; False if there is none to take back."""
        if not self.can_undo:
            return False
        for state in self._committed or ():
            state.undo()
        return True

    @property
    def can_undo(self) -> bool:
        """Whether `undo` would take a commit back."""
        if self._committed is None:
            return not self._names  # a rank without slots has nothing that could be ahead
        return all(state.undoable for state in self._committed)

    def forget(self, names: Sequence[str]) -> None:
        """Make slots as cold as new ones, if new ones are cold."""
        if self.born_warm:
            return
        fresh = self.recipe.make_state(len(names), backward=False, device=self.device)
        self.load(Columns(names, fresh.history_rows(), fresh.scale, fresh.warm))

    def seed(self, names: Sequence[str], amaxes: torch.Tensor) -> None:
        """Give cold weight slots the scale of their amax.

        Args:
            names: union names that `amaxes` belong to; those of other ranks are passed over.
            amaxes: float32 [len(names)]; -1 where no holder wants a seed.
        """
        for state, part in zip(self._states, self._columns, strict=True):
            mine = [
                (self._index[name] - part.start, i)
                for i, name in enumerate(names)
                if name in self._index and part.start <= self._index[name] < part.stop
            ]
            if mine:
                local, given = torch.tensor(mine, device=self.device).unbind(1)
                wanted = amaxes[given] >= 0
                state.seed(local[wanted], amaxes[given][wanted])

    # -- state that travels ------------------------------------------------------------------------------

    def export(self) -> Columns:
        """State of all own slots."""
        return Columns(
            list(self._names),
            torch.cat([state.history_rows() for state in self._states], dim=1),
            self._scale.clone(),
            self._warm.clone(),
        )

    def load(self, columns: Columns) -> None:
        """Set the state of those own slots that `columns` names; the others keep theirs."""
        given = {name: i for i, name in enumerate(columns.names)}
        for state, part in zip(self._states, self._columns, strict=True):
            pairs = [(i, given[name]) for i, name in enumerate(self._names[part]) if name in given]
            if not pairs:
                continue
            to, source = torch.tensor(pairs).unbind(1)
            rows, scale = state.history_rows(), state.scale.clone()
            warm = state.warm.clone()
            rows[:, to] = columns.history[:, source].to(rows.device)
            scale[to] = columns.scale[source].to(scale.device)
            warm[to] = columns.warm[source].cpu()
            state.load(rows, scale, warm)

    def columns_as_words(self, names: Sequence[str]) -> torch.Tensor:
        """State and row of the named slots as int32 [len(names), 3 + L], ready for a MAX.

        A rank that has no committed state of a name sends INT32_MIN, which loses against the holder's.
        """
        length = self._states[0].history_rows().shape[0]
        words = torch.full((len(names), 3 + length), INT32_MIN, dtype=torch.int32, device=self.device)
        columns = self.export()
        bits = torch.cat(
            [
                columns.scale.view(torch.int32)[None],
                columns.warm.to(self.device, torch.int32)[None],
                columns.history.view(torch.int32),
            ]
        )
        position = self.layout.position
        for i, name in enumerate(names):
            amax = self.row[position[name]] if name in position else torch.tensor(ABSENT, device=self.device)
            words[i, 0] = amax.view(torch.int32)
            if name in self._index:
                words[i, 1:] = bits[:, self._index[name]]
            elif name in self.slots:
                cell = self.slots[name].amax.to(self.device).view(torch.int32)[0]
                words[i, 0] = torch.maximum(words[i, 0], cell)
        return words

    def load_words(self, names: Sequence[str], words: torch.Tensor) -> None:
        """Take over the reduced `columns_as_words`: amaxes into the row, states where a holder had one."""
        position = self.layout.position
        index = torch.tensor([position[name] for name in names], device=self.device)
        self.row[index] = words[:, 0].contiguous().view(torch.float32)
        known = (words[:, 1] != INT32_MIN).tolist()
        kept = [i for i, has_state in enumerate(known) if has_state]
        columns = words[kept].T.contiguous()
        self.load(
            Columns(
                [names[i] for i in kept],
                columns[3:].view(torch.float32),
                columns[1].view(torch.float32),
                columns[2].cpu() != 0,
            )
        )

    # -- what other people read --------------------------------------------------------------------------

    @property
    def bound(self) -> bool:
        """Whether a layout was agreed."""
        return bool(self._states)

    @property
    def nonfinite(self) -> int:
        """How many infinite or NaN amaxes were reduced so far."""
        return self.nonfinite_before + sum(int(state.nonfinite.sum()) for state in self._states)

    def refresh_digests(self, generation: int) -> None:
        """Recompute the header's pair of every class from the scales and histories."""
        assert self.digests is not None
        self.digests.refresh(self._states, generation)

    def members_of_class(self, c: int) -> tuple[list[str], list[int], list[float]]:
        """Names of the slots of class `c`; their digests and scales, empty if this rank holds none of them."""
        assert self.digests is not None
        names = [name for name, of in zip(self.layout.names, self.layout.class_of, strict=True) if of == c]
        mine, digests = self.digests.members(self._states, c)
        return names, digests.tolist(), self._scale[mine].tolist()

    def full_digests(self) -> dict[int, int]:
        """Digest over scales, coldness and histories of each class this rank holds."""
        assert self.digests is not None
        columns = self.export()
        bits = torch.cat(
            [
                columns.scale.view(torch.int32)[None],
                columns.warm.to(self.device, torch.int32)[None],
                columns.history.view(torch.int32),
            ]
        )
        return self.digests.whole(bits)

    def count_casts(self, on: bool) -> None:
        """Give every slot a counter (values, saturated, flushed to zero), or take it away."""
        cells = torch.zeros((len(self._names), 3), dtype=torch.int64, device=self.device)
        self._counted = (self._names, cells) if on else None
        for name, cell in zip(self._names, cells.unbind(), strict=True):
            self.slots[name].casts = cell if on else None

    def casts(self) -> torch.Tensor | None:
        """int64 [n, 3] of `count_casts`, copied; None if they are not counted, or not since the layout changed."""
        counted = self._counted
        return counted[1].clone() if counted is not None and counted[0] is self._names else None

    def scales_now(self) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        """Names of the own slots (the same list until the layout changes), copies of scales and warmth."""
        if not self.bound:
            return self._names, torch.empty(0), torch.empty(0, dtype=torch.bool)
        return self._names, self._scale.clone(), self._warm.clone()

    def nonfinite_by_slot(self) -> torch.Tensor:
        """int64 [n], infinite and NaN amaxes of each own slot since the layout changed; on the slots' device."""
        counts = [state.nonfinite for state in self._states]
        return torch.cat(counts) if counts else torch.empty(0, dtype=torch.int64)
