"""What the kernels share on the device: amax, cast, and the two copies of one tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nan_max(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The larger one; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def record(amax_ptr: tl.tensor, amax: tl.tensor) -> None:
    """Raise a float32 cell to a scalar >= 0 or NaN."""
    # Positive floats order like their bits, NaN above all, the -1 of an empty cell below all.
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def quantized(values: tl.tensor, scale: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Scale float32 values, and round once.

    The hardware's cast saturates, infinities too, and passes NaN.
    """
    return (values * scale).to(dtype)


@triton.jit
def sealed(q: tl.tensor, size: tl.tensor) -> tl.tensor:
    """The same FP8 values, four to a register from here on.

    The assembler of CUDA 12.8 miscompiles a cast whose result is used both as a whole and by bytes, as the two
    copies of a tile do: it takes the bytes from a register that was never written. So both uses get it through an
    operation that the assembler cannot see through, an XOR with the sign of a size.
    """
    nothing = (size >> 31).to(tl.uint8)
    raw = tl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;",
        "=r,r,r",
        [q.to(tl.uint8, bitcast=True), nothing],
        tl.uint8,
        is_pure=True,
        pack=4,
    )
    return raw.to(q.dtype, bitcast=True)


@triton.jit
def count(
    casts_ptr: tl.tensor, values: tl.tensor, scale: tl.tensor, rows: tl.tensor, cols: tl.tensor,
    dtype: tl.constexpr,
) -> None:  # fmt: skip
    """Add a tile's casts to an int64 counter of three cells; outside of its [rows, cols] matrix it is 0.

    They are: values, which one program adds for the whole matrix; finite ones that saturate; those that become 0 and
    are not. It looks at no FP8 value, so what makes these stays the same code.
    """
    largest: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    # Half of the least value, which is a tie, and goes to the even 0.
    vanishing: tl.constexpr = 2.0**-10 if dtype == tl.float8e4nv else 2.0**-17
    scaled = tl.abs(values * scale)
    saturated = (scaled > largest) & (tl.abs(values) < float("inf"))
    flushed = (scaled <= vanishing) & (values != 0.0)
    tl.static_assert(values.numel < 2**16)  # so that one sum has room for both
    both = tl.sum(tl.where(saturated, 1, tl.where(flushed, 2**16, 0)))
    n_saturated, n_flushed = both & 0xFFFF, (both >> 16) & 0xFFFF
    if tl.program_id(0) == 0:
        tl.atomic_add(casts_ptr, rows.to(tl.int64) * cols, sem="relaxed")
    # Most tiles have nothing to add, and shall not queue for it.
    tl.atomic_add(casts_ptr + 1, n_saturated.to(tl.int64), mask=n_saturated > 0, sem="relaxed")
    tl.atomic_add(casts_ptr + 2, n_flushed.to(tl.int64), mask=n_flushed > 0, sem="relaxed")


@triton.jit
def store_scale_inv(scale_ptr: tl.tensor, scale_inv_ptr: tl.tensor) -> tl.tensor:
    """Read the scale; one program writes its inverse, correctly rounded, if that is wanted."""
    scale = tl.load(scale_ptr)
    if scale_inv_ptr is not None:  # noqa: SIM102  (no pointer, no code)
        if tl.program_id(0) == 0:
            tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    return scale


