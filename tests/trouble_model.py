"""A model in one process of what four ranks do in a schedule of trouble: it predicts what each of them sees.

It knows none of the library's code. A rank is a few numbers and a copy of each of its slots; a rule is a handful of
lines about one slot.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from trouble_schedules import (
    EVERYONE,
    WORLD,
    Act,
    Drift,
    Event,
    Load,
    Recover,
    Reopen,
    Rule,
    Save,
    Schedule,
    Step,
)

ROWS_IN_A_HEADER = (
    16  # rows of the histories that the ranks compare in one step, in turns; and always the newest one
)

F = np.float32


class Unfit(Exception):
    """The model does not predict this: ranks would wait for one that does not come."""


# -- one slot on one rank -----------------------------------------------------------------------------------

ABSENT, ZERO, LARGEST, SMALLEST = F(-1), F(0), np.finfo(F).max, np.finfo(F).tiny


@dataclass(frozen=True)
class Cell:
    """One rank's copy of a slot's state."""

    history: tuple[F, ...]
    """Oldest first."""
    scale: F
    warm: bool

    def bits(self) -> tuple[tuple[int, ...], int, bool]:
        """What is compared: exact bits."""
        return tuple(bits_of(x) for x in self.history), bits_of(self.scale), self.warm


def bits_of(x: F) -> int:
    """A float32 as its int32."""
    return int(np.asarray(x, F).view(np.int32))


def of_bits(bits: int) -> F:
    """Inverse of `bits_of`."""
    return F(np.asarray(bits, np.int32).view(F)[()])


def fresh(rule: Rule) -> Cell:
    """A slot before anything was recorded."""
    if rule.rule_set == "fp8dist":
        return Cell((ABSENT,) * rule.length, F(1), rule.first_step == "unit")
    return Cell((ABSENT,) + (ZERO,) * (rule.length - 1), F(1), True)


def after(rule: Rule, name: str, cell: Cell, amax: F) -> Cell:
    """The slot after a commit; `amax` is -1 where no rank ran the tensor."""
    fp8_max = 57344.0 if name.endswith(".grad_output") and not rule.e4m3 else 448.0
    aim = F(fp8_max * 2.0**-rule.margin)
    ours = rule.rule_set == "fp8dist"
    history, top = (_ours if ours else _theirs)(rule, cell.history, amax)
    if not (top > 0 and top < math.inf):
        return Cell(history, cell.scale, cell.warm)
    with np.errstate(over="ignore", under="ignore"):
        unfused = rule.rule_set == "te_unfused"
        scale = F(1) / top * F(fp8_max) / F(2.0**rule.margin) if unfused else aim / top
    return Cell(history, np.clip(scale, SMALLEST if ours else ZERO, LARGEST), True)


def _ours(rule: Rule, history: tuple[F, ...], amax: F) -> tuple[tuple[F, ...], F]:
    """The window, and the amax to scale by (0: keep the scale)."""
    finite, freezes = bool(amax < math.inf), rule.non_finite == "freeze"
    entering = amax if finite or freezes else ABSENT
    if rule.idle == "hold" and entering == ABSENT:
        return history, ZERO
    history = (*history[1:], entering)
    if not (finite or freezes):
        return history, ZERO
    return history, amax if rule.algo == "most_recent" else largest(history)


def _theirs(rule: Rule, history: tuple[F, ...], amax: F) -> tuple[tuple[F, ...], F]:
    """Transformer Engine's: one row of the history is only a place to gather in."""
    last = ZERO if amax == ABSENT else amax
    if rule.rule_set == "te_fused" and last == 0:
        return history, ZERO
    window = (*history[1:], last)
    counted = [x for x in window if x == x] if rule.rule_set == "te_fused" else window
    top = last if rule.algo == "most_recent" else largest(counted)
    return (ABSENT, *window[1:]), top


def largest(values: Iterable[F]) -> F:
    """The maximum; NaN wins, and -1 is less than all amaxes."""
    values = list(values)
    return next((x for x in values if x != x), max(values, default=ABSENT))


