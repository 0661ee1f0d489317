"""A step, planned: who does what in which order, whether it can end, and what its reductions cost.

    schedule, numbers ──▶ Table ──with updates──▶ programs ──▶ simulate ──▶ times, or a deadlock
                                                     └──▶ order of the collectives of each group

All ranks with the same place in the pipeline do the same, so one program stands for dp x tp of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from ._actions import COLLECTIVES, COMPUTE, Kind, Program, stages_of
from ._costs import Costs
from ._payload import Holdings, Model
from ._simulate import Run, simulate
from ._tables import NAMES, Table, table, table_from_csv
from ._verdict import CounterExample, Deadlock, check_run, counter_examples, deadlock, with_updates

Updates = Literal["per-step", "per-microbatch"]
Members = Literal["all", "stage", "dp"]


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, and along which dimensions.

    Raises:
        ValueError: a number below 1, or `ep` does not divide `dp`.
    """

    pp: int
    """Pipeline ranks."""
    dp: int = 1
    """Replicas of the pipeline."""
    tp: int = 1
    """Ranks that split one layer."""
    ep: int = 1
    """Ranks, among the replicas, that share out the experts; they add no ranks."""

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1 but got {getattr(self, name)}")
        if self.dp % self.ep:
            raise ValueError(f"expected ep to divide dp, {self.dp}, but got {self.ep}")

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.tp


@dataclass(frozen=True)
class Group:
    """Reduction groups that are alike, as one."""

    ranks: tuple[int, ...]
    """Pipeline ranks that have members in it."""
    size: int
    """Ranks in one such group."""
    count: int
    """How many of them there are."""
    collectives: int
    """That each member enters in one step; the most of any member."""
    n_bytes: int
    """Of one collective."""
    ms: float
    """Of one collective, once all are there."""
    counter_examples: tuple[CounterExample, ...]
    """Where its members do not agree; empty is the proof that they do."""


@dataclass(frozen=True)
class Load:
    """What reductions ask of one rank in one step: the most of any rank."""

    collectives: int
    n_bytes: int
    ms: float
    """All of them, without waiting for anybody."""


@dataclass(frozen=True)
class Plan:
    """What `plan` found. Pipeline rank r stands for all `dp * tp` ranks at that place."""

    schedule: str
    layout: Layout
    microbatches: int
    placement: tuple[int, ...]
    """The pipeline rank of each stage."""
    programs: tuple[Program, ...]
    """What each pipeline rank does, in order."""
    updates: Updates
    members: Members
    costs: Costs
    groups: tuple[Group, ...]
    run: Run
    """All spans on the clock, up to a deadlock."""
    makespan_without_ms: float | None
    """Of the same step with no collective in it; None if that would not end either."""
    per_step: Load
    """One update per step, over the chosen group."""
    per_microbatch: Load
    """One update behind each forward and each backward, over the ranks of a stage: Transformer Engine's way."""

    @cached_property
    def deadlock(self) -> Deadlock | None:
        """Why the step never ends; None if it does."""
        return deadlock(self.run)

    @property
    def good(self) -> bool:
        """It ends, and every group agrees on its collectives."""
        return self.deadlock is None and not any(group.counter_examples for group in self.groups)

    @property
    def makespan_ms(self) -> float | None:
        """From the opening of the first scope to the end of the last rank; None in a deadlock."""
        return None if self.run.waits else self.run.makespan_ms

    @property
    def exposed_ms(self) -> float | None:
        """How much longer the step takes than without its collectives."""
        if self.makespan_ms is None or self.makespan_without_ms is None:
            return None
        return self.makespan_ms - self.makespan_without_ms

    @cached_property
    def busy_ms(self) -> tuple[float, ...]:
        """Milliseconds of compute, by pipeline rank."""
        busy = [0.0] * len(self.programs)
        for span in self.run.spans:
            if span.action.kind in COMPUTE:
                busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def bubble(self) -> float | None:
        """The part of all ranks' time in which they compute nothing; None in a deadlock."""
        if not self.makespan_ms:
            return None
        return 1 - sum(self.busy_ms) / (self.makespan_ms * len(self.programs))


