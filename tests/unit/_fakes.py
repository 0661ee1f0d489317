"""A coordinator of one method, a layer built with it, and FP8 rounding by the formats' definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from fp8dist._amax import ABSENT
from fp8dist._scope import ScopeState
from fp8dist._slots import Slot
from fp8dist.modules.linear import Linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}


class FakeCoordinator:
    """Declares slots and opens scopes; reduces and commits nothing."""

    def __init__(self, *, warm: bool = False, stateless: bool = False) -> None:
        self.scope = ScopeState(stateless=stateless)
        self.warm = warm
        self.slots: dict[str, Slot] = {}
        self.declared: dict[str, dict] = {}

    def declare(self, name, *, shape, weight=None, sharded=False) -> Slot:
        if name in self.slots:
            raise ValueError(f"slot {name!r} is taken; pass prefix= to convert")
        dtype = E5M2 if name.endswith("grad_output") else E4M3
        slot = Slot(name, dtype=dtype, scaled_max=FP8_MAX[dtype], scope=self.scope, warm=self.warm)
        self.slots[name] = slot
        self.declared[name] = {"shape": shape, "weight": weight, "sharded": sharded}
        return slot

    def undeclare(self, name: str) -> None:
        del self.slots[name], self.declared[name]

    @contextmanager
    def step(self) -> Iterator[None]:
        self.scope.open()
        try:
            yield
        finally:
            self.scope.close()

    def amaxes(self) -> dict[str, float]:
        """Recorded amaxes by slot name, without those that are absent."""
        return {name: slot.amax.item() for name, slot in self.slots.items() if slot.amax.item() != ABSENT}

    def forget(self) -> None:
        """Reset the amax row, as a commit does."""
        for slot in self.slots.values():
            slot.amax.fill_(ABSENT)


def fp8_values(dtype: torch.dtype) -> np.ndarray:
    """The non-negative finite values of a format in the order of their codes."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == E4M3 else (5, 2, 15)
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        if exponent == 0:
            values.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
    return np.array([v for v in values if v <= FP8_MAX[dtype]])


def round_to_fp8(x: torch.Tensor, scale: float, dtype: torch.dtype) -> np.ndarray:
    """Scale in float32, clamp, round to the nearest value of the format (ties to the even code)."""
    scaled = x.detach().float().numpy() * np.float32(scale)
    magnitude = np.minimum(np.abs(scaled).astype(np.float64), FP8_MAX[dtype])
    values = fp8_values(dtype)
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    below = above - 1
    middle = (values[below] + values[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    rounded = np.where(up, values[above], values[below])
    return np.where(np.isnan(scaled), np.nan, np.copysign(rounded, scaled))


def make_linear(coordinator, in_features=32, out_features=16, *, seed=0, name="a", **kwargs) -> Linear:
    torch.manual_seed(seed)
    return Linear(in_features, out_features, coordinator=coordinator, name=name, **kwargs)


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.requires_grad_(grad)


def train(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients (of input, then of the parameters) of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    y = module(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy))
