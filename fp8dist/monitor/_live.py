"""The newest sample in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ._record import Record, check_positive_int, column, worst

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table


class LiveView:
    """A table in the terminal that follows the run: loss, waiting time, the worst slots, the newest warnings.

    Where the output is no terminal it prints a line now and then instead, and every warning.

    Args:
        slots: rows of the table.
        rank: the rank that shows it, so that ranks of one terminal do not paint over each other; None: all.
        line_every_s: seconds between two lines where there is no terminal.
        console: where to print; default: standard output.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        slots: int = 8,
        *,
        rank: int | None = 0,
        line_every_s: float = 30.0,
        console: Console | None = None,
    ) -> None:
        check_positive_int("slots", slots)
        if rank is not None and (not isinstance(rank, int) or rank < 0):
            raise ValueError(f"rank expects an int >= 0 or None but got {rank!r}")
        if not isinstance(line_every_s, float | int) or not line_every_s >= 0:
            raise ValueError(f"line_every_s expects seconds >= 0 but got {line_every_s!r}")
        from rich.console import Console

        self._slots, self._rank, self._line_every_s = slots, rank, line_every_s
        self._console = Console() if console is None else console
        self._live: Live | None = None
        self._start: Record = {}
        self._warnings: list[Record] = []
        self._last_line: float | None = None

    def write(self, record: Record) -> None:
        """Show it."""
        if self._rank not in (None, record["rank"]):
            return
        if record["kind"] == "start":
            self._start = record
        elif record["kind"] == "warning":
            self._warnings = [*self._warnings, record][-3:]
            if not self._console.is_terminal:
                self._print(f"step {record['step']}: warning: {record['message']}")
        elif self._console.is_terminal:
            self._show(record)
        else:
            now = time.monotonic()
            if self._last_line is None or now - self._last_line >= self._line_every_s:
                self._last_line = now
                self._print(self._line(record))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, sample: Record) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(sample), refresh=True)

    def _headline(self, sample: Record) -> str:
        parts = [f"step {sample['step']}"]
        if sample["loss"] is not None:
            parts.append(f"loss {sample['loss']:.4g}")
        parts.append(f"rank {sample['rank']} of {self._start['world']}")
        if sample["wait_s"] is not None:
            parts.append(f"waits {sample['wait_s'] * 1e3:.2f} ms a step")
        if sample["aborts"]:
            parts.append(f"{sample['aborts']} aborts")
        return ", ".join(parts)

    def _line(self, sample: Record) -> str:
        rows = worst(sample, 1)
        if not rows:
            return self._headline(sample)
        name, *cells = self._cells(sample, rows[0])
        told = ", ".join(f"{what} {cell}" for what, cell in zip(_COLUMNS, cells, strict=True) if cell)
        return f"{self._headline(sample)}; worst slot {name}: {told}"

    def _cells(self, sample: Record, i: int) -> list[str]:
        def cell(field: str, form: str) -> str:
            values = sample[field]
            return "" if values is None or values[i] is None else format(values[i], form)

        return [
            self._start["slots"][i],
            cell("saturated", ".3%"), cell("flushed", ".1%"), cell("headroom", ".1f"),
            cell("scale", ".3g"), cell("amax", ".3g"), cell("stale", "d"),
        ]  # fmt: skip

    def _table(self, sample: Record) -> Table:
        from rich.markup import escape
        from rich.table import Table

        saturated = column(sample, "saturated")
        told = [f"[yellow]step {w['step']}: {escape(w['message'])}[/]" for w in self._warnings]
        table = Table(
            title=escape(self._headline(sample)), caption="\n".join(told) or None, caption_justify="left"
        )
        table.add_column("worst slots", overflow="fold")
        for heading in _COLUMNS:
            table.add_column(heading, justify="right", no_wrap=True)
        for i in worst(sample, self._slots):
            style = "bold red" if saturated[i] > 1e-3 else None
            table.add_row(*map(escape, self._cells(sample, i)), style=style)
        return table

    def close(self) -> None:
        """Leave the last table where it is."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


_COLUMNS = ("saturated", "flushed", "headroom", "scale", "amax", "stale")
