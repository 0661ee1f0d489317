"""The FP8 matrix product, what replaces it where the hardware has none, and the products of many experts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

ALIGNMENT = 16

BLOCK_ROWS = 128
"""Rows of one group that a kernel finds by one look into `RowGroups.blocks`."""

GROUPED_WORK = 2.0**33
"""Multiplications per group below which one launch for all groups is worth more than cuBLAS's faster products.

An estimate: a product of that size takes about as long as the host takes to start one.
"""


def supported(m: int, k: int, n: int) -> bool:
    """True if `scaled_mm` can multiply [m, k] by [k, n].

    The rule is CUDA's, and it holds on the CPU too: a model must not compute something else on another
    device. `m` is free; it is asked for so that callers state the whole product.
    """
    return k % ALIGNMENT == 0 and n % ALIGNMENT == 0


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """Multiply two FP8 matrices, undo their scales, add the bias, and round once to `out_dtype`.

    Args:
        a: float8 [M, K], any strides; at most one of `a` and `b` is e5m2.
        b: float8 [K, N], any strides. Fast without a copy: `a` row-major, `b` the transpose of a
            row-major matrix; on a GPU parts of such matrices, too, that start and continue at multiples of 16.
        a_scale_inv: float32 [1].
        b_scale_inv: float32 [1].
        out_dtype: float32, bfloat16 or float16.
        bias: [N] of `out_dtype`, or None.
        out: [M, N] of `out_dtype`, row-major; takes the result. Not with a bias in float32.
        fast: let a GPU add up in its short accumulators, as is usual in the forward but not for gradients.

    Returns:
        [M, N] of `out_dtype`, row-major.

    Raises:
        ValueError: shapes that do not fit, or that `supported` refuses.
    """
    (m, k), (rows, n) = a.shape, b.shape
    if k != rows or not supported(m, k, n):
        raise ValueError(
            f"an FP8 product expected [M, K] @ [K, N] with K and N multiples of {ALIGNMENT} but got "
            f"{tuple(a.shape)} @ {tuple(b.shape)}; ask supported() first and multiply in high precision"
        )
    if 0 in (m, k, n):  # not every GPU library takes an empty matrix
        empty = torch.zeros(m, n, dtype=out_dtype, device=a.device) if out is None else out.zero_()
        return empty if bias is None else torch.add(empty, bias, out=out)
    if a.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # There torch multiplies dequantized matrices, which autocast would round to bfloat16 first.
        with torch.autocast("cpu", enabled=False):
            return _multiply(a, b, a_scale_inv, b_scale_inv, out_dtype, bias, out, fast)
    return _multiply(a, b, a_scale_inv, b_scale_inv, out_dtype, bias, out, fast)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    fast: bool,
) -> torch.Tensor:
    fused = bias is not None and out_dtype != torch.float32  # cuBLASLt adds no bias to a float32 result
    assert out is None or bias is None or fused, "an output for a product that gets its bias later"
    a = _row_major(a)
    if b.stride() != (1, b.shape[0]):  # the two views cost as much as a small kernel
        b = _row_major(b.t()).t()
    product = torch._scaled_mm(
        a,
        b,
        scale_a=a_scale_inv,
        scale_b=b_scale_inv,
        bias=bias if fused else None,
        out_dtype=out_dtype,
        use_fast_accum=fast,
        **({} if out is None else {"out": out}),
    )
    return product if bias is None or fused else product + bias


def _row_major(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.is_contiguous() or (matrix.device.type == "cuda" and _aligned_part(matrix)):
        return matrix
    # Not `.contiguous()`: that asks fake GPU tensors for CUDA, and no CPU machine could check layouts.
    return matrix.clone(memory_format=torch.contiguous_format)


def _aligned_part(matrix: torch.Tensor) -> bool:
    """Whether cuBLAS can read an FP8 matrix where it is, as a part of a row-major one."""
    to_next, step = matrix.stride()
    aligned = to_next % ALIGNMENT == 0 and matrix.storage_offset() % ALIGNMENT == 0
    return aligned and step == 1 and to_next >= matrix.shape[1]


def dequantize(q: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that an FP8 tensor stands for.

    Args:
        q: float8, any shape.
        scale_inv: float32 [1].
        dtype: of the result; the product is taken in float32 and rounded once.
    """
    return (q.float() * scale_inv).to(dtype)


