"""Normalizations and activations by name, computed in float32.

What they give is quantized next, so it stays float32 until then: rounded to bfloat16 on the way, it would be
rounded twice. Backward keeps their inputs in the dtype that these have, and nothing in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

aten = torch.ops.aten

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class Activation(NamedTuple):
    """What stands between the two layers of an MLP."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    """[..., width * features] to [..., features]."""
    derive: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The gradient of its result, and what it took, to the gradient of what it took."""
    width: int
    """Input features per output feature: 2 for gated activations."""


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")  # Transformer Engine's "gelu" is this one, too


def _gelu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dx: torch.Tensor = aten.gelu_backward(dy, x, approximate="tanh")
    return dx


def _relu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dx: torch.Tensor = aten.threshold_backward(dy, x, 0)
    return dx


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def _swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return torch.cat((aten.silu_backward(dy * value, gate), dy * F.silu(gate)), dim=-1)


ACTIVATIONS = {
    "gelu": Activation(_gelu, _gelu_backward, 1),
    "relu": Activation(F.relu, _relu_backward, 1),
    "swiglu": Activation(_swiglu, _swiglu_backward, 2),
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

    Returns:
        float32 like `x`; of DTensors what torch's own op gives.
    """
    assert normalization in NORMALIZATIONS
    if isinstance(x, DTensor) or isinstance(weight, DTensor):
        shape = (x.shape[-1],)
        if normalization == "RMSNorm":
            return F.rms_norm(x, shape, weight, eps)
        return F.layer_norm(x, shape, weight, bias, eps)
    norm: type[torch.autograd.Function] = _RMSNorm if normalization == "RMSNorm" else _LayerNorm
    y: torch.Tensor = norm.apply(x, weight, bias, eps)
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        shift = None if bias is None else bias.float()
        y, mean, rstd = torch.native_layer_norm(x.float(), [x.shape[-1]], weight.float(), shift, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        shift = None if bias is None else bias.float()
        dx, dw, db = aten.native_layer_norm_backward(
            dy, x.float(), [x.shape[-1]], mean, rstd, weight.float(), shift, list(ctx.needs_input_grad[:3])
        )
        return _as(dx, x), _as(dw, weight), _as(db, bias), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: None, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # Not every device has a backward op for it. So autograd differentiates this norm, here and at once.
        operands = [
            t.float().detach().requires_grad_(need)
            for t, need in zip((x, weight), ctx.needs_input_grad, strict=False)
        ]
        with torch.enable_grad():
            y = F.rms_norm(operands[0], (x.shape[-1],), operands[1], ctx.eps)
        found = iter(torch.autograd.grad(y, [t for t in operands if t.requires_grad], dy))
        dx, dw = (next(found) if t.requires_grad else None for t in operands)
        return _as(dx, x), _as(dw, weight), None, None


def _as(gradient: torch.Tensor | None, of: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or of is None else gradient.to(of.dtype)
