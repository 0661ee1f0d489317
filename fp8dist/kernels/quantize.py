"""Cast a tensor to FP8 with its slot's scale, and read its amax in the same call.

It is one opaque op for compiled graphs, so that these neither break at the in-place amax nor recompile when a
slot gets its first scale. On a GPU one Triton kernel reads the tensor once, writes all that is wanted of it, and counts
its casts if these are counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._amax import record_amax, scales_of, tensor_amax
from .._slots import Slot

FP8_MAX = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)

_LIBRARY = torch.library.Library("fp8dist", "FRAGMENT")
_LIBRARY.define(
    "quantize(Tensor x, Tensor scale, Tensor warm, Tensor(a!) amax, Tensor(b!)? casts, bool record, "
    "float scaled_max, ScalarType dtype, int layout) -> (Tensor, Tensor, Tensor)"
)


class Layout:
    """In which order a quantized matrix is wanted, as plain ints: a flag enum costs more than some kernels' launch.

    GPUs multiply a row-major by a column-major matrix only. Elsewhere a product takes either, so there every matrix
    is row-major, whatever is wanted.
    """

    ROWS = 1
    COLUMNS = 2
    BOTH = 3


class Quantized(NamedTuple):
    """An FP8 tensor and the factor that undoes its scaling."""

    data: torch.Tensor
    """FP8, the shape of the tensor that was quantized; row-major, unless only columns were wanted."""
    scale_inv: torch.Tensor
    """float32 [1], `1 / scale` of the scale really used. Nobody writes it later."""
    columns: torch.Tensor | None = None
    """The same values column-major, where that was wanted and made."""

    def for_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Data as the products of the backward take it as their second operand, and scale_inv."""
        return self.data if self.columns is None else self.columns, self.scale_inv


def quantize(
    x: torch.Tensor,
    slot: Slot,
    record: bool,
    layout: int = Layout.ROWS,
    *,
    share: bool = False,
) -> Quantized:
    """Quantize a tensor with its slot's scale; a cold slot scales by the tensor's own amax.

    Gradients do not flow through it: call it inside an `autograd.Function`.

    Args:
        x: float32, bfloat16 or float16, any shape and strides; may be empty.
        slot: where the scale comes from, and where amax and cast counts go.
        record: raise the slot's amax (and cast counts) by this tensor. An empty tensor records nothing.
        layout: what products will want of it; more than rows only of matrices.
        share: the result is used before the next update, or saved where autograd notices that one came between: so
            its `scale_inv` may be the slot's own.

    Raises:
        ValueError: another dtype, or the slot lies on another device than `x`.
    """
    scale, warm, cell, casts, inverse = prepare(x, slot, record)
    if runs_kernels(x) and x.dim() == 2:
        # The dispatcher costs as much as the kernel, so an eager GPU tensor goes past it.
        data, transposed, scale_inv = _quantize_by_kernel(
            x, scale, warm, cell if record else None, casts, slot.scaled_max, slot.dtype, layout,
            inverse if share else None,
        )  # fmt: skip
        columns = None if transposed is None else transposed.t()
        if data is None:
            assert columns is not None
            return Quantized(columns, scale_inv, columns)
        return Quantized(data, scale_inv, columns)
    data, transposed, scale_inv = torch.ops.fp8dist.quantize(
        x, scale, warm, cell, casts, record, slot.scaled_max, slot.dtype, layout
    )
    if layout == Layout.ROWS or not x.is_cuda:
        return Quantized(data, scale_inv)
    columns = transposed.t()
    return Quantized(data if layout & Layout.ROWS else columns, scale_inv, columns)


class Cast(NamedTuple):
    """What a cast needs of a slot."""

    scale: torch.Tensor
    warm: torch.Tensor
    amax: torch.Tensor
    casts: torch.Tensor | None
    scale_inv: torch.Tensor | None
    """The slot's own inverse, where the scale is the slot's and known, and an update would be noticed."""


def prepare(x: torch.Tensor, slot: Slot, record: bool) -> Cast:
    """Check a tensor against its slot, note that it is recorded, and find the scale to use.

    Raises:
        ValueError: the slot lies on another device than `x`.
    """
    if x.device != slot.scale.device:
        raise ValueError(
            f"expected slot {slot.name!r} on {x.device} like its tensor but got {slot.scale.device}; move "
            "the model before the first step (or before freeze())"
        )
    if not torch.compiler.is_compiling():  # a trace may not change an object (up to torch 2.12)
        if slot.scope.settle is not None:
            slot.scope.settle()
        if record:
            slot.scope.record()
    scale, warm, inverse = slot.scale, slot.warm, slot.scale_inv if record and slot.scope.guarded else None
    if slot.scope.tape is not None and not slot.backward:
        scale, warm = slot.scope.tape.play(scale, warm)
        inverse = None
    return Cast(scale, warm, slot.amax, slot.casts if record else None, inverse)


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the GPU's kernels may be called with this tensor here and now, without the dispatcher."""
    return x.is_cuda and type(x) in _PLAIN and not torch.compiler.is_compiling()


_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
    layout: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_dtype(x)
    if x.is_cuda and x.dim() == 2:
        rows, columns, scale_inv = _quantize_by_kernel(
            x, scale, warm, amax if record else None, casts, scaled_max, dtype, layout
        )
        none = [torch.empty(0, dtype=dtype, device=x.device) for part in (rows, columns) if part is None]
        return none.pop() if rows is None else rows, none.pop() if columns is None else columns, scale_inv
    cold = not bool(warm)
    # Runs in the caller's grad mode, and nothing in here may become part of a graph.
    x, scale = x.detach(), scale.detach()
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
    turned = x.is_cuda and layout & Layout.COLUMNS
    transposed = data.t().contiguous() if turned else data.new_empty(0)
    return data, transposed, torch.reciprocal(scale)


def _quantize_by_kernel(
    x: torch.Tensor,
    scale: torch.Tensor,
    warm: torch.Tensor,
    amax: torch.Tensor | None,
    casts: torch.Tensor | None,
    scaled_max: float,
    dtype: torch.dtype,
    layout: int,
    inverse: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Rows, transposed and scale_inv, in one pass; an amax of None is not recorded."""
    from .triton import cast

    if not warm and x.numel() > 0:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a CUDA graph expects slots that have a scale but a tensor of one without was to be cast, which every "
                "replay would scale by the amax of that tensor; run some steps before the capture, as "
                "fp8dist.graphs.GraphedStep does"
            )
        scale, inverse = scale_from_amax(tensor_amax(x.detach()).reshape(1), scaled_max), None
    return cast(
        x,
        scale,
        amax,
        dtype,
        FP8_MAX[dtype],
        transpose=layout & Layout.COLUMNS != 0,
        keep=layout & Layout.ROWS != 0,
        scale_inv=inverse,
        casts=casts,
    )


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
    layout: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_dtype(x)
    gpu = x.device.type == "cuda"
    data, transposed = (x.new_empty(0, dtype=dtype, requires_grad=False) for _ in range(2))
    if not gpu or layout & Layout.ROWS or x.dim() != 2:
        data = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
    if gpu and layout & Layout.COLUMNS:
        transposed = x.new_empty((x.shape[1], x.shape[0]), dtype=dtype, requires_grad=False)
    return data, transposed, torch.empty_like(scale)


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
