"""A small pipeline whose run under any schedule can be compared, bit for bit, with one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import fp8dist as f8

WIDTH, LAYERS, MICROBATCHES, ROWS = 32, 8, 8, 16
RECIPE = f8.DelayedScaling(amax_history_len=4)
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved1f1b": (ScheduleInterleaved1F1B, 2),
    "loopedbfs": (ScheduleLoopedBFS, 2),
}


def from_csv(stages: Sequence[Any], n_microbatches: int, loss_fn: Any) -> _PipelineScheduleRuntime:
    """One stage per rank: all forwards, all input gradients, all weight gradients, loaded from a file."""
    schedule = _PipelineScheduleRuntime(list(stages), n_microbatches, loss_fn=loss_fn)
    ranks = range(stages[0].group_size)
    rows = [[f"{r}{kind}{i}" for kind in "FIW" for i in range(n_microbatches)] for r in ranks]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text("".join(",".join(row) + "\n" for row in rows))
        schedule._load_csv(str(path))
    return schedule


# Those that split the backward: (schedule, stages per rank, stages laid out as a V).
SPLIT: dict[str, tuple[Any, int, bool]] = {
    "interleavedzb": (ScheduleInterleavedZeroBubble, 2, False),
    "zbv": (ScheduleZBVZeroBubble, 2, True),
    "dualpipev": (ScheduleDualPipeV, 2, True),
    "csv": (from_csv, 1, False),
}


class Block(nn.Module):
    """Two linears around an activation; weights depend on the layer's number alone."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.fc = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.nn.functional.gelu(self.fc(x)))


class Part(nn.Module):
    """Some of the layers, under their global names."""

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block(i) for i in indices})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@dataclass
class Run:
    """What one rank keeps of a run."""

    losses: list[list[float]] = field(default_factory=list)
    slots: list[dict[str, tuple[list[float], float]]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    collectives: list[int] = field(default_factory=list)
    products: list[Counter[str]] = field(default_factory=list)


@contextmanager
def counted_products() -> Iterator[Counter[str]]:
    """Count FP8 matrix products by kind. Only a gradient is e5m2, and only dgrad has it untransposed."""
    counts: Counter[str] = Counter()
    multiply = torch._scaled_mm

    def counting(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        kind = "forward" if a.dtype != torch.float8_e5m2 else "dgrad" if a.shape[0] == ROWS else "wgrad"
        counts[kind] += 1
        return multiply(a, b, **kwargs)

    torch._scaled_mm = counting
    try:
        yield counts
    finally:
        torch._scaled_mm = multiply


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of one step; gradients shrink and inputs grow, so that scales have to move."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=g) * 1.5**step
    return x, torch.randn(MICROBATCHES * ROWS, WIDTH, generator=g)


def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error of one microbatch."""
    return (y - target).square().mean()


def slot_state(coordinator: f8.ReductionGroupCoordinator) -> dict[str, tuple[list[float], float]]:
    """Histories and scales by name."""
    slots = coordinator.state_dict()["slots"]
    return {name: (s["history"].tolist(), s["scale"].item()) for name, s in slots.items()}


def run_alone(
    group: dist.ProcessGroup, steps: int, *, reverse: bool = False, skip: Sequence[str] = ()
) -> Run:
    """The reference: all layers on this rank, microbatches accumulated one after the other."""
    run = Run()
    with f8.ReductionGroupCoordinator(RECIPE, group, name="alone") as coordinator:
        model = f8.convert(Part(range(LAYERS)), coordinator, skip=skip)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(steps):
            x, target = batch(step)
            order = list(range(MICROBATCHES))
            losses = dict.fromkeys(order, 0.0)
            with coordinator.step(step):
                for i in reversed(order) if reverse else order:
                    rows = slice(i * ROWS, (i + 1) * ROWS)
                    loss = loss_fn(model(x[rows]), target[rows])
                    loss.backward()
                    losses[i] = loss.item()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(MICROBATCHES)
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append([losses[i] for i in order])
            run.slots.append(slot_state(coordinator))
        run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def stages_of(name: str, rank: int, size: int) -> list[int]:
    """The indices of this rank's stages."""
    _, chunks, is_v = SPLIT[name] if name in SPLIT else (*SCHEDULES[name], False)
    if is_v:
        return [rank, 2 * size - 1 - rank]
    return [rank + chunk * size for chunk in range(chunks)]


def build(
    name: str,
    coordinator: f8.ReductionGroupCoordinator,
    rank: int,
    size: int,
    skip: Sequence[str] = (),
    defer: bool = False,
) -> tuple[Any, list[Part]]:
    """This rank's attached schedule and its stage modules; `defer`: by dw_builder, not by forked nodes."""
    kind = (SPLIT if name in SPLIT else SCHEDULES)[name][0]
    indices = stages_of(name, rank, size)
    n_stages = size * len(indices)
    per_stage = LAYERS // n_stages
    stages, parts = [], []
    for index in indices:
        part = Part(range(index * per_stage, (index + 1) * per_stage))
        parts.append(f8.convert(part, coordinator, skip=skip))
        builder = f8.schedules.dw_builder(part) if defer else None
        stages.append(PipelineStage(part, index, n_stages, torch.device("cpu"), dw_builder=builder))
    alone = len(stages) == 1 and name != "csv"
    schedule = kind(stages[0] if alone else stages, MICROBATCHES, loss_fn=loss_fn)
    return f8.schedules.attach(schedule, coordinator, stages=stages), parts


def run_pipeline(
    name: str,
    rank: int,
    size: int,
    steps: int,
    *,
    skip: Sequence[str] = (),
    evaluate: bool = False,
    defer: bool = False,
) -> Run:
    """The same training under a pipeline schedule."""
    run = Run()
    with f8.ReductionGroupCoordinator(RECIPE, timeout=20.0) as coordinator:
        schedule, parts = build(name, coordinator, rank, size, skip, defer)
        parameters = [p for part in parts for p in part.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        indices = stages_of(name, rank, size)
        first, last = 0 in indices, size * len(indices) - 1 in indices
        coordinator.freeze()
        for step in range(steps):
            x, target = batch(step)
            before = coordinator.stats.collectives
            if evaluate:
                schedule.eval(*((x,) if first else ()), **({"target": target} if last else {}))
                assert coordinator.stats.collectives == before, "eval ran a collective"
            losses: list[torch.Tensor] = []
            kwargs = {"target": target, "losses": losses} if last else {}
            with counted_products() as products:
                schedule.step(*((x,) if first else ()), **kwargs)
            run.products.append(products)
            run.collectives.append(coordinator.stats.collectives - before)
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append([loss.item() for loss in losses])
            run.slots.append(slot_state(coordinator))
        run.weights = {n: p.detach().clone() for part in parts for n, p in part.named_parameters()}
        assert coordinator.stats.commits == steps
    return run


def assert_equal_bits(run: Run, reference: Run, last: bool) -> None:
    """Slots of every step, losses (on the rank of the `last` stage) and weights of this rank."""
    for step, (mine, expected) in enumerate(zip(run.slots, reference.slots, strict=True)):
        for name, state in mine.items():
            assert state == expected[name], f"step {step}, slot {name}"
    if last:
        assert run.losses == reference.losses
    assert run.weights
    for name, weight in run.weights.items():
        assert torch.equal(weight, reference.weights[name]), name