# -- the ranks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How an event ended on a rank: the error's type, what it names (one of `about`), whether a step committed."""

    error: str = ""
    about: frozenset[Any] = frozenset()
    committed: bool | None = None


@dataclass
class Rank:
    """What one rank knows; `cells` are its slots that the ranks have agreed on, before that what it has loaded."""

    declared: list[str]
    cells: dict[str, Cell] = field(default_factory=dict)
    layout: dict[str, tuple[int, ...]] | None = None
    generation: int = 0
    commits: int = 0
    aborts: int = 0
    collectives: int = 0
    started: int = 0
    """Collectives on the present communicator."""
    nonfinite: int = 0
    broken: bool = False
    undo: tuple[dict[str, Cell], int] | None = None

    @property
    def new(self) -> set[str]:
        """Declared, and not agreed on."""
        return set(self.declared).difference(self.cells if self.layout is not None else ())

    @property
    def can_undo(self) -> bool:
        """Whether it can go back by one commit."""
        return self.undo is not None or not self.cells

    def reduce(self, collectives: int = 1) -> None:
        """Take part in collectives."""
        self.collectives += collectives
        self.started += collectives

    def fail(self) -> None:
        """A step failed."""
        self.broken = True
        self.aborts += 1

    def stats(self) -> tuple[int, ...]:
        """In the order of `coordinator.stats`."""
        return self.commits, self.collectives, self.aborts, self.generation, self.nonfinite


