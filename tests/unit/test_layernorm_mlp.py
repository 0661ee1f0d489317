"""The fused block is a norm, two FP8 linear layers and an activation between them, and nothing else."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
import torch.nn.functional as F
from _fakes import FakeCoordinator, randn
from torch import nn

import fp8dist as f8
from fp8dist.errors import MissingScope
from fp8dist.modules.layernorm_mlp import LayerNormMLP
from fp8dist.modules.linear import Linear

SLOTS = [f"a.{fc}.{role}" for fc in ("fc1", "fc2") for role in ("input", "weight", "grad_output")]


class Parts(nn.Module):
    """The same as separate modules, whose parameters take the fused module's values and names."""

    def __init__(self, fused: LayerNormMLP, coordinator, dtype: torch.dtype) -> None:
        super().__init__()
        bias = fused.fc1_bias is not None
        norm = nn.LayerNorm if fused.normalization == "LayerNorm" else nn.RMSNorm
        self.layer_norm = norm(fused.hidden_size, eps=fused.eps, dtype=dtype)
        for fc in ("fc1", "fc2"):
            out_features, in_features = getattr(fused, f"{fc}_weight").shape
            linear = Linear(
                in_features, out_features, bias, coordinator=coordinator, name=f"a.{fc}", dtype=dtype
            )
            self.add_module(fc, linear)
        self.activation = fused.activation
        names = {name.replace(".", "_"): p for name, p in self.named_parameters()}
        assert names.keys() == dict(fused.named_parameters()).keys()
        with torch.no_grad():
            for name, parameter in fused.named_parameters():
                names[name].copy_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(self.layer_norm(x))
        if self.activation == "gelu":
            hidden = F.gelu(hidden, approximate="tanh")
        elif self.activation == "relu":
            hidden = F.relu(hidden)
        else:
            half = hidden.shape[-1] // 2
            hidden = F.silu(hidden[..., :half]) * hidden[..., half:]
        return self.fc2(hidden)


def make(coordinator, bias=True, *, hidden=32, ffn=48, dtype=torch.float32, **kwargs) -> LayerNormMLP:
    module = LayerNormMLP(hidden, ffn, bias, coordinator=coordinator, name="a", dtype=dtype, **kwargs)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed, dtype=dtype) * 0.3)
    return module


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name.replace(".", "_"): p.grad for name, p in module.named_parameters()}


