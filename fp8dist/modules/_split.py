"""The weight gradient apart from the input gradient: by a node of its own, or later by hand.

A schedule that splits the backward asks autograd for a stage's input gradients first (I), and for its weight
gradients later (W). One node per layer cannot give half an answer: asked twice it multiplies everything
twice, or (up to torch 2.12) fails. So a layer computes its weight gradient in one of three ways::

    fused      x ──▶ [ linear ] ──▶ y            one node, both products: nothing is faster
               w ───────┘

    forked     x ──▶ [ input side ] ──▶ + ──▶ y  autograd runs the side that it is asked for; both share
               w ──▶ [ weight side ] ───┘        one quantized gradient

    deferred   x ──▶ [ linear ] ──▶ y            backward keeps the operands of the weight gradient until
               w ───────┘                        `backward_dw()` multiplies them

The `+` must be a node of torch's own: a Python node at this place dies when a stage's outputs are detached
(up to torch 2.12). The weight side brings a negative zero, one element expanded: `y + -0.0` keeps every bit
of y, while `-0.0 + 0.0` would not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .._scope import Phase
from .._slots import Slot
from ..errors import ScheduleMismatch
from ..kernels.quantize import Layout, Quantized, quantize
from ._products import (
    Output,
    dgrad,
    forward_product,
    quantize_gradient,
    quantize_weight,
    rows,
    update_guards,
    wgrad,
)

if TYPE_CHECKING:
    from .linear import LinearSlots

WgradMode = Literal["fused", "forked", "deferred"]


# -- forked: two nodes ----------------------------------------------------------------------------------


def forked_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: LinearSlots,
    output: Output,
    training: bool,
) -> torch.Tensor:
    """The FP8 linear layer as two autograd nodes; arguments, bits and amaxes as in `linear`."""
    record = training and slots.input.scope.recording
    xq = quantize(rows(x.detach()), slots.input, record, layout=Layout.BOTH)
    wq = quantize_weight(weight, slots.weight, record)
    product = forward_product(xq, wq, None if bias is None else bias.detach(), x.shape, output.dtype)
    y = output.activate(product)
    needs_db = bias is not None and bias.requires_grad
    gradient = _SharedGradient(slots.grad_output, output, needs_db, training)
    # Both keep the product for the activation's derivative.
    kept = (output.kept(product), *update_guards(slots, training))
    # Made first, so that a full backward runs it right behind the input side.
    zero = _WeightSide.apply(weight, bias, xq, y, gradient, kept)
    joined: torch.Tensor = _InputSide.apply(x, wq, y, output.dx_dtype, gradient, kept) + zero
    return joined


class _ProductGradient(NamedTuple):
    """What both nodes need of one output gradient."""

    quantized: Quantized
    db: torch.Tensor | None


class _SharedGradient:
    """Quantizes one layer's output gradient once for the two nodes, in whatever order they run."""

    __slots__ = ("_needs_db", "_of", "_output", "_shared", "_slot", "_training", "_version")

    def __init__(self, slot: Slot, output: Output, needs_db: bool, training: bool) -> None:
        self._slot, self._output, self._needs_db, self._training = slot, output, needs_db, training
        self._forget()

    def _forget(self) -> None:
        self._of: torch.Tensor | None = None
        self._version = 0
        self._shared: _ProductGradient | None = None

    def take(self, dy: torch.Tensor, kept: torch.Tensor | None) -> _ProductGradient:
        """Quantize `dy`, unless the other node just did; what both have had is let go."""
        shared = self._shared
        # Both nodes get the very tensor that entered the `+`. Any other gradient is quantized anew, so that
        # a retained graph can be asked again.
        if shared is not None and self._of is dy and self._version == dy._version:
            self._forget()
            return shared
        gradient = self._output.derive(dy, kept)
        db = rows(gradient).sum(0) if self._needs_db else None  # before it is quantized
        shared = _ProductGradient(quantize_gradient(gradient, self._slot, self._training), db)
        if not dy.requires_grad:  # its graph would hold this object, which holds it
            self._of, self._version, self._shared = dy, dy._version, shared
        return shared


