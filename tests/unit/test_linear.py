"""The FP8 linear layer: its numbers, dtypes and shapes, and its life as a module."""

from __future__ import annotations

import copy
import logging
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _fakes import E4M3, E5M2, FP8_MAX, FakeCoordinator, randn, round_to_fp8, train
from _fakes import make_linear as make
from torch import nn

from fp8dist.modules.linear import Linear

HIGH = [torch.float32, torch.bfloat16, torch.float16]
ROLES = ("input", "weight", "grad_output")


def integers(*shape: int, seed: int, top: int = 4) -> torch.Tensor:
    """Values that both formats hold exactly under a scale of 1."""
    return torch.randint(-top, top + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(16,), (2, 24), (2, 4, 4), (), (5,), (3, 7)])
def test_it_equals_nn_linear_bit_for_bit_where_fp8_is_exact(dtype, bias, leading):
    coordinator = FakeCoordinator(warm=True)
    module = make(coordinator, 32, 16, bias=bias, dtype=dtype)
    plain = nn.Linear(32, 16, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter, seed in zip(module.parameters(), (3, 4), strict=False):
            parameter.copy_(integers(*parameter.shape, seed=seed, top=2))
    plain.load_state_dict(module.state_dict())
    x, dy = integers(*leading, 32, seed=5, top=2).to(dtype), integers(*leading, 16, seed=6, top=2).to(dtype)
    with coordinator.step():
        results = train(module, x, dy)
    for ours, theirs in zip(results, train(plain, x, dy), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens", [32, 7])
@pytest.mark.parametrize("scales", [None, (20.0, 300.0, 1000.0)])
def test_it_multiplies_quantized_operands_and_undoes_their_scales(tokens, scales):
    coordinator = FakeCoordinator(warm=scales is not None)
    module = make(coordinator)
    x, dy = randn(tokens, 32), randn(tokens, 16, seed=2) * 1e-3
    operands = []
    for index, (role, tensor) in enumerate(zip(ROLES, (x, module.weight, dy), strict=True)):
        fp8 = E5M2 if role == "grad_output" else E4M3
        if scales is None:
            scale = np.float32(FP8_MAX[fp8]) / np.float32(tensor.abs().max().item())
        else:
            scale = np.float32(scales[index])
            coordinator.slots[f"a.{role}"].scale.fill_(scales[index])
        operands.append(torch.from_numpy(round_to_fp8(tensor, scale, fp8)) / float(scale))
    xq, wq, gq = operands
    with coordinator.step():
        y, dx, dw, db = train(module, x, dy)
    references = (xq @ wq.t() + module.bias.double(), gq @ wq, gq.t() @ xq, dy.double().sum(0))
    for ours, reference in zip((y, dx, dw, db), references, strict=True):
        torch.testing.assert_close(
            ours.double(), reference, rtol=1e-5, atol=1e-6 * reference.abs().max().item()
        )


def test_the_gradient_of_the_bias_is_not_quantized():
    coordinator = FakeCoordinator()
    module, dy = make(coordinator), randn(4, 8, 16, seed=2)
    with coordinator.step():
        db = train(module, randn(4, 8, 32), dy)[-1]
    assert torch.equal(db, dy.sum((0, 1)))


def test_double_backward_is_refused():
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32, grad=True)
    with coordinator.step():
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


@pytest.mark.parametrize(("x_grad", "w_grad"), [(True, False), (False, True), (False, False)])
def test_only_needed_gradients_are_computed_and_they_are_right(x_grad, w_grad):
    results = []
    for needs in ((x_grad, w_grad), (True, True)):
        coordinator = FakeCoordinator()
        module = make(coordinator)
        x = randn(16, 32, grad=needs[0])
        module.weight.requires_grad_(needs[1])
        with coordinator.step():
            module(x).square().sum().backward()
        results.append((x.grad, module.weight.grad, module.bias.grad))
    needed, full = results
    for ours, theirs, wanted in zip(needed, full, (x_grad, w_grad, True), strict=True):
        assert torch.equal(ours, theirs) if wanted else ours is None


@pytest.mark.parametrize(("x_grad", "w_grad"), [(True, False), (False, True), (True, True)])
def test_backward_keeps_one_byte_per_element_of_what_it_needs(x_grad, w_grad):
    coordinator = FakeCoordinator()
    module = make(coordinator)
    module.weight.requires_grad_(w_grad)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with coordinator.step(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(randn(64, 32, grad=x_grad))
    sizes = sorted(t.numel() for t in saved if t.numel() > 1)
    assert sizes == [16 * 32] * x_grad + [64 * 32] * w_grad  # dgrad needs the weight, wgrad the input
    assert {t.dtype for t in saved if t.numel() > 1} == {E4M3}


# --- dtypes and shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast_decides_the_dtype_of_the_output_only(dtype, x_dtype):
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32, dtype=x_dtype, grad=True)
    with coordinator.step():
        with torch.autocast("cpu", dtype=dtype):
            y = module(x)
        y.float().square().sum().backward()
    assert (y.dtype, x.grad.dtype, module.weight.grad.dtype) == (dtype, x_dtype, torch.float32)
    assert module.bias.grad.dtype == torch.float32
    if x_dtype == torch.float32:  # not rounded to the dtype of the output on the way
        assert not torch.equal(x.grad, x.grad.to(dtype).float())
    assert not torch.equal(module.weight.grad, module.weight.grad.to(dtype).float())
    torch.testing.assert_close(y.float(), F.linear(x.float(), module.weight, module.bias), atol=0.2, rtol=0.1)


def test_autocast_around_the_backward_changes_nothing():
    grads = []
    for inside in (True, False):
        coordinator = FakeCoordinator()
        module, x = make(coordinator), randn(7, 32)  # an odd number of tokens: the high-precision product
        with coordinator.step():
            y = module(x)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                y.backward(randn(7, 16, seed=2))
        grads.append(module.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(16, 32, dtype=torch.int64), "input but got torch.int64"),
        (torch.zeros(16, 32, dtype=torch.float64), "input but got torch.float64"),
        (torch.zeros(16, 32, dtype=torch.bfloat16), "weight's dtype torch.float32 but got torch.bfloat16"),
        (torch.zeros(16, 48), r"shape \[\.\.\., 32\] but got \(16, 48\)"),
        (torch.tensor(1.0), r"shape \[\.\.\., 32\] but got \(\)"),
    ],
)
@pytest.mark.parametrize("out_features", [16, 10])
def test_inputs_that_do_not_fit_are_refused_before_anything_is_recorded(x, message, out_features):
    coordinator = FakeCoordinator()
    module = make(coordinator, out_features=out_features)
    with coordinator.step(), pytest.raises(ValueError, match=message):
        module(x)
    assert coordinator.amaxes() == {}


