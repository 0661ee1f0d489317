"""Records as TensorBoard curves."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ._json_lines import checked_directory
from ._record import Record, column, extremes

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MOST_CURVES = 100  # slots with curves of their own; TensorBoard gets slow with more


class TensorBoard:
    """Curves of the loss, the given numbers, waiting time, and the extremes and histograms over all slots.

    They go to `<run_dir>/tensorboard/rank<R>`; look at them with `tensorboard --logdir <run_dir>/tensorboard`.

    Args:
        run_dir: made when the first record comes.
        slots: slots that get curves of their own, by name or pattern (`"layers.0.*"`); at most 100 of them.

    Raises:
        ValueError: `run_dir` is no path of a directory, or `slots` holds no strings.
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, run_dir: str | Path, *, slots: Sequence[str] = ()) -> None:
        if isinstance(slots, str) or not all(isinstance(pattern, str) for pattern in slots):
            raise ValueError(f"slots expects a list of names or patterns but got {slots!r}")
        self.run_dir = checked_directory("run_dir", run_dir)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "the TensorBoard sink expects TensorBoard to be installed; pip install 'fp8dist[monitor]'"
            ) from error
        self._make = SummaryWriter
        self._patterns = tuple(slots)
        self._writer: SummaryWriter | None = None
        self._curves: list[tuple[int, str]] = []

    def write(self, record: Record) -> None:
        """Add it.

        Raises:
            OSError: the file system refuses.
        """
        if self._writer is None:
            self._writer = self._make(str(self.run_dir / "tensorboard" / f"rank{record['rank']}"))
        if record["kind"] == "start":
            wanted = (
                (i, name)
                for i, name in enumerate(record["slots"])
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
            )
            self._curves = list(wanted)[:MOST_CURVES]
        elif record["kind"] == "warning":
            self._writer.add_text(f"fp8/{record['what']}", record["message"], record["step"], record["time"])
        else:
            self._add_sample(self._writer, record)
        self._writer.flush()

    def _add_sample(self, writer: SummaryWriter, sample: Record) -> None:
        step, at = sample["step"], sample["time"]
        scalars = {"loss": sample["loss"], "fp8/wait_s": sample["wait_s"], "fp8/aborts": sample["aborts"]}
        scalars |= {f"numbers/{name}": value for name, value in sample["numbers"].items()}
        scalars |= {f"fp8/{name}": value for name, value in extremes(sample).items()}
        columns = {
            field: column(sample, field) for field in ("headroom", "saturated", "flushed", "stale", "scale")
        }
        for i, name in self._curves:
            scalars |= {f"slots/{name}/{field}": float(values[i]) for field, values in columns.items()}
        for tag, value in scalars.items():
            if value is not None and np.isfinite(value):
                writer.add_scalar(tag, value, step, at)
        for tag, values in (
            ("fp8/headroom", columns["headroom"]),
            ("fp8/log2_scale", np.log2(columns["scale"])),
        ):
            known = values[np.isfinite(values)]
            if known.size:
                writer.add_histogram(tag, known, step, walltime=at)

    def close(self) -> None:
        """Write what is left and close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
