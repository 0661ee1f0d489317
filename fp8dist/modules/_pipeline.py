"""A pipeline of operations as one autograd node.

Each operation knows its forward and backward. The backward formulas are torch's own derivatives, so that
the node gives the bits that autograd would give for the same modules one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .._scope import ScopeState
from ._multiply import Tensors, gradients, multiply
from ._products import update_guards
from .linear import Linear, check_operands

aten = torch.ops.aten
Needs = tuple[bool, ...]


class Operation:
    """One module in one forward, and in the backward of that forward.

    Attributes:
        parameters: tensors that may need a gradient; None for those that the module does without.
        scope: where its backward asks for an update, or None.
    """

    parameters: Tensors = ()
    scope: ScopeState | None = None

    def forward(self, x: torch.Tensor, needs: Needs) -> tuple[torch.Tensor, Tensors]:
        """Return the output and what backward needs.

        Args:
            x: the input.
            needs: whether a gradient is needed, for the input and then for each parameter.
        """
        raise NotImplementedError

    def backward(self, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        """Return the gradients of the input and of each parameter."""
        raise NotImplementedError

    def backward_onto(self, branch: torch.Tensor, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        """The same, added to the gradient `branch` that a `Residual` has for the input already."""
        dx, *rest = self.backward(saved, dy, needs)
        assert dx is not None
        return branch + dx, *rest


class _Fp8Linear(Operation):
    def __init__(self, module: Linear) -> None:
        assert module.slots is not None, "a layer without slots is not known"
        self.parameters = (module.weight, module.bias)
        self._slots, self._notices, self._training = module.slots, module._notices, module.training
        self.scope = module.slots.input.scope if module.training else None

    def forward(self, x: torch.Tensor, needs: Needs) -> tuple[torch.Tensor, Tensors]:
        weight, bias = self.parameters
        assert weight is not None
        check_operands(x, weight, autocast=False)
        self._dtypes = (x.dtype, weight.dtype)
        y, saved = multiply(
            x,
            weight,
            bias,
            self._slots,
            training=self._training,
            needs_dx=needs[0],
            needs_dw=needs[1],
            out_dtype=x.dtype,
            notices=self._notices,
        )
        return y, saved + update_guards(self._slots, self._training)

    def backward(self, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        return gradients(
            dy, saved[:4], self._slots, training=self._training, needs_db=needs[2], dtypes=self._dtypes
        )


class _LayerNorm(Operation):
    def __init__(self, module: nn.LayerNorm) -> None:
        self.parameters = (module.weight, module.bias)
        self._shape, self._eps = list(module.normalized_shape), module.eps

    def forward(self, x: torch.Tensor, needs: Needs) -> tuple[torch.Tensor, Tensors]:
        weight, bias = self.parameters
        y, mean, rstd = torch.native_layer_norm(x, self._shape, weight, bias, self._eps)
        return y, (x, mean, rstd, weight, bias)

    def backward(self, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        x, mean, rstd, weight, bias = saved
        grads: Tensors = aten.native_layer_norm_backward(
            dy, x, self._shape, mean, rstd, weight, bias, list(needs)
        )
        return grads


class _RMSNorm(Operation):
    def __init__(self, module: nn.RMSNorm) -> None:
        self.parameters = (module.weight,)
        self._shape, self._eps = list(module.normalized_shape), module.eps

    def forward(self, x: torch.Tensor, needs: Needs) -> tuple[torch.Tensor, Tensors]:
        weight = self.parameters[0]
        return F.rms_norm(x, self._shape, weight, self._eps), (x, weight)

    def backward(self, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        return self._differentiate(None, saved, dy, needs)

    def backward_onto(self, branch: torch.Tensor, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        return self._differentiate(branch, saved, dy, needs)

    def _differentiate(
        self, branch: torch.Tensor | None, saved: Tensors, dy: torch.Tensor, needs: Needs
    ) -> Tensors:
        # Not every device has a backward op for it. So autograd differentiates this norm, here and at once.
        x, weight = (
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip(saved, needs, strict=True)
        )
        assert x is not None
        with torch.enable_grad():
            outputs, grads = [F.rms_norm(x, self._shape, weight, self._eps)], [dy]
            # On the CPU autograd has several terms for x, and adds each to what is there: another order of
            # sums than in `branch + dx`.
            if branch is not None:
                outputs.append(x.view_as(x))
                grads.append(branch)
        wanted = [t for t in (x, weight) if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, grads))
        return tuple(next(found) if need else None for need in needs)


class _Activation(Operation):
    """An element-wise function with a backward op of its own that takes the input again."""

    def __init__(self, apply: Callable[..., torch.Tensor], derive: Callable[..., torch.Tensor]) -> None:
        self._apply, self._derive = apply, derive

    def forward(self, x: torch.Tensor, needs: Needs) -> tuple[torch.Tensor, Tensors]:
        return self._apply(x), (x,)

    def backward(self, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        return (self._derive(dy, saved[0]),)


def _gelu(module: nn.GELU) -> Operation:
    kind = module.approximate
    return _Activation(
        lambda x: F.gelu(x, approximate=kind), lambda dy, x: aten.gelu_backward(dy, x, approximate=kind)
    )


def _relu(module: nn.ReLU) -> Operation:
    return _Activation(F.relu, lambda dy, x: aten.threshold_backward(dy, x, 0))


def _silu(module: nn.SiLU) -> Operation:
    return _Activation(F.silu, aten.silu_backward)


class _Dropout(Operation):
    """Draws the random numbers that `nn.Dropout` draws, and keeps one byte per element."""

    def __init__(self, module: nn.Dropout) -> None:
        self._p = module.p if module.training else 0.0

    def forward(self, x: torch.Tensor, needs: Needs) -> tuple[torch.Tensor, Tensors]:
        if self._p == 0 or x.numel() == 0:
            return x, (None,)
        if x.is_cuda:
            y, mask = torch.native_dropout(x, self._p, True)
            return y, (mask,)
        mask = torch.empty_like(x).bernoulli_(1 - self._p).bool()
        return x * self._factors(mask, x.dtype), (mask,)

    def backward(self, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        mask = saved[0]
        if mask is None:
            return (dy,)
        if dy.is_cuda:
            return (aten.native_dropout_backward(dy, mask, 1 / (1 - self._p)),)
        return (dy * self._factors(mask, dy.dtype),)

    def _factors(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return mask.to(dtype).div_(1 - self._p)


class Residual(nn.Module):
    """A mark in a `Sequential`: adds the input of operation number `start` of the same `Sequential`."""

    def __init__(self, start: int = 0) -> None:
        """Remember where the branch starts.

        Args:
            start: index of an operation before this one; 0 adds what entered the whole `Sequential`.
        """
        super().__init__()
        self.start = start

    def forward(self, input: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Return `input + branch`, both [...] of one shape; `Sequential` passes `branch`."""
        if input.shape != branch.shape:
            raise ValueError(
                f"Residual({self.start}) expected two values of one shape but got {tuple(branch.shape)} at its start "
                f"and {tuple(input.shape)} here; let it start at an operation with another input"
            )
        return input + branch

    def extra_repr(self) -> str:
        """Where the branch starts."""
        return f"start={self.start}"


