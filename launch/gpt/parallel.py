"""From a configuration to a rank's part: its device and groups, its stages, and one forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from .config import CHUNKED_SCHEDULES, Ranks, TrainConfig
from .corpus import Batch
from .model import Stage, next_byte_loss

SCHEDULE_CLASSES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "loopedbfs": ScheduleLoopedBFS,
}


def choose_device(config: TrainConfig, ranks: Ranks) -> torch.device:
    """A GPU of this rank's own where every rank of the host can have one, else the CPU.

    Raises:
        ValueError: `--device cuda` was asked for and there are too few GPUs.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if gpus >= ranks.local_world:
        return torch.device("cuda", ranks.local_rank)
    if config.device == "cuda":
        raise ValueError(
            f"expected a GPU for each of {ranks.local_world} ranks of this host but got {gpus}; "
            "start fewer ranks or leave --device out"
        )
    return torch.device("cpu")


class Grid:
    """The ranks as [dp, pp]: neighbours form a pipeline, equal positions of the pipelines are replicas.

    Attributes:
        dp_index: which pipeline this rank belongs to.
        pp_index: its position there.
        pp_group: the ranks of this pipeline; None where a process is alone.
        dp_group: the ranks with the same stages; None where a process is alone.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.dp_index, self.pp_index = divmod(ranks.rank, config.pp)
        self.pp_group: dist.ProcessGroup | None = None
        self.dp_group: dist.ProcessGroup | None = None
        if config.world > 1:
            mesh = init_device_mesh(device.type, (config.dp, config.pp), mesh_dim_names=("dp", "pp"))
            self.pp_group, self.dp_group = mesh.get_group("pp"), mesh.get_group("dp")

    @property
    def first(self) -> bool:
        """This rank holds the embedding and takes the inputs."""
        return self.pp_index == 0

    @property
    def last(self) -> bool:
        """This rank holds the head and computes the loss."""
        return self.pp_index == self.config.pp - 1

    def stage_indices(self) -> list[int]:
        """Stages of this rank, dealt out round-robin as looped schedules want them."""
        return [self.pp_index + chunk * self.config.pp for chunk in range(self.config.chunks)]

    def replica_share(self, batch: Batch) -> Batch:
        """This replica's sequences of the global batch, on the rank's device."""
        parts = (part.chunk(self.config.dp)[self.dp_index].to(self.device) for part in batch)
        return Batch(*parts)

    def mean_loss(self, losses: list[torch.Tensor]) -> float:
        """Mean over microbatches and replicas, on every rank.

        Args:
            losses: float32 scalars of the microbatches; empty on ranks without the last stage.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if losses:
            total += torch.stack(losses).double().mean() / self.config.dp
        if self.config.world > 1:
            dist.all_reduce(total)
        return total.item()

    def average_gradients(self, stages: Iterable[Stage]) -> None:
        """Average each stage's gradients over the replicas, one all-reduce a stage.

        The sum's order is fixed, so a run repeats bit for bit. From three replicas on it depends on how the
        flat buffer is cut, hence on the partition, in the last bit.
        """
        if self.config.dp == 1:
            return
        for stage in stages:
            gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.dp_group)
            flat /= self.config.dp
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


class PlainLoop:
    """Forward and backward of all microbatches in one process, gradients averaged over them.

    Looped BFS accumulates the last microbatch first, and so does this loop in its place: then every
    schedule has a reference with the same order of additions.
    """

    def __init__(self, grid: Grid, stage: Stage, scope: Callable[[], AbstractContextManager[object]]) -> None:
        self.grid = grid
        self.stage = stage
        self.scope = scope

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """Accumulate the gradients of a replica's batch and return the microbatches' losses."""
        config = self.grid.config
        pairs = list(zip(*(part.chunk(config.microbatches) for part in batch), strict=True))
        if config.schedule == "loopedbfs":
            pairs.reverse()
        losses = []
        with self.scope():
            for inputs, targets in pairs:
                loss = next_byte_loss(self.stage(inputs), targets)
                loss.backward()
                losses.append(loss.detach())
        for parameter in self.stage.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(config.microbatches)
        return losses[::-1] if config.schedule == "loopedbfs" else losses


class Pipeline:
    """The same through one of torch's pipeline schedules, which averages over microbatches by itself."""

    def __init__(self, grid: Grid, stages: list[Stage], attach: Callable[[Any, list[Any]], Any]) -> None:
        config = grid.config
        self.grid = grid
        pipeline_stages = [
            PipelineStage(stage, index, config.stages, grid.device, group=grid.pp_group)
            for stage, index in zip(stages, grid.stage_indices(), strict=True)
        ]
        held: Any = pipeline_stages if config.schedule in CHUNKED_SCHEDULES else pipeline_stages[0]
        schedule = SCHEDULE_CLASSES[config.schedule](held, config.microbatches, loss_fn=next_byte_loss)
        self.schedule = attach(schedule, pipeline_stages)

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """As `PlainLoop.run`; ranks without the last stage return an empty list."""
        losses: list[torch.Tensor] = []
        inputs = (batch.inputs,) if self.grid.first else ()
        targets = {"target": batch.targets, "losses": losses} if self.grid.last else {}
        self.schedule.step(*inputs, return_outputs=False, **targets)
        return [loss.detach() for loss in losses]
