"""What the records of a run boil down to: bounded arrays by slot, bounded waits by rank.

Everything is folded in line by line, so that the memory depends on the number of slots and ranks and not on the
length of the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_COLUMNS = 200  # of the heat maps; a screen shows no more
RECENT = 5  # samples that "the last samples" are
KEPT_WAITS = 500  # samples of waits that are kept for each rank

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


class Columns:
    """Sampled steps, joined into at most `MAX_COLUMNS` columns of equally many samples.

    Attributes:
        starts: int64 [columns], first step of each column.
        last: the last sampled step.
    """

    def __init__(self, steps: Iterable[int]) -> None:
        ordered = np.array(sorted(set(steps)) or [0], dtype=np.int64)
        self.starts = ordered[:: math.ceil(len(ordered) / MAX_COLUMNS)]
        self.last = int(ordered[-1])

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, step: int) -> int:
        """The column of a step, also of one that was not announced."""
        return max(0, int(np.searchsorted(self.starts, step, side="right")) - 1)


@dataclass(frozen=True)
class SlotValues:
    """One sample of some slots; all arrays float64 [slots], NaN where nothing is known.

    Attributes:
        step: of the training loop.
        slots: intp [slots], positions in the `SlotSeries`.
        scale, amax: of the last commit.
        headroom: powers of two up to the largest value of the format; negative where values saturate.
        saturated, flushed: parts of all values; None in a sample that counted no casts.
        stale: steps since the slot got an amax.
    """

    step: int
    slots: Indices
    scale: Floats
    amax: Floats
    headroom: Floats
    saturated: Floats | None
    flushed: Floats | None
    stale: Floats


class SlotSeries:
    """What is known of each slot, by position. Slots that several ranks hold are one slot.

    Attributes:
        names: of the slots.
        columns: the steps of `lowest`.
        lowest: float32 [slots, columns], the lowest log2(scale) in the steps of a column; NaN where unknown.
        scale, amax, stale: the newest value; NaN if never known.
        headroom: the least one in the last samples.
        below: the part of the last samples with negative headroom.
        saturated, flushed: mean over the last samples of the rank where it is largest; NaN if never counted.
        saturated_rank: which rank that is; -1 if none.
        worst: the largest saturated part in one sample of the whole run, NaN if never counted.
        worst_step: where that was.
        contributed: whether any sample shows an amax.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.names: list[str] = []
        self._positions: dict[str, int] = {}
        self.lowest = np.full((0, len(columns)), np.nan, dtype=np.float32)
        self.scale, self.amax, self.stale, self.headroom, self.below = (self._none() for _ in range(5))
        self.saturated, self.flushed, self.worst = (self._none() for _ in range(3))
        self.saturated_rank = np.full(0, -1, dtype=np.int64)
        self.worst_step = np.full(0, -1, dtype=np.int64)
        self._newest = np.full(0, np.iinfo(np.int64).min, dtype=np.int64)
        self.contributed = np.zeros(0, dtype=bool)

    @staticmethod
    def _none() -> Floats:
        return np.full(0, np.nan)

    def positions(self, names: Sequence[str]) -> Indices:
        """Where these slots are; new ones get a place."""
        for name in names:
            if name not in self._positions:
                self._positions[name] = len(self.names)
                self.names.append(name)
        more = len(self.names) - len(self.scale)
        if more:
            for each, value in vars(self).items():
                if isinstance(value, np.ndarray):
                    fill = {"saturated_rank": -1, "worst_step": -1, "_newest": np.iinfo(np.int64).min}.get(
                        each, False if value.dtype == bool else np.nan
                    )
                    rest = np.full((more, *value.shape[1:]), fill, dtype=value.dtype)
                    setattr(self, each, np.concatenate([value, rest]))
        return np.array([self._positions[name] for name in names], dtype=np.intp)

    def add(self, values: SlotValues) -> None:
        """Fold in one sample of one rank."""
        slots, column = values.slots, self.columns.of(values.step)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log2(values.scale)
        logs[~np.isfinite(logs)] = np.nan
        self.lowest[slots, column] = np.fmin(self.lowest[slots, column], logs)
        self.contributed[slots] |= values.amax >= 0
        newer = values.step >= self._newest[slots]
        for mine, theirs in (
            (self.scale, values.scale),
            (self.amax, values.amax),
            (self.stale, values.stale),
        ):
            mine[slots[newer]] = theirs[newer]
        self._newest[slots[newer]] = values.step
        if values.saturated is not None:
            worse = np.isfinite(values.saturated) & ~(values.saturated <= self.worst[slots])
            self.worst[slots[worse]] = values.saturated[worse]
            self.worst_step[slots[worse]] = values.step

    def end_of_rank(self, rank: int, recent: Sequence[SlotValues]) -> None:
        """Fold in the means of one rank's last samples. Call once for each rank."""
        if not recent:
            return
        slots = np.unique(np.concatenate([values.slots for values in recent]))
        saturated = self._mean(slots, [(v.slots, v.saturated) for v in recent])
        more = np.isfinite(saturated) & ~(saturated <= self.saturated[slots])
        self.saturated[slots[more]] = saturated[more]
        self.saturated_rank[slots[more]] = rank
        flushed = self._mean(slots, [(v.slots, v.flushed) for v in recent])
        self.flushed[slots] = np.fmax(self.flushed[slots], flushed)
        signs = [np.where(np.isnan(v.headroom), np.nan, v.headroom < 0) for v in recent]
        below = self._mean(slots, [(v.slots, s) for v, s in zip(recent, signs, strict=True)])
        self.below[slots] = np.fmax(self.below[slots], below)
        for values in recent:
            self.headroom[values.slots] = np.fmin(self.headroom[values.slots], values.headroom)

    def _mean(self, slots: Indices, parts: Sequence[tuple[Indices, Floats | None]]) -> Floats:
        total, count = np.zeros(len(self.names)), np.zeros(len(self.names))
        for where, values in parts:
            if values is not None:
                known = np.isfinite(values)
                total[where[known]] += values[known]
                count[where[known]] += 1
        return np.divide(total[slots], count[slots], out=np.full(len(slots), np.nan), where=count[slots] > 0)


