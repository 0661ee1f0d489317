"""The fused module is a norm in high precision followed by the FP8 linear layer, and nothing else."""

from __future__ import annotations

import pytest
import torch
from _fakes import FakeCoordinator
from torch import nn

from fp8dist.errors import MissingScope
from fp8dist.modules.layernorm_linear import LayerNormLinear
from fp8dist.modules.linear import Linear


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused_and_parts(normalization: str, dtype: torch.dtype, bias: bool):
    """The fused module and the same as two modules, each with a coordinator of its own."""
    ours, theirs = FakeCoordinator(), FakeCoordinator()
    fused = LayerNormLinear(
        32, 16, bias, coordinator=ours, name="a", eps=1e-3, normalization=normalization, dtype=dtype
    )
    with torch.no_grad():
        for seed, parameter in enumerate(fused.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed))
    norm_class = nn.LayerNorm if normalization == "LayerNorm" else nn.RMSNorm
    norm = norm_class(32, eps=1e-3, dtype=dtype)
    linear = Linear(32, 16, bias, coordinator=theirs, name="a", dtype=dtype)
    state = fused.state_dict()
    norm.load_state_dict(
        {k.removeprefix("layer_norm_"): v for k, v in state.items() if k.startswith("layer_norm_")}
    )
    linear.load_state_dict({k: v for k, v in state.items() if not k.startswith("layer_norm_")})
    return (fused, ours), (nn.Sequential(norm, linear), theirs)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_it_equals_its_two_parts_bit_for_bit(normalization, dtype, bias):
    """In bfloat16 these are a float32 norm and a linear layer that gives bfloat16."""
    results = []
    fused, (parts, theirs) = fused_and_parts(normalization, dtype, bias)
    parts[0].float()
    for module, coordinator in (fused, (parts, theirs)):
        x = randn(2, 8, 32, dtype=dtype).requires_grad_()
        autocast = module is parts and dtype == torch.bfloat16
        with coordinator.step(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = module(x.float() if autocast else x)
            y.backward(randn(2, 8, 16, seed=9, dtype=dtype))
            assert coordinator.scope.requested
        # In the sequence of two modules the norm's parameters are called 0.*, the linear layer's 1.*.
        grads = {
            name.replace("0.", "layer_norm_").removeprefix("1."): parameter.grad
            for name, parameter in module.named_parameters()
        }
        results.append(({"y": y, "x": x.grad, **grads}, coordinator.amaxes()))
    (ours, our_amaxes), (theirs, their_amaxes) = results
    assert ours.keys() == theirs.keys()
    for key in ours:
        if dtype == torch.bfloat16 and (key == "x" or key.startswith("layer_norm")):
            # Behind the gradient of the norm's output, which the fused module rounds as its dtype asks for.
            assert ours[key].dtype == dtype
            torch.testing.assert_close(ours[key], theirs[key].to(dtype), rtol=2**-6, atol=0.05)
        else:
            assert torch.equal(ours[key], theirs[key]), key
    assert our_amaxes == their_amaxes
    assert list(our_amaxes) == ["a.weight", "a.input", "a.grad_output"]


@pytest.mark.parametrize(("normalization", "bias"), [("LayerNorm", True), ("RMSNorm", False)])
def test_parameter_names_and_first_values(normalization, bias):
    module = LayerNormLinear(
        32, 16, bias, coordinator=FakeCoordinator(), name="a", normalization=normalization
    )
    expected = {"layer_norm_weight", "weight"}
    expected |= {"layer_norm_bias"} if normalization == "LayerNorm" else set()
    expected |= {"bias"} if bias else set()
    assert set(module.state_dict()) == expected
    assert torch.equal(module.layer_norm_weight, torch.ones(32))
    bound = 32**-0.5
    assert 0.8 * bound < module.weight.abs().max().item() <= bound
    if normalization == "LayerNorm":
        assert torch.equal(module.layer_norm_bias, torch.zeros(32))


def test_it_can_return_the_normalized_input():
    module = LayerNormLinear(
        32, 16, coordinator=FakeCoordinator(), name="a", return_layernorm_output=True
    ).eval()
    x = randn(16, 32)
    y, normalized = module(x)
    assert torch.equal(normalized, nn.LayerNorm(32)(x))
    assert y.shape == (16, 16)


def test_autocast_decides_the_dtype_of_the_output():
    module = LayerNormLinear(32, 16, coordinator=FakeCoordinator(), name="a").eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(randn(16, 32)).dtype == torch.bfloat16


def test_training_outside_a_scope_raises_in_backward():
    module = LayerNormLinear(32, 16, coordinator=FakeCoordinator(), name="a")
    with pytest.raises(MissingScope):
        module(randn(16, 32)).sum().backward()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="one of LayerNorm, RMSNorm but got 'BatchNorm'"):
        LayerNormLinear(32, 16, coordinator=FakeCoordinator(), name="a", normalization="BatchNorm")
    module = LayerNormLinear(32, 16, coordinator=FakeCoordinator(), name="a")
    with pytest.raises(ValueError, match=r"but got torch\.int64"):
        module(torch.zeros(16, 32, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \[\.\.\., 32\]"):
        module(torch.zeros(16, 48))


def test_odd_features_compute_in_high_precision():
    coordinator = FakeCoordinator()
    module = LayerNormLinear(20, 10, coordinator=coordinator, name="a")
    x = randn(4, 20)
    expected = nn.functional.linear(nn.LayerNorm(20)(x), module.weight, module.bias)
    assert torch.equal(module(x), expected)
    assert coordinator.slots == {}


def test_its_repr_shows_the_norm_and_the_formats():
    text = repr(LayerNormLinear(32, 16, coordinator=FakeCoordinator(), name="a.b", normalization="RMSNorm"))
    assert "RMSNorm" in text
    assert "fp8=e4m3fn/e5m2, name='a.b'" in text
