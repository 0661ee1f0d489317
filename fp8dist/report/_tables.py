"""The rows of the page's tables and the layers of its heat maps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..blame import Judgement
from ._findings import aborted_steps, milliseconds, troubles
from ._read import MONITOR, Run
from ._series import MAX_COLUMNS
from ._svg import Map
from ._text import clean, natural
from ._waits import Waiting

ROLES = {"input": "Inputs", "weight": "Weights", "grad_output": "Output gradients", "": "Other slots"}
MAX_ROWS = MAX_COLUMNS  # of all heat maps together
TABLE_SLOTS = 25  # with trouble
HEALTHY_SLOTS = 10
MAX_FACTS = 40
UNKNOWN = 1e308  # sorts after every figure
MAX_BARS = 32


def maps(run: Run) -> list[Map]:
    """A heat map for each role that has slots; neighbours share a row where there are too many layers."""
    slots = run.slots
    by_role: dict[str, list[int]] = {role: [] for role in ROLES}
    for i, name in enumerate(slots.names):
        role = name.rpartition(".")[2]
        by_role[role if role in ROLES else ""].append(i)
    present = {role: found for role, found in by_role.items() if found}
    bad = {i for trouble in troubles(run) for i in trouble.slots}
    return [_map(run, role, found, bad, MAX_ROWS // len(present)) for role, found in present.items()]


def _map(run: Run, role: str, positions: list[int], bad: set[int], most: int) -> Map:
    slots = run.slots
    positions.sort(key=lambda i: natural(slots.names[i]))
    each = math.ceil(len(positions) / most)
    groups = [positions[i : i + each] for i in range(0, len(positions), each)]
    names = [slots.names[i].removesuffix(f".{role}") if role else slots.names[i] for i in positions]
    rows = [
        names[i] if len(group) == 1 else f"{names[i]} to {names[i + len(group) - 1]}"
        for i, group in zip(range(0, len(positions), each), groups, strict=True)
    ]
    cells = np.stack([np.fmin.reduce(slots.lowest[group], axis=0) for group in groups])
    return Map(
        f"{ROLES[role]}: log2(scale)", rows, [not bad.isdisjoint(group) for group in groups],
        cells.astype(np.float64), slots.columns.starts.tolist(), slots.columns.last,
    )  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A figure for people, and one to sort by."""

    shown: str
    key: float


@dataclass(frozen=True)
class SlotRow:
    """One slot of the table; `trouble` is empty where nothing ails it."""

    name: str
    trouble: str
    figures: tuple[Cell, ...]
    advice: str


SLOT_HEADINGS = (
    "saturated", "worst sample", "flushed", "headroom", "log2(scale)", "amax", "idle steps",
)  # fmt: skip


def slot_rows(run: Run) -> list[SlotRow]:
    """The worst slots: first those with trouble, then a few with the least headroom."""
    s = run.slots
    rows: dict[int, SlotRow] = {}
    for trouble in troubles(run):
        for i in trouble.slots[: TABLE_SLOTS - len(rows)]:
            rows.setdefault(i, SlotRow(s.names[i], trouble.words(i), _figures(run, i), trouble.advice(i)))
    healthy = [i for i in np.argsort(s.headroom, kind="stable").tolist() if i not in rows]
    for i in healthy[:HEALTHY_SLOTS]:
        if np.isfinite(s.headroom[i]):
            rows[i] = SlotRow(s.names[i], "", _figures(run, i), "")
    return list(rows.values())


def _figures(run: Run, i: int) -> tuple[Cell, ...]:
    s = run.slots
    worst = (
        Cell("–", -1.0)
        if np.isnan(s.worst[i])
        else Cell(_part(s.worst[i]).shown + (f" (step {s.worst_step[i]})" if s.worst[i] else ""), s.worst[i])
    )
    log = math.log2(s.scale[i]) if s.scale[i] > 0 and math.isfinite(s.scale[i]) else math.nan
    return (
        _part(s.saturated[i]), worst, _part(s.flushed[i]), _plain(s.headroom[i], "{:+.2f}"), _plain(log, "{:.1f}"),
        _plain(s.amax[i] if s.amax[i] >= 0 else math.nan, "{:.3g}"), _plain(s.stale[i], "{:.0f}"),
    )  # fmt: skip


