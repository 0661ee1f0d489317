"""The FP8 matrix product, and what replaces it where the hardware has none."""

from __future__ import annotations

import torch

ALIGNMENT = 16


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
) -> torch.Tensor:
    """Multiply two FP8 matrices, undo their scales, add the bias, and round once to `out_dtype`.

    Args:
        a: float8 [M, K], any strides; at most one of `a` and `b` is e5m2.
        b: float8 [K, N], any strides. Fast without a copy: `a` row-major, `b` the transpose of a
            row-major matrix.
        a_scale_inv: float32 [1].
        b_scale_inv: float32 [1].
        out_dtype: float32, bfloat16 or float16.
        bias: [N] of `out_dtype`, or None.

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
        empty = torch.zeros(m, n, dtype=out_dtype, device=a.device)
        return empty if bias is None else empty + bias
    if a.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # There torch multiplies dequantized matrices, which autocast would round to bfloat16 first.
        with torch.autocast("cpu", enabled=False):
            return _multiply(a, b, a_scale_inv, b_scale_inv, out_dtype, bias)
    return _multiply(a, b, a_scale_inv, b_scale_inv, out_dtype, bias)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    fused = bias is not None and out_dtype != torch.float32  # cuBLASLt adds no bias to a float32 result
    product = torch._scaled_mm(
        _row_major(a),
        _row_major(b.t()).t(),
        scale_a=a_scale_inv,
        scale_b=b_scale_inv,
        bias=bias if fused else None,
        out_dtype=out_dtype,
    )
    return product if bias is None or fused else product + bias


def _row_major(matrix: torch.Tensor) -> torch.Tensor:
    # Not `.contiguous()`: that asks fake GPU tensors for CUDA, and no CPU machine could check layouts.
    return matrix if matrix.is_contiguous() else matrix.clone(memory_format=torch.contiguous_format)


def dequantize(q: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that an FP8 tensor stands for.

    Args:
        q: float8, any shape.
        scale_inv: float32 [1].
        dtype: of the result; the product is taken in float32 and rounded once.
    """
    return (q.float() * scale_inv).to(dtype)