class _InputSide(torch.autograd.Function):
    """The layer's output, and the gradient of its input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        wq: Quantized,
        y: torch.Tensor,
        dx_dtype: torch.dtype,
        gradient: _SharedGradient,
        kept: tuple[torch.Tensor | None, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(*wq.for_gradients(), *kept)
        ctx.gradient, ctx.x_shape, ctx.dx_dtype = gradient, x.shape, dx_dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        w_data, w_scale_inv, kept, *_ = ctx.saved_tensors
        gq, _db = ctx.gradient.take(dy, kept)
        dx = dgrad(gq, Quantized(w_data, w_scale_inv), ctx.x_shape, ctx.dx_dtype)
        return dx, None, None, None, None, None


class _WeightSide(torch.autograd.Function):
    """A zero like the layer's output in forward; the gradients of weight and bias in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        xq: Quantized,
        y: torch.Tensor,
        gradient: _SharedGradient,
        kept: tuple[torch.Tensor | None, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(*(xq.for_gradients() if ctx.needs_input_grad[0] else (None, None)), *kept)
        ctx.gradient, ctx.weight_dtype = gradient, weight.dtype
        return torch.full((), -0.0, dtype=y.dtype, device=y.device).expand(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_data, x_scale_inv, kept, *_ = ctx.saved_tensors
        gq, db = ctx.gradient.take(dy, kept)
        dw = None if x_data is None else wgrad(gq, Quantized(x_data, x_scale_inv), ctx.weight_dtype)
        return dw, db, None, None, None, None


# -- deferred: owed until asked for ---------------------------------------------------------------------


@dataclass(frozen=True)
class OwedGradient:
    """What is left to do for the parameters of one layer after one of its backwards.

    Attributes:
        weight: [out_features, in_features], whose `.grad` takes the product.
        bias: [out_features] or None.
        operands: gradient [tokens, out_features] and input [tokens, in_features] in FP8; None if the weight is
            frozen.
        db: the gradient of the bias, summed before the gradient was quantized; None if it needs none.
        serial: the scope in which it came up.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    operands: tuple[Quantized, Quantized] | None
    db: torch.Tensor | None
    serial: int

    @torch.no_grad()
    def accumulate(self) -> None:
        """Multiply, and add to `.grad`."""
        if self.operands is not None:
            _add_to_grad(self.weight, wgrad(*self.operands, self.weight.dtype))
        if self.db is not None:
            assert self.bias is not None
            _add_to_grad(self.bias, self.db.to(self.bias.dtype))


def _add_to_grad(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class WeightGradients:
    """How one layer computes its weight gradients, and those that it owes.

    Attributes:
        name: of the layer, for messages.
        mode: see the head of this file.
        owed: first in, first out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.mode: WgradMode = "fused"
        self.owed: deque[OwedGradient] = deque()

    def sink(self, weight: torch.Tensor, bias: torch.Tensor | None) -> GradientSink:
        """Where the backward of one forward leaves its operands.

        Raises:
            ValueError: a parameter is no leaf, so it has no `.grad` to add to; or the graph is compiled.
        """
        for parameter in (weight, bias):
            if parameter is not None and parameter.requires_grad and not parameter.is_leaf:
                raise ValueError(
                    f"layer {self.name!r} defers its weight gradient, which expects parameters that are leaves "
                    f"but got one made by {parameter.grad_fn}; use wgrad='forked'"
                )
        if torch.compiler.is_compiling():
            raise ValueError(
                f"layer {self.name!r} defers its weight gradient, which a compiled graph cannot; set its "
                "wgrad to 'fused' or do not compile it"
            )
        return GradientSink(self, weight, bias)


@dataclass(frozen=True)
class GradientSink:
    """Ties one forward to the parameters that it used."""

    to: WeightGradients
    weight: torch.Tensor
    bias: torch.Tensor | None

    def keep(self, gq: Quantized, xq: Quantized | None, db: torch.Tensor | None, slot: Slot) -> None:
        """Owe a weight gradient (`xq` is None: none) and a bias gradient (`db`).

        Raises:
            ScheduleMismatch: one of an earlier scope is still owed.
        """
        if slot.scope.phase is Phase.PAUSED:  # a hidden pass on uninitialised memory: nobody asks for it
            return
        owed, serial = self.to.owed, slot.scope.serial
        if owed and owed[0].serial != serial:
            raise ScheduleMismatch(
                f"layer {self.to.name!r} expects backward_dw() once per backward but {len(owed)} weight "
                "gradients of an earlier step were never computed; call backward_dw() before the optimizer "
                "step, or discard_dw() after a failed step"
            )
        operands = None if xq is None else (gq, xq)
        owed.append(OwedGradient(self.weight, self.bias, operands, db, serial))


class SplitsBackward(nn.Module):
    """A layer whose weight gradient can be computed apart from its input gradient."""

    _weight_gradients: tuple[WeightGradients, ...]
    """One for each product with a weight."""

    @property
    def wgrad(self) -> WgradMode:
        """How the weight gradient is computed; the bits are the same.

        `"fused"`: in the layer's one backward node. `"forked"`: in a node of its own, for schedules that split
        the backward; costs one addition over the output. `"deferred"`: by `backward_dw()`, past autograd: hooks
        on the parameters (DDP, FSDP, an optimizer in backward) do not see it. A change takes effect with
        the next forward.

        Raises:
            ValueError: set to something else, or while weight gradients are owed.
        """
        return self._weight_gradients[0].mode

    @wgrad.setter
    def wgrad(self, mode: WgradMode) -> None:
        if mode not in get_args(WgradMode):
            raise ValueError(f"expected wgrad to be one of {', '.join(get_args(WgradMode))} but got {mode!r}")
        for gradients in self._weight_gradients:
            if gradients.owed:
                raise ValueError(
                    f"expected no owed weight gradient in layer {gradients.name!r} but got {len(gradients.owed)}; call "
                    "backward_dw() for each, or discard_dw()"
                )
        for gradients in self._weight_gradients:
            gradients.mode = mode

    def backward_dw(self) -> None:
        """Compute the weight and bias gradients of the oldest backward that lacks them, and add to `.grad`.

        Call it once per backward of this layer, in the step scope or behind it. Its operands are then freed.

        Raises:
            ScheduleMismatch: no backward lacks them.
        """
        owing = [gradients for gradients in self._weight_gradients if gradients.owed]
        if not owing:
            first = self._weight_gradients[0]
            raise ScheduleMismatch(
                f"backward_dw() of layer {first.name!r} expects a backward before it but no weight gradient is "
                f"owed (wgrad is {first.mode!r}; a backward under a shut gate owes none); call it once per "
                "backward with wgrad='deferred'"
            )
        for gradients in owing:
            gradients.owed.popleft().accumulate()

    def discard_dw(self) -> None:
        """Forget all owed weight gradients, after a step that failed."""
        for gradients in self._weight_gradients:
            gradients.owed.clear()

    def take_owed(self) -> list[OwedGradient]:
        """Hand over all that is owed, oldest first for each product."""
        taken = [owed for gradients in self._weight_gradients for owed in gradients.owed]
        self.discard_dw()
        return taken
