"""Operands and products of one FP8 linear layer, shared by every way to arrange them in an autograd graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._amax import ABSENT, record_amax
from .._slots import Slot
from ..kernels.gemm import dequantize, scaled_mm, supported
from ..kernels.quantize import Quantized, quantize
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
    y = scaled_mm(xq.data, wq.data.t(), xq.scale_inv, wq.scale_inv, dtype, bias)
    # Not `reshape`: an autograd.Function that returns a view forbids in-place activations behind the layer.
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(y, (*shape[:-1], wq.data.shape[0]))
    return result


def dgrad(gq: Quantized, wq: Quantized, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """`gq @ wq`, in the input's shape."""
    return scaled_mm(gq.data, wq.data, gq.scale_inv, wq.scale_inv, dtype).reshape(shape)


def wgrad(gq: Quantized, xq: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """`gq.T @ xq`, also where the number of tokens does not fit an FP8 product."""
    (tokens, out_features), in_features = gq.data.shape, xq.data.shape[1]
    if supported(out_features, tokens, in_features):
        return scaled_mm(gq.data.t(), xq.data, gq.scale_inv, xq.scale_inv, dtype)
    with torch.autocast(gq.data.device.type, enabled=False):
        g, x = (dequantize(q.data, q.scale_inv, torch.float32) for q in (gq, xq))
        return (g.t() @ x).to(dtype)


def rows(x: torch.Tensor) -> torch.Tensor:
    """[..., features] as a matrix of one token per row."""
    return x.reshape(-1, x.shape[-1])


def quantize_gradient(dy: torch.Tensor, slot: Slot, training: bool) -> Quantized:
    """Quantize the gradient of an output [..., out_features] as a matrix, and ask for an update."""
    # A compiled backward cannot set a flag on an object; the scope's exit commits without it, too.
    if training and not torch.compiler.is_compiling():
        slot.request()
    return quantize(rows(dy), slot, training and slot.scope.recording)


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
    amax: torch.Tensor


def quantize_weight(weight: torch.Tensor, slot: Slot, record: bool) -> Quantized:
    """Quantize a weight, once per scope; every use in a recording scope records its amax.

    A version counter proves nothing across steps (FSDP2 and `.data.copy_` write without it), and an
    inference tensor has none: so only a recording scope has a cache.
    """
    if isinstance(weight, GatheredWeight):
        return weight.use(slot, record)
    scope = slot.scope
    if not (record and scope.caching) or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return quantize(weight, slot, record)
    entry = scope.weight_cache.get(slot.name)
    if (
        entry is None
        or entry.serial != scope.serial
        or entry.weight is not weight
        or entry.version != weight._version
    ):
        amax = torch.full_like(slot.amax, ABSENT)
        quantized = quantize(weight, slot, record, amax=amax)
        entry = _CachedWeight(scope.serial, weight, weight._version, quantized, amax)
        scope.weight_cache[slot.name] = entry
    record_amax(slot.amax, entry.amax)
    return entry.quantized
