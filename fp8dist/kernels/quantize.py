"""Cast a tensor to FP8 with its slot's scale, and read its amax in the same call.

It is one opaque op, so that a compiled graph neither breaks at the in-place amax nor recompiles when a
slot gets its first scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._amax import record_amax, scales_of, tensor_amax
from .._slots import Slot

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)

_LIBRARY = torch.library.Library("fp8dist", "FRAGMENT")
_LIBRARY.define(
    "quantize(Tensor x, Tensor scale, Tensor warm, Tensor(a!) amax, Tensor(b!)? casts, bool record, "
    "float scaled_max, ScalarType dtype) -> (Tensor, Tensor)"
)


class Quantized(NamedTuple):
    """An FP8 tensor and the factor that undoes its scaling."""

    data: torch.Tensor
    """FP8, contiguous, the shape of the tensor that was quantized."""
    scale_inv: torch.Tensor
    """float32 [1], `1 / scale` of the scale really used. Nobody writes it later."""


def quantize(x: torch.Tensor, slot: Slot, record: bool, amax: torch.Tensor | None = None) -> Quantized:
    """Quantize a tensor with its slot's scale; a cold slot scales by the tensor's own amax.

    Gradients do not flow through it: call it inside an `autograd.Function`.

    Args:
        x: float32, bfloat16 or float16, any shape and strides; may be empty.
        slot: where the scale comes from, and where amax and cast counts go.
        record: raise the slot's amax (and cast counts) by this tensor. An empty tensor records nothing.
        amax: float32 [1] that takes the amax instead of `slot.amax`.

    Raises:
        ValueError: another dtype, or the slot lies on another device than `x`.
    """
    if x.device != slot.scale.device:
        raise ValueError(
            f"expected slot {slot.name!r} on {x.device} like its tensor but got {slot.scale.device}; move "
            "the model before the first step (or before freeze())"
        )
    if record and not torch.compiler.is_compiling():  # a trace may not change an object (up to torch 2.12)
        slot.scope.record()
    cell = slot.amax if amax is None else amax
    casts = slot.casts if record else None
    scale, warm = slot.scale, slot.warm
    if slot.scope.tape is not None and not slot.backward:
        scale, warm = slot.scope.tape.play(scale, warm)
    return Quantized(
        *torch.ops.fp8dist.quantize(x, scale, warm, cell, casts, record, slot.scaled_max, slot.dtype)
    )


def scale_from_amax(amax: torch.Tensor, scaled_max: float) -> torch.Tensor:
    """Return the scale that maps `amax` to `scaled_max`; 1 where no finite positive amax is known.

    Args:
        amax: float32, any shape.
        scaled_max: largest value after scaling.
    """
    scale = scales_of(amax, torch.full_like(amax, scaled_max))
    usable = (amax > 0) & torch.isfinite(amax)
    return torch.where(usable, scale, 1.0)


def _quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    warm: torch.Tensor,
    amax: torch.Tensor,
    casts: torch.Tensor | None,
    record: bool,
    scaled_max: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_dtype(x)
    # Runs in the caller's grad mode, and nothing in here may become part of a graph.
    x, scale = x.detach(), scale.detach()
    cold = not bool(warm)
    if x.numel() > 0 and (record or cold):
        own_amax = tensor_amax(x)
        if record:
            record_amax(amax, own_amax)
        if cold:
            scale = scale_from_amax(own_amax.reshape(1), scaled_max)
    # float32 times float32: going through bfloat16 on the way would round twice.
    scaled = x.float() * scale
    fp8_max = torch.finfo(dtype).max
    # e5m2 overflows to inf, e4m3 to NaN in some releases; delayed scales overflow by design. NaN passes.
    data = scaled.clamp(-fp8_max, fp8_max).to(dtype, memory_format=torch.contiguous_format)
    if casts is not None:
        _count_casts(casts, x, scaled, data, fp8_max)
    return data, torch.reciprocal(scale)


def _count_casts(
    casts: torch.Tensor, x: torch.Tensor, scaled: torch.Tensor, data: torch.Tensor, fp8_max: float
) -> None:
    saturated = ((scaled.abs() > fp8_max) & torch.isfinite(x)).sum()
    zero = (data.view(torch.uint8) & 0x7F) == 0  # float8 comparisons do not exist on every device
    flushed = (zero & (x != 0)).sum()
    casts[0] += x.numel()
    casts[1] += saturated
    casts[2] += flushed


def _quantize_fake(
    x: torch.Tensor,
    scale: torch.Tensor,
    warm: torch.Tensor,
    amax: torch.Tensor,
    casts: torch.Tensor | None,
    record: bool,
    scaled_max: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_dtype(x)
    data = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
    return data, torch.empty_like(scale)


def _check_dtype(x: torch.Tensor) -> None:
    if x.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"FP8 quantization expected a float32, bfloat16 or float16 tensor but got {x.dtype} of shape "
            f"{tuple(x.shape)}; cast it first"
        )


_LIBRARY.impl("quantize", _quantize, "CompositeExplicitAutograd")
# Without this the outputs ask for a gradient that nothing can compute.
_LIBRARY.impl("quantize", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("fp8dist::quantize", _quantize_fake, lib=_LIBRARY)
