"""What replicas of the model share: gradients by one all-reduce a stage, by DDP, or with the weights by FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .experts import is_expert
from .model import Stage
from .parallel import Grid


def replicate(grid: Grid, stage: Stage) -> nn.Module:
    """Make a stage one of several replicas; it keeps its parameters' names.

    Returns:
        The stage itself, or DDP around it.
    """
    if grid.config.dp == 1 or grid.config.dp_mode == "allreduce":
        return stage
    if grid.config.dp_mode == "ddp":
        return DistributedDataParallel(stage, process_group=grid.dp_group)
    for block in stage.layers.values():
        fully_shard(block, mesh=grid.dp_mesh)
    fully_shard(stage, mesh=grid.dp_mesh)
    return stage


@contextmanager
def accumulating(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Let DDP and FSDP2 share gradients behind the last microbatch only."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
    else:
        yield


def average_gradients(grid: Grid, stages: Iterable[Stage]) -> None:
    """Average each stage's gradients over the replicas, one all-reduce a stage, where nobody else does it.

    The sum's order is fixed, so a run repeats bit for bit. From three replicas on it depends on how the
    flat buffer is cut, hence on the partition, in the last bit.
    """
    if grid.config.dp == 1 or grid.config.dp_mode != "allreduce":
        return
    for stage in stages:
        gradients = []
        for name, parameter in stage.named_parameters():
            if parameter.grad is None:
                continue
            if grid.config.ep > 1 and is_expert(name, parameter):
                parameter.grad /= grid.config.dp  # it comes from the bytes of all replicas already
            else:
                gradients.append(local(parameter.grad))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=grid.dp_group)
        flat /= grid.config.dp
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that ranks may share."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that ranks may share. A collective over these."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def counts(grid: Grid, name: str, parameter: nn.Parameter) -> bool:
    """Whether this rank speaks for its part of a parameter, of which other ranks may hold copies."""
    if grid.config.ep > 1 and is_expert(name, parameter):
        return True
    if not isinstance(parameter, DTensor):
        return grid.dp_index == grid.tp_index == 0
    if grid.config.dp > 1 and grid.config.dp_mode == "fsdp":
        return True  # it shards everything
    sharded = any(placement.is_shard() for placement in parameter.placements)
    return grid.dp_index == 0 and (sharded or grid.tp_index == 0)
