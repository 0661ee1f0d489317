"""The linear layers of many experts as one module: each multiplies its own tokens, in FP8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ._functional import check_choice
from ._grouped import ExpertSlots, experts_linear, supports
from ._multiply import gradients, multiply
from ._products import update_guards
from ._split import SplitsBackward, WeightGradients
from .linear import LinearSlots, Notices, Registrar, check_operands, describe, linear

PATHS = ("grouped", "looped")


class GroupedLinear(SplitsBackward):
    """One linear layer per local expert, over tokens that are sorted by expert.

    Experts go by their global index, so they keep their scales when expert parallelism moves them.
    One without tokens records nothing, not even its weight, and gets gradients of zero. Its weight
    gradients can be forked, one expert after the other, but not deferred: an expert's weight is a part of a parameter.

    Attributes:
        weight: [num_experts_local, out_features, in_features].
        bias: [num_experts_local, out_features] or None.
        slots: three slots per local expert; None if it computes in high precision.
    """

    bias: nn.Parameter | None
    slots: tuple[LinearSlots, ...] | None

    def __init__(
        self,
        num_experts_local: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        coordinator: Registrar,
        name: str,
        expert_offset: int = 0,
        path: str = "grouped",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sharded: bool = False,
    ) -> None:
        """Create the parameters and declare three slots per expert.

        Args:
            num_experts_local: experts on this rank, at least 1.
            in_features: size of the last dimension of the input.
            out_features: size of the last dimension of the output.
            bias: add a bias per expert.
            coordinator: declares `<name>.expert.<global index>.input`, `.weight` and `.grad_output`.
            name: global name of this layer, the same on every rank that holds a part of its experts.
            expert_offset: global index of the first local expert.
            path: `grouped`, one autograd node for all experts, or `looped`, one per expert. The results
                have the same bits; but on a GPU, from the second step on, the node casts all experts' tensors in
                one launch each and multiplies together what is small, so that sums may be rounded differently.
            device: of the parameters.
            dtype: of the parameters: float32, bfloat16 or float16.
            sharded: ranks hold different parts of an expert's weight under one name.

        Raises:
            ValueError: no experts, a negative offset, an unknown path; the name is empty or taken.
        """
        super().__init__()
        check_choice("path", path, PATHS)
        if num_experts_local < 1 or expert_offset < 0:
            raise ValueError(
                f"expected at least one local expert and an offset >= 0 but got {num_experts_local} and "
                f"{expert_offset}; a rank without experts needs no GroupedLinear"
            )
        if not name:  # before `.expert` hides it
            raise ValueError("an FP8 layer needs a name, expected its global FQN but got ''; pass name=")
        self.num_experts_local, self.expert_offset = num_experts_local, expert_offset
        self.in_features, self.out_features = in_features, out_features
        self.path = path
        shape = (num_experts_local, out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()
        slots = [
            LinearSlots.declare(
                coordinator,
                f"{name}.expert.{expert_offset + i}",
                self,
                index=i,
                sharded=sharded,
            )
            for i in range(num_experts_local)
        ]
        held = tuple(s for s in slots if s is not None)  # one shape, so all or none
        self.slots = held or None
        self._expert_slots = ExpertSlots(held) if held else None
        self._weight_gradients = (WeightGradients(name),)
        self._notices = Notices(name)

    def reset_parameters(self) -> None:
        """Initialize each expert as `nn.Linear` does."""
        for weight in self.weight.detach().unbind(0):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor, tokens_per_expert: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Multiply each expert's tokens by its weight; dtypes as in `modules.linear.linear`.

        Args:
            input: [T, in_features], the tokens of the first local expert first.
            tokens_per_expert: num_experts_local counts >= 0, in the experts' order, that add up to T; a
                list, or an integer tensor (one on a GPU makes the host wait for it).

        Returns:
            [T, out_features].

        Raises:
            ValueError: counts, a dtype or a shape that does not fit.
        """
        autocast = torch.is_autocast_enabled(input.device.type)
        check_operands(input, self.weight[0], autocast=autocast)
        counts = self._check_counts(input, tokens_per_expert)
        if self.slots is None or self.path == "looped" or self.wgrad != "fused" or not self._fp8:
            return self._looped(input, counts)
        if self._expert_slots is not None and supports(input, self.weight, self.slots, counts):
            return experts_linear(input, self.weight, self.bias, self._expert_slots, counts, self.training)
        out_dtype = torch.get_autocast_dtype(input.device.type) if autocast else input.dtype
        bias = self.bias if self.bias is None else self.bias.to(out_dtype)
        y: torch.Tensor = _GroupedFunction.apply(
            input, self.weight, bias, self.slots, counts, out_dtype, self.training, self._notices
        )
        return y

    def _check_counts(
        self, input: torch.Tensor, tokens_per_expert: Sequence[int] | torch.Tensor
    ) -> list[int]:
        if isinstance(tokens_per_expert, torch.Tensor):
            if tokens_per_expert.is_floating_point():
                raise ValueError(
                    f"expected integer tokens_per_expert but got {tokens_per_expert.dtype}; pass the counts of a "
                    "bincount"
                )
            tokens_per_expert = tokens_per_expert.tolist()
        counts = list(tokens_per_expert)
        tokens = input.shape[0]
        if (
            input.dim() != 2
            or len(counts) != self.num_experts_local
            or min(counts) < 0
            or sum(counts) != tokens
        ):
            raise ValueError(
                f"expected an input [T, {self.in_features}] and {self.num_experts_local} counts >= 0 that add up to "
                f"T but got {tuple(input.shape)} and {counts}; sort the tokens by local expert first"
            )
        return counts

    @property
    def _fp8(self) -> bool:
        return self.slots is not None and self.slots[0].input.scope.enabled

    def _looped(self, input: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The reference: the layers one after the other."""
        slots: Sequence[LinearSlots | None] = self.slots or [None] * self.num_experts_local
        biases = [None] * self.num_experts_local if self.bias is None else self.bias.unbind(0)
        outputs = [
            # No tokens: nothing to record, but part of the graph, so that every gradient is zero and not None.
            linear(
                x,
                weight,
                bias,
                slot,
                training=self.training,
                notices=self._notices,
                wgrad=self._weight_gradients[0],
            )
            if len(x)
            else F.linear(x, weight, bias)
            for x, weight, bias, slot in zip(
                input.split(counts), self.weight.unbind(0), biases, slots, strict=True
            )
        ]
        return torch.cat(outputs)

    def extra_repr(self) -> str:
        """Experts, features, path, and which FP8 formats are in use."""
        last = self.expert_offset + self.num_experts_local - 1
        return (
            f"experts={self.expert_offset}..{last}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, path={self.path}, "
            f"first: {describe(self.slots[0] if self.slots else None)}"
        )


class _GroupedFunction(torch.autograd.Function):
    """All experts in one node, one after the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slots: tuple[LinearSlots, ...],
        counts: list[int],
        out_dtype: torch.dtype,
        training: bool,
        notices: Notices,
    ) -> torch.Tensor:
        needs_dx, needs_dw, ctx.needs_db = ctx.needs_input_grad[:3]
        ctx.slots, ctx.counts, ctx.training = slots, counts, training
        ctx.x_dtype, ctx.weight_dtype, ctx.weight_shape = x.dtype, weight.dtype, weight.shape
        y = x.new_empty(x.shape[0], weight.shape[1], dtype=out_dtype)
        weights = _expert_weights(weight, slots, training)
        kept: list[torch.Tensor | None] = []
        for expert, rows in _used(counts):
            y[rows], parts = multiply(
                x[rows],
                weights[expert],
                None if bias is None else bias[expert],
                slots[expert],
                training=training,
                needs_dx=needs_dx,
                needs_dw=needs_dw,
                out_dtype=out_dtype,
                notices=notices,
            )
            kept += parts
        used = [slot for expert, _ in _used(counts) for slot in slots[expert]]
        ctx.save_for_backward(*kept, *update_guards(used, training))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        used = _used(ctx.counts)
        kept = ctx.saved_tensors
        if ctx.training and used and not torch.compiler.is_compiling():
            ctx.slots[0].grad_output.request()
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        experts, out_features, in_features = ctx.weight_shape
        dx = dy.new_empty(dy.shape[0], in_features, dtype=ctx.x_dtype) if needs_dx else None
        dw = dy.new_zeros(ctx.weight_shape, dtype=ctx.weight_dtype) if needs_dw else None
        db = dy.new_zeros(experts, out_features) if ctx.needs_db else None
        for i, (expert, rows) in enumerate(used):
            parts = gradients(
                dy[rows],
                kept[4 * i : 4 * i + 4],
                ctx.slots[expert],
                training=ctx.training,
                needs_db=ctx.needs_db,
                dtypes=(ctx.x_dtype, ctx.weight_dtype),
            )
            places: tuple[slice | int, ...] = (rows, expert, expert)
            for whole, place, part in zip((dx, dw, db), places, parts, strict=True):
                if whole is not None and part is not None:
                    whole[place].copy_(part)
        return dx, dw, db, None, None, None, None, None


def _expert_weights(
    weight: torch.Tensor, slots: tuple[LinearSlots, ...], training: bool
) -> tuple[torch.Tensor, ...]:
    """The experts' weights as views: the same ones within a recording scope, whose cache knows them again."""
    scope = slots[0].weight.scope
    compiling = torch.compiler.is_compiling()
    if not (training and scope.caching) or compiling or torch.is_inference_mode_enabled():
        return weight.unbind(0)
    key = f"experts from {slots[0].weight.name}"
    known: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = scope.weight_cache.get(key)
    if known is None or known[0] is not weight:
        known = scope.weight_cache[key] = (weight, weight.detach().unbind(0))
    return known[1]


def _used(counts: list[int]) -> list[tuple[int, slice]]:
    """Experts that have tokens, and the rows of these."""
    used, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            used.append((expert, slice(start, start + count)))
        start += count
    return used
