"""The world fixture is the world that mpirun started, and its ranks reach each other."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import World

from fp8dist.bootstrap import init_process_group_from_mpi, mpi_world_size


def test_the_world_is_the_one_that_mpirun_started(world: World) -> None:
    assert world.size == mpi_world_size(os.environ)
    assert world.size in (2, 4)
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)


def test_every_rank_has_its_own_number(world: World) -> None:
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(ranks, torch.tensor([world.rank]))
    assert [int(rank) for rank in ranks] == list(range(world.size))


def test_int32_max_reaches_all_ranks(world: World) -> None:
    row = torch.full((5,), -1.0)
    row[world.rank] = float(world.rank)
    bits = row.view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX)
    assert row.tolist() == [float(i) if i < world.size else -1.0 for i in range(5)]


def test_a_second_initialisation_is_refused_on_every_rank(world: World) -> None:
    with pytest.raises(ValueError, match="on rank 0; do call either"):
        init_process_group_from_mpi("gloo")


def test_one_thread_per_rank(world: World) -> None:
    assert torch.get_num_threads() == 1


@pytest.mark.ranks(4)
def test_a_test_for_four_ranks_runs_on_four(world: World) -> None:
    assert world.size == 4
