"""The FP8 linear layer: `y = x @ weight.T + bias`, with its three matrix products in FP8.

Three GEMMs multiply six tensors, of which three are new; the others are these again, transposed::

    forward   y  = xq @ wq.T      input x weight
    dgrad     dx = gq @ wq        grad_output x weight
    wgrad     dw = gq.T @ xq      grad_output x input

So a layer has three slots: input and weight in the forward format, grad_output in the backward one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from .._slots import Slot
from ..kernels.gemm import ALIGNMENT, supported
from ..kernels.quantize import HIGH_PRECISION, Quantized, quantize
from ._dtensor import distributed_linear, splits_evenly
from ._functional import ACTIVATIONS
from ._products import (
    KeptWeight,
    Output,
    dgrad,
    forward_product,
    keep_weight,
    layout_of,
    quantize_gradient_and_bias,
    rows,
    update_guards,
)
from ._products import wgrad as _wgrad
from ._split import GradientSink, SplitsBackward, WeightGradients, forked_linear

logger = logging.getLogger("fp8dist")


class Registrar(Protocol):
    """What a module asks of a coordinator, once, when it is built."""

    def declare(
        self,
        name: str,
        *,
        shape: tuple[int, ...] | None,
        weight: Callable[[], torch.Tensor | None] | None = None,
        sharded: bool = False,
    ) -> Slot:
        """Create the slot `name`; ValueError if the name is taken."""
        ...

    def undeclare(self, name: str) -> None:
        """Take back a slot that no layer uses."""
        ...


class LinearSlots(NamedTuple):
    """The slots of one linear layer."""

    input: Slot
    weight: Slot
    grad_output: Slot

    @classmethod
    def declare(
        cls,
        coordinator: Registrar,
        name: str,
        module: nn.Module,
        *,
        weight: str = "weight",
        index: int | None = None,
        sharded: bool = False,
        weight_slot: Slot | None = None,
    ) -> LinearSlots | None:
        """Create the slots of a layer, or None if its features do not fit an FP8 product.

        Args:
            coordinator: declares the slots.
            name: the layer's global name.
            module: holds the weight; may be dropped later.
            weight: the attribute of `module` that is the weight, [out_features, in_features]; a DTensor
                counts with its global shape.
            index: the weight is this part of a parameter [n, out_features, in_features].
            sharded: ranks hold different parts of this weight under one name.
            weight_slot: the slot of this very weight, if another layer declared it.

        Raises:
            ValueError: `name` is empty or taken, or the weight is no parameter.
        """
        if not name:
            raise ValueError("an FP8 layer needs a name, expected its global FQN but got ''; pass name=")
        if not isinstance(getattr(module, weight), nn.Parameter):
            raise ValueError(
                f"expected the weight of {name!r} to be a Parameter but got a plain tensor (weight_norm and "
                "pruning compute one per forward); leave this layer in high precision"
            )
        source = _WeightOf(module, weight, index)
        now = source()
        assert now is not None, "the caller holds the module"
        out_features, in_features = now.shape
        if now.numel() == 0 or not fp8_shape(in_features, out_features):
            return None
        if weight_slot is None:
            weight_slot = coordinator.declare(
                f"{name}.weight", shape=tuple(now.shape), weight=source, sharded=sharded
            )
        # The hook knows its slot, so that one module can have several, and that a layer made from this one
        # can share its hooks.
        module.register_load_state_dict_post_hook(partial(_weight_loaded, weight_slot))
        return cls(
            input=coordinator.declare(f"{name}.input", shape=None),
            weight=weight_slot,
            grad_output=coordinator.declare(f"{name}.grad_output", shape=None),
        )


class _WeightOf:
    """Asks a module for a weight it has now: `to_empty` and `fully_shard` put another one in its place."""

    def __init__(self, module: nn.Module, attribute: str, index: int | None) -> None:
        self._module = weakref.ref(module)  # a module that is dropped must not live on in the coordinator
        self._attribute = attribute
        self._index = index

    def __call__(self) -> torch.Tensor | None:
        module = self._module()
        if module is None:
            return None
        weight: torch.Tensor = getattr(module, self._attribute)
        return weight if self._index is None else weight.detach()[self._index]


def _weight_loaded(slot: Slot, module: nn.Module, incompatible_keys: object) -> None:
    """The history of the old weight says nothing of the new one."""
    slot.scope.reloaded.add(slot.name)


def fp8_shape(in_features: int, out_features: int) -> bool:
    """True if forward and dgrad of such a layer are FP8 products, whatever the number of tokens."""
    return supported(1, in_features, out_features) and supported(1, out_features, in_features)


class Notices:
    """Says each thing once for one layer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Log a warning, the first time only. Silent while a graph is traced."""
        if text in self._said or torch.compiler.is_compiling():
            return
        self._said.add(text)
        logger.warning("FP8 layer %r: %s", self.name, text)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: LinearSlots | None,
    *,
    training: bool,
    notices: Notices,
    wgrad: WeightGradients | None = None,
    dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute `activation(x @ weight.T + bias)` in FP8; the bias is added before the product is rounded.

    Args:
        x: [..., in_features], float32, bfloat16 or float16.
        weight: [out_features, in_features], the dtype of `x` unless autocast is on or `dtype` is given.
        bias: [out_features] or None.
        slots: the layer's slots; None computes in high precision and records nothing.
        training: record amaxes while a scope is open, and ask for an update in backward.
        notices: where a fallback to high precision is said.
        wgrad: how the weight gradient is computed, and where it is kept if later; None: in the one backward.
        dtype: `x` is a float32 intermediate of a module that computes in this dtype: the product has it, and
            so does the gradient of `x` before autograd takes it for a float32 one. None: that of `x`.
        activation: one of `ACTIVATIONS`, applied in float32 to the rounded product. Its gradient is quantized
            before anything rounds it.

    Returns:
        [..., out_features] in the autocast dtype if autocast is on for this device, else in `dtype`. With
        an activation its result in float32.

    Raises:
        ValueError: a dtype or shape that does not fit.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    check_operands(x, weight, autocast=autocast or dtype is not None)
    if slots is None or not slots.input.scope.enabled:
        return _activate(_in_high_precision(x, weight, bias, slots, training, notices, dtype), activation)
    if isinstance(weight, DTensor) or isinstance(x, DTensor):
        on_shards = partial(linear, slots=slots, training=training, notices=notices, wgrad=wgrad, dtype=dtype)
        return _activate(_linear_of_shards(x, weight, bias, on_shards, notices), activation)
    output = Output(
        dtype=torch.get_autocast_dtype(device) if autocast else dtype or x.dtype,
        dx_dtype=dtype or x.dtype,
        activation=activation,
    )
    mode = wgrad.mode if wgrad is not None and torch.is_grad_enabled() else "fused"
    sink = wgrad.sink(weight, bias) if wgrad is not None and mode == "deferred" else None
    bias = bias if bias is None else bias.to(output.dtype)
    needs_dw = weight.requires_grad and torch.is_grad_enabled()
    if needs_dw and not supported(weight.shape[0], x.numel() // x.shape[-1], x.shape[-1]):
        notices.say(
            f"the number of tokens is no multiple of {ALIGNMENT}, so its weight gradient is computed in "
            "high precision (from the FP8 operands)"
        )
    has_two_sides = x.requires_grad and (needs_dw or (bias is not None and bias.requires_grad))
    if mode == "forked" and has_two_sides and not torch.compiler.is_compiling():
        return forked_linear(x, weight, bias, slots, output, training)
    y: torch.Tensor = _LinearFunction.apply(x, weight, bias, slots, output, training, sink)
    return y


def _in_high_precision(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: LinearSlots | None,
    training: bool,
    notices: Notices,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Where FP8 cannot or shall not compute; a calibration records all the same."""
    if slots is None:
        notices.say(
            f"its {weight.shape[1]} input and {weight.shape[0]} output features are not both multiples of "
            f"{ALIGNMENT}, so it computes in high precision and records nothing"
        )
    elif slots.input.scope.calibrating and training:
        slots.input.record(x)
        slots.weight.record(weight)
    return F.linear(x if dtype is None else x.to(dtype), weight, bias)


