"""Directories of simulated runs for the tests of the report: healthy ones, and with trouble that is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = 1.8e9  # unix seconds
STEP = 0.25  # seconds
SCALED_MAX = 448.0
MICROBATCHES = 4


@dataclass
class Simulated:
    """A run of `world` ranks, two on each host, that all hold all layers.

    Attributes:
        saturating: slot -> part of its values that saturates in every sample of the second half.
        slow: rank -> seconds that it is late in every step.
        aborted: step that rank 1 gives up, or None.
        failed: (rank, message): its ValueError ends the run in the last step, or None.
        stages: rank -> stages; the rank's stage shifts nothing here.
        unused: slots that never get an amax.
    """

    world: int = 4
    layers: int = 8
    steps: int = 200
    every: int = 10
    saturating: Mapping[str, float] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)
    aborted: int | None = None
    failed: tuple[int, str] | None = None
    stages: Mapping[int, list[str]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    extra_slots: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("a", "b")

    def __post_init__(self) -> None:
        self.random = random.Random(7)
        self.slots = [
            f"layers.{layer}.{module}.{role}"
            for layer in range(self.layers)
            for module in ("attn.qkv", "mlp.up", "mlp.down")
            for role in ("input", "weight", "grad_output")
        ]
        self.slots += self.extra_slots

    def host(self, rank: int) -> str:
        return self.hosts[rank // 2 % len(self.hosts)]

    def write(self, directory: Path, *, flight: bool = True, metrics: bool = True) -> Path:
        """All files of the run."""
        directory.mkdir(parents=True, exist_ok=True)
        for rank in range(self.world):
            write_lines(directory / f"monitor-rank{rank}.jsonl", self.monitor(rank))
            if flight:
                (directory / "flight").mkdir(exist_ok=True)
                write_lines(directory / "flight" / f"flight-main-rank{rank}.jsonl", self.flight(rank))
        if metrics:
            lines = [{"step": s, "loss": self.loss(s), "seconds": STEP} for s in range(self.steps)]
            write_lines(directory / "metrics.jsonl", lines)
            lines = [{"step": s, "loss": self.loss(s) * 0.999, "seconds": STEP} for s in range(self.steps)]
            write_lines(directory / "metrics-fp32.jsonl", lines)
        return directory

    def loss(self, step: int) -> float:
        return 2.0 + 3.0 * math.exp(-step / 60) + 0.05 * math.sin(step)

    def wait(self, rank: int) -> float:
        """Everybody waits for the latest; the rest is noise."""
        late = self.slow.get(rank, 0.0)
        return max(0.0, max(self.slow.values(), default=0.0) - late) + 0.002 + self.random.uniform(0, 5e-4)

    def monitor(self, rank: int) -> list[dict[str, Any]]:
        stages = self.stages.get(rank, [])
        recipe = {"fp8_format": "HYBRID", "amax_history_len": 16, "margin": 0}
        lines: list[dict[str, Any]] = [
            {"kind": "start", "version": 1, "rank": rank, "world": self.world, "host": self.host(rank),
             "name": "main", "recipe": recipe, "time": START, "slots": self.slots, "stages": stages}
        ]  # fmt: skip
        for step in range(0, self.steps, self.every):
            late = step >= self.steps // 2
            scale = [self.scale(slot, step) for slot in self.slots]
            parts = [self.saturating.get(slot, 0.0) if late else 0.0 for slot in self.slots]
            headroom = [-0.6 if part else 1.5 for part in parts]
            amax = [
                -1.0 if slot in self.unused else SCALED_MAX / s / 2**h
                for slot, s, h in zip(self.slots, scale, headroom, strict=True)
            ]
            lines.append(
                {"kind": "sample", "step": step, "time": START + STEP * step, "rank": rank,
                 "generation": step + 1, "commits": step + 1,
                 "aborts": int(self.aborted is not None and step > self.aborted),
                 "collectives": step + 1, "wait_s": self.wait(rank), "loss": self.loss(step) if rank == 0 else None,
                 "numbers": {"lr": 3e-4}, "scale": scale, "amax": amax,
                 "headroom": headroom, "saturated": parts, "flushed": [0.01] * len(parts), "stale": [0] * len(parts)}
            )  # fmt: skip
        return lines

    def scale(self, slot: str, step: int) -> float:
        base = {"input": 7, "weight": 10, "grad_output": 18}.get(slot.rpartition(".")[2], 5)
        wave = math.sin(step / 40 + len(slot)) + (hash_of(slot) % 5) / 3
        return 2.0 ** (base + wave - (3 if self.saturating.get(slot) and step >= self.steps // 2 else 0))

    def flight(self, rank: int) -> list[dict[str, Any]]:
        """The last three steps; `serial` is the step plus one."""
        end = START + STEP * self.steps
        header = {
            "fp8dist_flight": 1, "coordinator": "main", "rank": rank, "world": self.world, "host": self.host(rank),
            "pid": 100 + rank, "reason": "end", "dropped": 100, "time": end, "elapsed": end,
        }  # fmt: skip
        lines: list[dict[str, Any]] = [header]
        steps = range(self.steps - 3, self.steps)
        for step in steps:
            lines += self.one_step(rank, step, last=step == steps[-1])
        return lines

    def one_step(self, rank: int, step: int, *, last: bool) -> list[dict[str, Any]]:
        begin, late = START + STEP * step, self.slow.get(rank, 0.0)
        stage = self.stages.get(rank, ["0"])[0]
        most = max(self.slow.values(), default=0.0)

        def event(time: float, kind: str, **detail: Any) -> dict[str, Any]:
            known = {"serial": step + 1, "tag": step, "detail": detail}
            return {"time": begin + time, "elapsed": begin + time, "kind": kind, **known}

        events = [event(0, "open", place="train.py:40")]
        for i in range(MICROBATCHES):
            events.append(event(0.01 + 0.02 * i, "chunk", action="F", stage=stage, microbatch=i))
        for i in range(MICROBATCHES):
            events.append(event(0.09 + (0.02 + late / 4) * i, "chunk", action="B", stage=stage, microbatch=i))
        events.append(event(0.16 + late, "request"))
        if last and self.failed is not None:
            failing, message = self.failed
            if rank == failing:
                return [*events, event(0.14, "error", type="ValueError", message=message)]
            echo = event(0.2 + most, "error", type="PeerAborted", message=f"rank {failing} left the step")
            return [*events, event(0.17 + late, "enter", generation=step, layout="1f", active=1), echo]
        events.append(event(0.17 + late, "enter", generation=step, layout="1f", active=1))
        if self.aborted == step:
            return [*events, event(0.175 + most, "abort", rank=1)]
        return [*events, event(0.175 + most, "commit", generation=step + 1, wait_s=most - late + 0.005)]


def hash_of(text: str) -> int:
    """The same in every process, unlike `hash`."""
    return sum(i * ord(c) for i, c in enumerate(text, start=1))


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


SICK = "layers.5.mlp.down.grad_output"


def troubled() -> Simulated:
    """A saturating slot, a slow rank, an aborted step, and a failure at the end."""
    return Simulated(saturating={SICK: 0.008}, slow={2: 0.039}, aborted=198, failed=(3, "bad batch"))
