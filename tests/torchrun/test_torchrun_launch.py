"""Under a real torchrun the launcher is recognised and MPI stays out of it."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

Torchrun = Callable[..., CompletedProcess[str]]


def test_torchrun_is_recognised_and_its_world_works(torchrun: Torchrun) -> None:
    done = torchrun(
        """
        import sys
        import torch, torch.distributed as dist
        from fp8dist.bootstrap import expected_world_size, launched_by

        assert (launched_by(), expected_world_size()) == ("torchrun", 2)
        assert "mpi4py" not in sys.modules
        dist.init_process_group("gloo")
        row = torch.tensor([dist.get_rank() + 1], dtype=torch.int32)
        dist.all_reduce(row, op=dist.ReduceOp.MAX)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()} got {row.item()}", flush=True)
        dist.destroy_process_group()
        """
    )
    assert done.returncode == 0, done.stdout
    assert all(f"rank {rank} of 2 got 2" in done.stdout for rank in range(2)), done.stdout


def test_a_rank_that_fails_fails_the_launch(torchrun: Torchrun) -> None:
    done = torchrun("import os\nassert os.environ['RANK'] != '1', 'not on this rank'\n")
    assert done.returncode != 0
    assert "not on this rank" in done.stdout