@pytest.mark.parametrize(("in_features", "out_features"), [(20, 16), (32, 10), (0, 16), (16, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_odd_features_mean_nn_linear_without_slots_said_once(in_features, out_features, caplog):
    coordinator = FakeCoordinator()
    module = make(coordinator, in_features, out_features)
    plain = nn.Linear(in_features, out_features)
    plain.load_state_dict(module.state_dict())
    x, dy = randn(16, in_features), randn(16, out_features, seed=2)
    with caplog.at_level(logging.WARNING, "fp8dist"):
        for _ in range(2):
            for ours, theirs in zip(train(module, x, dy), train(plain, x, dy), strict=True):
                assert torch.equal(ours, theirs)
    assert module.slots is None
    assert coordinator.slots == {}
    assert [record.getMessage().startswith("FP8 layer 'a': its ") for record in caplog.records] == [True]


def test_odd_tokens_move_only_the_weight_gradient_said_once_per_module(caplog):
    coordinator = FakeCoordinator()
    modules = [make(coordinator, name=name) for name in "ab"]
    with caplog.at_level(logging.WARNING, "fp8dist"), coordinator.step():
        for module in modules * 2:
            for tokens in (7, 9, 16):
                train(module, randn(tokens, 32), randn(tokens, 16))
    said = [record.getMessage() for record in caplog.records]
    assert ["'a'" in said[0], "'b'" in said[1]] == [True, True]
    assert len(said) == 2
    assert all("weight gradient is computed in high precision" in text for text in said)


def test_odd_tokens_are_not_mentioned_where_no_weight_gradient_is_computed(caplog):
    coordinator = FakeCoordinator()
    module = make(coordinator).requires_grad_(False)
    with caplog.at_level(logging.WARNING, "fp8dist"), coordinator.step():
        module(randn(7, 32, grad=True)).sum().backward()
    assert caplog.records == []


@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 16)])
def test_an_empty_batch_gives_zero_gradients_and_records_the_weight_only(leading):
    coordinator = FakeCoordinator()
    module = make(coordinator)
    with coordinator.step():
        y, dx, dw, db = train(module, torch.empty(*leading, 32), torch.empty(*leading, 16))
        assert coordinator.scope.requested
    assert (y.shape, dx.shape) == ((*leading, 16), (*leading, 32))
    assert torch.equal(dw, torch.zeros(16, 32))
    assert torch.equal(db, torch.zeros(16))
    assert list(coordinator.amaxes()) == ["a.weight"]


