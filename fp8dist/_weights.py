"""What the layout and the first step need to know of a weight: where it is, whether it is whole, its values."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.tensor import DTensor

from ._amax import ABSENT, tensor_amax
from .modules._fsdp import GatheredWeight

_SAMPLES = 4096


def is_sharded(weight: torch.Tensor) -> bool:
    """Whether this rank holds a part only, as far as the tensor itself can tell."""
    if isinstance(weight, GatheredWeight):  # what is known of it (its amax) is known of this rank's shard
        return True
    return isinstance(weight, DTensor) and any(not p.is_replicate() for p in weight.placements)


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """The values on this rank."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


def check_materialised(name: str, weight: torch.Tensor) -> None:
    """Refuse meta weights: they have no values to take a scale from.

    Raises:
        ValueError: the weight is on the meta device.
    """
    if local_part(weight).is_meta:
        raise ValueError(
            f"freeze() expects real weights but {name!r} is on the meta device; call model.to_empty(device=...) and "
            "initialise or load the weights before the first step"
        )


def fingerprint(weight: torch.Tensor) -> str:
    """Digest of evenly spaced values: equal on replicas, different for another layer with equal shape."""
    flat = local_part(weight).reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    sample = flat[::step].float().cpu().contiguous()
    return hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def seed_amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of the local values, float32 scalar; -1 (absent) if there are none or not finite."""
    absent = torch.tensor(ABSENT, device=weight.device)
    if isinstance(weight, GatheredWeight):
        amax = absent if weight.shard_amax is None else weight.shard_amax[0]
    else:
        part = local_part(weight)
        amax = tensor_amax(part) if part.numel() else absent
    return torch.where(torch.isfinite(amax), amax, absent)
