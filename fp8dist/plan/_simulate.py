"""Runs programs on a clock that nobody waits for.

A rank does its actions in order. A send is buffered and costs its sender nothing; a compute action waits until its
input is there; a collective waits for every member of its group. Nothing else orders two ranks, so the times do not
depend on which rank is advanced first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ._actions import COLLECTIVES, COMPUTE, SENDS, Action, Kind, Message, Program, gives, needs


class Span(NamedTuple):
    """One compute action or collective on the clock, in ms from the start of the step."""

    rank: int
    action: Action
    since: float
    """When the rank was free for it: `start - since` is how long it waited for others."""
    start: float
    end: float


@dataclass(frozen=True)
class Wait:
    """Where a rank is stuck."""

    rank: int
    action: Action
    """What it cannot do, or cannot finish."""
    message: Message | None
    """What it waits for; None: it waits in a collective."""
    ranks: tuple[int, ...]
    """Whom it waits for."""
    absent: tuple[int, ...]
    """Those of them that would never come, even if nothing kept them: it is not in their program (any more)."""


@dataclass(frozen=True)
class Run:
    """What came of it."""

    spans: tuple[Span, ...]
    """By rank, then time. Up to the deadlock, if there is one."""
    waits: tuple[Wait, ...]
    """The ranks that are stuck; none if all came to their end."""
    collectives: tuple[tuple[Action, ...], ...]
    """What each rank entered and left, in order."""

    @property
    def makespan_ms(self) -> float:
        """The end of the last action."""
        return max((span.end for span in self.spans), default=0.0)


def simulate(
    programs: Sequence[Program],
    placement: Sequence[int],
    *,
    compute_ms: Mapping[Kind, float],
    message_ms: float = 0.0,
    groups: Sequence[int] = (),
    collective_ms: Sequence[float] = (),
    replicas: int = 1,
) -> Run:
    """Run one program per rank.

    Args:
        programs: of each rank.
        placement: the rank of each stage, within one replica.
        compute_ms: of F, B, I and W.
        message_ms: from a send to the arrival.
        groups: the number of each rank's reduction group; none: all are in group 0.
        collective_ms: of one collective, by group; none: 0.
        replicas: pipelines among the ranks, which follow each other; messages stay within one.
    """
    simulator = _Simulator(
        programs, placement, compute_ms, message_ms, groups or [0] * len(programs), collective_ms, replicas
    )
    simulator.run()
    spans = sorted(simulator.spans, key=lambda span: (span.rank, span.end))
    return Run(tuple(spans), tuple(simulator.stuck()), tuple(map(tuple, simulator.left)))


class _Simulator:
    def __init__(
        self,
        programs: Sequence[Program],
        placement: Sequence[int],
        compute_ms: Mapping[Kind, float],
        message_ms: float,
        groups: Sequence[int],
        collective_ms: Sequence[float],
        replicas: int,
    ) -> None:
        assert len(programs) % replicas == 0 and len(groups) == len(programs)
        self.programs, self.placement = programs, placement
        self.compute_ms, self.message_ms = compute_ms, message_ms
        self.groups, self.collective_ms = groups, collective_ms
        self.pp = len(programs) // replicas
        self.n_stages = len(placement)
        self.members: dict[int, list[int]] = {}
        for rank, group in enumerate(groups):
            self.members.setdefault(group, []).append(rank)
        self.position = [0] * len(programs)
        self.clock = [0.0] * len(programs)
        self.arrived: dict[tuple[int, Message], float] = {}
        self.waiting: dict[tuple[int, Message], int] = {}
        self.inside: dict[int, dict[int, float]] = {group: {} for group in self.members}
        self.spans: list[Span] = []
        self.left: list[list[Action]] = [[] for _ in programs]
        self.ready = deque(range(len(programs)))

    def run(self) -> None:
        """Advance whoever can advance until nobody can."""
        while self.ready:
            self._advance(self.ready.popleft())

    def _advance(self, rank: int) -> None:
        program = self.programs[rank]
        while self.position[rank] < len(program):
            action = program[self.position[rank]]
            if action.kind in COLLECTIVES:
                self._enter(rank)
                return
            if action.kind in COMPUTE and not self._compute(rank, action):
                return
            if action.kind in SENDS:
                self._deliver(rank, action, self.clock[rank] + self.message_ms)
            self.position[rank] += 1

    def _compute(self, rank: int, action: Action) -> bool:
        since = start = self.clock[rank]
        wanted = needs(action, self.n_stages)
        if wanted is not None:
            key = (rank // self.pp, wanted)
            if key not in self.arrived:
                self.waiting[key] = rank
                return False
            start = max(since, self.arrived[key])
        self.clock[rank] = end = start + self.compute_ms[action.kind]
        self.spans.append(Span(rank, action, since, start, end))
        made = gives(action, self.n_stages)
        if made is not None and self.placement[made.stage] == rank % self.pp:
            self._deliver(rank, action, end)  # to another stage of this rank, without a message
        return True

    def _deliver(self, rank: int, action: Action, at: float) -> None:
        made = gives(action, self.n_stages)
        assert made is not None, action
        key = (rank // self.pp, made)
        self.arrived[key] = at
        if key in self.waiting:
            self.ready.append(self.waiting.pop(key))

    def _enter(self, rank: int) -> None:
        """Stay, unless all others are here; the last one frees all."""
        group = self.groups[rank]
        inside = self.inside[group]
        inside[rank] = self.clock[rank]
        if len(inside) < len(self.members[group]):
            return
        start = max(inside.values())
        end = start + (self.collective_ms[group] if self.collective_ms else 0.0)
        for member, since in inside.items():
            action = self.programs[member][self.position[member]]
            self.spans.append(Span(member, action, since, start, end))
            self.left[member].append(action)
            self.clock[member] = end
            self.position[member] += 1
            self.ready.append(member)
        inside.clear()

    def stuck(self) -> list[Wait]:
        """Whoever has not come to its end, and whom it waits for."""
        return [self._wait(rank) for rank, at in enumerate(self.position) if at < len(self.programs[rank])]

    def _wait(self, rank: int) -> Wait:
        action = self.programs[rank][self.position[rank]]
        message: Message | None = None
        if action.kind in COLLECTIVES:
            group = self.groups[rank]
            missing = tuple(r for r in self.members[group] if r not in self.inside[group])
            absent = tuple(r for r in missing if not any(a.kind in COLLECTIVES for a in self._left_to_do(r)))
        else:
            message = needs(action, self.n_stages)
            assert message is not None, action
            source = rank // self.pp * self.pp + self.placement[message.source]
            kinds = COMPUTE if source == rank else SENDS
            sent = any(
                a.kind in kinds and gives(a, self.n_stages) == message for a in self._left_to_do(source)
            )
            missing, absent = (source,), () if sent else (source,)
        return Wait(rank, action, message, missing, absent)

    def _left_to_do(self, rank: int) -> Program:
        return self.programs[rank][self.position[rank] :]
