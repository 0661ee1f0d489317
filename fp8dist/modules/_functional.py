"""Normalizations and activations by name, in high precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class Activation(NamedTuple):
    """What stands between the two layers of an MLP."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    """[..., width * features] to [..., features]."""
    width: int
    """Input features per output feature: 2 for gated activations."""


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")  # Transformer Engine's "gelu" is this one, too


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS = {
    "gelu": Activation(_gelu, 1),
    "relu": Activation(F.relu, 1),
    "swiglu": Activation(_swiglu, 2),
}


def check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"expected {argument} to be one of {', '.join(choices)} but got {value!r}")


def normalize(
    x: torch.Tensor, normalization: str, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Normalize over the last dimension.

    Args:
        x: [..., features].
        normalization: one of `NORMALIZATIONS`.
        weight: [features].
        bias: [features]; None for RMSNorm.
        eps: added to the variance, or to the mean square.
    """
    assert normalization in NORMALIZATIONS
    if normalization == "RMSNorm":
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
