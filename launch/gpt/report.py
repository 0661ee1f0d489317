"""Results: a run's summary, the comparison of two precisions, its table and its figure.

`python -m gpt.report RUN_DIR` joins RUN_DIR/fp8 and RUN_DIR/fp32 into RUN_DIR.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from .config import TrainConfig
from .progress import metrics_line, read_metrics, write_json

if TYPE_CHECKING:
    from .training import TrainResult

LAST = 20  # steps in the mean loss that runs are compared by
PLOTTED_LAYERS = 3  # more curves than 3 layers x 3 roles cannot be told apart
ROLES = {"input": "-", "weight": "--", "grad_output": ":"}


def summarize(
    config: TrainConfig, result: TrainResult, metrics: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """A run's figures as plain values; FP8's are None in other precisions.

    Args:
        config: the run.
        result: what this process saw, at least one step if `metrics` are left out.
        metrics: the lines of `metrics.jsonl`, which also hold the steps before a restart.
    """
    lines = metrics or [metrics_line(record) for record in result.steps]
    losses = [line["loss"] for line in lines]
    seconds = [line["seconds"] for line in lines]
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    summary: dict[str, Any] = {
        "precision": config.precision,
        "schedule": config.schedule if config.pp > 1 else "accumulation in one process",
        "world": config.world,
        "pp": config.pp,
        "dp": config.dp,
        "chunks": config.chunks,
        "microbatches": config.microbatches,
        "steps": config.steps,
        "seed": config.seed,
        "loss_first": losses[0],
        "loss_last20_mean": statistics.fmean(losses[-LAST:]),
        "eval_loss": evaluated[-1] if evaluated else None,
        "seconds_per_step": statistics.median(seconds),
        "seconds": sum(seconds),
        "tokens_per_second": config.batch * config.seq_len / statistics.median(seconds),
    }
    counts = [counts for record in result.steps if record.sample for counts in record.sample.casts.values()]
    values = sum(count.values for count in counts)
    fp8 = result.fp8
    return summary | {
        "commits": fp8.commits if fp8 else None,
        "aborts": fp8.aborts if fp8 else None,
        "collectives_per_step": _plain(fp8.collectives / len(result.steps)) if fp8 and result.steps else None,
        "ranks_agree": fp8.ranks_agree if fp8 else None,
        "saturated_fraction": sum(count.saturated for count in counts) / values if values else None,
        "flushed_fraction": sum(count.flushed for count in counts) / values if values else None,
    }


def _plain(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def combine(fp8: Mapping[str, Any], fp32: Mapping[str, Any]) -> dict[str, Any]:
    """Join the summaries of the same run in two precisions."""
    reference = fp32["loss_last20_mean"]
    return {
        "collectives_per_step": fp8["collectives_per_step"],
        "ranks_agree": fp8["ranks_agree"],
        "loss_difference_percent": 100 * (fp8["loss_last20_mean"] - reference) / reference,
        "fp8": dict(fp8),
        "fp32": dict(fp32),
    }


def comparison_table(summary: Mapping[str, Any]) -> Table:
    """The closing table of both runs."""
    fp8, fp32 = summary["fp8"], summary["fp32"]
    table = Table(title="A byte-level GPT in FP8, and the same run in FP32")
    table.add_column("")
    table.add_column("FP8", justify="right")
    table.add_column("FP32", justify="right")
    rows = [
        ("loss of the first step", "loss_first", "{:.4f}"),
        (f"mean loss of the last {LAST} steps", "loss_last20_mean", "{:.4f}"),
        ("collectives per step", "collectives_per_step", "{}"),
        ("commits", "commits", "{}"),
        ("all ranks' scale digests agree", "ranks_agree", "{}"),
        ("saturated values", "saturated_fraction", "{:.2e}"),
        ("values flushed to zero", "flushed_fraction", "{:.2e}"),
        ("seconds per step (median)", "seconds_per_step", "{:.3f}"),
        ("seconds in all", "seconds", "{:.1f}"),
    ]
    for label, key, form in rows:
        table.add_row(label, *(_cell(run[key], form) for run in (fp8, fp32)))
    table.add_row("difference of the mean loss", f"{summary['loss_difference_percent']:+.3f} %", "")
    return table


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return form.format(value)


def plot(runs: Mapping[str, list[dict[str, Any]]], path: Path) -> bool:
    """Draw the losses of the runs, and the scales of some slots, as a PNG.

    Args:
        runs: lines of `metrics.jsonl` by the run's label.
        path: file to write.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, scales) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for (label, lines), style in zip(runs.items(), ("-", "--", ":"), strict=False):
        losses.plot([line["step"] for line in lines], [line["loss"] for line in lines], style, label=label)
    losses.set(title="Loss", xlabel="step", ylabel="nats per byte")
    losses.legend()
    sampled = next((s for lines in runs.values() if (s := [line for line in lines if "scales" in line])), [])
    _plot_scales(scales, sampled)
    for axes in (losses, scales):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _plot_scales(axes: Any, sampled: list[dict[str, Any]]) -> None:
    axes.set(title="FP8 scales", xlabel="step", ylabel="scale (log axis)", yscale="log")
    if not sampled:
        axes.text(0.5, 0.5, "no FP8 run", transform=axes.transAxes, ha="center")
        return
    for index, module in enumerate(plotted_modules(sampled[-1]["scales"])):
        for role, style in ROLES.items():
            points = [
                (line["step"], line["scales"][f"{module}.{role}"])
                for line in sampled
                if f"{module}.{role}" in line["scales"]
            ]
            axes.step(
                *zip(*points, strict=True), style, where="post", color=f"C{index}", label=f"{module}.{role}"
            )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def plotted_modules(scales: Mapping[str, float]) -> list[str]:
    """One linear each of the first, the middle and the last layer."""
    modules = sorted(
        {name.rpartition(".")[0] for name in scales if ".mlp.up." in name},
        key=lambda name: [int(part) for part in name.split(".") if part.isdigit()],
    )
    if len(modules) <= PLOTTED_LAYERS:
        return modules
    return [modules[0], modules[len(modules) // 2], modules[-1]]


def passed(summary: Mapping[str, Any]) -> bool:
    """Whether both runs have finite losses and FP8's ranks agree."""
    finite = all(math.isfinite(summary[run]["loss_last20_mean"]) for run in ("fp8", "fp32"))
    return finite and summary["ranks_agree"] is True


def main(run_dir: Path) -> int:
    """Join two runs' folders; returns the exit code."""
    summary = combine(*(json.loads((run_dir / run / "summary.json").read_text()) for run in ("fp8", "fp32")))
    (run_dir / "fp8" / "metrics.jsonl").replace(run_dir / "metrics.jsonl")
    (run_dir / "fp32" / "metrics.jsonl").replace(run_dir / "metrics-fp32.jsonl")
    for pattern in ("monitor-rank*.jsonl", "flight"):  # for `fp8dist report`
        for file in (run_dir / "fp8").glob(pattern):
            file.replace(run_dir / file.name)
    write_json(run_dir / "summary.json", summary)
    for run in ("fp8", "fp32"):  # what they held is in the joined files now
        shutil.rmtree(run_dir / run)
    console = Console()
    console.print(comparison_table(summary))
    figure = run_dir / "losses-and-scales.png"
    runs = {
        "FP8": read_metrics(run_dir / "metrics.jsonl"),
        "FP32": read_metrics(run_dir / "metrics-fp32.jsonl"),
    }
    drawn = plot(runs, figure)
    files = ["summary.json", "metrics.jsonl", "metrics-fp32.jsonl", *([figure.name] if drawn else [])]
    console.print(f"{run_dir}: {', '.join(files)}", soft_wrap=True)
    if not drawn:
        console.print("no figure: matplotlib is not installed (extra 'monitor')")
    return 0 if passed(summary) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
