"""How payload, memory and time grow with slots, ranks and microbatches, on one process.

    python benchmarks/scaling.py [--json FILE]

Slots: one rank without peers, so the times are what a rank computes itself. Ranks: what group rank 0 does once, when it
decides a layout for thousands of ranks in many pipeline stages; one process brings what all of them would bring.
Microbatches: collectives per step, which must not grow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fp8dist as f8
from fp8dist import _decisions
from fp8dist._header import header_words
from fp8dist._layout import layout_from_plain

LENGTH = 16


def median_us(run: Callable[[], None], repeats: int) -> float:
    """Median microseconds of `run`."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e6


def by_slots(n: int) -> dict[str, float]:
    """One rank with `n` slots."""
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=LENGTH), name=f"n{n}")
    start = time.perf_counter()
    for i in range(n // 2):
        coordinator.slot(f"layer{i}.input")
        coordinator.slot(f"layer{i}.grad_output")
    declare = time.perf_counter() - start
    start = time.perf_counter()
    coordinator.freeze()
    freeze = time.perf_counter() - start

    def step() -> None:
        with coordinator.step():
            pass

    us = median_us(step, max(5, min(100, 1_000_000 // n)))
    tensors = [t for state in coordinator._table._states for t in state.tensors().values()]
    held = sum(t.numel() * t.element_size() for t in (*tensors, coordinator._table.words))
    result = {
        "slots": n,
        "payload_kib": coordinator.payload_words / 256,
        "state_mib": held / 2**20,
        "declare_s": declare,
        "freeze_s": freeze,
        "step_us": us,
    }
    coordinator.close()
    return result


def by_ranks(ranks: int, stages: int, slots_per_stage: int) -> dict[str, float]:
    """The decision on a layout for `ranks` ranks, each of which holds one of `stages` stages."""
    recipe = f8.DelayedScaling(amax_history_len=LENGTH)
    with f8.ReductionGroupCoordinator(recipe, name=f"r{ranks}") as coordinator:
        brought: list[tuple[Any, list[int]]] = []
        for stage in range(stages):
            for i in range(slots_per_stage // 2):
                for role in ("input", "grad_output"):
                    coordinator._declared.add(f"stage{stage}.layer{i}.{role}", None, None, False)
            payload = coordinator._declared.payload(recipe, recipe.digest(), {})
            brought.append((payload, list(range(stage, ranks, stages))))
            coordinator._declared = type(coordinator._declared)()
        start = time.perf_counter()
        agreed = _decisions.layout(brought)
        decide = time.perf_counter() - start
        start = time.perf_counter()
        layout = layout_from_plain(agreed["layout"])
        read = time.perf_counter() - start
    words = header_words(len(layout.holders)) + len(layout.names)
    return {
        "ranks": ranks, "stages": stages, "slots": len(layout.names), "classes": len(layout.holders),
        "payload_kib": words / 256, "decide_s": decide, "read_s": read,
    }  # fmt: skip


def by_microbatches(microbatches: int) -> dict[str, float]:
    """Collectives and milliseconds of a step with many microbatches."""
    coordinator = f8.ReductionGroupCoordinator(
        f8.DelayedScaling(amax_history_len=LENGTH), name=f"m{microbatches}"
    )
    model = f8.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), coordinator)
    x = torch.randn(16, 32)
    with coordinator.step():
        model(x).sum().backward()
    before, start = coordinator.stats.collectives, time.perf_counter()
    with coordinator.step():
        for _ in range(microbatches):
            model(x).sum().backward()
    seconds = time.perf_counter() - start
    collectives = coordinator.stats.collectives - before
    coordinator.close()
    return {
        "microbatches": microbatches,
        "collectives": collectives,
        "ms_per_microbatch": seconds / microbatches * 1e3,
    }


def show(title: str, rows: list[dict[str, float]]) -> None:
    """Print one table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    Console().print(table)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "prediction: 4 bytes of payload and about 110 of state a slot (L = 16); one collective a step, always"
    )
    slots = [by_slots(n) for n in (100, 1000, 10_000, 100_000, 1_000_000)]
    ranks = [by_ranks(r, s, 400) for r, s in ((8, 4), (256, 16), (4096, 64), (16_384, 64))]
    microbatches = [by_microbatches(m) for m in (1, 8, 64, 512)]
    show(f"Slots, L = {LENGTH}, one rank", slots)
    show("Ranks: what rank 0 decides once", ranks)
    show("Microbatches", microbatches)
    if args.json:
        args.json.write_text(
            json.dumps({"slots": slots, "ranks": ranks, "microbatches": microbatches}, indent=1)
        )


if __name__ == "__main__":
    main()