def plan(
    schedule: str | Path,
    *,
    pp: int | None = None,
    chunks: int | None = None,
    microbatches: int | None = None,
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    model: Model | None = None,
    updates: Updates = "per-step",
    group: Members = "all",
    costs: Costs | None = None,
) -> Plan:
    """Plan one training step. Needs no device and no process group.

    Args:
        schedule: one of `NAMES`, or a CSV file in the format of torch's schedules.
        pp: pipeline ranks; a file says it itself.
        chunks: stages per rank; None is what the schedule needs, or 2.
        microbatches: per step; None is twice `pp` (at least as many as DualPipeV needs), a file says it itself.
        dp: replicas of the pipeline.
        tp: ranks that split one layer.
        ep: ranks, among the replicas, that share out the experts.
        model: decides the payload; None is one layer of four linears per stage.
        updates: `per-step` is one collective at the end; `per-microbatch` a blocking one in each backward.
        group: whom a collective joins: `all` ranks, the ranks of one `stage` (dp x tp), or `dp` of them.
        costs: times of the simulated clock.

    Raises:
        ValueError: numbers that do not fit each other, or a file that is no table.
        OSError: the file cannot be read.
    """
    _check_choice("updates", updates, get_args(Updates))
    _check_choice("group", group, get_args(Members))
    model, costs = model or Model(), costs or Costs()
    found = _table(schedule, pp, chunks, microbatches)
    layout = Layout(len(found.programs), dp, tp, ep)
    if model.experts % ep:
        raise ValueError(f"expected ep to divide the experts of a layer, {model.experts}, but got {ep}")
    kind = Kind.EXIT if updates == "per-step" else Kind.UPDATE
    programs = tuple(with_updates(program, kind) for program in found.programs)
    holdings = Holdings.of(model, found.placement, layout.pp, ep)
    groups = _groups(programs, holdings, layout, group, updates, costs)
    run = simulate(
        programs, found.placement, compute_ms=costs.compute_ms, message_ms=costs.message_ms,
        groups=[next(i for i, g in enumerate(groups) if r in g.ranks) for r in range(layout.pp)],
        collective_ms=[g.ms for g in groups],
    )  # fmt: skip
    check_run(run, programs)
    without = simulate(
        found.programs, found.placement, compute_ms=costs.compute_ms, message_ms=costs.message_ms
    )
    return Plan(
        found.schedule, layout, found.microbatches, found.placement, programs, updates, group, costs, groups, run,
        None if without.waits else without.makespan_ms,
        *_loads(found.programs, holdings, layout, group, costs),
    )  # fmt: skip


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"expected {name} to be {' or '.join(choices)} but got {value!r}")


def _table(schedule: str | Path, pp: int | None, chunks: int | None, microbatches: int | None) -> Table:
    for name, value in (("pp", pp), ("chunks", chunks), ("microbatches", microbatches)):
        if value is not None and value < 1:
            raise ValueError(f"expected {name} >= 1 but got {value}")
    if isinstance(schedule, str) and schedule.lower() in NAMES:
        if pp is None:
            raise ValueError(f"expected the number of pipeline ranks (pp) for {schedule} but got none")
        return table(schedule, pp, chunks, 2 * pp if microbatches is None else microbatches)
    if not Path(schedule).is_file():
        raise ValueError(
            f"expected a schedule out of {', '.join(NAMES)}, or a CSV file, but got {str(schedule)!r}"
        )
    found = table_from_csv(Path(schedule))
    held = {len(stages_of(program)) for program in found.programs}
    theirs = {"pp": {len(found.programs)}, "chunks": held, "microbatches": {found.microbatches}}
    for name, value in (("pp", pp), ("chunks", chunks), ("microbatches", microbatches)):
        own = theirs[name]
        if value is not None and own != {value}:
            raise ValueError(
                f"{schedule}: expected {name} {value} but got {', '.join(map(str, sorted(own)))}"
            )
    return found


def _members(layout: Layout, group: Members) -> tuple[list[tuple[int, ...]], int, int]:
    """The pipeline ranks of each kind of group; the size of a group, and how many there are of each kind."""
    if group == "all":
        return [tuple(range(layout.pp))], layout.world, 1
    alone: list[tuple[int, ...]] = [(rank,) for rank in range(layout.pp)]
    if group == "stage":
        return alone, layout.dp * layout.tp, 1
    return alone, layout.dp, layout.tp


def _groups(
    programs: Sequence[Program],
    holdings: Holdings,
    layout: Layout,
    group: Members,
    updates: Updates,
    costs: Costs,
) -> tuple[Group, ...]:
    kinds, size, count = _members(layout, group)
    groups = []
    for ranks in kinds:
        n_bytes = holdings.row_bytes(ranks) if updates == "per-step" else holdings.backward_bytes(ranks)
        collectives = max(sum(action.kind in COLLECTIVES for action in programs[rank]) for rank in ranks)
        found = counter_examples(programs, ranks)
        ms = costs.all_reduce_ms(size, n_bytes)
        groups.append(Group(ranks, size, count, collectives, n_bytes, ms, found))
    return tuple(groups)


def _loads(
    programs: Sequence[Program], holdings: Holdings, layout: Layout, group: Members, costs: Costs
) -> tuple[Load, Load]:
    """One update per step, and one per microbatch, chunk and direction."""
    kinds, size, _ = _members(layout, group)
    row = max(map(holdings.row_bytes, kinds))
    once = Load(1, row, costs.all_reduce_ms(size, row))
    often = []
    for rank, program in enumerate(programs):
        forwards = sum(action.kind is Kind.F for action in program)
        parts = holdings.both_ways_bytes(rank)
        ms = sum(costs.all_reduce_ms(layout.dp * layout.tp, part) for part in parts)
        often.append(Load(2 * forwards, forwards * sum(parts), forwards * ms))
    return once, max(often, key=lambda load: (load.n_bytes, load.collectives))
