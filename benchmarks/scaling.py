"""How payload, memory and time grow with slots, ranks and microbatches, on one process.

    python benchmarks/scaling.py [--json FILE]

Slots: one rank without peers, so the times are what a rank computes itself. Ranks: what group rank 0 does once, when it
decides a layout for thousands of ranks in many pipeline stages; one process brings what all of them would bring. Fake
ranks: group rank 0 of thousands under torch's fake process group, whose collectives return at once; a thread brings and
acknowledges what the others would, in a store of this process. Microbatches: collectives per step, which must not grow.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8dist as f8
from fp8dist import _decisions
from fp8dist._declarations import Declarations
from fp8dist._header import header_words
from fp8dist._layout import layout_from_plain, pack, unpack
from fp8dist.transport import Control, TorchTransport

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
            coordinator._table.row.fill_(1.0)  # every tensor ran

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
    payloads = stage_payloads(f8.DelayedScaling(amax_history_len=LENGTH), stages, slots_per_stage)
    brought = [(payload, list(range(stage, ranks, stages))) for stage, payload in enumerate(payloads)]
    gc.collect()  # what earlier measurements have left is none of this one's business
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


def stage_payloads(recipe: f8.DelayedScaling, stages: int, slots_per_stage: int) -> list[Any]:
    """What a rank of each stage brings to the agreement on a layout."""
    payloads = []
    for stage in range(stages):
        declared = Declarations()
        for name in stage_slots(stage, slots_per_stage):
            declared.add(name, None, None, False)
        payloads.append(declared.payload(recipe, recipe.digest(), {}))
    return payloads


def stage_slots(stage: int, n: int) -> list[str]:
    """Names of the slots of one stage."""
    return [f"stage{stage}.layer{i}.{role}" for i in range(n // 2) for role in ("input", "grad_output")]


class OtherRanks(threading.Thread):
    """Brings the payloads of all ranks but the first to the agreement, and acknowledges the result."""

    def __init__(self, here: Control, ranks: int, payloads: list[Any]) -> None:
        super().__init__(daemon=True)
        self._here, self._ranks, self._payloads = here, ranks, payloads

    def run(self) -> None:
        """Until the result is acknowledged, or for two minutes."""
        blobs = [pack(payload) for payload in self._payloads]
        digests = [hashlib.sha256(blob).hexdigest() for blob in blobs]
        for blob, digest in zip(blobs, digests, strict=True):
            self._here.set(f"blob/{digest}", blob)
        for rank in range(1, self._ranks):
            self._here.set(f"entry/{rank}", f"{rank:012x} {digests[rank % len(digests)]}")
        deadline = time.monotonic() + 120
        while (result := self._here.get("result")) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        decided = unpack(result or b"")["id"]
        for rank in range(1, self._ranks):
            self._here.set(f"ack/{rank}", decided)


def by_fake_ranks(ranks: int, stages: int, slots_per_stage: int) -> dict[str, float]:
    """The first rank's agreement and steps among `ranks` ranks."""
    recipe = f8.DelayedScaling(amax_history_len=LENGTH)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    coordinator = f8.ReductionGroupCoordinator(recipe, store=dist.HashStore(), name=f"fake {ranks}")
    transport = coordinator._transport
    assert isinstance(transport, TorchTransport)

    def connect(communicator: str, device: torch.device, timeout: float | None) -> None:
        transport._group = dist.group.WORLD

    transport.connect = connect  # type: ignore[method-assign]
    transport.disconnect = lambda: None  # type: ignore[method-assign]
    for name in stage_slots(0, slots_per_stage):
        coordinator.slot(name)
    others = OtherRanks(
        coordinator._control.under("layout"), ranks, stage_payloads(recipe, stages, slots_per_stage)
    )
    others.start()
    start = time.perf_counter()
    coordinator.freeze()
    freeze = time.perf_counter() - start
    others.join()
    entries, exits = [], []
    for i in range(60):
        scope = coordinator.step(i)
        start = time.perf_counter()
        scope.__enter__()
        entries.append(time.perf_counter() - start)
        coordinator._table.row.fill_(1.0)  # every tensor ran
        start = time.perf_counter()
        scope.__exit__(None, None, None)
        exits.append(time.perf_counter() - start)
    result = {
        "ranks": ranks, "stages": stages, "payload_kib": coordinator.payload_words / 256, "freeze_s": freeze,
        "entry_us": statistics.median(entries[10:]) * 1e6, "exit_us": statistics.median(exits[10:]) * 1e6,
        "collectives_per_step": coordinator.stats.collectives / 60,
    }  # fmt: skip
    coordinator._drop()  # its peers will not close
    dist.destroy_process_group()
    return result


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
    Console(width=110).print(table)


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
    worlds = ((8, 4), (256, 16), (4096, 64), (16_384, 64))
    ranks = [by_ranks(r, s, 400) for r, s in worlds]
    fake = [by_fake_ranks(r, s, 400) for r, s in worlds]
    microbatches = [by_microbatches(m) for m in (1, 8, 64, 512)]
    show(f"Slots, L = {LENGTH}, one rank", slots)
    show("Ranks: what rank 0 decides once", ranks)
    show("Fake ranks: what rank 0 does, in one process with what stands for the others", fake)
    show("Microbatches", microbatches)
    if args.json:
        args.json.write_text(
            json.dumps(
                {"slots": slots, "ranks": ranks, "fake_ranks": fake, "microbatches": microbatches}, indent=1
            )
        )


if __name__ == "__main__":
    main()
