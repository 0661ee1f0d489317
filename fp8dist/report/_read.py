"""Reads what a run has left in its directory. Bad lines are skipped and counted."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .._flight import PATTERN, Dump, read_dump
from ..monitor._json_lines import PATTERN as MONITOR
from ..monitor._lines import Lines, Records, UnknownVersion, whole
from ..monitor._record import VERSION, Record
from ._series import RECENT, Columns, Floats, Indices, RankSeries, SlotSeries, SlotValues, Warned

# A sample's step without parsing its line, which may hold 100 000 slots.
_STEP = re.compile(rb'"sample".{0,40}"step":\s*(\d{1,15})\b')
_HEAD = 200  # bytes of a line in which the step is looked for


@dataclass
class Run:
    """All that was found.

    Attributes:
        directory: of the run.
        slots: what is known of each slot; no names if nothing is.
        ranks: by rank, from the monitor.
        warnings: the monitor's, by what and slot.
        losses: by label (`FP8`, `FP32`), loss by step; NaN where it was not a number.
        casts: role -> `saturated` and `flushed` parts in the last samples of `metrics.jsonl`.
        summary: `summary.json`, flat; empty if there is none.
        dumps: of the flight recorder, by coordinator and rank.
        remarks: what could not be read, one line each.
        found: the files that were read.
    """

    directory: Path
    slots: SlotSeries
    ranks: dict[int, RankSeries] = field(default_factory=dict)
    warnings: dict[tuple[str, str | None], Warned] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    casts: dict[str, dict[str, float]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    dumps: dict[str, dict[int, Dump]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)


def read_run(directory: Path) -> Run:
    """Read all files of a run that are there.

    Raises:
        ValueError: no directory, nothing readable in it, or a monitor file of another version.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory}: expected the directory of a run but got no directory")
    files = sorted((p for p in directory.glob(MONITOR) if p.is_file()), key=lambda p: (len(p.name), p.name))
    run = Run(directory, SlotSeries(Columns(_announced_steps(files))))
    for path in files:
        _guarded(run, path, _read_monitor)
    known = [rank.losses for rank in run.ranks.values() if rank.losses]
    run.losses = {"FP8": known[0]} if known else {}
    _guarded(run, directory / "summary.json", _read_summary)
    _guarded(run, directory / "metrics.jsonl", _read_metrics)
    _guarded(run, directory / "metrics-fp32.jsonl", _read_metrics)
    _read_flight(run)
    if not run.found:
        said = "".join(f"; {remark}" for remark in run.remarks[:1])
        raise ValueError(
            f"{directory}: expected {MONITOR}, metrics.jsonl or {PATTERN} but got nothing readable{said}"
        )
    return run


def _guarded(run: Run, path: Path, read: Any) -> None:
    """Read one file. One that is not there is no mistake, and one that cannot be read is a remark."""
    if not path.is_file():
        return
    try:
        read(run, path)
    except OSError as error:
        run.remarks.append(f"{path.name} cannot be read: {error.strerror or error}")
    except UnknownVersion as error:
        raise ValueError(
            f"{path}: expected version {VERSION} but got {str(error.version)[:40]!r}; "
            "make the report with the fp8dist that wrote it"
        ) from None


def _conclude(run: Run, lines: Lines) -> None:
    """Say what a file of lines gave."""
    if lines.good:
        run.found.append(lines.path.name)
    if lines.skipped:
        run.remarks.append(f"{lines.path.name}: {lines.skipped} damaged or unknown lines were skipped")


def _announced_steps(files: list[Path]) -> Iterator[int]:
    for path in files:
        try:
            with path.open("rb") as file:
                for line in file:
                    if found := _STEP.search(line, 0, _HEAD):
                        yield int(found[1])
        except OSError:
            continue  # the reader proper makes a remark


def number(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) else None


# -- monitor-rank<R>.jsonl --------------------------------------------------------------------------------


def _read_monitor(run: Run, path: Path) -> None:
    records = Records(path)
    rank: RankSeries | None = None
    slots: Indices = np.zeros(0, dtype=np.intp)
    recent: deque[SlotValues] = deque(maxlen=RECENT)
    for record in records:
        if record["kind"] == "start":
            rank, slots = _start(run, record), run.slots.positions(record["slots"])
        elif record["kind"] == "warning":
            _warning(run, record)
        else:
            assert rank is not None
            try:
                values = _slot_values(record, slots)
            except OverflowError:  # an integer that no float holds
                records.reject()
                continue
            _sample(run, rank, record)
            run.slots.add(values)
            recent.append(values)
    if rank is not None:
        run.slots.end_of_rank(rank.rank, recent)
    _conclude(run, records)


def _start(run: Run, record: Record) -> RankSeries:
    rank, world, recipe, stages = record["rank"], record["world"], record.get("recipe"), record.get("stages")
    found = run.ranks.setdefault(rank, RankSeries(rank, world, "", "", {}, ()))
    found.world, found.host, found.name = world, str(record.get("host", "")), str(record.get("name", ""))
    found.first = None
    found.recipe = recipe if isinstance(recipe, dict) else {}
    found.stages = tuple(str(stage) for stage in stages) if isinstance(stages, list) else ()
    return found


