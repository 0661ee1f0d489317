"""Tensor parallelism: each rank computes some heads of every attention and some features of every MLP."""

from __future__ import annotations

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .model import Stage
from .parallel import Grid

PLAN: dict[str, type[ColwiseParallel] | type[RowwiseParallel]] = {
    "layers.*.attn.qkv": ColwiseParallel,
    "layers.*.attn.proj": RowwiseParallel,
    "layers.*.mlp.up": ColwiseParallel,
    "layers.*.mlp.down": RowwiseParallel,
}


def split_layers(grid: Grid, stage: Stage) -> None:
    """Split the linear layers of a stage's blocks over the ranks of a tensor-parallel group, in place.

    Embeddings, norms and the head stay whole on every rank: their gradients are equal there.
    """
    if grid.config.tp > 1:
        parallelize_module(stage, grid.tp_mesh, {name: style() for name, style in PLAN.items()})
