"""Activations and their derivatives in float32, cast to FP8 before they reach memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from ._launch import Launcher, blocks, unit_of
from ._tile import load_tile, record, store_column_sums, store_scale_inv, store_tile, tile_amax
from .cast import Cast, add_partials, new_cast, row_major

WIDTHS = {"gelu": 1, "relu": 1, "silu": 1, "swiglu": 2}
"""Input features per output feature, by activation."""

# Rows, columns, rows that a thread owns (see `tile_rows`), warps; measured on an H200.
FORWARD_TILE = (64, 64, 1, 4)
BACKWARD_TILE = (64, 64, 1, 4)
BACKWARD_SUM_TILE = (64, 64, 2, 4)
GATED_BACKWARD_TILE = (32, 128, 1, 8)
GATED_BACKWARD_SUM_TILE = (64, 32, 1, 4)

# gelu(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3)), its tanh form without the cancellation of 1 + tanh.
_GELU = tl.constexpr(1.5957691216057308)
_GELU_CUBE = tl.constexpr(0.044715 * 1.5957691216057308)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exponent(x: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """t, for which the activation is x / (1 + 2**t)."""
    if kind == "gelu":
        return x * (-_LOG2_E * _GELU - _LOG2_E * _GELU_CUBE * x * x)
    else:
        return x * -_LOG2_E


@triton.jit
def _activation(x: tl.tensor, again: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Of float32 values, which come as two (see `_widened_again`)."""
    if kind == "relu":
        return tl.where(x <= 0.0, 0.0, x)  # NaN passes
    else:
        return libdevice.fast_dividef(x, 1.0 + tl.exp2(_exponent(again, kind)))


