"""FP8 products of DTensors: every rank multiplies what it holds, and placements say what that makes.

An opaque op has no sharding rule, so tensors are unwrapped before it and wrapped again behind it. Shards of
one tensor share one slot: each rank records its own shard, and the step's MAX makes the whole tensor's amax
of it. Along one mesh dimension::

    x           weight      y           bias        dx          dw          db
    Replicate   Shard(0)    Shard(-1)   Shard(0)    Partial     Shard(0)    Shard(0)     colwise
    Shard(-1)   Shard(1)    Partial     Replicate   Shard(-1)   Shard(1)    Replicate    rowwise
    Shard(d)    Replicate   Shard(d)    Replicate   Shard(d)    Partial     Partial      sequence, batch
    Replicate   Replicate   Replicate   Replicate   Replicate   Replicate   Replicate
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..kernels.gemm import supported

LocalLinear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class _Rule(NamedTuple):
    """One row of the table above."""

    x: Placement
    y: Placement
    bias: Placement
    dx: Placement
    dw: Placement
    db: Placement


def distributed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, local_linear: LocalLinear
) -> DTensor:
    """Compute `x @ weight.T + bias` of DTensors through their local parts.

    Args:
        x: DTensor [..., in_features]. Brought to the placement that the weight asks for, if it has another.
        weight: DTensor [out_features, in_features] on the mesh of `x`, `splits_evenly`.
        bias: DTensor [out_features] or None.
        local_linear: the product of local tensors, differentiable.

    Returns:
        DTensor [..., out_features]; rowwise it is Partial, for the caller to reduce.

    Raises:
        ValueError: only some of the tensors are DTensors, their meshes differ, or the weight has a placement
            that no rule covers.
    """
    for name, tensor in (("input", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and not isinstance(tensor, DTensor):
            raise ValueError(
                f"an FP8 linear layer expected a DTensor for its {name}, as for the others, but got a plain tensor; "
                "use parallelize_module (its styles convert inputs), or DTensor.from_local"
            )
    assert isinstance(x, DTensor)
    assert isinstance(weight, DTensor)
    mesh, last = x.device_mesh, x.dim() - 1
    if weight.device_mesh != mesh:
        raise ValueError(
            f"expected an input on the weight's mesh {weight.device_mesh} but got {mesh}; redistribute the input"
        )
    rules = [_rule(x_at, w_at, last) for x_at, w_at in zip(x.placements, weight.placements, strict=True)]

    x = x.redistribute(placements=[rule.x for rule in rules])
    local_bias = None
    if bias is not None:
        assert isinstance(bias, DTensor)
        bias = bias.redistribute(placements=[rule.bias for rule in rules])
        local_bias = bias.to_local(grad_placements=[rule.db for rule in rules])
        partial = [dim for dim, rule in enumerate(rules) if rule.y.is_partial()]
        if any(mesh.get_local_rank(dim) for dim in partial):
            # A sum over ranks takes the bias from the first of them; the others give a zero, whose gradient
            # is the bias's all the same.
            local_bias = local_bias - local_bias.detach()
    local_weight = weight.to_local(grad_placements=[rule.dw for rule in rules])
    if not torch.is_grad_enabled():
        # Up to torch 2.12 that is the local part itself, whose version counter an in-place op on the DTensor
        # leaves alone. Another object is never taken for a weight that is quantized already.
        local_weight = local_weight.detach()
    y = local_linear(x.to_local(grad_placements=[rule.dx for rule in rules]), local_weight, local_bias)
    # Without the global shape, shards of unequal sizes would be taken for equal ones.
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        y, mesh, [rule.y for rule in rules], run_check=False, shape=shape, stride=stride
    )


def splits_evenly(weight: DTensor) -> bool:
    """Whether every rank's part of the weight fits an FP8 product; the same answer on every rank."""
    parts = [1, 1]
    for placement, size in zip(weight.placements, weight.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= size
    if any(size % n for size, n in zip(weight.shape, parts, strict=True)):
        return False
    out_features, in_features = (size // n for size, n in zip(weight.shape, parts, strict=True))
    return supported(1, in_features, out_features) and supported(1, out_features, in_features)


def _rule(x: Placement, weight: Placement, last: int) -> _Rule:
    if weight == Shard(0):
        return _Rule(Replicate(), Shard(last), Shard(0), Partial(), Shard(0), Shard(0))
    if weight == Shard(1):
        return _Rule(Shard(last), Partial(), Replicate(), Shard(last), Shard(1), Replicate())
    if weight != Replicate():
        raise ValueError(
            f"an FP8 linear layer expected a weight of placement Shard(0), Shard(1) or Replicate() but got {weight}; "
            "redistribute it, or leave this layer in high precision (convert(..., skip=...))"
        )
    if type(x) is Shard and x.dim < last:
        return _Rule(x, x, Replicate(), x, Partial(), Partial())
    return _Rule(*[Replicate()] * 6)
