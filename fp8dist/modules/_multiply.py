"""One FP8 linear layer's forward and backward as plain functions, for nodes that hold several layers."""

from __future__ import annotations

import torch

from ..kernels.gemm import ALIGNMENT, supported
from ..kernels.quantize import Quantized, quantize
from ._products import dgrad, forward_product, layout_of, quantize_weight, rows, wgrad
from .linear import LinearSlots, Notices

Tensors = tuple[torch.Tensor | None, ...]


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: LinearSlots,
    *,
    training: bool,
    needs_dx: bool,
    needs_dw: bool,
    out_dtype: torch.dtype,
    notices: Notices,
) -> tuple[torch.Tensor, Tensors]:
    """Quantize both operands and compute `x @ weight.T + bias`.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features] of `out_dtype`, or None.
        slots: of this layer.
        training: record the amaxes of input and weight while a scope is open.
        needs_dx: keep the quantized weight for `gradients`.
        needs_dw: keep the quantized input for `gradients`.
        out_dtype: of the result.
        notices: where a weight gradient in high precision is said.

    Returns:
        [..., out_features], and four tensors for `gradients`: data and scale_inv of input (as a matrix) and
        of weight, each pair None if nobody needs it.
    """
    record = training and slots.input.scope.recording
    tokens = rows(x)
    xq = quantize(tokens, slots.input, record, layout=layout_of(rows=True, columns=needs_dw), share=True)
    wq = quantize_weight(weight, slots.weight, record, layout_of(rows=True, columns=needs_dx))
    y = forward_product(xq, wq, bias, x.shape, out_dtype)
    out_features, in_features = weight.shape
    if needs_dw and not supported(out_features, tokens.shape[0], in_features):
        notices.say(
            f"the number of tokens is no multiple of {ALIGNMENT}, so its weight gradient is computed in "
            "high precision (from the FP8 operands)"
        )
    kept: Tensors = xq.for_gradients() if needs_dw else (None, None)
    return y, (*kept, *(wq.for_gradients() if needs_dx else (None, None)))


def gradients(
    dy: torch.Tensor,
    saved: Tensors,
    slots: LinearSlots,
    *,
    training: bool,
    needs_db: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Tensors:
    """Quantize the gradient once and multiply it with what `multiply` kept. Asks for no update.

    Args:
        dy: [..., out_features].
        saved: from `multiply`.
        slots: of this layer.
        training: record the amax of the gradient while a scope is open.
        needs_db: sum the gradient for the bias, before it is quantized.
        dtypes: of the gradients of input and weight.

    Returns:
        Gradients of input [..., in_features], weight [out_features, in_features] and bias [out_features]
        of dtype `dy.dtype`; None where nothing was kept, or not asked for.
    """
    x_data, x_scale_inv, w_data, w_scale_inv = saved
    layout = layout_of(rows=w_data is not None, columns=x_data is not None)
    record = training and slots.grad_output.scope.recording
    gq = quantize(rows(dy), slots.grad_output, record, layout=layout, share=True)
    dx = dw = None
    if w_data is not None and w_scale_inv is not None:
        shape = torch.Size((*dy.shape[:-1], w_data.shape[1]))
        dx = dgrad(gq, Quantized(w_data, w_scale_inv), shape, dtypes[0])
    if x_data is not None and x_scale_inv is not None:
        dw = wgrad(gq, Quantized(x_data, x_scale_inv), dtypes[1])
    return dx, dw, rows(dy).sum(0) if needs_db else None