def _activate(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    return y if activation is None else ACTIVATIONS[activation].apply(y.float())


def _linear_of_shards(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    on_shards: Callable[..., torch.Tensor],
    notices: Notices,
) -> torch.Tensor:
    """Compute on the local parts of DTensors, where FP8 can take these."""
    if isinstance(weight, DTensor) and not splits_evenly(weight):
        notices.say(
            f"the features of its shards are not all multiples of {ALIGNMENT}, so it computes in high "
            "precision and records nothing"
        )
        return F.linear(x, weight, bias)
    return distributed_linear(x, weight, bias, on_shards)


def check_operands(x: torch.Tensor, weight: torch.Tensor, *, autocast: bool) -> None:
    """Raise ValueError unless `x` and `weight` can be multiplied."""
    for name, tensor in (("input", x), ("weight", weight)):
        if tensor.dtype not in HIGH_PRECISION:
            raise ValueError(
                f"an FP8 linear layer expected a float32, bfloat16 or float16 {name} but got {tensor.dtype}; "
                "cast it first"
            )
    if x.dtype != weight.dtype and not autocast:
        raise ValueError(
            f"expected an input of the weight's dtype {weight.dtype} but got {x.dtype}; cast one of them, or "
            "use torch.autocast"
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected an input of shape [..., {weight.shape[1]}] but got {tuple(x.shape)}")


class _LinearFunction(torch.autograd.Function):
    """The three GEMMs. Keeps one byte per element of input and weight for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slots: LinearSlots,
        output: Output,
        training: bool,
        sink: GradientSink | None,
    ) -> torch.Tensor:
        record = training and slots.input.scope.recording
        needs_dx, needs_dw, ctx.needs_db = ctx.needs_input_grad[:3]
        xq = quantize(
            rows(x), slots.input, record, layout=layout_of(rows=True, columns=needs_dw), share=sink is None
        )
        wq, kept_weight = keep_weight(weight, slots.weight, record, needs_dx)
        y = forward_product(xq, wq, bias, x.shape, output.dtype)
        ctx.save_for_backward(
            *(xq.for_gradients() if needs_dw else (None, None)),
            *kept_weight,
            output.kept(y),
            *update_guards(slots, training),
        )
        ctx.slots, ctx.output, ctx.training, ctx.sink = slots, output, training, sink
        ctx.x_shape, ctx.weight_dtype = x.shape, weight.dtype
        return output.activate(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_data, x_scale_inv, w_data, w_scale_inv, kept, *_ = ctx.saved_tensors
        gq, db = quantize_gradient_and_bias(
            rows(ctx.output.derive(dy, kept)),
            ctx.slots.grad_output,
            ctx.training,
            rows_wanted=w_data is not None,
            columns=x_data is not None,
            db=ctx.needs_db,
            share=ctx.sink is None,
        )
        dx = dw = None
        if w_data is not None:
            wq = KeptWeight(w_data, w_scale_inv).columns(ctx.slots.weight)
            dx = dgrad(gq, wq, ctx.x_shape, ctx.output.dx_dtype)
        xq = None if x_data is None else Quantized(x_data, x_scale_inv)
        if ctx.sink is not None:
            if xq is not None or db is not None:
                ctx.sink.keep(gq, xq, db, ctx.slots.grad_output)
            db = None
        elif xq is not None:
            dw = _wgrad(gq, xq, ctx.weight_dtype)
        return dx, dw, db, None, None, None, None


class Linear(SplitsBackward, nn.Linear):
    """`nn.Linear` whose matrix products run in FP8, with the parameters and state_dict of `nn.Linear`.

    Features that are no multiples of 16 make it compute in high precision, which is logged once; tokens
    that are none only move the weight gradient there.

    Attributes:
        slots: its three slots; None if it computes in high precision.
        wgrad: how its weight gradient is computed: "fused" (the default), "forked" or "deferred".
    """

    slots: LinearSlots | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        coordinator: Registrar,
        name: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sharded: bool = False,
    ) -> None:
        """Create parameters like `nn.Linear` and declare three slots.

        Args:
            in_features: size of the last dimension of the input.
            out_features: size of the last dimension of the output.
            bias: add a bias.
            coordinator: declares the slots `<name>.input`, `<name>.weight` and `<name>.grad_output`.
            name: global name of this layer, the same on every rank that holds it, and in no two places.
            device: of the parameters.
            dtype: of the parameters: float32, bfloat16 or float16.
            sharded: ranks hold different parts of this weight under one name.

        Raises:
            ValueError: the name is empty or taken.
        """
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.slots = LinearSlots.declare(coordinator, name, self, sharded=sharded)
        self._notices = Notices(name)
        self._weight_gradients = (WeightGradients(name),)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        coordinator: Registrar,
        name: str,
        sharded: bool = False,
        *,
        weight_slot: Slot | None = None,
    ) -> Linear:
        """Make an FP8 layer that shares the parameters, training flag and hooks of `linear`.

        Args:
            linear: stays usable; its parameters may be on the meta device.
            coordinator: declares the slots.
            name: global name of the layer.
            sharded: ranks hold different parts of this weight under one name.
            weight_slot: the slot of this weight, if another layer (with a tied weight) declared it.

        Raises:
            ValueError: the name is empty or taken.
        """
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        # The dictionaries of hooks are shared, not copied: a hook's handle must still be able to remove it.
        vars(module).update(vars(linear))
        module._parameters = dict(linear._parameters)
        module._buffers = dict(linear._buffers)
        module._modules = dict(linear._modules)
        module.slots = LinearSlots.declare(
            coordinator, name, module, sharded=sharded, weight_slot=weight_slot
        )
        module._notices = Notices(name)
        module._weight_gradients = (WeightGradients(name),)
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return `input @ weight.T + bias`; shapes, dtypes and errors as in `linear`."""
        return linear(
            input,
            self.weight,
            self.bias,
            self.slots,
            training=self.training,
            notices=self._notices,
            wgrad=self._weight_gradients[0],
        )

    def extra_repr(self) -> str:
        """Features, and which FP8 formats are in use."""
        return f"{super().extra_repr()}, {describe(self.slots)}"


def describe(slots: LinearSlots | None) -> str:
    """Name and formats of a layer, for `extra_repr`."""
    if slots is None:
        return "high precision"
    forward, backward = (
        str(slot.dtype).removeprefix("torch.float8_") for slot in (slots.input, slots.grad_output)
    )
    return f"fp8={forward}/{backward}, name={slots.input.name.removesuffix('.input')!r}"
