"""Cast the rows of many experts in one launch: each group of rows has a scale and an amax of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..gemm import ALIGNMENT, BLOCK_ROWS, RowGroups
from ._launch import FP8_MAX, Launcher, blocks, unit_of
from ._tile import load_tile, quantized, record, sealed, store_column_sums, tile_amax, tile_rows
from .cast import SUM_TILE, TILE, row_major

BIAS_TILE = (64, 128, 4)
"""Rows, columns, warps. An estimate, not measured."""

_APART = tl.constexpr(4)  # cuBLASLt takes the address of a factor only if it is a multiple of 16
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_BLOCK_ROWS = tl.constexpr(BLOCK_ROWS)


class GroupedCast(NamedTuple):
    """FP8 copies of one matrix [T, K] of G groups of rows."""

    data: torch.Tensor | None
    """FP8 [T, K], row-major."""
    data_t: torch.Tensor | None
    """FP8 [K, width], row-major, see `RowGroups`."""
    scale_inv: torch.Tensor
    """float32 [G], `1 / scale` of each group; 16 bytes apart, as a product of one group takes their addresses."""
    row_scale_inv: torch.Tensor
    """float32 [T], the same for each row."""
    sums: torch.Tensor | None = None
    """[G, K], the sum of each group's rows."""


@triton.jit
def _cell(addresses_ptr: tl.tensor, group: tl.tensor) -> tl.tensor:
    """Pointer to a group's float32 cell, whose address stands in an int64 table."""
    return tl.load(addresses_ptr + group).to(tl.pointer_type(tl.float32))