def _slot_values(record: Record, slots: Indices) -> SlotValues:
    def column(name: str) -> Floats:
        return np.array(record[name], dtype=np.float64)  # null becomes NaN

    def counted(name: str) -> Floats | None:
        return None if record.get(name) is None else column(name)

    return SlotValues(
        record["step"], slots, column("scale"), column("amax"), column("headroom"),
        counted("saturated"), counted("flushed"), column("stale"),
    )  # fmt: skip


def _sample(run: Run, rank: RankSeries, record: Record) -> None:
    step, time = record["step"], number(record["time"])
    for name in ("generation", "commits", "aborts", "collectives"):
        setattr(rank, name, record[name])
    rank.first = rank.first or (rank.commits + rank.aborts, rank.collectives)
    if rank.samples and step > rank.last_step:
        rank.interval = max(rank.interval, step - rank.last_step)
    rank.samples += 1
    rank.last_step = step
    wait = number(record["wait_s"])
    if wait is not None and wait >= 0 and time is not None:
        rank.waits.append((step, wait, time))
    loss = number(record.get("loss"))
    if rank.losses:  # it had one before, so null stands for what JSON cannot write
        rank.losses[step] = math.nan if loss is None else loss
    elif loss is not None and not any(other.losses for other in run.ranks.values()):
        rank.losses[step] = loss
    numbers = record.get("numbers")
    if isinstance(numbers, dict):
        rank.numbers = {name: v for name, value in numbers.items() if (v := number(value)) is not None}


def _warning(run: Run, record: Record) -> None:
    what, slot, step, message = record["what"], record["slot"], record["step"], record["message"]
    warned = run.warnings.setdefault((what, slot), Warned(what, slot, message, step, step))
    warned.message, warned.first, warned.last = message, min(warned.first, step), max(warned.last, step)
    warned.count += 1
    warned.ranks.add(record["rank"])


# -- metrics.jsonl and summary.json of launch/ ------------------------------------------------------------


def _read_summary(run: Run, path: Path) -> None:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        run.remarks.append(f"{path.name} holds no JSON object")
        return
    own = value.get("fp8")  # the quickstart joins two runs
    run.summary = {**own, **value} if isinstance(own, dict) else value
    run.found.append(path.name)


def _read_metrics(run: Run, path: Path) -> None:
    precision = run.summary.get("precision", "fp8") if path.stem == "metrics" else "fp32"
    losses: dict[int, float] = {}
    scales_wanted = not run.slots.names and precision == "fp8"
    sampled: dict[int, dict[str, Any]] = {}
    casts: deque[dict[str, Any]] = deque(maxlen=RECENT)
    lines = Lines(path)
    for line in lines:
        step = line.get("step")
        if not whole(step):
            lines.reject()
            continue
        if "loss" in line:
            loss = number(line["loss"])
            losses[step] = math.nan if loss is None else loss
        if scales_wanted and isinstance(line.get("scales"), dict):
            sampled[step] = line["scales"]
        if isinstance(line.get("casts"), dict):
            casts.append(line["casts"])
    _conclude(run, lines)
    if losses:
        run.losses[str(precision)[:16].upper()] = losses
    run.casts = run.casts or _mean_casts(casts)
    if sampled:
        run.slots = _scales_only(sampled)


def _mean_casts(recent: deque[dict[str, Any]]) -> dict[str, dict[str, float]]:
    seen: dict[str, dict[str, list[float]]] = {}
    for casts in recent:
        for role, parts in casts.items():
            for name in ("saturated", "flushed"):
                value = number(parts.get(name)) if isinstance(parts, dict) else None
                if value is not None:
                    seen.setdefault(role, {}).setdefault(name, []).append(value)
    return {role: {name: sum(v) / len(v) for name, v in by.items()} for role, by in seen.items()}


def _scales_only(sampled: dict[int, dict[str, Any]]) -> SlotSeries:
    series = SlotSeries(Columns(sampled))
    for step, scales in sampled.items():
        known = {name: v for name, value in scales.items() if (v := number(value)) is not None}
        slots = series.positions(list(known))
        unknown = np.full(len(known), np.nan)
        values = np.array(list(known.values()), dtype=np.float64)
        series.add(SlotValues(step, slots, values, unknown, unknown, None, None, unknown))
    return series


# -- flight recorder --------------------------------------------------------------------------------------


def _read_flight(run: Run) -> None:
    for directory in (run.directory, run.directory / "flight"):
        for path in sorted(directory.glob(PATTERN)):
            try:
                dump = read_dump(path)
            except ValueError as error:
                run.remarks.append(str(error).removeprefix(f"{directory}/"))
                continue
            times = [dump.time, dump.elapsed, *(t for e in dump.events for t in (e.time, e.elapsed))]
            if any(number(time) is None for time in times):
                run.remarks.append(f"{path.name}: expected finite times; the dump is left out")
                continue
            others = run.dumps.setdefault(dump.coordinator, {})
            newer = all(dump.time >= other.time for other in others.values())
            if any(other.world != dump.world for other in others.values()):
                run.remarks.append(
                    f"{path.name}: dumps of runs of different size; only the newest run is shown"
                )
                if not newer:
                    continue
                others.clear()
            if dump.rank not in others or others[dump.rank].time <= dump.time:
                others[dump.rank] = dump
            run.found.append(str(path.relative_to(run.directory)))