@triton.jit
def _derivative(x: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    exponent = _exponent(x, kind)
    # Bounded, so that 1 - sigmoid can be had without cancellation, as power * sigmoid, also where 2**t overflows.
    power = tl.exp2(tl.minimum(exponent, 126.0))
    sigmoid = libdevice.fast_dividef(1.0, 1.0 + power)
    slope = x * (sigmoid * (power * sigmoid))
    if kind == "gelu":
        slope *= _GELU + 3.0 * _GELU_CUBE * x * x
    return sigmoid + tl.where(exponent > 126.0, 0.0, slope)


@triton.jit
def _widened_again(x: tl.tensor) -> tl.tensor:
    """A bfloat16 tile as float32, by another instruction than `x.to(float32)`.

    Triton moves the transposition of a tile up to a single widening, and then computes all between twice, once for
    each copy. Two different widenings stop that.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit(
    do_not_specialize=["m_units", "f_units", "stride_units"],
    do_not_specialize_on_alignment=["scale_ptr", "scale_inv_ptr", "amax_ptr", "casts_ptr"],
)
def _forward_kernel(
    h_ptr: tl.tensor, data_ptr: tl.tensor, data_t_ptr: tl.tensor, scale_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor, amax_ptr: tl.tensor, casts_ptr: tl.tensor, m_units: tl.tensor,
    f_units: tl.tensor, stride_units: tl.tensor, m_unit: tl.constexpr, f_unit: tl.constexpr,
    kind: tl.constexpr, tile_m: tl.constexpr, tile_f: tl.constexpr, owned: tl.constexpr,
) -> None:  # fmt: skip
    rows, cols, stride = m_units * m_unit, f_units * f_unit, stride_units * f_unit
    across = tl.cdiv(cols, tile_f)
    row0, col0 = (tl.program_id(0) // across) * tile_m, (tl.program_id(0) % across) * tile_f
    h = load_tile(h_ptr, row0, col0, rows, cols, stride, tile_m, tile_f, owned)
    if kind == "swiglu":
        value = load_tile(h_ptr + cols, row0, col0, rows, cols, stride, tile_m, tile_f, owned).to(tl.float32)
        values = _activation(h.to(tl.float32), h.to(tl.float32), "silu") * value
    else:
        values = _activation(h.to(tl.float32), _widened_again(h), kind)
    scale = store_scale_inv(scale_ptr, scale_inv_ptr)
    if amax_ptr is not None:
        record(amax_ptr, tile_amax(values))
    store_tile(
        values, data_ptr, data_t_ptr, casts_ptr, scale, row0, col0, rows, cols, cols, tile_m, tile_f, owned
    )


@triton.jit(
    do_not_specialize=["m_units", "f_units", "dy_stride_units", "h_stride_units"],
    do_not_specialize_on_alignment=["scale_ptr", "scale_inv_ptr", "amax_ptr", "casts_ptr"],
)
def _backward_kernel(
    dy_ptr: tl.tensor, h_ptr: tl.tensor, data_ptr: tl.tensor, data_t_ptr: tl.tensor, partial_ptr: tl.tensor,
    scale_ptr: tl.tensor, scale_inv_ptr: tl.tensor, amax_ptr: tl.tensor, casts_ptr: tl.tensor,
    m_units: tl.tensor, f_units: tl.tensor, dy_stride_units: tl.tensor, h_stride_units: tl.tensor,
    m_unit: tl.constexpr, f_unit: tl.constexpr, kind: tl.constexpr, width: tl.constexpr,
    tile_m: tl.constexpr, tile_f: tl.constexpr, owned: tl.constexpr,
) -> None:  # fmt: skip
    rows, features = m_units * m_unit, f_units * f_unit
    dy_stride, h_stride = dy_stride_units * f_unit, h_stride_units * f_unit
    cols = features * width
    across = tl.cdiv(features, tile_f)
    row_block = tl.program_id(0) // across
    row0, col0 = row_block * tile_m, (tl.program_id(0) % across) * tile_f
    scale = store_scale_inv(scale_ptr, scale_inv_ptr)
    dy = load_tile(dy_ptr, row0, col0, rows, features, dy_stride, tile_m, tile_f, owned).to(tl.float32)
    h = load_tile(h_ptr, row0, col0, rows, features, h_stride, tile_m, tile_f, owned).to(tl.float32)
    if kind == "swiglu":
        value = load_tile(h_ptr + features, row0, col0, rows, features, h_stride, tile_m, tile_f, owned).to(
            tl.float32
        )
        dvalue = libdevice.mul_rn(dy, _activation(h, h, "silu"))
        dy *= value
        if amax_ptr is not None:
            record(amax_ptr, tile_amax(dvalue))
        if partial_ptr is not None:
            store_column_sums(dvalue, partial_ptr + features, row_block, col0, features, cols, tile_f)
        # The right half of the columns, the lower half of the transposed rows.
        right = None if data_ptr is None else data_ptr + features
        below = None if data_t_ptr is None else data_t_ptr + features.to(tl.int64) * rows
        store_tile(
            dvalue, right, below, casts_ptr, scale, row0, col0, rows, features, cols, tile_m, tile_f, owned
        )
    # Rounded, and not part of a fused multiply-add with the sums: whether the assembler makes one depends on what else
    # uses the product, and a step whose casts are counted shall have the bits of one whose are not.
    dh = tl.where(h <= 0.0, 0.0, dy) if kind == "relu" else libdevice.mul_rn(dy, _derivative(h, kind))
    if amax_ptr is not None:
        record(amax_ptr, tile_amax(dh))
    if partial_ptr is not None:
        store_column_sums(dh, partial_ptr, row_block, col0, features, cols, tile_f)
    store_tile(
        dh, data_ptr, data_t_ptr, casts_ptr, scale, row0, col0, rows, features, cols, tile_m, tile_f, owned
    )


_launch_forward = Launcher(_forward_kernel)
_launch_backward = Launcher(_backward_kernel)


def activation_cast(
    h: torch.Tensor,
    kind: str,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    transpose: bool,
    keep: bool = True,
    casts: torch.Tensor | None = None,
) -> Cast:
    """Apply an activation in float32, and cast what it gives.

    Args:
        h: [M, width * F], float32, bfloat16 or float16, any strides; may be empty.
        kind: one of `WIDTHS`, which gives the width. `gelu` is the tanh form; `swiglu` is
            `silu(h[:, :F]) * h[:, F:]`.
        scale: float32 [1].
        amax: float32 [1] that is raised to the activation's amax, or None.
        dtype: float8_e4m3fn or float8_e5m2.
        fp8_max: its largest value.
        transpose: write `data_t`, [F, M].
        keep: write `data`, [M, F].
        casts: int64 [3] = values, saturated, flushed to zero, to which these are added; or None.
    """
    h = h if row_major(h) else h.contiguous()
    m, f = h.shape[0], h.shape[1] // WIDTHS[kind]
    result = new_cast(m, f, scale, dtype, fp8_max, transpose, keep)
    if m * f == 0:
        torch.reciprocal(scale, out=result.scale_inv)
        return result
    stride = h.stride(0)
    m_unit, f_unit = unit_of(m), unit_of(f, stride)
    bm, bf, owned, warps = FORWARD_TILE
    _launch_forward(
        (blocks(m, bm) * blocks(f, bf), 1, 1),
        (h, result.data, result.data_t, scale, result.scale_inv, amax, casts),
        (m // m_unit, f // f_unit, stride // f_unit),
        (m_unit, f_unit, kind, bm, bf, owned),
        warps,
    )
    return result


def activation_backward_cast(
    dy: torch.Tensor,
    h: torch.Tensor,
    kind: str,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    transpose: bool,
    keep: bool = True,
    casts: torch.Tensor | None = None,
    want_db: bool = False,
    db_dtype: torch.dtype = torch.float32,
) -> tuple[Cast, torch.Tensor | None]:
    """Differentiate an activation in float32, and cast the gradient of what it took.

    Args:
        dy: [M, F], the gradient of what the activation gave; dtypes and strides like `h`.
        h: [M, width * F], what the activation took.
        kind: see `activation_cast`.
        scale: float32 [1], of the gradient's slot.
        amax: float32 [1] that is raised to the gradient's amax, or None.
        dtype: float8_e4m3fn or float8_e5m2.
        fp8_max: its largest value.
        transpose: write `data_t`, [width * F, M].
        keep: write `data`, [M, width * F].
        casts: int64 [3] = values, saturated, flushed to zero, to which the gradient's are added; or None.
        want_db: sum the gradient over the rows, which is the gradient of the bias in front of the activation.
        db_dtype: of that sum, which is taken in float32.

    Returns:
        The casts, and `db_dtype` [width * F] or None.
    """
    dy, h = (t if row_major(t) else t.contiguous() for t in (dy, h))
    m, f = dy.shape
    cols = WIDTHS[kind] * f
    result = new_cast(m, cols, scale, dtype, fp8_max, transpose, keep)
    bm, bf, owned, warps = _backward_tile(WIDTHS[kind], want_db)
    shape = (blocks(m, bm), cols)
    partial = torch.empty(shape, dtype=torch.float32, device=dy.device) if want_db else None
    if m * f == 0:
        torch.reciprocal(scale, out=result.scale_inv)
    else:
        strides = dy.stride(0), h.stride(0)
        m_unit, f_unit = unit_of(m), unit_of(f, *strides)
        _launch_backward(
            (blocks(m, bm) * blocks(f, bf), 1, 1),
            (dy, h, result.data, result.data_t, partial, scale, result.scale_inv, amax, casts),
            (m // m_unit, f // f_unit, strides[0] // f_unit, strides[1] // f_unit),
            (m_unit, f_unit, kind, WIDTHS[kind], bm, bf, owned),
            warps,
        )
    return result, None if partial is None else add_partials(partial, db_dtype)


def _backward_tile(width: int, want_db: bool) -> tuple[int, int, int, int]:
    if width == 2:
        return GATED_BACKWARD_SUM_TILE if want_db else GATED_BACKWARD_TILE
    return BACKWARD_SUM_TILE if want_db else BACKWARD_TILE