@triton.jit
def _store_columns(
    q: tl.tensor, t_ptr: tl.tensor, column0: tl.tensor, col0: tl.tensor, columns: tl.tensor, cols: tl.tensor,
    stride: tl.tensor, tile_m: tl.constexpr, tile_k: tl.constexpr, owned: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile of `columns` rows in a row-major [cols, stride] matrix, from `column0` on."""
    t = tl.permute(tl.reshape(q, [owned, tile_m // owned, tile_k]), (2, 1, 0))
    row, col = tl.arange(0, tile_m), tl.arange(0, tile_k)
    inside = (col < cols - col0)[:, None] & (row < columns)[None, :]
    corner = t_ptr + col0.to(tl.int64) * stride + column0
    tl.store(corner + col[:, None] * stride + row[None, :], tl.reshape(t, [tile_k, tile_m]), mask=inside)


@triton.jit(
    do_not_specialize=["k_units", "stride_units", "width_units"],
    do_not_specialize_on_alignment=[
        "blocks_ptr", "scales_ptr", "cells_ptr", "amax_ptr", "scale_inv_ptr", "row_scale_inv_ptr",
    ],
)  # fmt: skip
def _cast_kernel(
    x_ptr: tl.tensor, data_ptr: tl.tensor, data_t_ptr: tl.tensor, partial_ptr: tl.tensor,
    blocks_ptr: tl.tensor, scales_ptr: tl.tensor, cells_ptr: tl.tensor, amax_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor, row_scale_inv_ptr: tl.tensor, k_units: tl.tensor, stride_units: tl.tensor,
    width_units: tl.tensor, k_unit: tl.constexpr, tile_m: tl.constexpr, tile_k: tl.constexpr,
    owned: tl.constexpr,
) -> None:  # fmt: skip
    cols, stride = k_units * k_unit, stride_units * k_unit
    across = tl.cdiv(cols, tile_k)
    part, col0 = tl.program_id(0) // across, (tl.program_id(0) % across) * tile_k
    parts: tl.constexpr = _BLOCK_ROWS // tile_m
    block_ptr, before = blocks_ptr + (part // parts) * 4, (part % parts) * tile_m
    group, row0 = tl.load(block_ptr), tl.load(block_ptr + 1) + before
    left, column0 = tl.load(block_ptr + 2), tl.load(block_ptr + 3) * _ALIGNMENT + before
    rows = left - before  # of the group, from this tile on; may be negative
    values = load_tile(x_ptr, row0, col0, row0 + rows, cols, stride, tile_m, tile_k, owned).to(tl.float32)
    scale = tl.load(_cell(scales_ptr, group))
    if rows > 0:  # an empty group records nothing
        if cells_ptr is not None:
            record(_cell(cells_ptr, group), tile_amax(values))
        if amax_ptr is not None:
            record(amax_ptr + group, tile_amax(values))
    if col0 == 0:
        scale_inv = tl.div_rn(1.0, scale)
        tl.store(scale_inv_ptr + group * _APART, scale_inv)
        row = tl.arange(0, tile_m)
        tl.store(row_scale_inv_ptr + row0 + row, tl.zeros([tile_m], tl.float32) + scale_inv, mask=row < rows)
    if partial_ptr is not None:
        store_column_sums(values, partial_ptr, part, col0, cols, cols, tile_k)
    if data_ptr is not None or data_t_ptr is not None:
        dtype: tl.constexpr = (data_t_ptr if data_ptr is None else data_ptr).dtype.element_ty
        q = sealed(quantized(values, scale, dtype), row0)
        if data_ptr is not None:
            row, col = tile_rows(tile_m, owned), tl.arange(0, tile_k)
            inside = (row < rows)[:, None] & (col < cols - col0)[None, :]
            corner = data_ptr + row0.to(tl.int64) * cols + col0
            tl.store(corner + row[:, None] * cols + col[None, :], q, mask=inside)
        if data_t_ptr is not None:
            # Behind the group's rows the tile is zero, and so are the columns that fill up its last sixteen.
            columns = tl.maximum(tl.cdiv(left, _ALIGNMENT), 1) * _ALIGNMENT - before
            width = width_units * _ALIGNMENT
            _store_columns(q, data_t_ptr, column0, col0, columns, cols, width, tile_m, tile_k, owned)


@triton.jit(do_not_specialize=["cols"], do_not_specialize_on_alignment=["first_blocks_ptr"])
def _sum_kernel(
    partial_ptr: tl.tensor, sums_ptr: tl.tensor, first_blocks_ptr: tl.tensor, cols: tl.tensor,
    tile_p: tl.constexpr, tile_k: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the float32 rows [blocks, cols] of each group."""
    col, group = tl.program_id(0) * tile_k + tl.arange(0, tile_k), tl.program_id(1)
    part = tl.arange(0, tile_p)
    end = tl.load(first_blocks_ptr + group + 1)
    total = tl.zeros([tile_p, tile_k], tl.float32)
    for start in range(tl.load(first_blocks_ptr + group), end, tile_p):
        inside = (part < end - start)[:, None] & (col < cols)[None, :]
        row = part.to(tl.int64)[:, None] + start
        total += tl.load(partial_ptr + row * cols + col[None, :], mask=inside, other=0.0)
    result = tl.sum(total, 0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + group.to(tl.int64) * cols + col, result, mask=col < cols)


@triton.jit(
    do_not_specialize=["groups"], do_not_specialize_on_alignment=["amax_ptr", "cells_ptr", "ends_ptr"]
)
def _record_kernel(
    amax_ptr: tl.tensor, cells_ptr: tl.tensor, ends_ptr: tl.tensor, groups: tl.tensor, tile: tl.constexpr
) -> None:
    group = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = group < groups
    start = tl.load(ends_ptr + group - 1, mask=inside & (group > 0), other=0)
    used = inside & (tl.load(ends_ptr + group, mask=inside, other=0) > start)
    # The bits order as `record` says; here they are those of a cell already.
    bits = tl.load(amax_ptr + group, mask=used, other=0.0).to(tl.int32, bitcast=True)
    cells = tl.load(cells_ptr + group, mask=used, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_max(cells, bits, mask=used, sem="relaxed")


@triton.jit(do_not_specialize=["k_units"], do_not_specialize_on_alignment=["blocks_ptr"])
def _bias_kernel(
    y_ptr: tl.tensor, bias_ptr: tl.tensor, blocks_ptr: tl.tensor, k_units: tl.tensor, k_unit: tl.constexpr,
    tile_m: tl.constexpr, tile_k: tl.constexpr,
) -> None:  # fmt: skip
    cols = k_units * k_unit
    across = tl.cdiv(cols, tile_k)
    part, col0 = tl.program_id(0) // across, (tl.program_id(0) % across) * tile_k
    parts: tl.constexpr = _BLOCK_ROWS // tile_m
    block_ptr, before = blocks_ptr + (part // parts) * 4, (part % parts) * tile_m
    group, row0 = tl.load(block_ptr), tl.load(block_ptr + 1) + before
    rows = tl.load(block_ptr + 2) - before
    row, col = tl.arange(0, tile_m), col0 + tl.arange(0, tile_k)
    bias = tl.load(bias_ptr + group.to(tl.int64) * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = y_ptr + row0.to(tl.int64) * cols + row[:, None] * cols + col[None, :]
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=inside)


_launch_cast = Launcher(_cast_kernel)
_launch_sum = Launcher(_sum_kernel)
_launch_record = Launcher(_record_kernel)
_launch_bias = Launcher(_bias_kernel)


def cast_groups(
    x: torch.Tensor,
    groups: RowGroups,
    scales: torch.Tensor,
    cells: torch.Tensor | None,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    transpose: bool,
    keep: bool,
    sums_dtype: torch.dtype | None = None,
) -> GroupedCast:
    """Cast all groups of a matrix to FP8, and read their amaxes, in one pass.

    Args:
        x: [T, K] with T > 0 and K > 0, float32, bfloat16 or float16, any strides; fast if its rows are dense.
        groups: of its rows.
        scales: int64 [G], on the device of `x`: the address of each group's scale, a float32.
        cells: int64 [G], there: the address of each group's amax, a float32 that is raised to the largest
            absolute value (NaN wins); or None. An empty group leaves its own alone.
        amax: float32 [G], raised likewise; or None.
        dtype: float8_e4m3fn or float8_e5m2; what is above its largest value saturates.
        transpose: write `data_t`.
        keep: write `data`.
        sums_dtype: of `sums`, which are taken in float32, in an order that depends on the counts only; None:
            no sums.
    """
    x = x if row_major(x) else x.contiguous()
    tokens, k = x.shape
    assert dtype in FP8_MAX and groups.width < 2**24, (dtype, groups.width)  # as in `new_cast`
    data = torch.empty((tokens, k), dtype=dtype, device=x.device) if keep else None
    data_t = torch.empty((k, groups.width), dtype=dtype, device=x.device) if transpose else None
    scale_inv = torch.empty((len(groups), _APART.value), dtype=torch.float32, device=x.device)[:, 0]
    row_scale_inv = torch.empty(tokens, dtype=torch.float32, device=x.device)
    n_blocks = groups.blocks.shape[0]
    partial = sums = None
    if sums_dtype is not None:
        partial = torch.empty((n_blocks, k), dtype=torch.float32, device=x.device)
    bm, bk, owned, warps = TILE if partial is None else SUM_TILE
    assert partial is None or bm == BLOCK_ROWS, "one partial sum per block"
    unit = unit_of(k, x.stride(0))
    _launch_cast(
        (n_blocks * (BLOCK_ROWS // bm) * blocks(k, bk), 1, 1),
        (x, data, data_t, partial, groups.blocks, scales, cells, amax, scale_inv, row_scale_inv),
        (k // unit, x.stride(0) // unit, groups.width // ALIGNMENT),
        (unit, bm, bk, owned),
        warps,
    )
    if partial is not None:
        sums = torch.empty((len(groups), k), dtype=sums_dtype, device=x.device)
        _launch_sum((blocks(k, 32), len(groups), 1), (partial, sums, groups.first_blocks), (k,), (64, 32), 4)
    return GroupedCast(data, data_t, scale_inv, row_scale_inv, sums)


def record_groups(amax: torch.Tensor, cells: torch.Tensor, groups: RowGroups) -> None:
    """Raise the amax cells of all groups that have rows.

    Args:
        amax: float32 [G], as `cast_groups` left it.
        cells: int64 [G], the addresses of the cells.
        groups: which of them have rows.
    """
    n = len(groups)
    _launch_record((blocks(n, 128), 1, 1), (amax, cells, groups.ends), (n,), (128,), 4)


def add_bias(y: torch.Tensor, bias: torch.Tensor, groups: RowGroups) -> None:
    """Add each group's bias to its rows, in place.

    Args:
        y: [T, K], row-major, dense.
        bias: [G, K], dense.
        groups: of the rows of `y`.
    """
    assert y.is_contiguous()
    k = y.shape[1]
    unit, (bm, bk, warps) = unit_of(k), BIAS_TILE
    grid = (groups.blocks.shape[0] * (BLOCK_ROWS // bm) * blocks(k, bk), 1, 1)
    _launch_bias(grid, (y, bias.contiguous(), groups.blocks), (k // unit,), (unit, bm, bk), warps)
