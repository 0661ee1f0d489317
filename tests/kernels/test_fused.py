"""On a GPU the fused nodes give what the separate nodes give, and record the same amaxes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp8dist as f8

TOKENS, HIDDEN, FFN = 256, 128, 320


def build(kind: str, normalization: str, activation: str, bias: bool) -> tuple[nn.Module, Any]:
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4), name=f"c{kind}")
    common = {
        "coordinator": coordinator, "name": "a", "device": "cuda", "dtype": torch.bfloat16,
        "normalization": normalization,
    }  # fmt: skip
    if kind == "linear":
        return f8.LayerNormLinear(HIDDEN, FFN, bias, **common), coordinator
    return f8.LayerNormMLP(HIDDEN, FFN, bias, activation=activation, **common), coordinator


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).cuda().bfloat16()


def train(module: nn.Module, coordinator: Any, steps: int = 3, microbatches: int = 1) -> list[dict[str, Any]]:
    results = []
    for step in range(steps):
        module.zero_grad()
        got: dict[str, Any] = {}
        with coordinator.step(step):
            for m in range(microbatches):
                x = random(2, TOKENS // 2, HIDDEN, seed=10 * step + m).requires_grad_()
                y = module(x)
                y.backward(random(*y.shape, seed=100 + 10 * step + m, scale=0.1))
                got |= {f"y{m}": y.detach(), f"dx{m}": x.grad}
        got |= {name: p.grad for name, p in module.named_parameters()}
        got["scales"] = coordinator.scales()
        results.append(got)
    return results


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "normalization", "activation"),
    [
        ("linear", "LayerNorm", ""),
        ("linear", "RMSNorm", ""),
        ("mlp", "LayerNorm", "gelu"),
        ("mlp", "RMSNorm", "swiglu"),
        ("mlp", "LayerNorm", "relu"),
    ],
)
def test_a_fused_node_equals_separate_nodes(
    kind: str, normalization: str, activation: str, bias: bool, microbatches: int
) -> None:
    runs = []
    for wgrad in ("fused", "forked"):  # forked layers are never fused
        torch.manual_seed(0)
        module, coordinator = build(kind, normalization, activation, bias)
        with torch.no_grad():
            for seed, p in enumerate(module.parameters()):
                p.copy_(random(*p.shape, seed=1000 + seed, scale=0.2) + (p.dim() == 1))
        module.wgrad = wgrad
        runs.append(train(module, coordinator, microbatches=microbatches))
        coordinator.close()
    for step, (ours, theirs) in enumerate(zip(*runs, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if name == "scales":
                for slot, scale in ours[name].items():
                    assert scale == pytest.approx(theirs[name][slot], rel=2**-7), (step, slot)
            elif theirs[name] is None:
                assert ours[name] is None, (step, name)
            else:
                assert ours[name].dtype == theirs[name].dtype, (step, name)
                assert ours[name].shape == theirs[name].shape, (step, name)
                assert relative(ours[name], theirs[name]) < 0.02, (step, name)


def test_the_fused_node_runs_from_the_second_step_on() -> None:
    module, coordinator = build("mlp", "LayerNorm", "gelu", True)
    names = []
    for step in range(3):
        with coordinator.step(step):
            y = module(random(TOKENS, HIDDEN, seed=step).requires_grad_())
            names.append(type(y.grad_fn).__name__)
            y.backward(torch.ones_like(y))
    assert names == ["_LinearFunctionBackward", "_FusedFunctionBackward", "_FusedFunctionBackward"]
    coordinator.close()


@pytest.mark.parametrize("frozen", ["x", "fc1", "fc2", "norm", "all but fc2 bias"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: str) -> None:
    grads = []
    for wgrad in ("fused", "forked"):
        module, coordinator = build("mlp", "LayerNorm", "gelu", True)
        with torch.no_grad():
            for seed, p in enumerate(module.parameters()):
                p.copy_(random(*p.shape, seed=1000 + seed, scale=0.2) + (p.dim() == 1))
        module.wgrad = wgrad
        train(module, coordinator, steps=2)
        module.zero_grad()
        for name, p in module.named_parameters():
            parts = {"fc1": "fc1_", "fc2": "fc2_", "norm": "layer_norm_"}
            if frozen == "all but fc2 bias":
                p.requires_grad_(name == "fc2_bias")
            elif frozen in parts and name.startswith(parts[frozen]):
                p.requires_grad_(False)
        x = random(TOKENS, HIDDEN, seed=5).requires_grad_(frozen not in ("x", "all but fc2 bias"))
        with coordinator.step(9):
            y = module(x)
            y.backward(random(*y.shape, seed=6, scale=0.1))
        grads.append({"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}})
        coordinator.close()
    for name, ours in grads[0].items():
        theirs = grads[1][name]
        assert (ours is None) == (theirs is None), name
        assert ours is None or relative(ours, theirs) < 0.02, name


def test_a_weight_used_once_is_not_kept_and_one_used_often_is() -> None:
    module, coordinator = build("linear", "LayerNorm", "", True)
    kept = []
    for step, microbatches in enumerate((1, 1, 2, 2)):
        with coordinator.step(step):
            for m in range(microbatches):
                module(random(TOKENS, HIDDEN, seed=m).requires_grad_()).sum().backward()
            kept.append("a.weight" in coordinator._scope.weight_cache)
    assert kept == [False, False, False, True]
    coordinator.close()