class Model:
    """All ranks of a schedule in one process."""

    def __init__(self, schedule: Schedule) -> None:
        self.rule = schedule.rule
        self.ranks = [Rank(list(names)) for names in schedule.slots]
        self.checkpoints: list[tuple[int, dict[str, Cell]]] = []

    def state(self, rank: Rank) -> dict[str, Cell]:
        """What the rank's `state_dict()` holds."""
        known = rank.cells if rank.layout is None else {**dict.fromkeys(rank.layout), **rank.cells}
        new = {name: fresh(self.rule) for name in rank.declared if name not in known}
        return {**rank.cells, **new}

    def apply(self, event: Event) -> list[Ended]:
        """Let an event happen; how it ends on each rank. `Unfit` leaves the model as it was."""
        ended = [Ended()] * WORLD
        match event:
            case Step(acts):
                ended = self._step(acts)
            case Recover(heal_from):
                ended = self._recover(heal_from)
            case Save():
                states = [self.state(rank) for rank in self.ranks]
                union = {name: cell for state in reversed(states) for name, cell in state.items()}
                self.checkpoints.append((self.ranks[0].generation, union))
            case Load(checkpoint, chosen) if self.checkpoints:
                for r in chosen:
                    ended[r] = self._load(self.ranks[r], checkpoint)
            case Drift(r, name, row):
                self._drift(self.ranks[r], name, row)
            case Reopen(checkpoint, chosen):
                self.ranks = [Rank(rank.declared) for rank in self.ranks]
                if self.checkpoints and checkpoint is not None:
                    for r in chosen:
                        ended[r] = self._load(self.ranks[r], checkpoint)
        return ended

    # -- a step -----------------------------------------------------------------------------------------

    def _step(self, acts: tuple[Act, ...]) -> list[Ended]:
        failing = [r for r, act in enumerate(acts) if act.fail]
        torn = [r for r, rank in enumerate(self.ranks) if rank.broken]
        if not torn:
            self._check_fit(acts)
            self._freeze()
        for rank, act in zip(self.ranks, acts, strict=True):
            if not rank.broken and not (act.fail and act.fail_first):
                rank.declared += [name for name in act.new if name not in rank.declared]
        if torn:
            return [self._torn_step(r, act, {*torn, *failing}) for r, act in enumerate(acts)]
        verdict = self._verdict(acts, failing)
        commits = verdict.committed is True
        grows = commits and any(rank.new for rank in self.ranks)
        for rank in self.ranks:
            rank.reduce(2 if grows else 1)
        hit = [r for r, act in enumerate(acts) if act.lost == 1 + grows and r not in failing]
        if commits:
            self._commit(acts, [r for r in EVERYONE if r not in hit], grows)
        ended = []
        for r, (rank, act) in enumerate(zip(self.ranks, acts, strict=True)):
            how = Ended(act.fail, committed=False) if act.fail else verdict
            if r in hit:
                how = Ended("Lost", committed=False)
            if how.error:
                rank.fail()
            elif not commits:
                rank.aborts += 1
            ended.append(how)
        return ended

    def _check_fit(self, acts: tuple[Act, ...]) -> None:
        grows = any(act.new or rank.new for act, rank in zip(acts, self.ranks, strict=True))
        if not grows or all(act.lost != 1 for act in acts):
            return
        calm = tuple(Act(new=act.new, tag=act.tag, abort=act.abort, fail=act.fail) for act in acts)
        if all(how.committed for how in copy.deepcopy(self)._step(calm)):
            raise Unfit("a rank that is hit after the first collective does not come to the agreement")

    def _torn_step(self, r: int, act: Act, named: set[int]) -> Ended:
        """Some ranks refuse the step: whoever opens it waits for them until it learns why."""
        rank = self.ranks[r]
        if rank.broken:
            return Ended("NeedsRecovery")
        rank.fail()
        rank.reduce()
        return Ended(act.fail or "PeerAborted", frozenset() if act.fail else frozenset(named), False)

    def _verdict(self, acts: tuple[Act, ...], failing: list[int]) -> Ended:
        """What the one collective tells every rank."""
        if failing:
            return Ended("PeerAborted", frozenset(failing), False)
        for what, differ in (
            ("tag", len({act.tag for act in acts}) > 1),
            ("generation", len({rank.generation for rank in self.ranks}) > 1),
            ("scales", self.drifted()),
        ):
            if differ:
                return Ended("RanksDisagree", frozenset([what]), False)
        return Ended(committed=not any(act.abort for act in acts))

    def drifted(self) -> bool:
        """Whether the header of a step that opens now would tell that copies of a slot differ."""
        seen: dict[str, Any] = {}
        length = self.rule.length
        for rank in self.ranks:
            first = ROWS_IN_A_HEADER * rank.generation
            shown = {(first + i) % length for i in range(ROWS_IN_A_HEADER)} | {length - 1}
            for name, cell in rank.cells.items():
                compared = bits_of(cell.scale), [bits_of(cell.history[i]) for i in sorted(shown)]
                if seen.setdefault(name, compared) != compared:
                    return True
        return False

    def _freeze(self) -> None:
        if self.ranks[0].layout is not None:
            return
        layout = self._union()
        born_cold = not fresh(self.rule).warm
        for rank in self.ranks:
            rank.layout = layout
            rank.cells = {name: rank.cells.get(name, fresh(self.rule)) for name in rank.declared}
            rank.started = 0
            if born_cold and any(name.endswith(".weight") for name in layout):
                rank.reduce()  # the first scales of weights

    def _union(self) -> dict[str, tuple[int, ...]]:
        names = {name for rank in self.ranks for name in rank.declared}
        return {name: tuple(r for r in EVERYONE if name in self.ranks[r].declared) for name in names}

    def _take_over(self, chosen: list[int], *, only_new: bool = False) -> None:
        """These ranks learn of all declared slots; a new holder gets the state that others have of it."""
        layout = self._union()
        known = [dict(rank.cells) for rank in self.ranks]
        for r in chosen:
            rank = self.ranks[r]
            before, rank.layout = rank.layout or {}, layout
            for name in rank.declared:
                givers = [cells[name] for cells in known if name in cells]
                if not givers:
                    rank.cells[name] = fresh(self.rule)
                elif name not in rank.cells or (before[name] != layout[name] and not only_new):
                    rank.cells[name] = _greatest(givers)

    def _commit(self, acts: tuple[Act, ...], chosen: list[int], grows: bool) -> None:
        reduced: dict[str, list[F]] = {}
        for rank, act in zip(self.ranks, acts, strict=True):
            for name, amax in act.records:
                if name in rank.declared:
                    reduced.setdefault(name, []).append(F(amax))
        if grows:
            self._take_over(chosen)
        for r in chosen:
            rank = self.ranks[r]
            rank.undo = dict(rank.cells), rank.nonfinite
            for name, cell in rank.cells.items():
                reduced_amax = largest(reduced.get(name, ()))
                rank.cells[name] = after(self.rule, name, cell, reduced_amax)
                rank.nonfinite += not reduced_amax < math.inf
            rank.generation += 1
            rank.commits += 1

    # -- recovery and state -----------------------------------------------------------------------------

    def _recover(self, heal_from: int | None) -> list[Ended]:
        ranks = self.ranks
        if ranks[0].layout is None:
            return [Ended()] * WORLD
        to = min(rank.generation for rank in ranks) if heal_from is None else ranks[heal_from].generation
        ahead = [rank for rank in ranks if rank.generation == to + 1 and rank.can_undo]
        level = [rank for rank in ranks if rank.generation == to or rank in ahead]
        if heal_from is None and len(level) < WORLD:
            return [Ended("RanksDisagree", frozenset(["generation"]))] * WORLD
        layouts = [rank.layout for rank in ranks]
        if heal_from is not None and layouts.count(layouts[0]) < WORLD and len(level) < WORLD:
            raise Unfit("holders are of several generations, and whose state a new holder gets is not said")
        most = max(rank.started for rank in ranks)
        for rank in ranks:
            rank.reduce(most - rank.started)
            if rank in ahead:
                rank.generation -= 1
                if rank.undo is not None:
                    rank.cells, rank.nonfinite = rank.undo
                rank.undo = None
        relayout = layouts.count(layouts[0]) < WORLD
        if relayout:
            self._take_over(list(EVERYONE), only_new=True)
        for rank in ranks:
            rank.started, rank.broken = 0, False
            if relayout:
                rank.undo = None
                rank.reduce()
        if heal_from is not None:
            self._heal(heal_from, level)
        return [Ended()] * WORLD

    def _heal(self, healer: int, level: list[Rank]) -> None:
        layout = self.ranks[0].layout or {}
        given = {}
        for name, holders in layout.items():
            fitting = [holder for holder in holders if self.ranks[holder] in level] or holders
            given[name] = self.ranks[healer if healer in holders else fitting[0]].cells[name]
        for rank in self.ranks:
            rank.cells = {name: given[name] for name in rank.cells}
            rank.generation, rank.undo = self.ranks[healer].generation, None
            rank.reduce()

    def _load(self, rank: Rank, checkpoint: int) -> Ended:
        """Take the state as it is, else, where it is refused, what of it there is."""
        generation, cells = self.checkpoints[checkpoint % len(self.checkpoints)]
        bound = rank.layout is not None
        own = list(rank.cells) if bound else rank.declared
        refused = bool(bound and rank.new) or any(name not in cells for name in own)
        rank.cells = {name: cells.get(name, fresh(self.rule)) for name in own}
        rank.generation, rank.undo = generation, None
        return Ended("ValueError" if refused else "")

    def _drift(self, rank: Rank, name: str, row: int | None) -> None:
        cell = rank.cells.get(name)
        if cell is None or rank.layout is None:
            raise Unfit("there is no such slot")
        if any(other.cells.get(name, cell).bits() != cell.bits() for other in self.ranks):
            raise Unfit("ranks compare a sum, in which a second change may undo the first")
        old = cell.scale if row is None else cell.history[row]
        if not 0 <= old < math.inf:
            raise Unfit("no run writes what would be loaded")
        changed = of_bits(bits_of(old) ^ 1)
        history = tuple(changed if i == row else x for i, x in enumerate(cell.history))
        rank.cells[name] = Cell(history, changed if row is None else cell.scale, cell.warm)
        rank.undo = None


def _greatest(cells: list[Cell]) -> Cell:
    """What an element-wise MAX of the bits makes of copies, which may differ in rows that no header has shown yet."""
    history = tuple(
        of_bits(max(map(bits_of, row))) for row in zip(*(cell.history for cell in cells), strict=True)
    )
    return Cell(history, of_bits(max(bits_of(c.scale) for c in cells)), any(c.warm for c in cells))
