"""One forward and backward of all microbatches: in one process, or through a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
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

from .config import CHUNKED_SCHEDULES
from .corpus import Batch
from .model import next_byte_loss
from .parallel import Grid
from .replicas import accumulating

SCHEDULE_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "loopedbfs": ScheduleLoopedBFS,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


@contextmanager
def evaluating(stages: list[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation for a while: FP8 layers then use their scales and record nothing."""
    for stage in stages:
        stage.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for stage in stages:
            stage.train()


class PlainLoop:
    """Forward and backward of all microbatches in one process, gradients averaged over them.

    Looped BFS accumulates the last microbatch first, and so does this loop in its place: then every
    schedule has a reference with the same order of additions.
    """

    def __init__(
        self, grid: Grid, stage: nn.Module, scope: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.grid = grid
        self.stage = stage
        self.scope = scope

    def evaluate(self, batch: Batch) -> list[torch.Tensor]:
        """The microbatches' losses alone."""
        pairs = self._microbatches(batch)
        with evaluating([self.stage]):
            return [next_byte_loss(self.stage(inputs), targets) for inputs, targets in pairs]

    def _microbatches(self, batch: Batch) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(part.chunk(self.grid.config.microbatches) for part in batch), strict=True))

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """Accumulate the gradients of a replica's batch and return the microbatches' losses."""
        config = self.grid.config
        pairs = self._microbatches(batch)
        if config.schedule == "loopedbfs":
            pairs.reverse()
        losses = []
        with self.scope():
            for index, (inputs, targets) in enumerate(pairs):
                with accumulating(self.stage, last=index == len(pairs) - 1):
                    loss = next_byte_loss(self.stage(inputs), targets)
                    loss.backward()
                losses.append(loss.detach())
        for parameter in self.stage.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(config.microbatches)
        return losses[::-1] if config.schedule == "loopedbfs" else losses


class EvaluatingStage(PipelineStage):
    """Passes no gradient to another stage of its rank in evaluation, where torch's own raises on that rank alone."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradient for the stage before, which is on this rank, too."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradient from the stage behind, which is on this rank, too."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Pipeline:
    """The same through one of torch's pipeline schedules, which averages over microbatches by itself."""

    def __init__(self, grid: Grid, stages: list[nn.Module], attach: Callable[[Any, list[Any]], Any]) -> None:
        config = grid.config
        self.grid = grid
        self.stages = stages
        pipeline_stages = [
            EvaluatingStage(stage, index, config.stages, grid.device, group=grid.pp_group)
            for stage, index in zip(stages, grid.stage_indices(), strict=True)
        ]
        held: Any = pipeline_stages if config.schedule in CHUNKED_SCHEDULES else pipeline_stages[0]
        schedule = SCHEDULE_CLASSES[config.schedule](held, config.microbatches, loss_fn=next_byte_loss)
        self.schedule = attach(schedule, pipeline_stages)

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """As `PlainLoop.run`; ranks without the last stage return an empty list."""
        return self._call(self.schedule.step, batch)

    def evaluate(self, batch: Batch) -> list[torch.Tensor]:
        """As `PlainLoop.evaluate`; ranks without the last stage return an empty list."""
        with evaluating(self.stages):
            return self._call(self.schedule.eval, batch)

    def _call(self, function: Callable[..., Any], batch: Batch) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        inputs = (batch.inputs,) if self.grid.first else ()
        targets = {"target": batch.targets, "losses": losses} if self.grid.last else {}
        function(*inputs, return_outputs=False, **targets)
        return [loss.detach() for loss in losses]
