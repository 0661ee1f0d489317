"""LayerNorm and RMSNorm with float32 statistics: forward into FP8, backward with the residual's gradient added."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._launch import FP8_MAX, Launcher, blocks, unit_of
from ._tile import count, nan_max, quantized, record, store_scale_inv
from .cast import add_partials, fp8_transpose, row_major

MAX_FEATURES = 32768
"""A program holds whole rows in registers."""


class NormCast(NamedTuple):
    """What a norm gives: FP8 copies of its result, and what its backward needs."""

    data: torch.Tensor
    """FP8 [M, K], row-major."""
    data_t: torch.Tensor | None
    """FP8 [K, M], row-major."""
    scale_inv: torch.Tensor
    """float32 [1], `1 / scale`."""
    mean: torch.Tensor | None
    """float32 [M]; None of RMSNorm."""
    rstd: torch.Tensor
    """float32 [M], the inverse of the standard deviation, or of the root of the mean square."""
    normal: torch.Tensor | None
    """The result in the dtype of `x`, [M, K]."""


@triton.jit
def _features(ptr: tl.tensor, col: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """A [K] parameter as one float32 row."""
    return tl.load(ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit(
    do_not_specialize=["rows", "k_units", "stride_units"],
    do_not_specialize_on_alignment=["scale_ptr", "scale_inv_ptr", "amax_ptr", "casts_ptr"],
)
def _forward_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, data_ptr: tl.tensor, normal_ptr: tl.tensor,
    mean_ptr: tl.tensor, rstd_ptr: tl.tensor, scale_ptr: tl.tensor, scale_inv_ptr: tl.tensor,
    amax_ptr: tl.tensor, casts_ptr: tl.tensor, rows: tl.tensor, k_units: tl.tensor,
    stride_units: tl.tensor, k_unit: tl.constexpr, eps: tl.constexpr, tile_m: tl.constexpr,
    tile_k: tl.constexpr,
) -> None:  # fmt: skip
    cols, stride = k_units * k_unit, stride_units * k_unit
    row = tl.program_id(0).to(tl.int64) * tile_m + tl.arange(0, tile_m)
    col = tl.arange(0, tile_k)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        mean = tl.sum(x, 1) / cols
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 1) / cols + eps))
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    values = x * rstd[:, None] * _features(weight_ptr, col, col < cols)
    if bias_ptr is not None:
        values += _features(bias_ptr, col, col < cols)
    scale = store_scale_inv(scale_ptr, scale_inv_ptr)
    if amax_ptr is not None:
        present = tl.where(inside, tl.abs(values), 0.0)  # rows beyond the end would give the bias
        record(amax_ptr, tl.reduce(present, None, nan_max))
    if casts_ptr is not None:
        present = tl.where(inside, values, 0.0)
        count(casts_ptr, present, scale, rows, cols, data_ptr.dtype.element_ty)
    offsets = row[:, None] * cols + col[None, :]
    tl.store(data_ptr + offsets, quantized(values, scale, data_ptr.dtype.element_ty), mask=inside)
    if normal_ptr is not None:
        tl.store(normal_ptr + offsets, values.to(normal_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "k_units", "dy_stride_units", "x_stride_units"])
def _backward_kernel(
    dy_ptr: tl.tensor, x_ptr: tl.tensor, weight_ptr: tl.tensor, mean_ptr: tl.tensor, rstd_ptr: tl.tensor,
    residual_ptr: tl.tensor, dx_ptr: tl.tensor, partial_ptr: tl.tensor, rows: tl.tensor, k_units: tl.tensor,
    dy_stride_units: tl.tensor, x_stride_units: tl.tensor, k_unit: tl.constexpr, tile_k: tl.constexpr,
    stages: tl.constexpr,
) -> None:  # fmt: skip
    cols, dy_stride, x_stride = k_units * k_unit, dy_stride_units * k_unit, x_stride_units * k_unit
    program, programs = tl.program_id(0), tl.num_programs(0)
    col = tl.arange(0, tile_k)
    inside = col < cols
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([tile_k], tl.float32)
    dbias = tl.zeros([tile_k], tl.float32)
    for row in tl.range(program, rows, programs, num_stages=stages):
        start = row.to(tl.int64)
        dy = tl.load(dy_ptr + start * dy_stride + col, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start * x_stride + col, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if mean_ptr is not None:
            x = tl.where(inside, x - tl.load(mean_ptr + row), 0.0)
            dbias += dy
        normal = x * rstd
        dweight += dy * normal
        dnormal = dy * weight
        dx = dnormal - normal * (tl.sum(dnormal * normal, 0) / cols)
        if mean_ptr is not None:
            dx -= tl.sum(dnormal, 0) / cols
        dx *= rstd
        if residual_ptr is not None:
            dx += tl.load(residual_ptr + start * cols + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + start * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + program.to(tl.int64) * cols + col, dweight, mask=inside)
    if mean_ptr is not None:
        tl.store(partial_ptr + (programs + program).to(tl.int64) * cols + col, dbias, mask=inside)


_launch_forward = Launcher(_forward_kernel)
_launch_backward = Launcher(_backward_kernel)


def norm_cast(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    transpose: bool,
    want_normal: bool = False,
    casts: torch.Tensor | None = None,
) -> NormCast:
    """Normalize each row in float32, and cast what that gives.

    Args:
        x: [M, K], float32, bfloat16 or float16, any strides, K <= `MAX_FEATURES`; may have no rows.
        weight: [K].
        bias: [K], or None.
        eps: added to the variance, or to the mean square.
        kind: `LayerNorm` or `RMSNorm`.
        scale: float32 [1].
        amax: float32 [1] that is raised to the result's amax, or None.
        dtype: float8_e4m3fn or float8_e5m2.
        fp8_max: its largest value.
        transpose: write `data_t`.
        want_normal: write `normal`.
        casts: int64 [3] = values, saturated, flushed to zero, to which the result's are added; or None.
    """
    assert fp8_max == FP8_MAX[dtype], (fp8_max, dtype)
    x = x if row_major(x) else x.contiguous()
    m, k = x.shape
    data = torch.empty((m, k), dtype=dtype, device=x.device)
    statistics = torch.empty((2, m), dtype=torch.float32, device=x.device)
    rstd, mean = statistics[0], statistics[1] if kind == "LayerNorm" else None
    normal = torch.empty((m, k), dtype=x.dtype, device=x.device) if want_normal else None
    scale_inv = torch.empty_like(scale)
    if m == 0:
        torch.reciprocal(scale, out=scale_inv)
        data_t = torch.empty((k, m), dtype=dtype, device=x.device) if transpose else None
        return NormCast(data, data_t, scale_inv, mean, rstd, normal)
    block, bm, warps = _forward_block(k, kind)
    unit = unit_of(k, x.stride(0))
    _launch_forward(
        (blocks(m, bm), 1, 1),
        (x, weight, bias, data, normal, mean, rstd, scale, scale_inv, amax, casts),
        (m, k // unit, x.stride(0) // unit),
        (unit, eps, bm, block),
        warps,
    )
    return NormCast(data, fp8_transpose(data) if transpose else None, scale_inv, mean, rstd, normal)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    kind: str,
    residual_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Differentiate a norm, in float32 and in an order that depends on the shape only.

    Args:
        dy: [M, K], gradient of the norm's result; dtypes and strides like `x`.
        x: [M, K], what was normalized.
        weight: [K].
        mean: float32 [M] of LayerNorm, None of RMSNorm.
        rstd: float32 [M].
        kind: `LayerNorm` or `RMSNorm`.
        residual_grad: [M, K], gradient that reached `x` on another way; added before the result is rounded.

    Returns:
        dx [M, K] in the dtype of `x`; dweight [K] in that of `weight`; dbias [K] in that of `weight`, None of RMSNorm.
    """
    assert (kind == "LayerNorm") == (mean is not None), (kind, mean is not None)
    dy, x = (t if row_major(t) else t.contiguous() for t in (dy, x))
    residual_grad = None if residual_grad is None else residual_grad.contiguous()
    m, k = x.shape
    dx = torch.empty((m, k), dtype=x.dtype, device=x.device)
    programs = min(m, _BACKWARD_PROGRAMS)
    shape = (programs, k) if mean is None else (2, programs, k)
    partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    if m > 0:
        row_bytes = sum(t.element_size() for t in (dy, x, residual_grad) if t is not None) * k
        block, stages, warps = _backward_block(k, row_bytes)
        unit = unit_of(k, dy.stride(0), x.stride(0))
        _launch_backward(
            (programs, 1, 1),
            (dy, x, weight, mean, rstd, residual_grad, dx, partial),
            (m, k // unit, dy.stride(0) // unit, x.stride(0) // unit),
            (unit, block, stages),
            warps,
        )
    if mean is None:
        return dx, add_partials(partial, weight.dtype), None
    return (dx, *add_partials(partial, weight.dtype, weight.dtype))


_BACKWARD_PROGRAMS = (
    264  # two for each multiprocessor of an H100 or H200; fixed, so that sums do not depend on the card
)


def _columns(features: int) -> int:
    if features > MAX_FEATURES:
        raise ValueError(
            f"the norm kernels expected at most {MAX_FEATURES} features but got {features}; normalize with torch"
        )
    return max(128, triton.next_power_of_2(features))


def _forward_block(features: int, kind: str) -> tuple[int, int, int]:
    """Columns, rows and warps of a program; measured on an H200."""
    columns = _columns(features)
    warps = min(16, max(4, columns // 1024))
    if columns > 16384:
        return columns, 1, warps
    if kind == "LayerNorm":  # two reductions, so that a second row is worth having meanwhile
        return columns, max(2, 8192 // columns), warps
    return (columns, 2, 8) if columns == 16384 else (columns, max(1, 4096 // columns), warps)


def _backward_block(features: int, row_bytes: int) -> tuple[int, int, int]:
    """Columns, stages and warps of a program; measured on an H200."""
    columns = _columns(features)
    # Rows to come wait in shared memory, of which each of two programs on a multiprocessor has about 110 KiB.
    return columns, 3 if row_bytes <= 32768 else 1, min(16, max(4, columns // 1024))
