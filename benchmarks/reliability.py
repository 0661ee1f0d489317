"""What self-check, inspector and flight recorder cost a step, and how a stall is told among many processes.

    python benchmarks/reliability.py [--ranks 4] [--slots 10000] [--rounds 2000] [--processes 300] [--json FILE]

First table: steps of two coordinators take turns on gloo, one thread per rank. One is whole; of the other the digests,
the progress records and the recorder are cut out, so that what is left is scope, reduction and update. Aim: < 2 %.
Second table: light processes without torch.distributed share one store; two of them are missing, all others wait for
them. Read how long after the deadline the last one has its error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from coordinator import free_port
from rich.console import Console
from rich.table import Table

import fp8dist as f8
from fp8dist._notes import Notes
from fp8dist._stall import StallInspector
from fp8dist.transport import Control

AIM = 0.02
TIMEOUT = 3.0
MISSING = (1, 7)


def without_reliability(coordinator: f8.ReductionGroupCoordinator) -> f8.ReductionGroupCoordinator:
    """Cut out what a step does for the self-check's digests, the inspector and the recorder."""
    nothing: Any = lambda *args, **kwargs: None  # noqa: E731
    coordinator._stall.progress.publish = nothing  # type: ignore[method-assign]
    coordinator.flight.record = nothing  # type: ignore[method-assign]
    coordinator._table.refresh_digests = nothing  # type: ignore[method-assign]
    coordinator._flight_header = lambda header: {}  # type: ignore[method-assign]
    return coordinator


def trimmed_mean(values: list[float]) -> float:
    """Mean of all but the lowest and the highest tenth."""
    cut = len(values) // 10
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def rank_main(rank: int, world: int, port: int, n: int, rounds: int, out: str) -> None:
    """One rank of the first benchmark; rank 0 writes the slowest rank's medians."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sides = {}
    for name in ("whole", "cut"):
        coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=16), name=name)
        slots = [coordinator.slot(f"l{i}.{role}") for i in range(n // 2) for role in ("input", "grad_output")]
        slot = slots[0]
        coordinator.freeze()
        with coordinator.step():
            slot.record(torch.tensor([1.0]))
        sides[name] = (coordinator if name == "whole" else without_reliability(coordinator), slot)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 5):
        for name in ("whole", "cut") if i % 2 else ("cut", "whole"):
            coordinator, slot = sides[name]
            dist.barrier()
            start = time.perf_counter()
            with coordinator.step(i):
                slot.record(torch.tensor([1.0 + i]))
            times[name].append(time.perf_counter() - start)
    means = {name: trimmed_mean(values[5:]) * 1e6 for name, values in times.items()}
    differences = [a - b for a, b in zip(times["whole"][5:], times["cut"][5:], strict=True)]
    means["error"] = statistics.stdev(differences) / math.sqrt(len(differences)) * 1e6
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, means)
    if rank == 0:
        Path(out).write_text(json.dumps({name: max(m[name] for m in everyone) for name in means}))
    dist.barrier()
    os._exit(0)


class _Never:
    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


def light_rank(rank: int, world: int, port: int, begin: float, folder: str) -> None:
    """One process that waits for the missing ones, or is one."""
    everyone = Control(dist.TCPStore("127.0.0.1", port, is_master=False), "fp8dist")
    control = everyone.under("main")
    inspector = StallInspector(control, everyone, "main", rank, tuple(range(world)), None)
    notes = Notes(control, "main", rank, world, communicator="c")
    inspector.start([rank % 8])
    inspector.progress.publish("open", 2, 17, "train.py:30")
    time.sleep(max(0.0, begin - time.time()))
    if rank in MISSING:
        inspector.progress.chunk("F", rank, 4)
        time.sleep(TIMEOUT + 12)
        return
    inspector.progress.publish("exit", 2, 17, "train.py:30")
    start, cpu = time.monotonic(), time.process_time()
    try:
        inspector.wait(_Never(), 2, 17, TIMEOUT, lambda: notes.look(2))
    except f8.Fp8DistError as error:
        missing = getattr(error, "missing", ())
        notes.leave(rank, 17, str(error), missing=missing)
        result = [time.monotonic() - start, list(missing) == list(MISSING), time.process_time() - cpu]
        Path(folder, str(rank)).write_text(json.dumps(result))
        time.sleep(2)


def many(processes: int) -> dict[str, float]:
    """Seconds after the deadline until each rank was told, and whether rightly."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # an IPv4 socket: the server asks no resolver for the names of its clients
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    begin = time.time() + 6 + processes * 0.03
    pids = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(processes):
            pid = os.fork()
            if pid == 0:
                light_rank(rank, processes, store.port, begin, folder)
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        results = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    late = sorted(seconds - TIMEOUT for seconds, _, _ in results)
    return {
        "processes": processes,
        "told": len(results),
        "right": sum(right for _, right, _ in results),
        "median_s": statistics.median(late),
        "last_s": late[-1],
        "cpu_s": statistics.median(cpu for _, _, cpu in results),
    }


def show(cost: dict[str, float], told: dict[str, float], ranks: int, slots: int) -> None:
    """Print both tables."""
    console = Console()
    table = Table(title=f"A step of {slots} slots, {ranks} gloo ranks, trimmed means, slowest rank")
    for name in ("whole us", "without self-check and inspector us", "cost", "standard error"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{cost['whole']:.0f}", f"{cost['cut']:.0f}", f"{cost['whole'] / cost['cut'] - 1:+.1%}",
        f"{cost['error'] / cost['cut']:.1%}",
    )  # fmt: skip
    console.print(table)
    table = Table(title=f"{told['processes']:.0f} processes, ranks {MISSING} missing, timeout {TIMEOUT:g} s")
    for name in ("told", "rightly", "median after the deadline s", "last s", "CPU s while waiting, median"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{told['told']:.0f}", f"{told['right']:.0f}", f"{told['median_s']:.2f}", f"{told['last_s']:.2f}",
        f"{told['cpu_s']:.3f}",
    )  # fmt: skip
    console.print(table)


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slots", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"prediction: cost < {AIM:.0%}; all of {args.processes} processes told within 2 s of the deadline")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        mp.start_processes(
            rank_main,
            args=(args.ranks, free_port(), args.slots, args.rounds, str(out)),
            nprocs=args.ranks,
            start_method="fork",
        )
        cost = json.loads(out.read_text())
    told = many(args.processes)
    show(cost, told, args.ranks, args.slots)
    if args.json:
        args.json.write_text(json.dumps({"step": cost, "stall": told}, indent=1))


if __name__ == "__main__":
    main()
