"""The charts, as SVG text. `Markup.format` escapes everything that comes from a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from ._events import WORDS, Picture
from ._series import Floats
from ._text import clean, shorten

WIDTH = 720
MAX_POINTS = 400  # of a curve
LEVELS = 9  # of a heat map
LABEL = 190  # pixels for the names at the left of a heat map
LINE = 13  # pixels that a line of text needs


def svg(height: float, title: str, description: str, body: Markup) -> Markup:
    """A picture with a name and a description for those who do not see it."""
    return Markup(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title><desc>{}</desc>{}</svg>'
    ).format(WIDTH, round(height), title, title, description, body)


def join(parts: Sequence[Markup]) -> Markup:
    """Several pieces in a row."""
    return Markup("").join(parts)


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "tick") -> Markup:
    """A line of text."""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>').format(
        x, y, anchor, kind, words
    )


# -- curves -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Maps values between the outer ticks onto pixels."""

    ticks: Sequence[float]
    start: float
    end: float

    def at(self, values: Floats) -> Floats:
        """Pixels."""
        low, high = self.ticks[0], self.ticks[-1]
        return self.start + (values - low) / (high - low) * (self.end - self.start)


def losses(series: Mapping[str, Mapping[int, float]]) -> Markup:
    """Losses over steps, one curve a run."""
    curves = {}
    for label, losses_of in series.items():
        finite = np.array(
            [(s, v) for s, v in sorted(losses_of.items()) if math.isfinite(v)], dtype=np.float64
        )
        if len(finite):
            curves[label] = (finite[:, 0], finite[:, 1])
    if not curves:
        return Markup("")
    steps, values = (np.concatenate([c[i] for c in curves.values()]) for i in (0, 1))
    x_axis = Axis(ticks(steps.min(), steps.max(), whole=True), 56.0, WIDTH - 16.0)
    y_axis = Axis(ticks(values.min(), values.max()), 244.0, 34.0)
    parts = _axes(x_axis, y_axis)
    for i, (label, (xs, ys)) in enumerate(curves.items()):
        xs, ys = thin(xs, ys)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(x_axis.at(xs), y_axis.at(ys), strict=True))
        kind = f"curve c{i % 2}"
        curve = '<polyline class="{}" points="{}"><title>{}</title></polyline>'
        parts.append(Markup(curve).format(kind, points, label))
        x = x_axis.start + 120 * i
        parts.append(Markup('<line class="{}" x1="{}" x2="{}" y1="14" y2="14"/>').format(kind, x, x + 28))
        parts.append(text(x + 34, 18, label, kind="label"))
    said = "; ".join(
        f"{label}: from {ys[0]:.4g} at step {xs[0]:.0f} to {ys[-1]:.4g} at step {xs[-1]:.0f}"
        for label, (xs, ys) in curves.items()
    )
    return svg(284, "Loss over steps", said, join(parts))


