"""Read a matrix once; write its FP8 copy, its transposed FP8 copy, its amax and its column sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ._launch import FP8_MAX, Launcher, blocks, unit_of
from ._tile import (
    add_partials_kernel,
    load_tile,
    record,
    store_column_sums,
    store_scale_inv,
    store_tile,
    store_transposed,
    tile_amax,
    tile_rows,
)

# Rows, columns, rows that a thread owns (see `tile_rows`), warps; measured on an H200.
TILE = (64, 64, 2, 4)
SUM_TILE = (128, 64, 1, 2)
TURN_TILE = (128, 128, 4, 8)


class Cast(NamedTuple):
    """FP8 copies of one matrix [M, K]."""

    data: torch.Tensor | None
    """FP8 [M, K], row-major."""
    data_t: torch.Tensor | None
    """FP8 [K, M], row-major."""
    scale_inv: torch.Tensor
    """float32 [1], `1 / scale`."""


@triton.jit(
    do_not_specialize=["m_units", "k_units", "stride_units"],
    do_not_specialize_on_alignment=["scale_ptr", "scale_inv_ptr", "amax_ptr", "casts_ptr"],
)
def _cast_kernel(
    x_ptr: tl.tensor, data_ptr: tl.tensor, data_t_ptr: tl.tensor, partial_ptr: tl.tensor,
    scale_ptr: tl.tensor, scale_inv_ptr: tl.tensor, amax_ptr: tl.tensor, casts_ptr: tl.tensor,
    m_units: tl.tensor, k_units: tl.tensor, stride_units: tl.tensor, m_unit: tl.constexpr,
    k_unit: tl.constexpr, tile_m: tl.constexpr, tile_k: tl.constexpr, owned: tl.constexpr,
) -> None:  # fmt: skip
    rows, cols, stride = m_units * m_unit, k_units * k_unit, stride_units * k_unit
    across = tl.cdiv(cols, tile_k)
    row_block = tl.program_id(0) // across
    row0, col0 = row_block * tile_m, (tl.program_id(0) % across) * tile_k
    scale = store_scale_inv(scale_ptr, scale_inv_ptr)
    values = load_tile(x_ptr, row0, col0, rows, cols, stride, tile_m, tile_k, owned).to(tl.float32)
    if amax_ptr is not None:
        record(amax_ptr, tile_amax(values))
    if partial_ptr is not None:
        store_column_sums(values, partial_ptr, row_block, col0, cols, cols, tile_k)
    store_tile(
        values, data_ptr, data_t_ptr, casts_ptr, scale, row0, col0, rows, cols, cols, tile_m, tile_k, owned
    )


@triton.jit(do_not_specialize=["m_units", "k_units"])
def _transpose_kernel(
    q_ptr: tl.tensor, t_ptr: tl.tensor, m_units: tl.tensor, k_units: tl.tensor, m_unit: tl.constexpr,
    k_unit: tl.constexpr, tile_m: tl.constexpr, tile_k: tl.constexpr, owned: tl.constexpr,
) -> None:  # fmt: skip
    rows, cols = m_units * m_unit, k_units * k_unit
    across = tl.cdiv(cols, tile_k)
    row0, col0 = (tl.program_id(0) // across) * tile_m, (tl.program_id(0) % across) * tile_k
    row, col = tile_rows(tile_m, owned), tl.arange(0, tile_k)
    inside = (row < rows - row0)[:, None] & (col < cols - col0)[None, :]
    corner = q_ptr + row0.to(tl.int64) * cols + col0
    tile = tl.load(corner + row[:, None] * cols + col[None, :], mask=inside)
    store_transposed(tile, t_ptr, row0, col0, rows, cols, tile_m, tile_k, owned)


_launch_cast = Launcher(_cast_kernel)
_launch_transpose = Launcher(_transpose_kernel)
_launch_add_partials = Launcher(add_partials_kernel)


def cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    transpose: bool,
    keep: bool = True,
    scale_inv: torch.Tensor | None = None,
    casts: torch.Tensor | None = None,
) -> Cast:
    """Cast a matrix to FP8, read its amax, and count its casts, in one pass.

    Args:
        x: [M, K], float32, bfloat16 or float16, any strides; may be empty. Fast if a row or a column is dense.
        scale: float32 [1].
        amax: float32 [1] that is raised to the largest absolute value (NaN wins), or None. Empty matrices
            leave it alone.
        dtype: float8_e4m3fn or float8_e5m2.
        fp8_max: its largest value; what is above saturates.
        transpose: write `data_t`.
        keep: write `data`.
        scale_inv: float32 [1], the scale's inverse where it is known; None: it is computed.
        casts: int64 [3] = values, saturated, flushed to zero, to which this matrix is added; or None.
    """
    if not row_major(x):
        if row_major(x.t()):
            flipped = cast(x.t(), scale, amax, dtype, fp8_max, keep, transpose, scale_inv, casts)
            return Cast(flipped.data_t, flipped.data, flipped.scale_inv)
        x = x.contiguous()
    return _cast_rows(x, scale, amax, dtype, fp8_max, transpose, keep, scale_inv, casts, None)


def cast_gradient(
    dy: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    transpose: bool,
    keep: bool = True,
    scale_inv: torch.Tensor | None = None,
    casts: torch.Tensor | None = None,
    want_db: bool = False,
    db_dtype: torch.dtype = torch.float32,
) -> tuple[Cast, torch.Tensor | None]:
    """`cast`, and the gradient of the bias.

    Args:
        dy: [M, K], the gradient of a layer's output.
        scale: see `cast`, like all that is not named here.
        amax: see `cast`.
        dtype: see `cast`.
        fp8_max: see `cast`.
        transpose: see `cast`.
        keep: see `cast`.
        scale_inv: see `cast`.
        casts: see `cast`.
        want_db: sum over the rows.
        db_dtype: of that sum, which is taken in float32, in an order that depends on the shape only.

    Returns:
        The casts, and `db_dtype` [K] or None.
    """
    if not want_db:
        return cast(dy, scale, amax, dtype, fp8_max, transpose, keep, scale_inv, casts), None
    dy = dy if row_major(dy) else dy.contiguous()
    partial = torch.empty(
        (blocks(dy.shape[0], SUM_TILE[0]), dy.shape[1]), dtype=torch.float32, device=dy.device
    )
    result = _cast_rows(dy, scale, amax, dtype, fp8_max, transpose, keep, scale_inv, casts, partial)
    return result, add_partials(partial, db_dtype)


def _cast_rows(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    transpose: bool,
    keep: bool,
    scale_inv: torch.Tensor | None,
    casts: torch.Tensor | None,
    partial: torch.Tensor | None,
) -> Cast:
    m, k = x.shape
    result = new_cast(m, k, scale, dtype, fp8_max, transpose, keep, scale_inv)
    wanted = result.scale_inv if scale_inv is None else None
    if m * k == 0:
        if wanted is not None:
            torch.reciprocal(scale, out=wanted)
        return result
    stride = x.stride(0)
    m_unit, k_unit = unit_of(m), unit_of(k, stride)
    bm, bk, owned, warps = TILE if partial is None else SUM_TILE
    _launch_cast(
        (blocks(m, bm) * blocks(k, bk), 1, 1),
        (x, result.data, result.data_t, partial, scale, wanted, amax, casts),
        (m // m_unit, k // k_unit, stride // k_unit),
        (m_unit, k_unit, bm, bk, owned),
        warps,
    )
    return result


def new_cast(
    m: int,
    k: int,
    scale: torch.Tensor,
    dtype: torch.dtype,
    fp8_max: float,
    transpose: bool,
    keep: bool,
    scale_inv: torch.Tensor | None = None,
) -> Cast:
    """Memory for the casts of an [m, k] matrix, and of the scale's inverse if it is not known."""
    assert fp8_max == FP8_MAX[dtype], (fp8_max, dtype)
    assert keep or transpose, "a cast is kept"
    assert m < 2**24, m  # offsets within a tile of the transposed copy fit 32 bits
    device = scale.device
    return Cast(
        torch.empty(m, k, dtype=dtype, device=device) if keep else None,
        torch.empty(k, m, dtype=dtype, device=device) if transpose else None,
        torch.empty(1, device=device) if scale_inv is None else scale_inv,
    )