class _Add(Operation):
    """The pipeline itself brings the branch, and takes the gradient back to where it starts."""

    def __init__(self, module: Residual) -> None:
        self.start, self.add = module.start, module.forward

    def backward(self, saved: Tensors, dy: torch.Tensor, needs: Needs) -> Tensors:
        return (dy,)


_KNOWN: dict[type[nn.Module], Callable[[Any], Operation]] = {
    Linear: _Fp8Linear,
    nn.LayerNorm: _LayerNorm,
    nn.RMSNorm: _RMSNorm,
    nn.GELU: _gelu,
    nn.ReLU: _relu,
    nn.SiLU: _silu,
    nn.Dropout: _Dropout,
    Residual: _Add,
}


def operation_of(module: nn.Module) -> Operation | None:
    """The operation that computes what calling `module` computes, or None if there is none.

    Subclasses, patched modules and those with hooks may do more than their class says.
    """
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    make = _KNOWN.get(type(module))
    if make is None or any(hooks) or "forward" in vars(module) or getattr(module, "inplace", False):
        return None
    if isinstance(module, Linear) and not _fuses(module):
        return None
    if isinstance(module, nn.Dropout) and module.p == 1:
        return None
    return make(module)


def _fuses(module: Linear) -> bool:
    """Whether the layer computes in FP8 now, in its one node."""
    return module.slots is not None and module.slots.input.scope.enabled and module.wgrad == "fused"


