"""A norm and one or two FP8 linear layers as one autograd node, on a GPU.

Each tensor is read once: the norm, the activation and its derivative write FP8 at once, in the order that the
products take, and nothing waits in high precision for the backward but what the layers' own inputs are::

    forward    x ─norm─▶ xq ─fc1─▶ h ─activation─▶ aq ─fc2─▶ y
    backward   dy ─▶ gq ─fc2─▶ da ─derivative─▶ gq1 ─fc1─▶ dn ─norm─▶ dx      (the weight gradients beside it)

The quantized inputs of both layers are made again in the backward, from x and from h: that costs one more reading of
each, and saves half the memory that they take. The results are those of the separate nodes, see `supports` for
where these run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..kernels.gemm import scaled_mm, supported
from ..kernels.quantize import FP8_MAX, Layout, Quantized, prepare, runs_kernels
from ._fsdp import GatheredWeight, ShardedWeight
from ._products import (
    KeptWeight,
    dgrad,
    keep_weight,
    layout_of,
    quantize_gradient_and_bias,
    rows,
    update_guards,
    wgrad,
)
from .linear import LinearSlots

MAX_FEATURES = 16384  # of a row that the norm kernels take


class Layers(NamedTuple):
    """What the node computes besides its tensors."""

    normalization: str
    eps: float
    slots: tuple[LinearSlots, ...]
    """Of fc1, and of fc2 if there is one."""
    activation: str
    """Between fc1 and fc2."""
    training: bool


def supports(
    x: torch.Tensor, weights: Sequence[torch.Tensor], slots: Sequence[LinearSlots | None], mode: str
) -> bool:
    """Whether the node can compute this now. Otherwise separate nodes do: off a GPU, under a compiler, for DTensors,
    for weight gradients apart from the rest, or in the first step (no scale is known yet).
    """
    if mode != "fused" or not runs_kernels(x) or torch.is_autocast_enabled("cuda"):
        return False
    if x.shape[-1] > MAX_FEATURES or x.numel() == 0 or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if any(isinstance(w, GatheredWeight | ShardedWeight) or not w.is_cuda for w in weights):
        return False
    tokens = x.numel() // x.shape[-1]
    if not all(supported(w.shape[0], tokens, w.shape[1]) for w in weights):
        return False
    for layer in slots:
        if layer is None or not layer.input.scope.enabled:
            return False
        if not all(bool(slot.warm) for slot in layer):
            return False
    return True


def fused(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    parameters: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    layers: Layers,
) -> torch.Tensor:
    """Compute `fc2(activation(fc1(norm(x))))`, or `fc1(norm(x))`.

    Args:
        x: [..., hidden_size].
        norm_weight: [hidden_size].
        norm_bias: [hidden_size] or None.
        parameters: weight and bias of each layer.
        layers: what to compute.
    """
    (w1, b1), (w2, b2) = (*parameters, (None, None))[:2]
    y: torch.Tensor = _FusedFunction.apply(x, norm_weight, norm_bias, w1, b1, w2, b2, layers)
    return y


class _FusedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor | None,
        b2: torch.Tensor | None,
        layers: Layers,
    ) -> torch.Tensor:

        first, second = layers.slots[0], layers.slots[-1]
        record = layers.training and first.input.scope.recording
        tokens = rows(x)
        needs = ctx.needs_input_grad
        needs_dn = any(needs[:3])
        normed = _normalize(tokens, norm_weight, norm_bias, layers, record, transpose=False)
        w1q, kept1 = keep_weight(w1, first.weight, record, needs_dn)
        y = h = scaled_mm(normed.data, w1q.data.t(), normed.scale_inv, w1q.scale_inv, x.dtype, b1, fast=True)
        kept2 = KeptWeight(None, None)
        if w2 is not None:
            aq = _activate(h, layers, record, rows_wanted=True)
            w2q, kept2 = keep_weight(w2, second.weight, record, needs_dn or any(needs[3:5]))
            y = scaled_mm(aq.data, w2q.data.t(), aq.scale_inv, w2q.scale_inv, x.dtype, b2, fast=True)
        ctx.save_for_backward(
            tokens, norm_weight, norm_bias, normed.mean, normed.rstd, *kept1, *kept2,
            h if w2 is not None else None,
            *(guard for slots in layers.slots for guard in update_guards(slots, layers.training)),
        )  # fmt: skip
        ctx.layers, ctx.shape = layers, x.shape
        ctx.dtypes = w1.dtype, w1.dtype if w2 is None else w2.dtype
        result: torch.Tensor = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[1]))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from ..kernels import triton as kernels

        tokens, norm_weight, norm_bias, mean, rstd, *kept = ctx.saved_tensors
        kept1, kept2, h = KeptWeight(*kept[:2]), KeptWeight(*kept[2:4]), kept[4]
        layers: Layers = ctx.layers
        needs = ctx.needs_input_grad
        needs_dn = any(needs[:3])
        dw2 = db2 = None
        gradient = rows(dy)
        if h is not None:
            second = layers.slots[1]
            below = needs_dn or any(needs[3:5])
            g2, db2 = quantize_gradient_and_bias(
                gradient,
                second.grad_output,
                layers.training,
                rows_wanted=below,
                columns=needs[5],
                db=needs[6],
            )
            if needs[5]:
                a_columns = _activate(h, layers, record=False, rows_wanted=False)
                dw2 = wgrad(g2, a_columns, ctx.dtypes[1])
                del a_columns  # the most memory is in use a little later
            if below:
                w2q = kept2.columns(second.weight)
                gradient = dgrad(g2, w2q, torch.Size((len(tokens), w2q.data.shape[1])), tokens.dtype)
            else:
                return None, None, None, None, None, dw2, db2, None
            del g2
        g1, db1 = _first_gradient(gradient, h, layers, needs, needs_dn)
        del gradient
        dx = dnw = dnb = dw1 = None
        if needs[3]:
            normed = _normalize(tokens, norm_weight, norm_bias, layers, record=False, transpose=True)
            dw1 = wgrad(g1, Quantized(normed.data_t.t(), normed.scale_inv), ctx.dtypes[0])
            del normed
        if needs_dn:
            dn = dgrad(g1, kept1.columns(layers.slots[0].weight), tokens.shape, tokens.dtype)
            dx, dnw, dnb = kernels.norm_backward(dn, tokens, norm_weight, mean, rstd, layers.normalization)
            dx = dx.view(ctx.shape)
        return dx, dnw, None if norm_bias is None else dnb, dw1, db1, dw2, db2, None


def _normalize(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layers: Layers,
    record: bool,
    *,
    transpose: bool,
) -> Any:
    """The quantized input of fc1: by rows for the forward, with columns for its weight gradient."""
    from ..kernels import triton as kernels

    slot = layers.slots[0].input
    cast = prepare(tokens, slot, record)
    return kernels.norm_cast(
        tokens,
        weight,
        bias,
        layers.eps,
        layers.normalization,
        cast.scale,
        cast.amax if record else None,
        slot.dtype,
        FP8_MAX[slot.dtype],
        transpose=transpose,
        casts=cast.casts,
    )


def _activate(h: torch.Tensor, layers: Layers, record: bool, *, rows_wanted: bool) -> Quantized:
    """The quantized input of fc2: by rows for the forward, by columns for its weight gradient."""
    from ..kernels import triton as kernels

    slot = layers.slots[1].input
    cast = prepare(h, slot, record)
    result = kernels.activation_cast(
        h,
        layers.activation,
        cast.scale,
        cast.amax if record else None,
        slot.dtype,
        FP8_MAX[slot.dtype],
        transpose=not rows_wanted,
        keep=rows_wanted,
        casts=cast.casts,
    )
    data = result.data if result.data_t is None else result.data_t.t()
    assert data is not None
    return Quantized(data, result.scale_inv, None if rows_wanted else data)


def _first_gradient(
    gradient: torch.Tensor, h: torch.Tensor | None, layers: Layers, needs: Sequence[bool], needs_dn: bool
) -> tuple[Quantized, torch.Tensor | None]:
    """The quantized gradient of fc1's output, and that of its bias."""
    slot = layers.slots[0].grad_output
    if h is None:
        return quantize_gradient_and_bias(
            gradient, slot, layers.training, rows_wanted=needs_dn, columns=needs[3], db=needs[4]
        )
    from ..kernels import triton as kernels

    layout = layout_of(rows=needs_dn, columns=needs[3])
    record = layers.training and slot.scope.recording
    cast = prepare(gradient, slot, record)
    result, db = kernels.activation_backward_cast(
        gradient,
        h,
        layers.activation,
        cast.scale,
        cast.amax if record else None,
        slot.dtype,
        FP8_MAX[slot.dtype],
        transpose=bool(layout & Layout.COLUMNS),
        keep=bool(layout & Layout.ROWS),
        casts=cast.casts,
        want_db=needs[4],
        db_dtype=h.dtype,
    )
    columns = None if result.data_t is None else result.data_t.t()
    data = columns if result.data is None else result.data
    assert data is not None
    return Quantized(data, result.scale_inv, columns), db
