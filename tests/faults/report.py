"""What the tests of the fault matrix have seen, as a page.

python tests/faults/report.py DIR docs/reliability.md

DIR holds what `pytest --reliability DIR` has recorded: one file per process, one JSON row per line.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TRANSPORTS = ("gloo", "mpi", "torchrun, gloo", "mpirun, MPI", "mpirun with ULFM, MPI", "python")
LONGEST = 120  # characters of a message

INTRODUCTION = """\
# What happens when something goes wrong

This page is made by the tests. Each line is a fault that a test has injected into four ranks, and what the test saw.

## What the library promises

* **No rank waits for ever in an update.** A rank that fails tells the others; a process that dies is noticed; a rank
  that does not come is named, with a warning after `stall_warning` and an error after `timeout`.
* **Every error names a rank and a cause**, on every rank that lives.
* **No rank's scales move alone.** A step is committed on all ranks or on none. One all-reduce is no atomic commit: who
  dies, or gives up, in the middle of it can leave a rank one commit ahead. Then `recover()` takes that one back.
* **Where all ranks live, they go on.** Each catches its error and calls `recover()`; the step is repeated or skipped.
  The tests run two more steps and compare the state, bit for bit, with one process in which nothing went wrong.

## What it cannot do

* Free ranks that are blocked in the pipeline schedule's own sends and receives, or in the gradients' all-reduce, when
  another rank fails: they wait for that communicator's timeout, or for the failed process to end.
* Go on without a rank. `recover()` names those that do not come, and never makes the group smaller: the launcher
  restarts, from a checkpoint.
* Keep a launcher from its habits: plain `mpirun`, and `torchrun`, end the survivors of a dead process at once. Open MPI
  with `--with-ft ulfm` lets them live; then save what is to be saved and leave by `comm.Abort()` or `os._exit`, since
  `MPI_Finalize` may wait for the dead for ever (seen in one of four runs).
* See a process on another host die at once. There the broken connection tells, or the timeout does.

## The table

*Seconds* are from the fault (for a dead rank: from the step) to the last rank that was told, on a small machine that
was busy with other things. The timeout was {timeout} s where a rank was waited for, 8 s elsewhere, and 60 s under a
launcher. A dash: that rank sees no error. *State* is what the ranks hold before anybody recovers.
"""

AGAIN = """\
## Make this page again

    python -m pytest tests/faults --reliability DIR
    mpirun -n 4 python -m pytest --with-mpi --world-size 4 -p tests.faults.conftest --reliability DIR \\
        tests/distributed/test_fault_matrix_mpi.py
    python tests/faults/report.py DIR docs/reliability.md
"""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    fault: str
    what: str
    transport: str
    own: str
    peers: str
    seconds: float
    state: str
    goes_on: str


def record(directory: str | Path | None, row: Row) -> None:
    """Leave a row, if there is a place for it."""
    if directory is None:
        return
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with (path / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def saw(error: str | None, text: str) -> str:
    """Type and beginning of an error, without what is of one run only."""
    if error is None:
        return "–"
    text = re.sub(
        r"^coordinator (?P<q>['\"]).*?(?P=q)(, rank \d+)?(, step [^:]*)?: ", "", " ".join(text.split())
    )
    text = re.sub(r" of coordinator (?P<q>['\"]).*?(?P=q)", "", text)
    text = re.sub(r" \(this is rank \d[^)]*\)", "", text)
    text = re.sub(r"host [\w.-]+, pid \d+", "host h, pid p", text)
    text = re.sub(r"(/[\w.-]+)+/(?=[\w.-]+)", "", text)
    text = re.sub(r"\d+\.\d+\.\d+\.\d+:\d+", "host:port", text)
    text = re.sub(r"(process|from|pid) \d+", r"\1 p", text)
    return f"`{error}`: {textwrap.shorten(text, LONGEST, placeholder=' …')}" if text else f"`{error}`"


def page(rows: Sequence[Row], timeout: float) -> str:
    """The whole page."""
    lines = [INTRODUCTION.format(timeout=timeout)]
    lines.append(
        "| fault | transport | the faulty rank sees | the others see | seconds | state | goes on by |"
    )
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (
            f"**{row.fault}**: {row.what}", row.transport, row.own, row.peers, f"{row.seconds:.1f}", row.state,
            row.goes_on,
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", AGAIN])


def collect(directory: Path, order: Sequence[str]) -> list[Row]:
    """All rows by fault and transport; of several of one kind the newest."""
    files = sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    rows = [Row(**json.loads(line)) for path in files for line in path.read_text().splitlines()]
    newest = {(row.fault, row.transport): row for row in rows}
    places = {name: place for place, name in enumerate(order)}
    return sorted(newest.values(), key=lambda row: (places[row.fault], TRANSPORTS.index(row.transport)))


def main(directory: str, output: str) -> None:
    """Write the page."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from matrix import NAMES
    from trial import T

    rows = collect(Path(directory), NAMES)
    missing = [name for name in NAMES if name not in {row.fault for row in rows}]
    if missing:
        sys.exit(f"expected a row for every fault but got none for {missing}; run those tests, too")
    Path(output).write_text(page(rows, T))


if __name__ == "__main__":
    main(*sys.argv[1:])
