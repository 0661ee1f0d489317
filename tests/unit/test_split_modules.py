"""LayerNormMLP and GroupedLinear split their backward, too: the same bits, each product once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist as f8
from fp8dist.modules import _products

Make = Callable[[f8.ReductionGroupCoordinator], tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]


def mlp(
    coordinator: f8.ReductionGroupCoordinator,
) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    module = f8.LayerNormMLP(32, 64, coordinator=coordinator, name="mlp")
    return module, module


def experts(
    coordinator: f8.ReductionGroupCoordinator,
) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    module = f8.GroupedLinear(3, 32, 16, coordinator=coordinator, name="experts")
    return module, lambda x: module(x, [16, 0, 32])


PRODUCTS = {"mlp": 2, "experts": 2}  # of one kind: two layers; two experts that have tokens


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, f8.ReductionGroupCoordinator]]:
    torch.manual_seed(0)
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=3)) as coordinator:
        yield *globals()[request.param](coordinator), coordinator


def fused(make: Make, steps: int = 2) -> list[list[list[float]]]:
    """Gradients of input and parameters under the plain backward."""
    torch.manual_seed(0)
    results = []
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=3), name="fused") as coordinator:
        module, call = make(coordinator)
        for step in range(steps):
            x = batch(step)
            with coordinator.step():
                grads = torch.autograd.grad(call(x).square().sum(), [x, *module.parameters()])
            results.append([g.tolist() for g in grads])
        results.append([[float(coordinator.digest())]])
    return results


def batch(step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(step)
    return (torch.randn(48, 32, generator=g) * 3.0**step).requires_grad_()


@pytest.mark.parametrize("made", ["mlp", "experts"], indirect=True)
def test_halves_give_the_bits_of_the_whole_and_multiply_once(
    made: tuple[Any, Any, f8.ReductionGroupCoordinator],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, call, coordinator = made
    name = request.node.callspec.params["made"]
    module.wgrad = "forked"
    counts = {"dgrad": 0, "wgrad": 0}
    for kind in counts:
        plain = getattr(_products, kind)

        def counting(*args: Any, kind: str = kind, plain: Any = plain) -> torch.Tensor:
            counts[kind] += 1
            return plain(*args)

        for holder in ("_products", "_split"):
            monkeypatch.setattr(f"fp8dist.modules.{holder}.{kind}", counting)
    results = []
    for step in range(2):
        x = batch(step)
        with coordinator.step():
            loss = call(x).square().sum()
            (dx,) = torch.autograd.grad(loss, [x], retain_graph=True)
            assert counts["wgrad"] == PRODUCTS[name] * step
            grads = torch.autograd.grad(loss, list(module.parameters()))
        results.append([g.tolist() for g in (dx, *grads)])
    results.append([[float(coordinator.digest())]])
    assert counts["wgrad"] == PRODUCTS[name] * 2
    assert results == fused(globals()[name])


def test_a_deferred_mlp_pays_both_layers_at_once() -> None:
    torch.manual_seed(0)
    expected = fused(mlp)
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=3)) as coordinator:
        torch.manual_seed(0)
        module, call = mlp(coordinator)
        module.wgrad = "deferred"
        for step in range(2):
            x = batch(step)
            module.zero_grad()
            with coordinator.step():
                call(x).square().sum().backward()
                assert module.fc1_weight.grad is None
                assert module.fc2_weight.grad is None
                module.backward_dw()
            grads = [x.grad, *(p.grad for p in module.parameters())]
            assert [g.tolist() for g in grads] == expected[step]
        with pytest.raises(f8.ScheduleMismatch, match="no weight gradient is owed"):
            module.backward_dw()


def test_deferred_experts_are_refused() -> None:
    with f8.ReductionGroupCoordinator(f8.DelayedScaling()) as coordinator:
        module, call = experts(coordinator)
        module.wgrad = "deferred"
        with pytest.raises(ValueError, match="forked"):
            call(batch(0))
