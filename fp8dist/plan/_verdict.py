"""Two questions about a plan: do all members of a group enter the same collectives, and who waits for whom for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._layout import format_ranks
from ._actions import COLLECTIVES, Action, Kind, Program, stages_of
from ._simulate import Run, Wait

SHOWN_WAITS = 3  # of a circle, in the line that tells it


@dataclass(frozen=True)
class CounterExample:
    """Two ranks of one group that would meet in a collective for different things."""

    index: int
    """Which collective of the group, from 0: collectives pair by order."""
    ranks: tuple[int, int]
    """Two pipeline ranks."""
    what: tuple[str, str]
    """What each of them enters it for."""

    def __str__(self) -> str:
        (one, other), (its, others) = self.ranks, self.what
        return f"collective {self.index}: rank {one} {its}, rank {other} {others}"


def counter_examples(programs: Sequence[Program], ranks: Sequence[int]) -> tuple[CounterExample, ...]:
    """Where the collectives of these ranks, paired by order, are not about the same thing.

    The same thing is the same step, or the backward of the same microbatch and chunk (a chunk is counted within its
    rank: 0 is the first stage that it holds).

    Args:
        programs: by rank.
        ranks: the members of one group.
    """
    sequences = {rank: _meanings(programs[rank]) for rank in ranks}
    found = []
    for index in range(max(map(len, sequences.values()), default=0)):
        what = {rank: s[index] if index < len(s) else "has none" for rank, s in sequences.items()}
        first = ranks[0]
        other = next((rank for rank in ranks if what[rank] != what[first]), None)
        if other is not None:
            found.append(CounterExample(index, (first, other), (what[first], what[other])))
    return tuple(found)


def _meanings(program: Program) -> list[str]:
    chunks = {stage: chunk for chunk, stage in enumerate(stages_of(program))}
    return [
        "leaves the step" if action.kind is Kind.EXIT
        else f"reduces for microbatch {action.microbatch} of its chunk {chunks[action.stage]}"
        for action in program if action.kind in COLLECTIVES
    ]  # fmt: skip


def check_run(run: Run, programs: Sequence[Program]) -> None:
    """A run that came to its end has gone through every collective of every program, in order."""
    for rank, program in enumerate(programs):
        expected = tuple(action for action in program if action.kind in COLLECTIVES)
        assert run.waits or run.collectives[rank] == expected, f"rank {rank} left {run.collectives[rank]}"


@dataclass(frozen=True)
class Deadlock:
    """Why a run never ends."""

    where: str
    """Which rank waits where for whom, one line."""
    why: str
    """What keeps the awaited rank, and what to do; one line."""
    cycle: tuple[int, ...]
    """Ranks that wait for each other in a circle, each for the next one; empty if one would never come."""
    waits: tuple[Wait, ...]
    """Every rank that is stuck."""


def deadlock(run: Run) -> Deadlock | None:
    """None if every rank came to its end."""
    if not run.waits:
        return None
    chain, closed = _follow(run.waits)
    shown = "; ".join(map(describe, chain[:SHOWN_WAITS] if closed else chain[-SHOWN_WAITS:]))
    if len(chain) > SHOWN_WAITS:
        shown += f"; and so on over {len(chain)} ranks"
    if closed:
        cycle = tuple(wait.rank for wait in chain)
        why = f"{_held_up(chain[0], chain[-1])}: ranks {' -> '.join(map(str, (*cycle, cycle[0])))} wait in a circle"
    else:
        cycle = ()
        last = chain[-1]
        owed = "collective for it" if last.message is None else "send of it"
        why = f"{format_ranks(last.absent[:1])} has no {owed} left in its program"
    return Deadlock(f"deadlock: {shown}", f"why: {why}; {_mend(chain)}", cycle, run.waits)


def describe(wait: Wait) -> str:
    """`rank 3 waits in 3UPDATE0 for ranks 0-2`."""
    if wait.message is None:
        inside = (
            "in the exit of its scope"
            if wait.action.kind is Kind.EXIT
            else f"in its collective {wait.action}"
        )
        return f"rank {wait.rank} waits {inside} for {format_ranks(wait.ranks)}"
    return (
        f"rank {wait.rank} waits before {wait.action} for the {wait.message.what}, {format_ranks(wait.ranks)}"
    )


def _follow(waits: Sequence[Wait]) -> tuple[list[Wait], bool]:
    """A circle of waits if the first stuck collective (or else the first stuck rank) leads into one, or a chain."""
    stuck = {wait.rank: wait for wait in waits}
    wait = next((wait for wait in waits if wait.message is None), waits[0])
    chain: list[Wait] = []
    while wait not in chain:
        chain.append(wait)
        if wait.absent:
            return chain, False
        # Of several that are missing, one that waits for this rank shows the circle best.
        back = [rank for rank in wait.ranks if stuck[rank].ranks == (wait.rank,)]
        wait = stuck[(back or list(wait.ranks))[0]]
    return chain[chain.index(wait) :], True


def _held_up(first: Wait, last: Wait) -> str:
    """Why `first`, which `last` waits for, does not come."""
    owed = "enters that collective" if last.message is None else f"sends that {last.message.noun}"
    return f"rank {first.rank} {owed} only behind its {first.action}"


def _mend(chain: Sequence[Wait]) -> str:
    if any(wait.action.kind is Kind.UPDATE for wait in chain):
        return "take one update per step, or a reduction group within one stage"
    if chain[-1].absent:
        return "add it there"
    return "change the order of these actions"


def with_updates(program: Program, kind: Kind) -> Program:
    """A program in a step scope (`EXIT`), or with a collective at the end of each backward (`UPDATE`).

    A backward in two halves reduces behind its first half, which is where gradients are quantized first. Its send
    comes behind the collective: the collective is part of the backward.
    """
    if kind is Kind.EXIT:
        return (Action(Kind.OPEN), *program, Action(Kind.EXIT))
    assert kind is Kind.UPDATE, kind
    actions = []
    for action in program:
        actions.append(action)
        if action.kind in (Kind.B, Kind.I):
            actions.append(Action(Kind.UPDATE, action.stage, action.microbatch))
    return tuple(actions)
