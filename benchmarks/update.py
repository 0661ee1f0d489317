"""The scale update of many modules on a GPU: what one commit costs on the device and on the host.

    python benchmarks/update.py [--modules 800] [--length 16] [--json FILE]

A module has two forward slots (input, weight) and one for gradients. Compared with a loop over modules by the
same rule in torch operations, which is what a module-wise library does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import fp8dist as f8


def timed(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median milliseconds on the device, and microseconds on the host."""
    for _ in range(5):
        run()
    device, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # the host runs ahead, so that only the device is timed
        begin.record()
        start = time.perf_counter()
        run()
        host.append(time.perf_counter() - start)
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end))
    return statistics.median(device), statistics.median(host) * 1e6


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modules", type=int, default=800)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("prediction: two launches, <= 0.05 ms on the device for 800 modules")
    recipe = f8.DelayedScaling(amax_history_len=args.length)
    n = args.modules
    states = [
        recipe.make_state(2 * n, backward=False, device="cuda"),
        recipe.make_state(n, backward=True, device="cuda"),
    ]
    rows = [torch.rand(state.n, device="cuda") + 0.5 for state in states]

    def one_commit() -> None:
        for state, row in zip(states, rows, strict=True):
            state.update(row)

    one_commit()
    results = {"one commit": timed(one_commit, 50)}
    parts = [(recipe.make_state(2, backward=False), recipe.make_state(1, backward=True)) for _ in range(n)]
    cells = [torch.rand(2) + 0.5, torch.rand(1) + 0.5]

    def loop() -> None:
        for pair in parts:
            for state, row in zip(pair, cells, strict=True):
                state.update(row)

    start = time.perf_counter()
    loop()
    results["a loop over modules (host)"] = (0.0, (time.perf_counter() - start) * 1e6)
    table = Table(title=f"{n} modules, L = {args.length}, {torch.cuda.get_device_name()}")
    for heading in ("", "device ms", "host us"):
        table.add_column(heading, justify="right")
    for name, (ms, us) in results.items():
        table.add_row(name, f"{ms:.4f}" if ms else "", f"{us:.0f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