@dataclass(frozen=True)
class RowGroups:
    """Rows of a matrix that belong together, one group after the other, and the tables by which kernels find them.

    A transposed copy [features, width] has the groups as columns. There each one starts at a multiple of 16 and
    ends at one, as FP8 products take it: a few columns behind its own are zero, and add nothing to a sum. An empty
    group has 16 of these.
    """

    counts: Sequence[int]
    """Rows of each group."""
    rows: Sequence[slice]
    """Where a group lies in the matrix."""
    columns: Sequence[slice]
    """Where it lies in a transposed copy, with its zeros."""
    width: int
    """Columns of a transposed copy."""
    ends: torch.Tensor
    """int32 [G], on the device: where the rows of each group end."""
    column_ends: torch.Tensor
    """int32 [G], on the device: where its columns end."""
    first_blocks: torch.Tensor
    """int32 [G + 1], on the device: where its rows in `blocks` start."""
    blocks: torch.Tensor
    """int32 [B, 4], on the device, for every `BLOCK_ROWS` rows of a group, and once for an empty one: the group, the
    first row, the rows that the group has from there on, the first column by `ALIGNMENT`."""

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> RowGroups:
        """Lay out groups; the host does not wait for the device.

        Args:
            counts: rows of each group, >= 0.
            device: of the tables.
        """
        given = np.asarray(counts, dtype=np.int64)
        ends, units = given.cumsum(), np.maximum(-(-given // ALIGNMENT), 1)
        unit_ends = units.cumsum()
        starts, unit_starts = ends - given, unit_ends - units
        in_group = -(-units // (BLOCK_ROWS // ALIGNMENT))
        first_blocks = np.concatenate(([0], in_group.cumsum()))
        group = np.repeat(np.arange(len(given)), in_group)
        before = (np.arange(len(group)) - first_blocks[group]) * BLOCK_ROWS  # in the same group
        blocks = np.stack(
            (group, starts[group] + before, given[group] - before, unit_starts[group] + before // ALIGNMENT),
            1,
        )
        parts = (blocks.ravel(), ends, unit_ends * ALIGNMENT, first_blocks)
        table = to_device(np.concatenate(parts).astype(np.int32), device)
        tables = table.split([len(part) for part in parts])
        return cls(
            counts=counts,
            rows=_slices(starts, ends),
            columns=_slices(unit_starts * ALIGNMENT, unit_ends * ALIGNMENT),
            width=int(unit_ends[-1]) * ALIGNMENT,
            ends=tables[1],
            column_ends=tables[2],
            first_blocks=tables[3],
            blocks=tables[0].view(-1, 4),
        )

    def __len__(self) -> int:
        return len(self.counts)


def _slices(starts: np.ndarray, ends: np.ndarray) -> list[slice]:
    return [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for that."""
    host = torch.from_numpy(values)
    if device.type == "cuda":
        host = host.pin_memory()  # from other memory the copy would block
    return host.to(device, non_blocking=True)


def grouped_supported(a: torch.dtype, b: torch.dtype, out: torch.dtype, device: torch.device) -> bool:
    """True if `scaled_grouped_mm` takes these dtypes there: no gradients in e5m2, and nothing but Hopper."""
    e4m3 = torch.float8_e4m3fn
    return (
        a == b == e4m3
        and out == torch.bfloat16
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    ends: torch.Tensor,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """Multiply the groups of two matrices in one launch: `a[rows] @ b[group]`, or `a[:, columns] @ b[columns]`.

    All matrices and parts of them start, and their rows follow each other, at multiples of 16; ask
    `grouped_supported` first.

    Args:
        a: float8_e4m3fn [T, K], row-major, split along T; or [M, C], split along C.
        b: float8_e4m3fn [G, K, N], each group the transpose of a row-major matrix; or [C, N], itself such a
            transpose, split along C.
        a_scale_inv: float32, one per row of each result: [T], or [G * M].
        b_scale_inv: float32, one per column of each result: [G, N], or [G * N].
        ends: int32 [G] on the device, where the groups end. Along C no group may be empty, and all ends are
            multiples of 16.
        fast: see `scaled_mm`.

    Returns:
        bfloat16 [T, N], or [G, M, N].
    """
    return torch._scaled_grouped_mm(
        a, b, a_scale_inv, b_scale_inv, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