@dataclass
class RankSeries:
    """What is known of one rank.

    Attributes:
        rank, world, host, name, recipe, stages: of its newest start; `name` is the coordinator's.
        samples: number of them.
        last_step: of the newest sample.
        interval: the most steps between two samples that followed each other.
        generation, commits, aborts, collectives: of the newest sample.
        first: steps and collectives of the first sample since a start; None before it.
        waits: the newest (step, seconds a step, unix time).
        numbers: of the newest sample.
        losses: by step; of the lowest rank that knows them only.
    """

    rank: int
    world: int
    host: str
    name: str
    recipe: dict[str, Any]
    stages: tuple[str, ...]
    samples: int = 0
    last_step: int = -1
    interval: int = 0
    generation: int = 0
    commits: int = 0
    aborts: int = 0
    collectives: int = 0
    first: tuple[int, int] | None = None
    waits: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_WAITS))
    numbers: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def collectives_per_step(self) -> float | None:
        """Between the first and the newest sample: what happens once before does not count."""
        if self.first is None or self.commits + self.aborts <= self.first[0]:
            return None
        return (self.collectives - self.first[1]) / (self.commits + self.aborts - self.first[0])


@dataclass
class Warned:
    """One kind of warning about one slot (or about a rank).

    Attributes:
        what, slot: its key.
        message: the newest.
        first, last: steps.
        count: how often, over all ranks.
        ranks: who warned.
    """

    what: str
    slot: str | None
    message: str
    first: int
    last: int
    count: int = 0
    ranks: set[int] = field(default_factory=set)
