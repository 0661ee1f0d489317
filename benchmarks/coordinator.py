"""What one step's exit costs against a bare all-reduce, and one update against a loop over modules.

    python benchmarks/coordinator.py [--ranks 4] [--slots 100 1000 10000 100000] [--rounds 60] [--json FILE]

Both sides run interleaved on gloo, one thread per rank, each on a communicator of its own (a group whose threads the
barrier has just woken is faster). Read the ratios: absolute times belong to the machine. A round is: barrier, bare
all-reduce of the bytes that the exit sends, barrier, scope entry, barrier, scope exit. Aims: exit / bare <= 1.10 at
10 000 slots; the update in 24-40 us at 1000 slots, L = 16.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import fp8dist as f8

LENGTH = 16
AIM_RATIO, AIM_UPDATE_US = 1.10, 40.0


def median_us(seconds: list[float]) -> float:
    """Median in microseconds."""
    return statistics.median(seconds) * 1e6


def time_exit(n: int, rounds: int) -> dict[str, float]:
    """Bare all-reduce, the scope's exit and what it does besides, for `n` slots on this rank."""
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=LENGTH), name=f"n{n}")
    for i in range(n // 2):
        for role in ("input", "grad_output"):
            coordinator.slot(f"layer{i}.{role}")
    coordinator.freeze()
    words = coordinator.payload_words
    payload = torch.zeros(words, dtype=torch.int32)
    group = dist.new_group()
    bare, enter, leave, local = [], [], [], []
    for i in range(rounds + 5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group)
        bare.append(time.perf_counter() - start)
        scope = coordinator.step(i)
        dist.barrier()
        start = time.perf_counter()
        scope.__enter__()
        enter.append(time.perf_counter() - start)
        coordinator._table.row.fill_(1.0 + i)  # every tensor ran
        dist.barrier()
        start = time.perf_counter()
        scope.__exit__(None, None, None)
        leave.append(time.perf_counter() - start)
        local.append(leave[-1] - coordinator.stats.last_wait_s)
    coordinator.close()
    times = {"bare_us": bare, "enter_us": enter, "exit_us": leave, "local_us": local}
    return {"slots": n, "words": words, **{name: median_us(values[5:]) for name, values in times.items()}}


def time_update(n: int, rounds: int) -> dict[str, float]:
    """One vectorized update of `n` slots against a loop over modules of three slots each."""
    recipe = f8.DelayedScaling(amax_history_len=LENGTH)
    whole = recipe.make_state(n, backward=False)
    modules = [recipe.make_state(3, backward=False) for _ in range(max(1, n // 3))]
    row = torch.rand(n) + 0.5
    parts = [torch.rand(3) + 0.5 for _ in modules]
    fast, slow = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        whole.update(row)
        fast.append(time.perf_counter() - start)
    for _ in range(max(3, min(rounds, 20_000 // n))):
        start = time.perf_counter()
        for module, part in zip(modules, parts, strict=True):
            module.update(part)
        slow.append(time.perf_counter() - start)
    return {"slots": n, "update_us": median_us(fast), "loop_us": median_us(slow)}


def rank_main(rank: int, world: int, port: int, sizes: list[int], rounds: int, out: str) -> None:
    """One rank of the exit benchmark; rank 0 writes the results."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results = [time_exit(n, rounds) for n in sizes]
    worst: list[Any] = [None] * world
    dist.all_gather_object(worst, results)
    if rank == 0:
        merged = [
            {key: max(per_rank[i][key] for per_rank in worst) for key in results[i]}
            for i in range(len(sizes))
        ]
        Path(out).write_text(json.dumps(merged))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def show(exits: list[dict[str, float]], updates: list[dict[str, float]], ranks: int) -> None:
    """Print both tables."""
    console = Console()
    table = Table(title=f"Exit of one step, {ranks} gloo ranks, medians, slowest rank")
    for name in (
        "slots",
        "payload KiB",
        "bare us",
        "entry us",
        "exit us",
        "of it local us",
        "exit / bare",
    ):
        table.add_column(name, justify="right")
    for r in exits:
        table.add_row(
            f"{r['slots']:.0f}", f"{r['words'] / 256:.1f}", f"{r['bare_us']:.0f}", f"{r['enter_us']:.0f}",
            f"{r['exit_us']:.0f}", f"{r['local_us']:.0f}", f"{r['exit_us'] / r['bare_us']:.2f}",
        )  # fmt: skip
    console.print(table)
    table = Table(title=f"One update, L = {LENGTH}, one thread, medians")
    for name in ("slots", "update us", "loop over modules us", "loop / update"):
        table.add_column(name, justify="right")
    for r in updates:
        table.add_row(
            f"{r['slots']:.0f}",
            f"{r['update_us']:.1f}",
            f"{r['loop_us']:.0f}",
            f"{r['loop_us'] / r['update_us']:.0f}",
        )
    console.print(table)


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slots", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"prediction: exit / bare <= {AIM_RATIO:.2f} at 10 000 slots, since the reduction dominates; "
        f"update <= {AIM_UPDATE_US:.0f} us at 1000 slots"
    )
    updates = [time_update(n, 200) for n in args.slots]
    out = Path(f"/dev/shm/fp8dist-bench-{os.getpid()}.json")
    try:
        mp.start_processes(
            rank_main,
            args=(args.ranks, free_port(), args.slots, args.rounds, str(out)),
            nprocs=args.ranks,
            start_method="fork",
        )
        exits = json.loads(out.read_text())
    finally:
        out.unlink(missing_ok=True)
    show(exits, updates, args.ranks)
    if args.json:
        args.json.write_text(json.dumps({"exit": exits, "update": updates}, indent=1))


if __name__ == "__main__":
    main()
