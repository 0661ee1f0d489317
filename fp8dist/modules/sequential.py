"""A sequence of modules that runs as one autograd node where it can."""

from __future__ import annotations

import torch
from torch import nn

from ._pipeline import Operation, Residual, operation_of, run_fused
from .linear import Notices

__all__ = ["Residual", "Sequential"]


class Sequential(nn.Sequential):
    """`nn.Sequential` that fuses its operations into one autograd node with one request per backward.

    It fuses `Linear`, `nn.LayerNorm`, `nn.RMSNorm`, `nn.GELU`, `nn.ReLU`, `nn.SiLU`, `nn.Dropout` and
    `Residual`. Outputs, gradients, amaxes and random numbers are, bit for bit, those of the same modules
    called one after the other. They are so called, which is logged once, if there is another module among
    them, or one with hooks, in-place or in high precision; under autocast; with tensor subclasses (DTensor)
    or mixed dtypes; and under `torch.compile`, which fuses on its own (not logged).

    Parameters, their names, indexing and slicing are those of `nn.Sequential`::

        f8.Sequential(nn.LayerNorm(64), fc1, nn.GELU(), fc2, nn.Dropout(0.1), f8.Residual(0))
    """

    def __init__(self, *operations: nn.Module) -> None:
        """Take the operations.

        Args:
            *operations: in the order of execution, or one `OrderedDict` of them, as in `nn.Sequential`.
        """
        super().__init__(*operations)
        self._notices = Notices("Sequential")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Run the operations.

        Args:
            input: what the first operation takes.

        Returns:
            What the last operation returns; the input if there is none.

        Raises:
            ValueError: a `Residual` that does not start before itself, or adds two shapes; and what the
                operations raise.
        """
        modules = list(self)
        for index, module in enumerate(modules):
            if isinstance(module, Residual) and not 0 <= module.start < index:
                raise ValueError(
                    f"operation {index} expected a start in 0..{index - 1} but got Residual({module.start}); count "
                    "operations from 0, the start before the Residual"
                )
        operations = [operation_of(module) for module in modules]
        reason = self._unfit(input, modules, operations)
        if reason is None:
            return run_fused(input, [operation for operation in operations if operation is not None])
        self._notices.say(f"it runs its operations one by one, since {reason}")
        return _run_plain(input, modules)

    @staticmethod
    def _unfit(
        input: torch.Tensor, modules: list[nn.Module], operations: list[Operation | None]
    ) -> str | None:
        """Why the operations cannot be one node now, or None."""
        for index, (module, operation) in enumerate(zip(modules, operations, strict=True)):
            if operation is None:
                return f"it cannot fuse operation {index} ({module})"
        if torch.compiler.is_compiling():
            return "a compiler traces it"
        if torch.is_autocast_enabled(input.device.type):
            return "autocast is on"
        parameters = [
            p for operation in operations if operation for p in operation.parameters if p is not None
        ]
        if any(type(t) not in (torch.Tensor, nn.Parameter) for t in (input, *parameters)):
            return "there are tensor subclasses"
        if any(p.dtype != input.dtype for p in parameters):
            return f"not all parameters have the input's dtype {input.dtype}"
        return None


def _run_plain(x: torch.Tensor, modules: list[nn.Module]) -> torch.Tensor:
    entered = []
    for module in modules:
        entered.append(x)
        x = module(x, entered[module.start]) if isinstance(module, Residual) else module(x)
    return x
