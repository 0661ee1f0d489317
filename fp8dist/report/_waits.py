"""Who is late: the rank that waits least in the collective is the one that the others wait for."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._flight import Dump
from ._read import Run, number

# A rank is late if the others wait longer than it by this part of a step (a part of a millisecond is noise
# everywhere), and if it is among the last in most of the steps.
LATE_PART_OF_STEP = 0.05
LATE_SECONDS = 1e-3
LATE_SECONDS_UNKNOWN_STEP = 5e-3
LATE_STEPS = 0.6
NEAR_THE_LAST = 0.25  # of the range of waits; ranks below are late together

Waits = Mapping[int, float]


@dataclass(frozen=True)
class Wait:
    """How long one rank waits.

    Attributes:
        rank: which.
        host: its machine.
        stages: pipeline stages that it holds.
        seconds: mean a step, over the last samples.
        last_in: part of these samples in which it waited least; 0 to 1.
    """

    rank: int
    host: str
    stages: tuple[str, ...]
    seconds: float
    last_in: float


@dataclass(frozen=True)
class Late:
    """Ranks that the others wait for.

    Attributes:
        ranks: which.
        own: seconds that they wait in a step, mean.
        others: seconds that the others wait, median.
        by_pipeline: they hold other stages than those who wait, so the schedule alone may explain it.
    """

    ranks: tuple[int, ...]
    own: float
    others: float
    by_pipeline: bool


@dataclass(frozen=True)
class Waiting:
    """Waits of all ranks whose records are there.

    Attributes:
        rows: by rank; empty where nothing is known.
        late: who makes the others wait, if anybody does.
        step_seconds: median time of a step; None if unknown.
        source: where the figures come from.
    """

    rows: tuple[Wait, ...]
    late: Late | None
    step_seconds: float | None
    source: str


def waiting(run: Run) -> Waiting:
    """From the monitor's records, or from the flight recorder where there are none."""
    waits = {rank: {step: wait for step, wait, _ in r.waits} for rank, r in run.ranks.items() if r.waits}
    if waits:
        hosts = {rank: run.ranks[rank].host for rank in waits}
        stages = {rank: run.ranks[rank].stages for rank in waits}
        speeds = [speed for rank in waits if (speed := _step_seconds(list(run.ranks[rank].waits)))]
        return _judge(waits, hosts, stages, statistics.median(speeds) if speeds else None, "monitor")
    for dumps in run.dumps.values():
        waits = {rank: found for rank, dump in dumps.items() if (found := _recorded(dump))}
        if waits:
            hosts = {rank: dumps[rank].host for rank in waits}
            stages = {rank: _stages(dumps[rank]) for rank in waits}
            speeds = [speed for rank in waits if (speed := _scope_seconds(dumps[rank]))]
            return _judge(
                waits, hosts, stages, statistics.median(speeds) if speeds else None, "flight recorder"
            )
    return Waiting((), None, None, "")


def _step_seconds(samples: Sequence[tuple[int, float, float]]) -> float | None:
    pairs = itertools.pairwise(samples)
    each = [(b[2] - a[2]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0] and b[2] > a[2]]
    return statistics.median(each) if each else None


def _scope_seconds(dump: Dump) -> float | None:
    commits = [event.elapsed for event in dump.events if event.kind == "commit"]
    each = [b - a for a, b in itertools.pairwise(commits) if b > a]
    return statistics.median(each) if each else None


def _recorded(dump: Dump) -> dict[int, float]:
    found = {
        event.serial: number(event.detail.get("wait_s")) for event in dump.events if event.kind == "commit"
    }
    return {serial: wait for serial, wait in found.items() if wait is not None}


def _stages(dump: Dump) -> tuple[str, ...]:
    return tuple(sorted({str(e.detail["stage"]) for e in dump.events if "stage" in e.detail}))


def _judge(
    waits: Mapping[int, Waits],
    hosts: Mapping[int, str],
    stages: Mapping[int, tuple[str, ...]],
    step_seconds: float | None,
    source: str,
) -> Waiting:
    # The first sample holds what happens once: compilation, the first layout.
    cut = {rank: dict(list(w.items())[1:]) if len(w) > 3 else dict(w) for rank, w in waits.items()}
    means = {rank: statistics.fmean(w.values()) for rank, w in cut.items()}
    last = _last_to_come(cut)
    rows = tuple(
        Wait(rank, hosts[rank], stages[rank], means[rank], last.get(rank, 0.0)) for rank in sorted(means)
    )
    return Waiting(rows, _late(cut, means, stages, step_seconds), step_seconds, source)


def _last_to_come(waits: Mapping[int, Waits]) -> dict[int, float]:
    """The part of the common steps in which each rank waited least."""
    common = set.intersection(*(set(w) for w in waits.values()))
    counts = Counter(min(waits, key=lambda rank: waits[rank][step]) for step in common)
    return {rank: count / len(common) for rank, count in counts.items()}


def _late(
    waits: Mapping[int, Waits],
    means: Waits,
    stages: Mapping[int, tuple[str, ...]],
    step_seconds: float | None,
) -> Late | None:
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in means:
        groups[stages[rank]].append(rank)
    # Ranks with the same stages have the same part in the schedule: only these compare fairly.
    found = [late for group in groups.values() if (late := _late_in(group, waits, means, step_seconds))]
    if found:
        return Late(
            tuple(sorted(rank for late in found for rank in late.ranks)),
            statistics.fmean(late.own for late in found),
            max(late.others for late in found),
            by_pipeline=False,
        )
    late = _late_in(list(means), waits, means, step_seconds) if len(groups) > 1 else None
    return late and Late(late.ranks, late.own, late.others, by_pipeline=True)


def _late_in(
    ranks: Sequence[int], waits: Mapping[int, Waits], means: Waits, step_seconds: float | None
) -> Late | None:
    if len(ranks) < 2:
        return None
    low, high = min(means[r] for r in ranks), max(means[r] for r in ranks)
    late = [r for r in ranks if means[r] <= low + NEAR_THE_LAST * (high - low)]
    others = [r for r in ranks if r not in late]
    if not others or len(late) > len(ranks) / 2:
        return None  # most ranks come together, and somebody with less to do waits for them
    own, their = statistics.fmean(means[r] for r in late), statistics.median(means[r] for r in others)
    least = LATE_SECONDS_UNKNOWN_STEP
    if step_seconds is not None:
        least = max(LATE_SECONDS, LATE_PART_OF_STEP * step_seconds)
    last = _last_to_come({r: waits[r] for r in ranks})
    if their - own < least or sum(last.get(r, 0.0) for r in late) < LATE_STEPS:
        return None
    return Late(tuple(sorted(late)), own, their, by_pipeline=False)