# --- construction and life


def test_parameters_checkpoints_and_initialization_are_those_of_nn_linear():
    module = make(FakeCoordinator(), seed=5)
    torch.manual_seed(5)
    plain = nn.Linear(32, 16)
    assert isinstance(module, nn.Linear)
    assert list(module.state_dict()) == list(plain.state_dict())
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    plain.load_state_dict(module.state_dict())
    assert dict(module.named_buffers()) == {}


def test_it_declares_three_slots_and_gives_only_the_weight_a_shape():
    coordinator = FakeCoordinator()
    module = make(coordinator, name="layers.0.fc", sharded=True)
    slots = {f"layers.0.fc.{role}": slot for role, slot in module.slots._asdict().items()}
    assert slots == coordinator.slots
    nothing = {"shape": None, "weight": None, "sharded": False}
    assert coordinator.declared["layers.0.fc.input"] == nothing
    assert coordinator.declared["layers.0.fc.grad_output"] == nothing
    weight = coordinator.declared["layers.0.fc.weight"]
    assert (weight["shape"], weight["sharded"]) == ((16, 32), True)
    assert weight["weight"]() is module.weight
    module.to(torch.bfloat16).to_empty(device="cpu")
    assert weight["weight"]() is module.weight
    del module, slots
    assert weight["weight"]() is None, "the coordinator does not keep a dropped layer alive"


def test_a_taken_or_empty_name_is_refused():
    coordinator = FakeCoordinator()
    make(coordinator)
    with pytest.raises(ValueError, match="taken"):
        make(coordinator)
    with pytest.raises(ValueError, match="needs a name"):
        make(coordinator, name="")


def test_from_linear_shares_parameters_mode_and_hooks():
    plain = nn.Linear(32, 16).eval()
    plain.note = "mine"
    calls = []
    handle = plain.register_forward_hook(lambda *_: calls.append(1))
    module = Linear.from_linear(plain, FakeCoordinator(), "a")
    assert module.weight is plain.weight
    assert module.bias is plain.bias
    assert (module.training, module.note, type(plain)) == (False, "mine", nn.Linear)
    module(randn(16, 32))
    assert calls == [1]
    handle.remove()
    module(randn(16, 32))
    assert calls == [1]
    module.weight = None  # no longer the other's business
    assert plain.weight is not None


def test_a_weight_that_is_no_parameter_is_refused():
    plain = nn.Linear(32, 16)
    weight = plain._parameters.pop("weight")
    plain.weight = weight * 2
    with pytest.raises(ValueError, match="expected the weight of 'a' to be a Parameter"):
        Linear.from_linear(plain, FakeCoordinator(), "a")


def test_a_copy_has_its_own_parameters_and_the_same_slots():
    module = make(FakeCoordinator())
    twin = copy.deepcopy(module)
    assert twin.weight is not module.weight
    assert torch.equal(twin.weight, module.weight)
    assert all(a is b for a, b in zip(twin.slots, module.slots, strict=True))


def test_pickling_the_module_says_what_to_save_instead():
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(make(FakeCoordinator()))


def test_its_repr_names_the_layer_and_the_formats():
    assert "out_features=16, bias=True, fp8=e4m3fn/e5m2, name='a'" in repr(make(FakeCoordinator()))
    assert "high precision" in repr(make(FakeCoordinator(), 20, 10))


def test_two_layers_compile_into_one_graph_with_the_same_bits():
    coordinator = FakeCoordinator()
    model = nn.Sequential(make(coordinator, 32, 32, name="a"), make(coordinator, 32, 16, name="b"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    runs = []
    for module in (model, compiled):
        coordinator.forget()
        with coordinator.step():
            runs.append((train(module, randn(16, 32), randn(16, 16, seed=2)), coordinator.amaxes()))
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(ours, theirs)
    assert runs[0][1] == runs[1][1]
    assert len(runs[0][1]) == 6


def test_the_layer_it_was_made_from_still_loads_its_weights():
    coordinator = FakeCoordinator()
    plain = nn.Linear(32, 16)
    module = Linear.from_linear(plain, coordinator, "a")
    plain.load_state_dict({"weight": torch.ones(16, 32), "bias": torch.ones(16)})
    assert torch.equal(module.weight, torch.ones(16, 32))
    assert coordinator.scope.reloaded == {"a.weight"}