class _Step(NamedTuple):
    """An operation that did something; its number is that of the value which it took."""

    operation: Operation
    needs: Needs
    """Which gradients: of the input, then of the parameters."""
    kept: int
    """How many of the saved tensors are this operation's."""
    start: int
    """Of a residual: the number of the value that it added."""


class _Pipeline(torch.autograd.Function):
    """Sums of gradients are taken in autograd's order: the operation that ran last comes first."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, operations: list[Operation], *parameters: torch.Tensor | None
    ) -> torch.Tensor:
        needs_dx, _, *last_first = ctx.needs_input_grad
        needs_parameters = reversed(last_first)
        starts = {operation.start for operation in operations if isinstance(operation, _Add)}
        entered: dict[int, tuple[int, torch.Tensor]] = {}
        kept: list[torch.Tensor | None] = []
        steps: list[_Step] = []
        for index, operation in enumerate(operations):
            if index in starts:
                entered[index] = len(steps), x
            needs = (needs_dx, *islice(needs_parameters, len(operation.parameters)))
            start, saved = -1, cast(Tensors, ())
            if isinstance(operation, _Add):
                start, branch = entered[operation.start]
                y = operation.add(x, branch)
            else:
                y, saved = operation.forward(x, needs)
            if y is x:  # an operation that did nothing is no node for autograd either
                continue
            x, needs_dx = y, any(needs)  # what comes later needs a gradient, too
            if not needs_dx:
                saved = ()
            kept += saved
            steps.append(_Step(operation, needs, len(saved), start))
        ctx.save_for_backward(*kept)
        ctx.steps = steps
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Tensors:
        steps: list[_Step] = ctx.steps
        saved = ctx.saved_tensors
        asked = (step.operation.scope for step in steps if any(step.needs))
        for scope in {scope for scope in asked if scope is not None}:  # more than one with two coordinators
            scope.request()
        end = len(saved)
        grad: torch.Tensor | None = dy
        branches: dict[int, torch.Tensor] = {}  # what residuals have for the value of that number
        grads: list[torch.Tensor | None] = []  # of the parameters
        for number, (operation, needs, kept, start) in reversed(list(enumerate(steps))):
            if not any(needs):  # nothing before it needs a gradient either
                grads += [None] * len(operation.parameters)
                continue
            assert grad is not None
            if isinstance(operation, _Add):
                branches[start] = branches[start] + grad if start in branches else grad
            mine = saved[end - kept : end]
            end -= kept
            if needs[0] and number in branches:
                grad, *own = operation.backward_onto(branches.pop(number), mine, grad, needs)
            else:
                grad, *own = operation.backward(mine, grad, needs)
            grads += reversed(own)
        return grad, None, *grads


def run_fused(x: torch.Tensor, operations: list[Operation]) -> torch.Tensor:
    """Run operations one after the other, as one node with one request in backward.

    Args:
        x: [...], of the dtype of all parameters.
        operations: fresh ones; each is for one forward.
    """
    parameters = [parameter for operation in operations for parameter in operation.parameters]
    y: torch.Tensor = _Pipeline.apply(x, operations, *reversed(parameters))
    return y
