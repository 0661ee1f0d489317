"""Operands and products of one FP8 linear layer, shared by every way to arrange them in an autograd graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._slots import Slot
from ..kernels.gemm import dequantize, scaled_mm, supported
from ..kernels.quantize import FP8_MAX, Layout, Quantized, prepare, quantize, runs_kernels
from ._fsdp import GatheredWeight
from ._functional import ACTIVATIONS


class Output(NamedTuple):
    """What one layer gives, forward and backward."""

    dtype: torch.dtype
    """Of the product."""
    dx_dtype: torch.dtype
    """In which the gradient of the input is computed."""
    activation: str | None = None
    """Applied to the product in float32."""

    def activate(self, y: torch.Tensor) -> torch.Tensor:
        """What the layer returns for the product `y` [..., out_features]."""
        return y if self.activation is None else ACTIVATIONS[self.activation].apply(y.float())

    def kept(self, y: torch.Tensor) -> torch.Tensor | None:
        """What `derive` needs of the product."""
        return None if self.activation is None else y

    def derive(self, dy: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the product, for `dy`, that of what the layer returned."""
        if self.activation is None:
            return dy
        assert kept is not None
        return ACTIVATIONS[self.activation].derive(dy.float(), kept.float())


def forward_product(
    xq: Quantized, wq: Quantized, bias: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """`xq @ wq.T + bias`, with the leading dimensions of `shape`, the input's."""
    y = scaled_mm(xq.data, wq.data.t(), xq.scale_inv, wq.scale_inv, dtype, bias, fast=True)
    if len(shape) == 2:
        return y
    # Not `reshape`: an autograd.Function that returns a view forbids in-place activations behind the layer.
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(y, (*shape[:-1], wq.data.shape[0]))
    return result


def dgrad(gq: Quantized, wq: Quantized, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """`gq @ wq`, in the input's shape; `wq` as `for_gradients` gave it."""
    dx = scaled_mm(gq.data, wq.data, gq.scale_inv, wq.scale_inv, dtype)
    return dx if len(shape) == 2 else dx.reshape(shape)


def wgrad(gq: Quantized, xq: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """`gq.T @ xq`, also where the number of tokens does not fit an FP8 product; `xq` as `for_gradients` gave it."""
    g = gq.for_gradients()[0]
    (tokens, out_features), in_features = g.shape, xq.data.shape[1]
    if supported(out_features, tokens, in_features):
        return scaled_mm(g.t(), xq.data, gq.scale_inv, xq.scale_inv, dtype)
    with torch.autocast(g.device.type, enabled=False):
        factors = (dequantize(*pair, torch.float32) for pair in ((g, gq.scale_inv), (xq.data, xq.scale_inv)))
        return (next(factors).t() @ next(factors)).to(dtype)


def rows(x: torch.Tensor) -> torch.Tensor:
    """[..., features] as a matrix of one token per row."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def quantize_gradient(
    dy: torch.Tensor, slot: Slot, training: bool, layout: int = Layout.BOTH, *, share: bool = False
) -> Quantized:
    """Quantize the gradient of an output [..., out_features] as a matrix, and ask for an update.

    `share` as for `quantize`.
    """
    # A compiled backward cannot set a flag on an object; the scope's exit commits without it, too.
    if training and not torch.compiler.is_compiling():
        slot.request()
    return quantize(rows(dy), slot, training and slot.scope.recording, layout=layout, share=share)


def quantize_gradient_and_bias(
    dy: torch.Tensor,
    slot: Slot,
    training: bool,
    *,
    rows_wanted: bool,
    columns: bool,
    db: bool,
    share: bool = False,
) -> tuple[Quantized, torch.Tensor | None]:
    """`quantize_gradient`, and the gradient of the bias: the sum over the tokens before they are quantized.

    Args:
        dy: [tokens, out_features].
        slot: the gradient's.
        training: record, and ask for an update.
        rows_wanted: for the gradient of the input.
        columns: for that of the weight.
        db: whether the sum is wanted.
        share: see `quantize`.
    """
    layout = layout_of(rows=rows_wanted, columns=columns)
    if not (db and runs_kernels(dy) and bool(slot.warm)):
        return quantize_gradient(dy, slot, training, layout, share=share), dy.sum(0) if db else None
    from ..kernels.triton import cast_gradient

    if training:
        slot.request()
    record = training and slot.scope.recording
    cast = prepare(dy, slot, record)
    result, total = cast_gradient(
        dy,
        cast.scale,
        cast.amax if record else None,
        slot.dtype,
        FP8_MAX[slot.dtype],
        transpose=bool(layout & Layout.COLUMNS),
        keep=bool(layout & Layout.ROWS),
        scale_inv=cast.scale_inv if share else None,
        casts=cast.casts,
        want_db=True,
        db_dtype=dy.dtype,
    )
    by_columns = None if result.data_t is None else result.data_t.t()
    data = by_columns if result.data is None else result.data
    assert data is not None
    return Quantized(data, result.scale_inv, by_columns), total


class KeptWeight(NamedTuple):
    """A weight in a node that waits for its backward."""

    data: torch.Tensor | None
    """FP8 for the gradient of the input; or the weight itself, which is then quantized again; or None."""
    scale_inv: torch.Tensor | None
    """None where `data` is the weight itself."""

    def columns(self, slot: Slot) -> Quantized:
        """The weight as the gradient of the input takes it."""
        assert self.data is not None
        if self.scale_inv is not None:
            return Quantized(self.data, self.scale_inv)
        again = quantize(self.data, slot, False, layout=Layout.COLUMNS)
        return Quantized(*again.for_gradients())


def keep_weight(
    weight: torch.Tensor, slot: Slot, record: bool, needs_dx: bool
) -> tuple[Quantized, KeptWeight]:
    """Quantize a weight for the forward, and keep what the gradient of the input will need.

    On a GPU a weight that a scope uses once is quantized a second time in the backward, which costs less than the
    memory of its FP8 copies would. From the second scope on it is known which weights are used more often (by
    several microbatches); those are quantized once per scope, in both orders.
    """
    once = weight.is_cuda and record and slot.scope.caching and slot.name not in slot.scope.reused
    if not once or isinstance(weight, GatheredWeight) or torch.compiler.is_compiling():
        wq = quantize_weight(weight, slot, record, layout_of(rows=True, columns=needs_dx))
        return wq, KeptWeight(*wq.for_gradients()) if needs_dx else KeptWeight(None, None)
    slot.scope.used(slot.name)
    wq = quantize(weight, slot, record, share=True)  # of this forward only: the backward quantizes again
    return wq, KeptWeight(weight, None) if needs_dx else KeptWeight(None, None)


def layout_of(*, rows: bool, columns: bool) -> int:
    """What to ask of `quantize`: rows for one product, columns for another."""
    return Layout.BOTH if rows and columns else Layout.COLUMNS if columns else Layout.ROWS


def update_guards(slots: Iterable[Slot], training: bool) -> tuple[torch.Tensor, ...]:
    """What a node saves for its version counters only: an update that lands before its backward then raises.

    A layer in eval mode takes no part in the step, so an update is none of its business; nor is it where updates
    between the two are wanted.
    """
    return tuple(slot.scale for slot in slots if slot.scope.guarded) if training else ()


@dataclass(frozen=True)
class _CachedWeight:
    """A quantized weight, valid in one scope for one version of one tensor."""

    serial: int
    weight: torch.Tensor
    version: int
    quantized: Quantized


def quantize_weight(weight: torch.Tensor, slot: Slot, record: bool, layout: int = Layout.BOTH) -> Quantized:
    """Quantize a weight, once per scope.

    Later uses need not record it again: what was recorded stays until the scope commits. A version counter proves
    nothing across steps (FSDP2 and `.data.copy_` write without it), and an inference tensor has none: so only a
    recording scope has a cache.
    """
    if isinstance(weight, GatheredWeight):
        return weight.use(slot, record)
    scope = slot.scope
    if not (record and scope.caching) or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return quantize(weight, slot, record, layout=layout)
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        # A graph would keep what was quantized before it, and what it quantizes has no values before it is replayed.
        return quantize(weight, slot, record, layout=layout)
    entry = scope.weight_cache.get(slot.name)
    if (
        entry is None
        or entry.serial != scope.serial
        or entry.weight is not weight
        or entry.version != weight._version
        or (layout & Layout.COLUMNS and entry.quantized.columns is None and weight.is_cuda)
    ):
        # Whoever uses it in a backward has saved it there, so an update in between is noticed.
        quantized = quantize(weight, slot, record, layout=layout, share=True)
        entry = _CachedWeight(scope.serial, weight, weight._version, quantized)
        scope.weight_cache[slot.name] = entry
    return entry.quantized