def assert_equal(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for key in ours:
        if ours[key] is None or theirs[key] is None:
            assert ours[key] is theirs[key], key
        else:
            assert ours[key].dtype == theirs[key].dtype, key
            assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_it_equals_its_parts_bit_for_bit(normalization, activation, bias, checkpoint):
    dtype = torch.float32
    ours, theirs = FakeCoordinator(), FakeCoordinator()
    kwargs = {"normalization": normalization, "activation": activation, "eps": 1e-3}
    fused = make(ours, bias, dtype=dtype, checkpoint=checkpoint, **kwargs)
    results = []
    for module, coordinator in ((fused, ours), (Parts(fused, theirs, dtype), theirs)):
        x = randn(2, 8, 32, dtype=dtype, grad=True)
        with coordinator.step():
            y = module(x)
            y.backward(randn(2, 8, 32, seed=9, dtype=dtype))
            assert coordinator.scope.requested
        results.append(({"y": y, "x": x.grad, **gradients(module)}, coordinator.amaxes()))
    assert_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert sorted(results[0][1]) == sorted(SLOTS)


def float32_reference(module: LayerNormMLP, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Amaxes by slot if nothing is rounded between the products but these themselves. Cold slots: scale by amax."""

    def fp8(t: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        # Powers of two would hide nothing here: the scale is the exact one, and the division undoes it.
        scale = torch.finfo(dtype).max / t.float().abs().max()
        return (t.float() * scale).to(dtype).float() / scale

    amaxes = {}
    x = x.float()
    weight, shift = module.layer_norm_weight.float(), module.layer_norm_bias
    if module.normalization == "RMSNorm":
        normal = F.rms_norm(x, (x.shape[-1],), weight, module.eps)
    else:
        normal = F.layer_norm(x, (x.shape[-1],), weight, shift.float(), module.eps)
    product = F.linear(fp8(normal), fp8(module.fc1_weight), module.fc1_bias.float()).bfloat16().float()
    product.requires_grad_()
    if module.activation == "swiglu":
        gate, value = product.chunk(2, dim=-1)
        hidden = F.silu(gate) * value
    else:
        hidden = F.relu(product) if module.activation == "relu" else F.gelu(product, approximate="tanh")
    dhidden = (fp8(dy, torch.float8_e5m2) @ fp8(module.fc2_weight)).bfloat16().float()
    (dproduct,) = torch.autograd.grad(hidden, product, dhidden)
    for name, tensor in {
        "fc1.input": normal,
        "fc1.weight": module.fc1_weight,
        "fc1.grad_output": dproduct,
        "fc2.input": hidden,
        "fc2.weight": module.fc2_weight,
        "fc2.grad_output": dy,
    }.items():
        amaxes[f"a.{name}"] = tensor.detach().float().abs().max().item()
    return amaxes


@pytest.mark.parametrize("wgrad", ["fused", "forked", "deferred"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_bfloat16_is_quantized_from_float32_norms_activations_and_derivatives(
    normalization, activation, checkpoint, wgrad
):
    ours = FakeCoordinator()
    module = make(
        ours,
        dtype=torch.bfloat16,
        checkpoint=checkpoint,
        normalization=normalization,
        activation=activation,
    )
    module.wgrad = wgrad
    x, dy = randn(16, 32, dtype=torch.bfloat16, grad=True), randn(16, 32, seed=9, dtype=torch.bfloat16)
    with ours.step():
        module(x).backward(dy)
        if wgrad == "deferred":
            module.backward_dw()
    expected = float32_reference(module, x.detach(), dy)
    assert ours.amaxes() == pytest.approx(expected, rel=2**-20)  # half a bfloat16 step is 2**-9
    assert all(g is not None and g.dtype == torch.bfloat16 for g in gradients(module).values())


def test_no_float32_activation_waits_for_backward():
    ours = FakeCoordinator()
    module = make(ours, dtype=torch.bfloat16)
    kept = []
    with ours.step(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = module(randn(16, 32, dtype=torch.bfloat16, grad=True))
    assert {(16, 32), (16, 48)} <= {tuple(t.shape) for t in kept}
    assert not [t.shape for t in kept if t.dtype == torch.float32 and t.numel() > 16]
    del y


@pytest.mark.parametrize("checkpoint", [False, True])
def test_it_trains_like_its_parts_over_several_steps(checkpoint):
    """With real scales, which move from step to step, and two microbatches in each."""
    states = []
    recipe = f8.DelayedScaling(amax_history_len=2)
    fused, parts = (f8.ReductionGroupCoordinator(recipe, name=name) for name in ("mlp", "parts"))
    module = make(fused, checkpoint=checkpoint)
    for model, coordinator in ((module, fused), (Parts(module, parts, torch.float32), parts)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = []
        for step in range(4):
            with coordinator.step(step):
                for seed in (step, step + 10):
                    y = model(randn(16, 32, seed=seed) * (step + 1))
                    y.square().mean().backward()
                    outputs.append(y.detach())
            optimizer.step()
            optimizer.zero_grad()
        states.append((outputs, coordinator.scales(), coordinator.state_dict()["slots"]))
        coordinator.close()
    for ours, theirs in zip(states[0][0], states[1][0], strict=True):
        assert torch.equal(ours, theirs)
    assert states[0][1] == states[1][1]
    for name in SLOTS:
        assert torch.equal(states[0][2][name]["history"], states[1][2][name]["history"]), name


@pytest.mark.parametrize("frozen", [(), ("fc1_weight",), ("fc1_weight", "fc1_bias", "fc2_weight"), "all"])
@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_frozen_parameters_and_inputs_get_no_gradient_and_change_no_other(frozen, x_grad, checkpoint):
    ours, theirs = FakeCoordinator(), FakeCoordinator()
    fused = make(ours, checkpoint=checkpoint)
    parts = Parts(fused, theirs, torch.float32)
    results = []
    for module, coordinator in ((fused, ours), (parts, theirs)):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(frozen != "all" and name.replace(".", "_") not in frozen)
        x = randn(16, 32, grad=x_grad)
        with coordinator.step():
            y = module(x)
            if y.requires_grad:
                y.square().sum().backward()
        results.append(({"x": x.grad, **gradients(module)}, coordinator.amaxes()))
    assert_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_with_checkpoint_only_input_and_quantized_hidden_values_are_kept():
    kept = {}
    for checkpoint in (True, False):
        coordinator = FakeCoordinator()
        module = make(coordinator, checkpoint=checkpoint)
        sizes: list[tuple[int, torch.dtype]] = []

        def pack(tensor: torch.Tensor, sizes=sizes) -> torch.Tensor:
            sizes.append((tensor.numel(), tensor.dtype))
            return tensor

        with coordinator.step(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            module(randn(64, 32, grad=True))
        kept[checkpoint] = [size for size in sizes if size[0] >= 64 * 32]
    assert kept[True] == [(64 * 32, torch.float32), (64 * 48, torch.float8_e4m3fn)]
    assert (64 * 48, torch.float32) in kept[False]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_in_eval_mode_nothing_is_recorded_and_scales_may_move_before_the_backward(checkpoint):
    coordinator = FakeCoordinator(warm=True)
    module, x = make(coordinator, checkpoint=checkpoint).eval(), randn(16, 32, grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)[0]
    with coordinator.step():
        y = module(x)
    for slot in coordinator.slots.values():
        if not slot.backward:
            slot.scale.fill_(3.0)
    y.sum().backward()
    assert torch.equal(x.grad, expected)
    assert coordinator.amaxes() == {}


def test_training_outside_a_scope_raises_in_backward():
    with pytest.raises(MissingScope):
        make(FakeCoordinator())(randn(16, 32)).sum().backward()


@pytest.mark.parametrize("checkpoint", [True, False])
def test_it_can_return_the_normalized_input(checkpoint):
    coordinator = FakeCoordinator()
    module = make(coordinator, checkpoint=checkpoint, return_layernorm_output=True)
    x = randn(16, 32)
    with coordinator.step():
        y, normalized = module(x)
    assert torch.equal(normalized, F.layer_norm(x, (32,), module.layer_norm_weight, module.layer_norm_bias))
    assert y.shape == (16, 32)


def test_autocast_decides_the_dtype_of_the_output():
    module = make(FakeCoordinator()).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(randn(16, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize(("activation", "rows"), [("gelu", 48), ("swiglu", 96)])
@pytest.mark.parametrize(("normalization", "bias"), [("LayerNorm", True), ("RMSNorm", False)])
def test_parameter_names_shapes_and_first_values(normalization, bias, activation, rows):
    module = LayerNormMLP(
        32,
        48,
        bias,
        coordinator=FakeCoordinator(),
        name="a",
        normalization=normalization,
        activation=activation,
    )
    expected = {"layer_norm_weight": (32,), "fc1_weight": (rows, 32), "fc2_weight": (32, 48)}
    expected |= {"layer_norm_bias": (32,)} if normalization == "LayerNorm" else {}
    expected |= {"fc1_bias": (rows,), "fc2_bias": (32,)} if bias else {}
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == expected
    assert torch.equal(module.layer_norm_weight, torch.ones(32))
    for fc, features in (("fc1", 32), ("fc2", 48)):
        largest = getattr(module, f"{fc}_weight").abs().max().item()
        assert 0.8 * features**-0.5 < largest <= features**-0.5
    assert [name for name, _ in module.named_modules()] == [""]


def test_each_weight_declares_itself_and_its_reload():
    coordinator = FakeCoordinator()
    module = make(coordinator, sharded=True)
    assert sorted(coordinator.slots) == sorted(SLOTS)
    for fc, shape in (("fc1", (48, 32)), ("fc2", (32, 48))):
        declared = coordinator.declared[f"a.{fc}.weight"]
        assert (declared["shape"], declared["sharded"]) == (shape, True)
        assert declared["weight"]() is getattr(module, f"{fc}_weight")
    twin = copy.deepcopy(module)
    assert all(a is b for a, b in zip(twin.fc1_slots, module.fc1_slots, strict=True))
    for loaded in (module, twin):
        coordinator.scope.reloaded.clear()
        loaded.load_state_dict(module.state_dict())
        assert coordinator.scope.reloaded == {"a.fc1.weight", "a.fc2.weight"}
    sources = [coordinator.declared[f"a.{fc}.weight"]["weight"] for fc in ("fc1", "fc2")]
    del module, loaded, twin
    gc.collect()
    assert [source() for source in sources] == [None, None]


def test_bad_arguments_are_refused():
    for argument, value in (("normalization", "BatchNorm"), ("activation", "tanh")):
        with pytest.raises(ValueError, match=f"expected {argument} to be one of .* but got '{value}'"):
            make(FakeCoordinator(), **{argument: value})
    with pytest.raises(ValueError, match="needs a name"):
        LayerNormMLP(32, 48, coordinator=FakeCoordinator(), name="")
    coordinator = FakeCoordinator()
    module = make(coordinator)
    with pytest.raises(ValueError, match="taken"):
        make(coordinator)
    with pytest.raises(ValueError, match=r"shape \[\.\.\., 32\]"):
        module(torch.zeros(16, 48))


def test_odd_features_compute_in_high_precision_said_once_per_layer(caplog):
    coordinator = FakeCoordinator()
    module = make(coordinator, hidden=20, ffn=48)
    x = randn(4, 20)
    hidden = F.layer_norm(x, (20,), module.layer_norm_weight, module.layer_norm_bias)
    hidden = F.gelu(F.linear(hidden, module.fc1_weight, module.fc1_bias), approximate="tanh")
    with caplog.at_level(logging.WARNING, "fp8dist"):
        for _ in range(2):
            assert torch.equal(module(x), F.linear(hidden, module.fc2_weight, module.fc2_bias))
    assert coordinator.slots == {}
    assert ["'a.fc1'" in caplog.messages[0], "'a.fc2'" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def test_its_repr_shows_norm_activation_and_formats():
    text = repr(make(FakeCoordinator(), normalization="RMSNorm", activation="swiglu"))
    for part in ("RMSNorm", "swiglu", "checkpoint=False", "name='a.fc1'", "fp8=e4m3fn/e5m2, name='a.fc2'"):
        assert part in text
