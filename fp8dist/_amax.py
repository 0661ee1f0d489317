"""What an amax is, how one is read and recorded, and the one formula that makes a scale of it."""

from __future__ import annotations

import torch

ABSENT = -1.0  # the amax of a tensor that nobody ran in this step; sorts below 0.0 as float and as int32
_FP32 = torch.finfo(torch.float32)


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest absolute value of a non-empty floating tensor as a float32 scalar; NaN if any value is NaN."""
    low, high = torch.aminmax(x.detach())
    return torch.maximum(low.abs(), high.abs()).float()


def record_amax(cell: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise `cell` to `amax` in place; NaN wins.

    Works on the int32 bits: amaxes are >= 0, where integer order is float order and a positive NaN is
    largest. The sign bit is masked, since 0/0 gives a negative NaN that would lose an integer MAX.

    Args:
        cell: float32, one element, a slot's amax.
        amax: float32, one element.
    """
    bits = cell.view(torch.int32)
    torch.maximum(bits, amax.detach().reshape(1).view(torch.int32) & 0x7FFFFFFF, out=bits)


def scales_of(amax: torch.Tensor, scaled_max: torch.Tensor) -> torch.Tensor:
    """`scaled_max / amax`, the scale that maps `amax` to `scaled_max`.

    It stays a normal number, so that its inverse is finite. What comes of an amax that is not finite and
    positive is not to be used.

    Args:
        amax: float32.
        scaled_max: float32 scalar. A tensor, since torch turns number / tensor into number * reciprocal, which
            rounds twice.
    """
    return torch.div(scaled_max, amax).clamp_(_FP32.tiny, _FP32.max)
