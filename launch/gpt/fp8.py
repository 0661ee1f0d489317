"""All that FP8 adds to the run: conversion, the step's scope, samples, and the comparison of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

import fp8dist as f8

from .config import TrainConfig
from .experts import ExpertLinear
from .model import Stage

SKIP = ("lm_head", "router")  # logits are sensitive to rounding, and one layer of many costs little


@dataclass
class CastCounts:
    """How many values were cast to FP8, and what became of them.

    Attributes:
        values: values cast.
        saturated: finite values beyond FP8's largest after scaling, so clamped.
        flushed: values other than zero that became zero.
    """

    values: int = 0
    saturated: int = 0
    flushed: int = 0

    def add(self, values: int, saturated: int, flushed: int) -> None:
        """Add the counts of one slot on one rank."""
        self.values += values
        self.saturated += saturated
        self.flushed += flushed

    def fractions(self) -> dict[str, float]:
        """`saturated` and `flushed` as parts of all values."""
        values = max(1, self.values)
        return {"saturated": self.saturated / values, "flushed": self.flushed / values}


@dataclass
class Sample:
    """Scales and casts of one step, over all ranks.

    Attributes:
        scales: scale of every slot of the model, by name.
        casts: counts by role (`input`, `weight`, `grad_output`).
    """

    scales: dict[str, float] = field(default_factory=dict)
    casts: dict[str, CastCounts] = field(default_factory=dict)


@dataclass
class Outcome:
    """What the coordinator did, measured over the training steps.

    Attributes:
        commits: steps that updated the scales.
        collectives: reductions that this took.
        aborts: steps that some rank refused.
        ranks_agree: all ranks counted the same, and whoever shares slots holds bit-equal state.
        state: the coordinator's named tensors on this rank.
    """

    commits: int
    collectives: int
    aborts: int
    ranks_agree: bool
    state: dict[str, Any]


class Fp8Run:
    """The coordinator of a training run, with the run's step as the tag that ranks compare."""

    def __init__(self, config: TrainConfig, stages: Iterable[Stage]) -> None:
        self.config = config
        self.step = 0
        recipe = f8.DelayedScaling(fp8_format=f8.Format.HYBRID, amax_history_len=config.amax_history_len)
        self.coordinator = f8.ReductionGroupCoordinator(recipe, flight_dir=config.run_dir / "flight")
        for stage in stages:
            f8.convert(stage, self.coordinator, skip=SKIP)
            convert_experts(stage, self.coordinator)

    def attach(self, schedule: Any, stages: list[Any]) -> Any:
        """Let a pipeline schedule open and close the scope by itself."""
        return f8.schedules.attach(schedule, self.coordinator, stages=stages, tag_fn=lambda: self.step)

    def scope(self) -> AbstractContextManager[object]:
        """The scope of one optimizer step in a plain loop."""
        return self.coordinator.step(tag=self.step)

    def start(self) -> None:
        """Negotiate the layout now, so that the first step is like all others, and note the counters."""
        self.coordinator.freeze()
        self._before = (self.coordinator.stats.commits, self.coordinator.stats.collectives)
        # It writes what `fp8dist report` reads. Casts are counted by `begin_step`, for `sample`.
        sink = f8.monitor.JsonLines(self.config.run_dir)
        self.monitor = f8.monitor.Monitor(
            self.coordinator, [sink], every=self.config.sample_every, count_casts=False
        )

    @property
    def collectives(self) -> int:
        """Reductions since `start`."""
        return self.coordinator.stats.collectives - self._before[1]

    def begin_step(self, step: int, *, sampled: bool) -> None:
        """Set the tag; count casts in sampled steps only, since counting reads every tensor again."""
        self.step = step
        self.coordinator.count_casts(sampled)

    def sample(self) -> Sample:
        """Scales and casts of the step that just ended, gathered from all ranks. A collective."""
        sample = Sample()
        for scales, casts in _gather((self.coordinator.scales(), self.coordinator.cast_counts())):
            sample.scales.update(scales)
            for name, counts in casts.items():
                sample.casts.setdefault(name.rpartition(".")[2], CastCounts()).add(*counts)
        return sample

    def end_step(self, step: int, loss: float) -> None:
        """Let the monitor see a step, behind everything else of it."""
        self.monitor.step(step=step, loss=loss)

    def finish(self) -> Outcome:
        """Compare the ranks and close the coordinator. A collective."""
        self.monitor.close()
        self.coordinator.dump_flight(self.config.run_dir / "flight", "end of the run")
        commits = self.coordinator.stats.commits - self._before[0]
        counted = (commits, self.collectives, self.coordinator.stats.generation)
        reports = _gather((counted, self.coordinator.class_digests()))
        outcome = Outcome(
            commits=commits,
            collectives=self.collectives,
            aborts=self.coordinator.stats.aborts,
            ranks_agree=agree(reports),
            state=self.coordinator.state_dict(),
        )
        self.coordinator.close()
        return outcome


def convert_experts(stage: Stage, coordinator: f8.ReductionGroupCoordinator) -> None:
    """Replace the linear layers of a stage's experts by FP8 ones, which share their parameters, in place."""
    for name, module in list(stage.named_modules()):
        if isinstance(module, ExpertLinear):
            count, outputs, inputs = module.weight.shape
            layer = f8.GroupedLinear(
                count,
                inputs,
                outputs,
                coordinator=coordinator,
                name=name,
                expert_offset=module.experts.start,
                device=module.weight.device,
            )
            layer.weight, layer.bias = module.weight, module.bias
            stage.set_submodule(name, layer)


def agree(reports: Iterable[tuple[tuple[int, ...], dict[str, int]]]) -> bool:
    """Whether ranks counted alike and shared state is equal.

    Args:
        reports: of each rank its counters, and a digest for each set of ranks that shares state with it.
    """
    seen_counters: set[tuple[int, ...]] = set()
    seen_digests: dict[str, set[int]] = {}
    for counters, digests in reports:
        seen_counters.add(counters)
        for label, digest in digests.items():
            seen_digests.setdefault(label, set()).add(digest)
    return len(seen_counters) == 1 and all(len(values) == 1 for values in seen_digests.values())


def _gather(value: Any) -> list[Any]:
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
