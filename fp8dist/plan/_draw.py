"""A plan's clock as a picture, and as trace events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._actions import COLLECTIVES, COMPUTE, Kind, stages_of
from ._plan import Plan
from ._simulate import Span
from ._verdict import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
# Told apart also by who sees no red or no green.
COLOURS = {
    "F": "#56B4E9",
    "B": "#E69F00",
    "I": "#CC79A7",
    "W": "#009E73",
    "collective": "#000000",
    "stuck": "#D55E00",
}
NAMES = {
    "F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights", "collective": "collective",
    "stuck": "stuck",
}  # fmt: skip
PALEST = 0.55  # of the first chunk, mixed with white
LABELS = 900  # spans up to which each has its microbatch written in it
DPI = 120


def draw(plan: Plan, path: Path) -> None:
    """Draw one lane per pipeline rank. Later chunks are darker; microbatches are written in where there is room.

    Args:
        plan: with or without a deadlock.
        path: ends in `.png` or `.svg`.

    Raises:
        ValueError: another suffix, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"expected a picture to end in {' or '.join(SUFFIXES)} but got {path}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "drawing expects matplotlib; install it with: pip install 'fp8dist[monitor]'"
        ) from None
    spans = plan.run.spans
    longest = max(len(program) for program in plan.programs)
    figure = Figure(
        figsize=(min(30.0, 8 + longest / 40), min(60.0, 2.2 + 0.38 * len(plan.programs))), dpi=DPI
    )
    axes = figure.add_subplot()
    end = plan.run.makespan_ms or 1.0
    _bars(axes, plan)
    if len(spans) <= LABELS:
        _labels(axes, plan)
    if plan.deadlock is not None:
        ends = {span.rank: span.end for span in spans}  # by rank, then time: the last one stays
        for wait in plan.deadlock.waits:
            start = ends.get(wait.rank, 0.0)
            axes.broken_barh(
                [(start, 1.15 * end - start)], (wait.rank - 0.4, 0.8), **_style("stuck", hatch=True)
            )
    axes.set_xlim(0, 1.15 * end if plan.deadlock is not None else 1.005 * end)
    axes.set_ylim(len(plan.programs) - 0.4, -0.6)
    axes.set_yticks(range(len(plan.programs)))
    axes.set_xlabel("ms")
    axes.set_ylabel("pipeline rank")
    axes.set_title(_title(plan), loc="left", fontsize="medium", pad=22)  # the legend lies between
    _legend(axes, {_name(span) for span in spans} | ({"stuck"} if plan.deadlock is not None else set()))
    figure.tight_layout()
    figure.savefig(path)


def _title(plan: Plan) -> str:
    layout = plan.layout
    ranks = f"{layout.pp} x {layout.dp} x {layout.tp} ranks"
    head = f"{Path(plan.schedule).name}, {ranks}, {plan.microbatches} microbatches"
    if plan.deadlock is not None:
        return f"{head}: deadlock"
    return f"{head}: {plan.makespan_ms:.2f} ms, bubble {plan.bubble:.1%}"


def _name(span: Span) -> str:
    return "collective" if span.action.kind in COLLECTIVES else span.action.kind.value


def _style(name: str, shade: float = 1.0, *, hatch: bool = False) -> dict[str, Any]:
    if hatch:
        return {"facecolor": "none", "edgecolor": COLOURS[name], "hatch": "///", "linewidth": 1.0}
    channels = (int(COLOURS[name][i : i + 2], 16) / 255 for i in (1, 3, 5))
    colour = tuple(1 - shade * (1 - channel) for channel in channels)
    # A collective is short: its outline keeps it in sight.
    return {"facecolor": colour, "edgecolor": colour if name == "collective" else "white", "linewidth": 0.4}


def _bars(axes: Axes, plan: Plan) -> None:
    bars: dict[tuple[int, str, float], list[tuple[float, float]]] = defaultdict(list)
    shades = [_shades(stages_of(program)) for program in plan.programs]
    for span in plan.run.spans:
        shade = shades[span.rank].get(span.action.stage, 1.0) if span.action.kind in COMPUTE else 1.0
        bars[span.rank, _name(span), shade].append((span.start, span.end - span.start))
    for (rank, name, shade), parts in bars.items():
        axes.broken_barh(parts, (rank - 0.4, 0.8), **_style(name, shade))


def _shades(stages: tuple[int, ...]) -> Mapping[int, float]:
    if len(stages) == 1:
        return {stages[0]: 1.0}
    return {stage: PALEST + (1 - PALEST) * i / (len(stages) - 1) for i, stage in enumerate(stages)}


def _labels(axes: Axes, plan: Plan) -> None:
    for span in plan.run.spans:
        if span.action.kind in COMPUTE:
            middle, text = (span.start + span.end) / 2, str(span.action.microbatch)
            axes.text(middle, span.rank, text, ha="center", va="center", fontsize="xx-small", clip_on=True)


def _legend(axes: Axes, names: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(**_style(name, hatch=name == "stuck"), label=NAMES[name]) for name in COLOURS if name in names
    ]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.99),
        fontsize="small",
        ncols=len(handles),
        frameon=False,
    )


def trace_events(plan: Plan) -> dict[str, Any]:
    """The clock as Chrome trace events, which ui.perfetto.dev opens: a process per pipeline rank; microseconds.

    A rank that waits has a slice `wait` with what it waits for behind it; one that is stuck has one that never ends.
    """
    events: list[dict[str, Any]] = []
    for rank, program in enumerate(plan.programs):
        stages = ", ".join(map(str, stages_of(program)))
        title = {"name": f"pipeline rank {rank}, stages {stages}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": title})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        )
    for span in plan.run.spans:
        where = {"ph": "X", "cat": "fp8dist", "pid": span.rank, "tid": 0}
        since, start, end = (round(ms * 1e3, 3) for ms in (span.since, span.start, span.end))
        if start > since:
            waits = {"before": str(span.action)}
            events.append(
                where | {"name": "wait", "ts": since, "dur": round(start - since, 3), "args": waits}
            )
        args: dict[str, Any] = {"kind": span.action.kind.value}
        if span.action.kind is not Kind.EXIT:
            args |= {"stage": span.action.stage, "microbatch": span.action.microbatch}
        events.append(
            where | {"name": str(span.action), "ts": start, "dur": round(end - start, 3), "args": args}
        )
    ends = {span.rank: round(span.end * 1e3, 3) for span in plan.run.spans}
    for wait in plan.run.waits:
        where = {"ph": "B", "cat": "fp8dist", "pid": wait.rank, "tid": 0, "ts": ends.get(wait.rank, 0.0)}
        events.append(where | {"name": f"stuck at {wait.action}", "args": {"why": describe(wait)}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