@triton.jit
def tile_rows(tile_m: tl.constexpr, owned: tl.constexpr) -> tl.tensor:
    """The order of a tile's rows [tile_m].

    A thread gets every (tile_m / owned)th row of a tile. Dealt out in this order these are neighbours, so that a
    thread can write `owned` neighbours of the transposed copy at once.
    """
    index = tl.arange(0, tile_m)
    return (index % (tile_m // owned)) * owned + index // (tile_m // owned)


@triton.jit
def load_tile(
    ptr: tl.tensor, row0: tl.tensor, col0: tl.tensor, rows: tl.tensor, cols: tl.tensor, stride: tl.tensor,
    tile_m: tl.constexpr, tile_k: tl.constexpr, owned: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile [tile_m, tile_k] of a row-major matrix, its rows in the order of `tile_rows`, 0 outside."""
    row, col = tile_rows(tile_m, owned), tl.arange(0, tile_k)
    inside = (row < rows - row0)[:, None] & (col < cols - col0)[None, :]
    corner = ptr + row0.to(tl.int64) * stride + col0
    return tl.load(corner + row[:, None] * stride + col[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(
    values: tl.tensor, data_ptr: tl.tensor, data_t_ptr: tl.tensor, casts_ptr: tl.tensor, scale: tl.tensor,
    row0: tl.tensor, col0: tl.tensor, rows: tl.tensor, cols: tl.tensor, stride: tl.tensor,
    tile_m: tl.constexpr, tile_k: tl.constexpr, owned: tl.constexpr,
) -> None:  # fmt: skip
    """Cast a tile, and store it in a row-major [rows, cols] and in a dense row-major [cols, rows] matrix.

    The casts are counted where there is a counter, see `count`.
    """
    dtype: tl.constexpr = (data_t_ptr if data_ptr is None else data_ptr).dtype.element_ty
    row, col = tile_rows(tile_m, owned), tl.arange(0, tile_k)
    inside = (row < rows - row0)[:, None] & (col < cols - col0)[None, :]
    if casts_ptr is not None:
        count(casts_ptr, values, scale, rows, cols, dtype)
    q = sealed(quantized(values, scale, dtype), rows)
    if data_ptr is not None:
        corner = data_ptr + row0.to(tl.int64) * stride + col0
        tl.store(corner + row[:, None] * stride + col[None, :], q, mask=inside)
    if data_t_ptr is not None:
        store_transposed(q, data_t_ptr, row0, col0, rows, cols, tile_m, tile_k, owned)


@triton.jit
def store_transposed(
    q: tl.tensor, t_ptr: tl.tensor, row0: tl.tensor, col0: tl.tensor, rows: tl.tensor, cols: tl.tensor,
    tile_m: tl.constexpr, tile_k: tl.constexpr, owned: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile of a [rows, cols] matrix in a dense row-major [cols, rows] matrix."""
    t = tl.permute(tl.reshape(q, [owned, tile_m // owned, tile_k]), (2, 1, 0))
    row, col = tl.arange(0, tile_m), tl.arange(0, tile_k)
    inside = (col < cols - col0)[:, None] & (row < rows - row0)[None, :]
    corner = t_ptr + col0.to(tl.int64) * rows + row0
    tl.store(corner + col[:, None] * rows + row[None, :], tl.reshape(t, [tile_k, tile_m]), mask=inside)


@triton.jit
def tile_amax(values: tl.tensor) -> tl.tensor:
    """Largest absolute value of a tile, NaN if there is one."""
    return tl.reduce(tl.abs(values), None, nan_max)


@triton.jit
def store_column_sums(
    values: tl.tensor, partial_ptr: tl.tensor, row: tl.tensor, col0: tl.tensor, cols: tl.tensor,
    stride: tl.tensor, tile_k: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sums over the rows of a tile in one row of a float32 matrix of `cols` columns."""
    col = tl.arange(0, tile_k)
    tl.store(partial_ptr + row.to(tl.int64) * stride + col0 + col, tl.sum(values, 0), mask=col < cols - col0)


@triton.jit(do_not_specialize=["parts", "cols"])
def add_partials_kernel(
    partial_ptr: tl.tensor, first_ptr: tl.tensor, second_ptr: tl.tensor, parts: tl.tensor, cols: tl.tensor,
    tile_p: tl.constexpr, tile_n: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the rows of one or two float32 [parts, cols] matrices that lie behind each other."""
    col = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    part = tl.arange(0, tile_p)
    which = tl.program_id(1)
    total = tl.zeros([tile_p, tile_n], tl.float32)
    for start in range(0, parts, tile_p):
        inside = (part < parts - start)[:, None] & (col < cols)[None, :]
        row = (which * parts + start).to(tl.int64) + part[:, None]
        total += tl.load(partial_ptr + row * cols + col[None, :], mask=inside, other=0.0)
    result = tl.sum(total, 0)
    if which == 0:
        tl.store(first_ptr + col, result.to(first_ptr.dtype.element_ty), mask=col < cols)
    else:
        if second_ptr is not None:
            tl.store(second_ptr + col, result.to(second_ptr.dtype.element_ty), mask=col < cols)
