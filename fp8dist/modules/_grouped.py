"""The FP8 linear layers of many experts as one autograd node, on a GPU.

One launch casts the tokens of all experts, one their weights, one their gradients; each expert keeps the scale and the
amax of its own slots. Products of small experts are one launch, too, where torch has such a product for their dtypes;
large ones, which keep a GPU busy each, and those with gradients in e5m2 start one after the other. The results are
those of the experts' separate products, up to the order in which these add up; see `supports` for where this runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from .._amax import ABSENT
from .._scope import ScopeState
from .._slots import Slot
from ..kernels import gemm
from ..kernels.gemm import RowGroups, grouped_supported, scaled_grouped_mm, scaled_mm
from ..kernels.quantize import runs_kernels
from ._products import update_guards
from .linear import LinearSlots

if TYPE_CHECKING:
    from ..kernels.triton.grouped import GroupedCast

MAX_GROUPS = 1023
"""Of one grouped product."""
MAX_ROWS = 2**24
"""Of one grouped cast, with what fills up its groups."""


def supports(
    x: torch.Tensor, weight: torch.Tensor, slots: Sequence[LinearSlots], counts: Sequence[int]
) -> bool:
    """Whether the node can compute this now. Otherwise the experts' layers do, one after the other: off a GPU, under a
    compiler or in a graph (which would keep the counts of its capture, but not their copies), with autocast or in
    float32, while a scale in use is not known yet, while casts are counted.

    Args:
        x: [T, in_features].
        weight: [num_experts, out_features, in_features].
        slots: of each expert.
        counts: tokens of each expert.
    """
    if not (runs_kernels(x) and runs_kernels(weight)) or x.numel() == 0:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    if torch.is_autocast_enabled("cuda") or torch.cuda.is_current_stream_capturing():
        return False
    experts, out_features, _ = weight.shape
    if experts > MAX_GROUPS or max(len(x) + 16 * experts, experts * out_features) >= MAX_ROWS:
        return False
    if slots[0].input.scope.tape is not None:
        return False
    for layer in slots:
        for slot in layer:
            if slot.casts is not None or slot.scale.device != x.device:
                return False
    # The weights of all experts are cast together.
    asked = [
        slot.warm
        for layer, n in zip(slots, counts, strict=True)
        for slot in (layer if n else (layer.weight,))
    ]
    return bool(torch.cat(asked).all())


class SlotCells:
    """Where the scales and the amaxes of one role's slots lie, for kernels that serve all experts."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self._table: tuple[tuple[int, ...], torch.Tensor] | None = None  # what it was made of, and the copy

    @property
    def dtype(self) -> torch.dtype:
        """FP8 dtype of the role."""
        return self.slots[0].dtype

    def addresses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two int64 [num_experts] on the slots' device: the addresses of the scales, and those of the amaxes.

        They are looked up at each call, since a new layout gives the slots new cells, and copied if they are not
        those of the call before; another stream does not wait for a copy of this one's.
        """
        device = self.slots[0].scale.device
        cells = [slot.scale.data_ptr() for slot in self.slots] + [slot.amax.data_ptr() for slot in self.slots]
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        source, table = (stream, *cells), self._table
        if table is None or table[0] != source:
            table = self._table = (source, gemm.to_device(np.array(cells, dtype=np.int64), device))
        scales, amaxes = table[1].split(len(self.slots))
        return scales, amaxes


class ExpertSlots:
    """The slots of one grouped layer, by expert and by role."""

    def __init__(self, layers: Sequence[LinearSlots]) -> None:
        self.layers = layers
        self.input = SlotCells([layer.input for layer in layers])
        self.weight = SlotCells([layer.weight for layer in layers])
        self.grad_output = SlotCells([layer.grad_output for layer in layers])

    @property
    def scope(self) -> ScopeState:
        """The one of all slots."""
        return self.layers[0].input.scope

    def records(self, training: bool) -> bool:
        """Whether amaxes are recorded now, which is noted; scales are usable from here on."""
        if self.scope.settle is not None:
            self.scope.settle()
        record = training and self.scope.recording
        if record:
            self.scope.record()
        return record


def experts_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: ExpertSlots,
    counts: Sequence[int],
    training: bool,
) -> torch.Tensor:
    """Compute `x[rows] @ weight[expert].T + bias[expert]` for each expert; `supports` comes first.

    A bias is added before the product is rounded where products start one by one, and after it where they are one
    launch.

    Args:
        x: [T, in_features], the tokens of the first expert first.
        weight: [num_experts, out_features, in_features].
        bias: [num_experts, out_features] or None.
        slots: of all experts.
        counts: tokens of each expert.
        training: record amaxes while a scope is open.

    Returns:
        [T, out_features] in the dtype of `x`.
    """
    y: torch.Tensor = _GroupedKernels.apply(x, weight, bias, slots, counts, training)
    return y


class _GroupedKernels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slots: ExpertSlots,
        counts: Sequence[int],
        training: bool,
    ) -> torch.Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        record = slots.records(training)
        groups = RowGroups.of(counts, x.device)
        xq = _cast(x, groups, slots.input, record, transpose=needs_dw, keep=True)
        wq = _quantized_weights(weight, slots, groups, record, transpose=needs_dx)
        y = _products(xq, wq, bias, groups, weight.shape, x.dtype)
        used = [slot for layer, n in zip(slots.layers, counts, strict=True) if n for slot in layer]
        ctx.save_for_backward(
            xq.data_t, xq.scale_inv, wq.data_t, wq.scale_inv, *update_guards(used, training)
        )
        ctx.groups, ctx.slots, ctx.training, ctx.shape = groups, slots, training, weight.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_columns, x_scale_inv, w_columns, w_scale_inv = ctx.saved_tensors[:4]
        groups: RowGroups = ctx.groups
        slots: ExpertSlots = ctx.slots
        if ctx.training:
            slots.layers[0].grad_output.request()
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        gq = _cast(
            dy,
            groups,
            slots.grad_output,
            slots.records(ctx.training),
            transpose=needs_dw,
            keep=needs_dx,
            sums_dtype=dy.dtype if needs_db else None,
        )
        dx = _dgrad(gq, w_columns, w_scale_inv, groups, ctx.shape, dy.dtype) if needs_dx else None
        dw = _wgrad(gq, x_columns, x_scale_inv, groups, dy.dtype) if needs_dw else None
        return dx, dw, gq.sums, None, None, None


def _cast(
    x: torch.Tensor,
    groups: RowGroups,
    cells: SlotCells,
    record: bool,
    *,
    transpose: bool,
    keep: bool,
    sums_dtype: torch.dtype | None = None,
) -> GroupedCast:
    from ..kernels.triton.grouped import cast_groups

    scales, amaxes = cells.addresses()
    return cast_groups(
        x,
        groups,
        scales,
        amaxes if record else None,
        None,
        cells.dtype,
        transpose=transpose,
        keep=keep,
        sums_dtype=sums_dtype,
    )


@dataclass(frozen=True)
class _CachedExperts:
    """Quantized weights, valid in one scope for one version of one tensor."""

    serial: int
    weight: torch.Tensor
    version: int
    quantized: GroupedCast
    amax: torch.Tensor
    """float32 [num_experts]."""


def _quantized_weights(
    weight: torch.Tensor, slots: ExpertSlots, groups: RowGroups, record: bool, *, transpose: bool
) -> GroupedCast:
    """The weights of all experts as one matrix [num_experts * out_features, in_features]; by the rules of
    `quantize_weight`: once per scope, and every use records the amaxes of the experts that have tokens.
    """
    scope, cells = slots.scope, slots.weight
    if not record:
        return _cast_weights(weight, cells, None, transpose)
    from ..kernels.triton.grouped import record_groups

    key = f"casts from {cells.slots[0].name}"
    caching = scope.caching and not torch.is_inference_mode_enabled()
    entry: _CachedExperts | None = scope.weight_cache.get(key) if caching else None
    if (
        entry is None
        or entry.serial != scope.serial
        or entry.weight is not weight
        or entry.version != weight._version
        or (transpose and entry.quantized.data_t is None)
    ):
        amax = torch.full((len(cells.slots),), ABSENT, device=weight.device)
        quantized = _cast_weights(weight, cells, amax, transpose)
        version = weight._version if caching else 0  # an inference tensor has none
        entry = _CachedExperts(scope.serial, weight, version, quantized, amax)
        if caching:
            scope.weight_cache[key] = entry
    record_groups(entry.amax, cells.addresses()[1], groups)
    return entry.quantized


def _cast_weights(
    weight: torch.Tensor, cells: SlotCells, amax: torch.Tensor | None, transpose: bool
) -> GroupedCast:
    from ..kernels.triton.grouped import cast_groups

    experts, out_features, in_features = weight.shape
    matrix = weight.detach().reshape(experts * out_features, in_features)
    groups = RowGroups.of([out_features] * experts, weight.device)
    return cast_groups(
        matrix, groups, cells.addresses()[0], None, amax, cells.dtype, transpose=transpose, keep=True
    )


def _together(
    groups: RowGroups, shape: torch.Size, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Whether the products of all experts shall be one launch."""
    _, out_features, in_features = shape
    work = sum(groups.counts) * out_features * in_features / len(groups)
    return work < gemm.GROUPED_WORK and grouped_supported(a.dtype, b.dtype, dtype, a.device)


