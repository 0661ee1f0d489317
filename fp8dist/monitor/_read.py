"""Reads what the ranks of a run have written, and finds the rank that the others wait for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from ._json_lines import PATTERN
from ._lines import Records
from ._record import Record

# When a rank counts as the one the others wait for.
FEWEST_SAMPLES = 5
SHARE = 0.8  # of the samples in which it waits least
LEAST_LOSS_S = 1e-3  # seconds a step that the others wait longer than it
LEAST_LOSS = 0.01  # of a step


@dataclass
class RankRun:
    """What one rank has written."""

    rank: int
    starts: list[Record] = field(default_factory=list)
    """One for each start of the program and each change of the slots."""
    samples: dict[int, Record] = field(default_factory=dict)
    """By step, ascending. Of a step that was repeated after a restart, the newer one."""
    slots_of: dict[int, list[str]] = field(default_factory=dict)
    """For each step of `samples`, the names that its lists go with."""
    warnings: list[Record] = field(default_factory=list)

    @property
    def wait_s(self) -> float | None:
        """Mean seconds a step that this rank waited in the collective."""
        waits = [sample["wait_s"] for sample in self.samples.values() if sample["wait_s"] is not None]
        return mean(waits) if waits else None


@dataclass(frozen=True)
class Run:
    """What all ranks have written."""

    ranks: dict[int, RankRun]
    """By rank, ascending."""
    warnings: list[Record]
    """Of all ranks, by step; and `always_last`, which no rank can know alone."""
    skipped_lines: int
    """Lines that are no record."""

    @property
    def waits(self) -> dict[int, float]:
        """Mean seconds a step that each rank waited in the collective; the slowest rank waits least."""
        return {rank: run.wait_s for rank, run in self.ranks.items() if run.wait_s is not None}

    @property
    def awaited_rank(self) -> int | None:
        """The rank that the others wait for in nearly every step, if there is one that costs them something."""
        found = [warning["rank"] for warning in self.warnings if warning["what"] == "always_last"]
        return found[0] if found else None


def read_run(run_dir: str | Path) -> Run:
    """Put together the files of a `JsonLines` sink from all ranks.

    Args:
        run_dir: holds `monitor-rank<R>.jsonl`, one for each rank; copy them together if each host has its own.

    Returns:
        The run. Damaged and truncated lines are left out and counted.

    Raises:
        ValueError: there is no such file, none holds a record, or they are of a newer version.
    """
    paths = {
        int(match[1]): path
        for path in Path(run_dir).glob(PATTERN)
        if (match := re.fullmatch(r"monitor-rank(\d+)\.jsonl", path.name))
    }
    if not paths:
        raise ValueError(
            f"{run_dir} expects files {PATTERN} of f8.monitor.JsonLines but has none; give the directory that the "
            "sink got"
        )
    ranks, skipped = {}, 0
    for rank, path in sorted(paths.items()):
        ranks[rank], bad = _read_rank(rank, path)
        skipped += bad
    if not any(run.starts for run in ranks.values()):
        raise ValueError(f"{run_dir} expects monitor records but none of its {skipped} lines is one")
    warnings = [warning for run in ranks.values() for warning in run.warnings]
    last = _always_last(ranks)
    if last is not None:
        warnings.append(last)
    return Run(ranks, sorted(warnings, key=lambda w: (w["step"], w["rank"])), skipped)


def _read_rank(rank: int, path: Path) -> tuple[RankRun, int]:
    run, records = RankRun(rank), Records(path)
    for record in records:
        if record["kind"] == "start":
            run.starts.append(record)
        elif record["kind"] == "warning":
            run.warnings.append(record)
        else:
            run.samples[record["step"]] = record
            run.slots_of[record["step"]] = run.starts[-1]["slots"]
    run.samples = dict(sorted(run.samples.items()))
    return run, records.skipped + records.empty


def _always_last(ranks: dict[int, RankRun]) -> Record | None:
    """The warning about the rank that the others wait for."""
    if len(ranks) < 2:
        return None
    common = set.intersection(*(set(run.samples) for run in ranks.values()))
    rows = []  # (step, wait of each rank)
    for step in sorted(common):
        waits = {rank: run.samples[step]["wait_s"] for rank, run in ranks.items()}
        if None not in waits.values():
            rows.append((step, waits))
    if len(rows) < FEWEST_SAMPLES:
        return None
    least = [min(waits, key=lambda rank: waits[rank]) for _, waits in rows]
    last = max(set(least), key=least.count)
    own = mean(waits[last] for _, waits in rows)
    others = mean(mean(w for rank, w in waits.items() if rank != last) for _, waits in rows)
    if least.count(last) < SHARE * len(rows) or others - own < max(LEAST_LOSS_S, own):
        return None
    run = ranks[last]
    first, end = (run.samples[rows[i][0]] for i in (0, -1))
    per_step = (end["time"] - first["time"]) / max(1, end["step"] - first["step"])
    if per_step > 0 and others - own < LEAST_LOSS * per_step:
        return None
    host = run.starts[-1].get("host", "an unknown host")
    return {
        "kind": "warning",
        "step": end["step"],
        "time": end["time"],
        "rank": last,
        "what": "always_last",
        "slot": None,
        "message": f"rank {last} on {host} is the one the others wait for: they wait {others * 1e3:.1f} ms a step, it "
        f"{own * 1e3:.1f} ms; give it less work, or look for what slows that host down.",
    }
