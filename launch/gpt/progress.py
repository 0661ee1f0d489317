"""What rank 0 shows while training: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import TrainConfig

if TYPE_CHECKING:
    from .training import StepRecord

LOG_LINES = 20  # about as many lines a run where there is no terminal


class ProgressDisplay:
    """Shows steps, and writes one line of `metrics.jsonl` for each."""

    def __init__(self, config: TrainConfig, console: Console | None = None, *, first_step: int = 0) -> None:
        """Open `metrics.jsonl`.

        Args:
            config: the run.
            console: where to show it; the terminal if left out.
            first_step: lines of earlier steps stay; a run that goes on from a checkpoint writes later ones anew.
        """
        self.config = config
        self.console = console or Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(
            config.precision, total=config.steps, figures="starting", completed=first_step
        )
        config.run_dir.mkdir(parents=True, exist_ok=True)
        metrics = config.run_dir / "metrics.jsonl"
        cut_metrics(metrics, first_step)
        self._metrics = metrics.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._metrics.close()

    def observe(self, record: StepRecord) -> None:
        """Show and write one step."""
        self._metrics.write(json.dumps(metrics_line(record)) + "\n")
        self._metrics.flush()
        figures = self._figures(record)
        self._bar.update(self._task, completed=record.step + 1, figures=figures)
        every = max(1, self.config.steps // LOG_LINES)
        last = record.step == self.config.steps - 1
        wanted = record.step % every == 0 or last or record.eval_loss is not None
        if wanted and not self.console.is_terminal:
            label = f"{self.config.precision:4s} step {record.step + 1:4d}/{self.config.steps}"
            self.console.print(f"{label}  {figures}", soft_wrap=True)

    def _figures(self, record: StepRecord) -> str:
        tokens = self.config.batch * self.config.seq_len / record.seconds
        figures = f"loss {record.loss:.4f}  {tokens:7.0f} tokens/s"
        if record.eval_loss is not None:
            figures = f"held out {record.eval_loss:.4f}  {figures}"
        return f"{figures}  {record.collectives} collectives" if self.config.precision == "fp8" else figures


def metrics_line(record: StepRecord) -> dict[str, Any]:
    """A step as plain values: what `metrics.jsonl` holds."""
    line: dict[str, Any] = {
        "step": record.step,
        "loss": record.loss,
        "seconds": round(record.seconds, 6),
        "collectives": record.collectives,
    }
    if record.gradient_norm is not None:
        line["gradient_norm"] = record.gradient_norm
    if record.eval_loss is not None:
        line["eval_loss"] = record.eval_loss
    if record.sample:
        line["scales"] = record.sample.scales
        line["casts"] = {role: counts.fractions() for role, counts in sorted(record.sample.casts.items())}
    return line


def cut_metrics(path: Path, first_step: int) -> None:
    """Keep the lines of the steps before one. A line that a killed process left half written is not among them."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if first_step and path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < first_step]
    whole = path.with_suffix(".partial")
    whole.write_text("".join(kept), encoding="utf-8")
    whole.replace(path)  # in one instant: a kill leaves the old file or the new one


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_json(path: Path, value: Any) -> None:
    """Write a value for people and programs."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
