"""Process groups: are all ranks alike, what does one collective cost, and what one step's exit."""

from __future__ import annotations

import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..coordinator import ReductionGroupCoordinator
from ..recipe import DelayedScaling
from ._findings import Finding, Level

WORDS = (64, 1024, 16_384, 262_144)
ROUNDS = 25
SLOTS = 1000
CLOCK_SECONDS = 5.0
RATIO = 3.0  # exit against bare all-reduce, above which something is odd; both take 0.5 ms between idle ranks


@dataclass(frozen=True)
class Constants:
    """Of the model `alpha * ceil(log2(ranks)) + bytes / beta` for one all-reduce, as `fp8dist plan` takes them."""

    alpha_us: float
    """Microseconds per round of a tree."""
    beta_gbps: float
    """10**9 bytes per second."""

    def as_plain(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class GroupHealth:
    """What all ranks measured together, as plain numbers; equal on all of them.

    Attributes:
        world: ranks.
        backend: of the group.
        ranks: of each rank its host, versions, clock and device.
        reduce_us: microseconds of a MAX all-reduce by its int32 words: median over rounds, slowest rank.
        exit_us: microseconds of a step's exit with 1000 slots, likewise.
        bare_us: the same number of words through a bare all-reduce, in the same rounds.
    """

    world: int
    backend: str
    ranks: list[dict[str, Any]]
    reduce_us: dict[int, float]
    exit_us: float
    bare_us: float

    @property
    def constants(self) -> Constants:
        """Least squares over the sizes, in relative errors; neither below 0."""
        rounds = max(1, math.ceil(math.log2(max(2, self.world))))
        times = np.array(list(self.reduce_us.values()))
        columns = np.array([[rounds, 4.0 * words] for words in self.reduce_us]) / times[:, None]
        (alpha, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
        if per_byte <= 0:  # latency all over: the largest size bounds the bandwidth from below
            per_byte = times[-1] / (4.0 * max(self.reduce_us))
        return Constants(
            alpha_us=round(max(0.0, float(alpha)), 3), beta_gbps=round(1e-3 / float(per_byte), 6)
        )

    def findings(self) -> list[Finding]:
        """What is odd about the ranks and their times."""
        return [*_differences(self.ranks), self._times()]

    def _times(self) -> Finding:
        sizes = ", ".join(f"{us:.0f} us for {4 * words / 1024:g} KiB" for words, us in self.reduce_us.items())
        ratio = self.exit_us / self.bare_us
        seen = (
            f"{self.world} ranks, {self.backend}: {sizes}; a step's exit with {SLOTS} slots {self.exit_us:.0f} us, "
            f"{ratio:.2f} x a bare all-reduce"
        )
        if ratio > RATIO:
            return Finding(
                "collective", Level.NOTE, seen, "look for more busy processes than cores on these hosts"
            )
        return Finding("collective", Level.OK, seen)


def _differences(ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    findings = []
    for what in ("fp8dist", "torch", "python"):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            values.setdefault(facts[what], []).append(rank)
        if len(values) > 1:
            seen = "; ".join(f"{value} on {_some(found)}" for value, found in values.items())
            findings.append(
                Finding(f"{what} of the ranks", Level.BAD, seen, f"install one {what} everywhere")
            )
    clocks = [facts["clock"] for facts in ranks]
    if max(clocks) - min(clocks) > CLOCK_SECONDS:
        late = clocks.index(min(clocks))
        findings.append(
            Finding(
                "clocks",
                Level.WARNING,
                f"{max(clocks) - min(clocks):.1f} s apart; rank {late} on {ranks[late]['host']} is the latest",
                "run a time service: flight recorder dumps are ordered by these clocks",
            )
        )
    hosts = len({facts["host"] for facts in ranks})
    if not findings:
        findings.append(Finding("ranks", Level.OK, f"{len(ranks)} ranks on {hosts} host(s), equal versions"))
    return findings


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > 8 else ''}"


def measure(rounds: int = ROUNDS) -> GroupHealth:
    """Measure on the default process group, which the caller has initialised. Collective.

    Args:
        rounds: timed rounds of each size.
    """
    device = _device()
    reduce_us = {words: _slowest(_bare(words, rounds, device)) for words in WORDS}
    bare, leaving = _exit(rounds, device)
    mine: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "fp8dist": _own_version(),
        "device": str(device),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.barrier()  # clocks are read together, as well as that goes
    mine["clock"] = time.time()
    dist.all_gather_object(ranks, mine)
    return GroupHealth(
        dist.get_world_size(), dist.get_backend(), ranks, reduce_us, _slowest(leaving), _slowest(bare)
    )


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _own_version() -> str:
    try:
        return metadata.version("fp8dist")
    except metadata.PackageNotFoundError:
        return "not installed"


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _bare(words: int, rounds: int, device: torch.device) -> float:
    payload = torch.zeros(words, dtype=torch.int32, device=device)
    seconds = []
    for _ in range(rounds + 3):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(payload, op=dist.ReduceOp.MAX)
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:]) * 1e6


def _exit(rounds: int, device: torch.device) -> tuple[float, float]:
    """Microseconds of a bare all-reduce and of a step's exit of the same size, in turns."""
    coordinator = ReductionGroupCoordinator(DelayedScaling(), name="fp8dist-doctor", stall_warning=None)
    slots = [coordinator.slot(f"doctor.{i}.input") for i in range(SLOTS)]
    coordinator.freeze()
    payload = torch.zeros(coordinator.payload_words, dtype=torch.int32, device=device)
    group = dist.new_group()  # not the barrier's: one whose threads have just been woken is faster
    bare, leaving = [], []
    for step in range(rounds + 3):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group)
        _finish(device)
        bare.append(time.perf_counter() - start)
        with coordinator.step(step):
            slots[step % SLOTS].record(torch.ones(1, device=device))
            dist.barrier()
            start = time.perf_counter()
        _finish(device)
        leaving.append(time.perf_counter() - start)
    coordinator.close()
    return statistics.median(bare[3:]) * 1e6, statistics.median(leaving[3:]) * 1e6


def _slowest(value: float) -> float:
    cell = torch.tensor([value], dtype=torch.float64, device=_device())
    dist.all_reduce(cell, op=dist.ReduceOp.MAX)
    return float(cell)
