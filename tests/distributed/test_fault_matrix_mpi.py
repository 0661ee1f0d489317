"""Every fault of the matrix that all ranks survive, on the MPI transport, in one session of mpirun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import World

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from matrix import FAULTS
from report import record as note
from trial import Fault, Place, check, row, trial

MPI = pytest.importorskip("mpi4py.MPI")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if "mpi" in fault.transports], ids=lambda fault: fault.name
)
def test_every_rank_is_told_no_state_moves_and_training_goes_on(
    world: World, fault: Fault, request: pytest.FixtureRequest
) -> None:
    mine = trial(fault, Place(world.rank, "mpi", MPI.COMM_WORLD))
    seen: list[Any] = [None] * world.size
    dist.all_gather_object(seen, mine)
    if world.rank == 0:  # a failure here is one of all ranks
        check(fault, seen, MPI.COMM_SELF)
        directory = request.config.getoption("--reliability", default=None)
        note(directory, row(fault, "mpi", dict(enumerate(seen))))