def _spread(factors: torch.Tensor, times: int) -> torch.Tensor:
    """[num_experts] to [num_experts * times], each one `times` times."""
    return factors.unsqueeze(1).expand(-1, times).reshape(-1)


def _used(groups: RowGroups) -> Iterator[int]:
    return (expert for expert, count in enumerate(groups.counts) if count)


def _products(
    xq: GroupedCast,
    wq: GroupedCast,
    bias: torch.Tensor | None,
    groups: RowGroups,
    shape: torch.Size,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`x @ w.T + bias`, expert by expert."""
    assert xq.data is not None and wq.data is not None
    experts, out_features, _ = shape
    weights = wq.data.view(shape)
    if _together(groups, shape, xq.data, weights, dtype):
        factors = wq.row_scale_inv.view(experts, out_features)
        y = scaled_grouped_mm(
            xq.data, weights.transpose(1, 2), xq.row_scale_inv, factors, groups.ends, fast=True
        )
        if bias is not None:
            from ..kernels.triton.grouped import add_bias

            add_bias(y, bias, groups)
        return y
    y = xq.data.new_empty(len(xq.data), out_features, dtype=dtype)
    x_factors, w_factors = xq.scale_inv.split(1), wq.scale_inv.split(1)
    for e in _used(groups):
        rows = groups.rows[e]
        own = None if bias is None else bias[e]
        scaled_mm(
            xq.data[rows], weights[e].t(), x_factors[e], w_factors[e], dtype, own, out=y[rows], fast=True
        )
    return y


def _dgrad(
    gq: GroupedCast,
    w_columns: torch.Tensor,
    w_scale_inv: torch.Tensor,
    groups: RowGroups,
    shape: torch.Size,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`g @ w`, expert by expert; `w_columns` [in_features, num_experts * out_features]."""
    assert gq.data is not None
    experts, out_features, in_features = shape
    weights = w_columns.view(in_features, experts, out_features).permute(1, 2, 0)
    if _together(groups, shape, gq.data, w_columns, dtype):
        factors = _spread(w_scale_inv, in_features).view(experts, in_features)
        return scaled_grouped_mm(gq.data, weights, gq.row_scale_inv, factors, groups.ends)
    dx = gq.data.new_empty(len(gq.data), in_features, dtype=dtype)
    g_factors, w_factors = gq.scale_inv.split(1), w_scale_inv.split(1)
    for e in _used(groups):
        rows = groups.rows[e]
        scaled_mm(gq.data[rows], weights[e], g_factors[e], w_factors[e], dtype, out=dx[rows])
    return dx


def _wgrad(
    gq: GroupedCast,
    x_columns: torch.Tensor,
    x_scale_inv: torch.Tensor,
    groups: RowGroups,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`g.T @ x`, expert by expert: of the transposed copies, whose zeros make any number of tokens fit."""
    g_columns = gq.data_t
    assert g_columns is not None
    experts, out_features, in_features = len(groups), len(g_columns), len(x_columns)
    shape = torch.Size((experts, out_features, in_features))
    if _together(groups, shape, g_columns, x_columns, dtype):
        g_rows, x_rows = _spread(gq.scale_inv, out_features), _spread(x_scale_inv, in_features)
        return scaled_grouped_mm(g_columns, x_columns.t(), g_rows, x_rows, groups.column_ends)
    dw = g_columns.new_empty(shape, dtype=dtype)
    g_factors, x_factors = gq.scale_inv.split(1), x_scale_inv.split(1)
    for e, columns in enumerate(groups.columns):
        g, x = g_columns[:, columns], x_columns[:, columns]
        scaled_mm(g, x.t(), g_factors[e], x_factors[e], dtype, out=dw[e])
    return dw