def _part(value: float) -> Cell:
    return Cell("–", -1.0) if math.isnan(value) else Cell(f"{100 * value:.3g}%", value)


def _plain(value: float, form: str) -> Cell:
    return Cell("–", UNKNOWN) if math.isnan(value) else Cell(form.format(value), value)


@dataclass(frozen=True)
class Bar:
    """How long a rank waits; `width` in percent of the longest."""

    rank: int
    host: str
    stages: str
    seconds: float
    shown: str
    width: float
    last_in: str
    late: bool


def bars(waits: Waiting) -> list[Bar]:
    """Bars by rank; of very many ranks those that wait least."""
    longest = max((row.seconds for row in waits.rows), default=0.0) or 1.0
    late = waits.late.ranks if waits.late and not waits.late.by_pipeline else ()
    rows = sorted(waits.rows, key=lambda row: row.seconds)[:MAX_BARS]
    return [
        Bar(row.rank, clean(row.host), clean(", ".join(row.stages)), row.seconds, milliseconds(row.seconds),
            100 * row.seconds / longest, f"{100 * row.last_in:.0f}%", row.rank in late)
        for row in sorted(rows, key=lambda row: row.rank)
    ]  # fmt: skip


def facts(run: Run, judgements: Sequence[Judgement]) -> list[tuple[str, str]]:
    """What was run, as pairs of name and value."""
    found: list[tuple[str, Any]] = []
    ranks = list(run.ranks.values())
    if ranks:
        hosts = sorted({r.host for r in ranks if r.host})
        newest = max(ranks, key=lambda r: r.last_step)
        found += [
            ("coordinator", newest.name), ("ranks", max(r.world for r in ranks)), ("hosts", ", ".join(hosts[:8])),
            ("slots", len(run.slots.names)), ("last sampled step", newest.last_step), ("commits", newest.commits),
            ("collectives per step", _known(newest.collectives_per_step)),
            ("aborted steps", aborted_steps(run)), ("generation", newest.generation),
        ]  # fmt: skip
        found += [(f"recipe: {name}", _value(value)) for name, value in newest.recipe.items()]
        found += [(f"last {name}", f"{value:.6g}") for name, value in newest.numbers.items()]
    elif judgements:
        found += [("ranks", max(j.world for j in judgements)), ("last commit", judgements[0].agreed)]
    known = {name for name, _ in found}
    found += [
        (words, _value(value))
        for name, value in run.summary.items()
        if (words := name.replace("_", " ")) not in known
        and not isinstance(value, dict)
        and value is not None
    ]
    return [(clean(name), clean(value)) for name, value in found[:MAX_FACTS]]


def _known(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _value(value: Any) -> str:
    return (
        value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
    )


def missing(run: Run, judgements: Sequence[Judgement]) -> list[tuple[str, str, str]]:
    """What the page cannot show: (what, words on how to get it, code for that)."""
    found = []
    if not run.ranks:
        found.append((
            f"Saturation, waits and headroom of each slot ({MONITOR})", "Let every rank sample its coordinator:",
            "monitor = f8.monitor.Monitor(coordinator, sinks=[f8.monitor.JsonLines(RUN)])\n"
            "monitor.step(step=step, loss=loss)  # after each optimizer step",
        ))  # fmt: skip
    else:
        world = max(rank.world for rank in run.ranks.values())
        if len(run.ranks) < world:
            words = "Copy the files of all ranks into one directory, or write them to a shared one."
            found.append((f"The monitor's files of {world - len(run.ranks)} of {world} ranks", words, ""))
    if not run.dumps:
        found.append((
            "The timeline, and who failed (flight records)", "Dump them on every rank at the end, also after an error:",
            'coordinator.dump_flight(RUN + "/flight", "end")',
        ))  # fmt: skip
    elif any(len(run.dumps[j.coordinator]) < j.world for j in judgements):
        found.append(("Flight records of some ranks", "Copy the files of all ranks into one directory.", ""))
    if not run.losses:
        words = "Give the loss to the monitor, or write lines with step and loss to metrics.jsonl."
        found.append(("The loss", words, ""))
    elif "FP32" not in run.losses:
        words = "Train the same in FP32 and put its metrics beside the others. One command that does both:"
        found.append(("The loss in FP32, to compare with", words, "bash launch/quickstart.sh"))
    return found
