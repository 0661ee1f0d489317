"""The step's exit against a bare MAX all-reduce on several GPUs: until the call returns, and until the device is done.

    python benchmarks/nccl.py [--ranks 2] [--slots 100 1000 10000 100000] [--rounds 50] [--json FILE]

One rank per GPU, NCCL; where there are too few GPUs, gloo on the CPU, to see that it runs. Both sides take
turns, each on a communicator of its own. The exit with overlap returns at once; its reduction is done by the
time the next step needs it, so its second column is that of `settle()`. Aim: exit / bare <= 1.10.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from coordinator import free_port
from rich.console import Console
from rich.table import Table

import fp8dist as f8

AIM = 1.10


def timed(body: Callable[[], None], finish: Callable[[], None]) -> tuple[float, float]:
    """Seconds until `body` returns, and until what it started is done."""
    dist.barrier()
    finish()
    start = time.perf_counter()
    body()
    returned = time.perf_counter() - start
    finish()
    return returned, time.perf_counter() - start


def measure(n: int, rounds: int, device: torch.device) -> dict[str, float]:
    """Medians on this rank for `n` slots, in microseconds."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(), name=f"n{n}")
    # Slots go where the weights are, so there is one.
    torch.manual_seed(0)
    weight = f8.Linear(16, 16, coordinator=coordinator, name="a layer", device=device)
    slots = [coordinator.slot(f"layer{i}.{role}") for i in range(n // 2) for role in ("input", "grad_output")]
    coordinator.freeze()
    payload = torch.zeros(coordinator.payload_words, dtype=torch.int32, device=device)
    group = dist.new_group()
    amax = torch.ones(1, device=device)
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "exit": [], "overlap": []}
    for i in range(rounds + 5):
        times["bare"].append(
            timed(lambda: dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group), finish)
        )
        for name, overlap in (("exit", False), ("overlap", True)):
            scope = coordinator.step(f"{name} {i}", overlap=overlap)
            scope.__enter__()
            slots[i % n].record(amax)
            returned, done = timed(functools.partial(scope.__exit__, None, None, None), finish)
            if overlap:
                start = time.perf_counter()
                coordinator.settle()
                finish()
                done += time.perf_counter() - start
            times[name].append((returned, done))
    assert weight.slots is not None and weight.slots.input.amax.device == device
    coordinator.close()
    medians: dict[str, float] = {"slots": n, "words": payload.numel()}
    for name, pairs in times.items():
        for column, what in enumerate(("returns", "done")):
            medians[f"{name}_{what}_us"] = statistics.median(pair[column] for pair in pairs[5:]) * 1e6
    return medians


def rank_main(rank: int, args: argparse.Namespace, port: int, out: str) -> None:
    """One rank; the first writes the slowest rank's medians."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= args.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, args.ranks, rank == 0)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=args.ranks)
    results = [measure(n, args.rounds, device) for n in args.slots]
    everyone: list[Any] = [None] * args.ranks
    dist.all_gather_object(everyone, results)
    if rank == 0:
        slowest = [
            {key: max(each[i][key] for each in everyone) for key in results[i]} for i in range(len(results))
        ]
        Path(out).write_text(json.dumps({"backend": dist.get_backend(), "results": slowest}))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slots", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        f"prediction: exit / bare <= {AIM:.2f} until the device is done; with overlap it returns in < 0.3 ms"
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        mp.start_processes(
            rank_main, args=(args, free_port(), str(out)), nprocs=args.ranks, start_method="spawn"
        )
        result = json.loads(out.read_text())
    table = Table(title=f"{args.ranks} ranks, {result['backend']}, torch {torch.__version__}, medians in us")
    columns = [f"{name} {what}" for name in ("bare", "exit", "overlap") for what in ("returns", "done")]
    for heading in ("slots", "KiB", *columns, "exit / bare"):
        table.add_column(heading, justify="right")
    for r in result["results"]:
        cells = [f"{r[f'{name}_{what}_us']:.0f}" for name, what in (c.split() for c in columns)]
        ratio = r["exit_done_us"] / r["bare_done_us"]
        table.add_row(f"{r['slots']}", f"{r['words'] / 256:.1f}", *cells, f"{ratio:.2f}")
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
