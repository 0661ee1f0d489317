"""A small pipeline whose run under any schedule can be compared, bit for bit, with one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

import fp8dist as f8

WIDTH, LAYERS, MICROBATCHES, ROWS = 32, 8, 8, 16
RECIPE = f8.DelayedScaling(amax_history_len=4)
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved1f1b": (ScheduleInterleaved1F1B, 2),
    "loopedbfs": (ScheduleLoopedBFS, 2),
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


def build(
    name: str, coordinator: f8.ReductionGroupCoordinator, rank: int, size: int, skip: Sequence[str] = ()
) -> tuple[Any, list[Part]]:
    """This rank's attached schedule and its stage modules."""
    kind, chunks = SCHEDULES[name]
    n_stages = size * chunks
    per_stage = LAYERS // n_stages
    stages, parts = [], []
    for chunk in range(chunks):
        index = rank + chunk * size
        part = Part(range(index * per_stage, (index + 1) * per_stage))
        parts.append(f8.convert(part, coordinator, skip=skip))
        stages.append(PipelineStage(part, index, n_stages, torch.device("cpu")))
    schedule = kind(stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=loss_fn)
    return f8.schedules.attach(schedule, coordinator, stages=stages), parts


def run_pipeline(
    name: str, rank: int, size: int, steps: int, *, skip: Sequence[str] = (), evaluate: bool = False
) -> Run:
    """The same training under a pipeline schedule."""
    run = Run()
    with f8.ReductionGroupCoordinator(RECIPE, timeout=20.0) as coordinator:
        schedule, parts = build(name, coordinator, rank, size, skip)
        parameters = [p for part in parts for p in part.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        last = rank == size - 1
        coordinator.freeze()
        for step in range(steps):
            x, target = batch(step)
            before = coordinator.stats.collectives
            if evaluate:
                schedule.eval(*((x,) if rank == 0 else ()), **({"target": target} if last else {}))
                assert coordinator.stats.collectives == before, "eval ran a collective"
            losses: list[torch.Tensor] = []
            kwargs = {"target": target, "losses": losses} if last else {}
            schedule.step(*((x,) if rank == 0 else ()), **kwargs)
            run.collectives.append(coordinator.stats.collectives - before)
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append([loss.item() for loss in losses])
            run.slots.append(slot_state(coordinator))
        run.weights = {n: p.detach().clone() for part in parts for n, p in part.named_parameters()}
        assert coordinator.stats.commits == steps
    return run