def _axes(x_axis: Axis, y_axis: Axis) -> list[Markup]:
    left, right, bottom = x_axis.start, x_axis.end, y_axis.start
    parts = [text((left + right) / 2, bottom + 36, "step", "middle")]
    for tick, y in zip(y_axis.ticks, y_axis.at(np.array(y_axis.ticks)), strict=True):
        line = '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
        parts.append(Markup(line).format(left, right, y, y))
        parts.append(text(left - 6, y + 4, f"{tick:.6g}", "end"))
    for tick, x in zip(x_axis.ticks, x_axis.at(np.array(x_axis.ticks)), strict=True):
        parts.append(text(x, bottom + 18, f"{tick:.0f}", "middle"))
    return parts


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers that enclose the range."""
    span = high - low
    if not span > abs(high) * 1e-9:
        span = max(abs(high), 1.0) * (1.0 if whole else 0.1)
        high = low + span
    unit = 10.0 ** math.floor(math.log10(span / 5))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= span / 5)
    step = max(1.0, step) if whole else step
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [i * step for i in range(first, last + 1)]


def thin(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """At most `MAX_POINTS` points, which keep the lowest and the highest of each part: peaks stay visible."""
    if len(steps) <= MAX_POINTS:
        return steps, values
    kept: list[int] = []
    for part in np.array_split(np.arange(len(steps)), MAX_POINTS // 2):
        kept += sorted({int(part[values[part].argmin()]), int(part[values[part].argmax()])})
    return steps[kept], values[kept]


# -- heat maps --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """A heat map of one role.

    Attributes:
        title: for people.
        rows: what each row shows, a layer or a range of layers.
        marked: rows with trouble.
        cells: float [rows, columns], log2(scale), NaN where there is none.
        starts: first step of each column.
        last: last step.
    """

    title: str
    rows: Sequence[str]
    marked: Sequence[bool]
    cells: Floats
    starts: Sequence[int]
    last: int


def heat_map(chart: Map) -> Markup:
    """A row for each layer, a column for each step or a few of them; the legend stands below."""
    rows, columns = chart.cells.shape
    low, high = bounds(chart.cells)
    height = max(5, min(16, 480 // rows))
    top, width = 4, WIDTH - LABEL - 4
    known = np.isfinite(chart.cells)
    level = np.full(chart.cells.shape, -1)
    level[known] = np.clip((chart.cells[known] - low) / (high - low) * LEVELS, 0, LEVELS - 1).astype(int)
    parts = [
        Markup('<rect class="none" x="{}" y="{}" width="{}" height="{}"/>').format(
            LABEL, top, width, rows * height
        ),
        Markup('<g class="cells" transform="translate({} {}) scale({:.5g} {})">{}</g>').format(
            LABEL, top, width / columns, height, _cells(level)
        ),
    ]
    every = math.ceil(LINE / height)
    for i, name in enumerate(chart.rows):
        row = chart.cells[i][known[i]]
        span = f"2^{row.min():.1f} to 2^{row.max():.1f}" if len(row) else "no scale"
        y = top + i * height
        parts.append(
            Markup('<rect class="hit" x="0" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
                y, WIDTH, height, f"{clean(name)}: scale {span}"
            )
        )
        near = any(chart.marked[max(0, i - every + 1) : i + every])
        if chart.marked[i] or (i % every == 0 and not near):
            words, kind = (
                (f"▲ {shorten(name, 25)}", "tick bad") if chart.marked[i] else (shorten(name, 28), "tick")
            )
            parts.append(text(LABEL - 6, y + height / 2 + 4, words, "end", kind))
    bottom = top + rows * height + 16
    for c in sorted({0, columns // 3, 2 * columns // 3}):
        parts.append(text(LABEL + c * width / columns, bottom, str(chart.starts[c])))
    parts.append(text(WIDTH - 4, bottom, f"step {chart.last}", "end"))
    parts.append(_legend(low, high, bottom + 12))
    said = f"{rows} rows, steps {chart.starts[0]} to {chart.last}, scales from 2^{low:.1f} to 2^{high:.1f}."
    return svg(bottom + 46, chart.title, said, join(parts))


def bounds(cells: Floats) -> tuple[float, float]:
    """The range of colours: at least one power of two, or noise would look like drama."""
    known = cells[np.isfinite(cells)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    spare = max(0.0, 1.0 - (high - low)) / 2
    return low - spare, high + spare


def _cells(level: np.ndarray) -> Markup:
    """One path for each colour; neighbours in a row become one line."""
    paths: list[list[str]] = [[] for _ in range(LEVELS)]
    for y, row in enumerate(level.tolist()):
        start = 0
        for x in range(1, len(row) + 1):
            if x == len(row) or row[x] != row[start]:
                if row[start] >= 0:
                    paths[row[start]].append(f"M{start} {y}.5h{x - start}")
                start = x
    return join(
        [
            Markup('<path class="h{}" d="{}"/>').format(i, "".join(path))
            for i, path in enumerate(paths)
            if path
        ]
    )


def _legend(low: float, high: float, y: float) -> Markup:
    width = (WIDTH - LABEL - 4) / LEVELS
    parts = [text(LABEL - 6, y + 11, "scale", "end")]
    for i in range(LEVELS):
        parts.append(
            Markup('<rect class="f{}" x="{:.1f}" y="{}" width="{:.1f}" height="12"/>').format(
                i, LABEL + i * width, y, width + 0.5
            )
        )
    for i in range(0, LEVELS + 1, 3):
        anchor = "start" if i == 0 else "end" if i == LEVELS else "middle"
        parts.append(text(LABEL + i * width, y + 25, f"2^{low + (high - low) * i / LEVELS:.1f}", anchor))
    return join(parts)


# -- one step ---------------------------------------------------------------------------------------------

KINDS = ("F", "B", "I", "W", "scope", "collective")


def timeline(picture: Picture) -> Markup:
    """A lane for each rank; what it did from left to right."""
    left, right, top, height = 66.0, WIDTH - 92.0, 30.0, 24
    seconds = picture.seconds or 1.0
    present = {span.kind for _, spans, _ in picture.lanes for span in spans}
    parts = _kinds_legend([kind for kind in KINDS if kind in present])
    for i, (rank, spans, end) in enumerate(picture.lanes):
        y = top + i * height
        parts.append(text(left - 6, y + 15, f"rank {rank}", "end"))
        for span in spans:
            x, width = (
                left + span.start / seconds * (right - left),
                (span.end - span.start) / seconds * (right - left),
            )
            kind = span.kind if span.kind in KINDS else "other"
            said = f"rank {rank}: {clean(span.text)}, {1000 * (span.end - span.start):.3g} ms"
            parts.append(
                Markup(
                    '<rect class="k-{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>{}</title></rect>'
                ).format(kind, x, y, max(0.8, width), height - 4, said)
            )
            if span.label and width > 9 * len(span.label) + 2:
                parts.append(text(x + width / 2, y + 14, clean(span.label), "middle", f"on k-{kind}-ink"))
        parts.append(
            text(right + 6, y + 15, shorten(end, 12), kind="tick" if end == "commit" else "tick bad")
        )
    bottom = top + len(picture.lanes) * height + 14
    for tick in ticks(0.0, 1000 * seconds):
        if tick <= 1000 * seconds:
            parts.append(text(left + tick / 1000 / seconds * (right - left), bottom, f"{tick:.6g}", "middle"))
    parts.append(text(right + 6, bottom, "ms"))
    said = f"{len(picture.lanes)} ranks, {1000 * seconds:.3g} ms; each mark tells its rank and duration."
    return svg(bottom + 8, picture.title, said, join(parts))


def _kinds_legend(kinds: Sequence[str]) -> list[Markup]:
    parts, x = [], 8.0
    for kind in kinds:
        words = f"{kind} {WORDS[kind]}" if len(kind) == 1 else WORDS[kind]
        parts.append(Markup('<rect class="k-{}" x="{:.0f}" y="4" width="14" height="14"/>').format(kind, x))
        parts.append(text(x + 19, 15, words))
        x += 40 + 6.1 * len(words)
    return parts
