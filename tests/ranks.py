"""What the tests of several folders share about ranks and their launchers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LAUNCHERS_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """The ranks that run a distributed test; torch.distributed is initialised (gloo) over all of them."""

    rank: int
    size: int


def size_that_mpirun_promised() -> int | None:
    """Return how many ranks mpirun started, or None without one. Needs no torch, unlike the library's own."""
    sizes = (os.environ.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    return next((int(size) for size in sizes if size.isdecimal()), None)


def environ_for_a_launcher() -> dict[str, str]:
    """Return this process's environment without what an outer launcher put there.

    A rank hands its launcher's variables on to its children, where the next launcher's ranks would join
    the outer job instead of their own.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_LAUNCHERS_VARIABLES)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
