"""The fused pipeline gives, bit for bit, what its modules give one after the other, as one autograd node."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict

import pytest
import torch
from _fakes import FakeCoordinator, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8dist as f8
from fp8dist.errors import MissingScope
from fp8dist.modules.linear import Linear
from fp8dist.modules.sequential import Residual, Sequential

H = 32
FUSED = "_PipelineBackward"


def make(kind: str, index: int, coordinator, dtype: torch.dtype = torch.float32) -> nn.Module:
    """One operation that keeps [..., H]."""
    if kind.startswith("linear"):
        return Linear(H, H, kind == "linear", coordinator=coordinator, name=f"a.{index}", dtype=dtype)
    if kind.startswith("residual"):
        return Residual(int(kind.removeprefix("residual")))
    return {
        "layernorm": lambda: nn.LayerNorm(H, dtype=dtype),
        "layernorm-plain": lambda: nn.LayerNorm(H, elementwise_affine=False),
        "layernorm-nobias": lambda: nn.LayerNorm(H, bias=False, dtype=dtype),
        "rmsnorm": lambda: nn.RMSNorm(H, dtype=dtype),
        "rmsnorm-plain": lambda: nn.RMSNorm(H, elementwise_affine=False),
        "gelu": lambda: nn.GELU(),
        "gelu-tanh": lambda: nn.GELU(approximate="tanh"),
        "relu": lambda: nn.ReLU(),
        "silu": lambda: nn.SiLU(),
        "dropout": lambda: nn.Dropout(0.3),
        "dropout0": lambda: nn.Dropout(0.0),
    }[kind]()


def build(kinds, coordinator, dtype: torch.dtype = torch.float32) -> Sequential:
    module = Sequential(*(make(kind, i, coordinator, dtype) for i, kind in enumerate(kinds)))
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed, dtype=dtype))
    return module


def one_by_one(module: Sequential, x: torch.Tensor) -> torch.Tensor:
    """The definition: what enters each operation is kept, a residual adds one of these values."""
    entered = []
    for operation in module:
        entered.append(x)
        x = x + entered[operation.start] if isinstance(operation, Residual) else operation(x)
    return x


def compare(kinds, *, dtype=torch.float32, x_grad=True, frozen=(), training=True, leading=(16,)) -> None:
    """Run both ways and compare output, all gradients, amaxes, random numbers."""
    results = []
    for fused in (True, False):
        coordinator = FakeCoordinator()
        module = build(kinds, coordinator, dtype).train(training)
        for index, parameter in enumerate(module.parameters()):
            parameter.requires_grad_(index not in frozen)
        x = randn(*leading, H, dtype=dtype, grad=x_grad)
        torch.manual_seed(3)
        with coordinator.step():
            y = module(x) if fused else one_by_one(module, x)
            if y.requires_grad:
                assert not fused or type(y.grad_fn).__name__ == FUSED
                y.backward(randn(*leading, H, seed=9, dtype=dtype))
            requested = coordinator.scope.requested
        gradients = [x.grad, *(p.grad for p in module.parameters())]
        results.append((y.detach(), *gradients, coordinator.amaxes(), requested, torch.rand(1)))
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        if isinstance(theirs, torch.Tensor):
            assert ours is not None, i
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(ours, theirs), i
        else:
            assert ours == theirs, i


BLOCK = ("layernorm", "linear", "gelu", "linear", "dropout", "residual0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        BLOCK,
        ("rmsnorm", "linear-nobias", "silu", "linear-nobias", "residual0"),
        ("linear", "relu", "residual1", "rmsnorm-plain", "linear", "residual0", "residual0"),
        ("layernorm-plain", "linear", "dropout0", "gelu-tanh", "layernorm-nobias"),
        ("gelu",),
        ("relu", "residual0"),
        ("dropout", "dropout", "relu"),
        ("dropout0",),
        ("dropout0", *["residual0"] * 3, "dropout0", "residual1", "residual5"),
    ],
    ids="-".join,
)
def test_it_equals_its_modules_one_after_the_other(kinds, training, dtype):
    compare(kinds, dtype=dtype, training=training)


KINDS = (
    "linear", "linear-nobias", "layernorm", "layernorm-nobias", "layernorm-plain", "rmsnorm", "rmsnorm-plain",
    "gelu", "gelu-tanh", "relu", "silu", "dropout", "dropout0",
)  # fmt: skip


@st.composite
def pipelines(draw) -> list[str]:
    kinds: list[str] = []
    for index in range(draw(st.integers(1, 7))):
        if index and draw(st.integers(0, 3)) == 0:
            kinds.append(f"residual{draw(st.integers(0, index - 1))}")
        else:
            kinds.append(draw(st.sampled_from(KINDS)))
    return kinds


@given(
    kinds=pipelines(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    x_grad=st.booleans(),
    frozen=st.sets(st.integers(0, 10)),
    training=st.booleans(),
    leading=st.sampled_from([(16,), (2, 8), (5,), (0,), ()]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_pipeline_equals_its_modules(kinds, dtype, x_grad, frozen, training, leading):
    compare(kinds, dtype=dtype, x_grad=x_grad, frozen=frozen, training=training, leading=leading)


def test_it_is_one_node_with_one_request(monkeypatch):
    coordinator = FakeCoordinator()
    module = build(BLOCK, coordinator)
    requests = []
    monkeypatch.setattr(type(coordinator.scope), "request", lambda scope: requests.append(scope))
    with coordinator.step():
        y = module(randn(16, H, grad=True))
        y.sum().backward()
    assert type(y.grad_fn).__name__ == FUSED
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node} == {"AccumulateGrad"}
    assert requests == [coordinator.scope]


def test_layers_of_two_coordinators_ask_both():
    one, two = FakeCoordinator(), FakeCoordinator()
    module = Sequential(make("linear", 0, one), make("linear", 0, two))
    with one.step(), two.step():
        module(randn(16, H)).sum().backward()
        assert (one.scope.requested, two.scope.requested) == (True, True)


def test_a_layer_that_takes_no_part_in_the_backward_asks_nobody():
    frozen, trained = FakeCoordinator(), FakeCoordinator()
    module = Sequential(make("linear", 0, frozen).requires_grad_(False), make("linear", 0, trained))
    with trained.step():
        module(randn(16, H)).sum().backward()
    assert (frozen.scope.requested, trained.scope.requested) == (False, True)
    assert frozen.amaxes() == {}


@pytest.mark.parametrize("wrap", [False, "reentrant", "non-reentrant"])
def test_it_trains_like_its_modules_over_several_steps(wrap):
    """With real scales, which move from step to step, and two microbatches in each."""
    runs = []
    for fused in (True, False):
        recipe = f8.DelayedScaling(amax_history_len=2)
        coordinator = f8.ReductionGroupCoordinator(recipe, name=f"sequential {fused}")
        module = build(BLOCK, coordinator)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        torch.manual_seed(7)
        outputs = []
        for step in range(4):
            with coordinator.step(step):
                for seed in (step, step + 10):
                    x = (randn(16, H, seed=seed) * (step + 1)).requires_grad_()
                    if not fused:
                        y = one_by_one(module, x)
                    elif wrap:
                        y = checkpoint(module, x, use_reentrant=wrap == "reentrant")
                    else:
                        y = module(x)
                    y.square().mean().backward()
                    outputs += [y.detach(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
        slots = coordinator.state_dict()["slots"]
        runs.append((outputs, coordinator.scales(), {name: slots[name]["history"] for name in slots}))
        coordinator.close()
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(ours, theirs)
    assert runs[0][1] == runs[1][1]
    for name, history in runs[0][2].items():
        assert torch.equal(history, runs[1][2][name]), name


def test_it_keeps_fp8_operands_one_mask_byte_and_what_norm_and_activation_need():
    coordinator = FakeCoordinator()
    module = build(BLOCK, coordinator)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with coordinator.step(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(randn(64, H, grad=True))
    tokens = sorted(str(t.dtype).removeprefix("torch.") for t in saved if t.numel() == 64 * H)
    # Inputs of norm and GELU, quantized inputs of both layers, the mask.
    assert tokens == ["bool", "float32", "float32", "float8_e4m3fn", "float8_e4m3fn"]


def test_what_needs_no_gradient_is_not_kept():
    coordinator = FakeCoordinator()
    module = build(BLOCK, coordinator).requires_grad_(False)
    module[3].bias.requires_grad_()
    saved = []
    with coordinator.step(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        module(randn(64, H))
    assert sorted(t.numel() for t in saved) == [1, 1, 1, 64 * H]  # the last layer's guards, the mask


def test_a_module_used_three_times_gets_the_sum_of_its_gradients():
    coordinator = FakeCoordinator()
    layer = make("linear", 0, coordinator)
    module = Sequential(layer, nn.ReLU(), layer, nn.GELU(), layer)
    grads = []
    for run in (module, lambda x: one_by_one(module, x)):
        layer.zero_grad()
        with coordinator.step():
            run(randn(16, H)).square().sum().backward()
        grads.append((layer.weight.grad, layer.bias.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_an_update_between_a_forward_and_its_backward_raises(role):
    coordinator = FakeCoordinator()
    module = build(BLOCK, coordinator)
    coordinator.scope.open()
    y = module(randn(16, H))
    coordinator.slots[f"a.1.{role}"].scale.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_training_outside_a_scope_raises_and_double_backward_is_refused():
    coordinator = FakeCoordinator()
    module, x = build(BLOCK, coordinator), randn(16, H, grad=True)
    with pytest.raises(MissingScope):
        module(x).sum().backward()
    with coordinator.step():
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


# --- what it does not fuse


class DoublingReLU(nn.ReLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked(register: str) -> nn.Module:
    module = nn.ReLU()
    double = {
        "register_forward_hook": lambda module, args, output: 2 * output,
        "register_forward_pre_hook": lambda module, args: (2 * args[0],),
        "register_full_backward_hook": lambda module, dx, dy: (2 * dx[0],),
        "register_full_backward_pre_hook": lambda module, dy: (2 * dy[0],),
    }[register]
    getattr(module, register)(double)
    return module


def patched() -> nn.Module:
    module = nn.ReLU()
    module.forward = lambda input: 2 * input
    return module


def deferring(coordinator) -> Linear:
    layer = make("linear", 9, coordinator)
    layer.wgrad = "forked"
    return layer


@pytest.mark.parametrize(
    "odd",
    [
        lambda c: nn.Tanh(),
        lambda c: nn.ReLU(inplace=True),
        lambda c: nn.Dropout(1.0),
        lambda c: nn.Linear(H, H),
        lambda c: Linear(H, 20, coordinator=c, name="odd"),
        lambda c: DoublingReLU(),
        lambda c: patched(),
        lambda c: hooked("register_forward_hook"),
        lambda c: hooked("register_forward_pre_hook"),
        lambda c: hooked("register_full_backward_hook"),
        lambda c: hooked("register_full_backward_pre_hook"),
        deferring,
        lambda c: nn.Sequential(nn.ReLU()),
        lambda c: nn.RMSNorm(H, dtype=torch.float64),
    ],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_an_operation_that_it_does_not_know_makes_it_run_all_one_by_one_said_once(odd, caplog):
    results = []
    for plain in (False, True):
        coordinator = FakeCoordinator()
        torch.manual_seed(1)
        module = Sequential(make("linear", 0, coordinator), nn.GELU(), odd(coordinator))
        x = randn(16, H, grad=True)
        with caplog.at_level(logging.WARNING, "fp8dist"), coordinator.step():
            for _ in range(2):
                y = one_by_one(module, x) if plain else module(x)
                y.square().sum().backward()
        results.append((y.detach(), x.grad, *(p.grad for p in module.parameters())))
        assert len(coordinator.amaxes()) >= 3
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    said = [text for text in caplog.messages if "one by one" in text]
    assert len(said) == 1
    assert "operation 2" in said[0] or "dtype" in said[0]


def test_autocast_runs_one_by_one(caplog):
    coordinator = FakeCoordinator()
    module, x = build(BLOCK, coordinator).eval(), randn(16, H)
    with caplog.at_level(logging.WARNING, "fp8dist"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x), one_by_one(module, x))
    assert ["autocast" in text for text in caplog.messages] == [True]


@pytest.mark.parametrize("which", ["input", "parameter"])
def test_a_tensor_subclass_runs_one_by_one(which, caplog):
    class Marked(torch.Tensor):
        pass

    module, x = build(("relu", "layernorm"), FakeCoordinator()), randn(16, H)
    if which == "input":
        x = x.as_subclass(Marked)
    else:
        module[1].weight = nn.Parameter(module[1].weight.detach().as_subclass(Marked))
    with caplog.at_level(logging.WARNING, "fp8dist"):
        assert isinstance(module(x), Marked)
    assert ["tensor subclasses" in text for text in caplog.messages] == [True]


def test_it_compiles_into_one_graph_with_the_same_bits():
    coordinator = FakeCoordinator()
    module = build(("layernorm", "linear", "gelu", "linear", "residual0"), coordinator)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    runs = []
    for run in (module, compiled):
        coordinator.forget()
        x = randn(16, H, grad=True)
        with coordinator.step():
            run(x).square().sum().backward()
        runs.append((x.grad, coordinator.amaxes()))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


# --- its life as a module


def test_it_has_the_names_and_indices_of_nn_sequential():
    coordinator = FakeCoordinator()
    named = OrderedDict(norm=make("layernorm", 0, coordinator), fc=make("linear", 1, coordinator))
    module = Sequential(named)
    assert list(module.state_dict()) == ["norm.weight", "norm.bias", "fc.weight", "fc.bias"]
    assert list(build(BLOCK, FakeCoordinator()).state_dict())[:3] == ["0.weight", "0.bias", "1.weight"]
    assert module[:1].norm is module.norm
    assert module[1] is module.fc
    twin = copy.deepcopy(module).eval()
    x = randn(16, H)
    assert torch.equal(twin(x), module.eval()(x))
    assert torch.equal(Sequential()(x), x)


@pytest.mark.parametrize("start", [1, 5, -1])
def test_a_residual_starts_before_itself(start):
    module = Sequential(nn.ReLU(), Residual(start))
    with pytest.raises(
        ValueError, match=rf"operation 1 expected a start in 0\.\.0 but got Residual\({start}\)"
    ):
        module(randn(16, H))


@pytest.mark.parametrize("odd", [[], [nn.Tanh()]])
def test_a_residual_adds_equal_shapes_only(odd):
    layer = Linear(H, 16, coordinator=FakeCoordinator(), name="a").eval()
    with pytest.raises(ValueError, match=r"got \(16, 32\) at its start and \(16, 16\) here"):
        Sequential(layer, *odd, Residual(0))(randn(16, H))


def test_inputs_that_do_not_fit_are_refused():
    module = build(("linear",), FakeCoordinator())
    with pytest.raises(ValueError, match=r"weight's dtype torch\.float32 but got torch\.bfloat16"):
        module(randn(16, H, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"shape \[\.\.\., 32\]"):
        module(randn(16, 48))


def test_its_repr_shows_residuals():
    assert "Residual(start=0)" in repr(build(BLOCK, FakeCoordinator()))
