"""One rank that `measure_on_new_ranks` starts: `python -m fp8dist.doctor._rank PORT RANK WORLD`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from ._group import measure


def main(port: int, rank: int, world: int) -> None:
    """Measure; rank 0 prints the result as JSON."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    health = measure()
    if rank == 0:
        print(json.dumps(asdict(health)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