def row_major(x: torch.Tensor) -> bool:
    """Whether the values of each row of a matrix are dense, and offsets within a tile fit 32 bits."""
    return (x.stride(1) == 1 or x.shape[1] == 1) and x.stride(0) < 2**23


def add_partials(partial: torch.Tensor, dtype: torch.dtype, second: torch.dtype | None = None) -> Any:
    """Add up the rows of a float32 [parts, K] matrix, or of two in a [2, parts, K] tensor.

    Returns:
        [K] of `dtype`, and with `second` a pair, the other one of that dtype.
    """
    parts, cols = partial.shape[-2:]
    first = torch.empty(cols, dtype=dtype, device=partial.device)
    other = None if second is None else torch.empty(cols, dtype=second, device=partial.device)
    if partial.numel() == 0:
        first.zero_()
        if other is not None:
            other.zero_()
    else:
        grid = (blocks(cols, 32), 1 if other is None else 2, 1)
        _launch_add_partials(grid, (partial, first, other), (parts, cols), (64, 32), 4)
    return first if second is None else (first, other)


def fp8_transpose(q: torch.Tensor) -> torch.Tensor:
    """Transposed copy of an FP8 matrix.

    Args:
        q: float8 [M, K], row-major.

    Returns:
        float8 [K, M], row-major.
    """
    m, k = q.shape
    t = torch.empty((k, m), dtype=q.dtype, device=q.device)
    if q.numel() > 0:
        m_unit, k_unit = unit_of(m), unit_of(k)
        bm, bk, owned, warps = TURN_TILE
        grid = (blocks(m, bm) * blocks(k, bk), 1, 1)
        _launch_transpose(grid, (q, t), (m // m_unit, k // k_unit), (m_unit, k_unit, bm, bk, owned), warps)
    return t
