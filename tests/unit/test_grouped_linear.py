"""Experts multiply their own tokens: both paths give the bits of separate FP8 linear layers."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from _fakes import FakeCoordinator, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fp8dist as f8
from fp8dist._declarations import slots_of
from fp8dist.errors import MissingScope
from fp8dist.modules.grouped_linear import GroupedLinear
from fp8dist.modules.linear import Linear

PATHS = ("grouped", "looped")
ROLES = ("input", "weight", "grad_output")


def make(coordinator, experts=3, bias=True, *, path="grouped", offset=0, dtype=torch.float32, **kwargs):
    module = GroupedLinear(
        experts,
        32,
        16,
        bias,
        coordinator=coordinator,
        name="a",
        expert_offset=offset,
        path=path,
        dtype=dtype,
        **kwargs,
    )
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed, dtype=dtype))
    return module


def separate(module: GroupedLinear, coordinator) -> nn.ModuleList:
    """One layer per expert, of the same names and values."""
    layers = nn.ModuleList()
    for i, weight in enumerate(module.weight.detach()):
        layer = Linear(
            32,
            16,
            module.bias is not None,
            coordinator=coordinator,
            name=f"a.expert.{module.expert_offset + i}",
            dtype=weight.dtype,
        )
        with torch.no_grad():
            layer.weight.copy_(weight)
            if module.bias is not None:
                layer.bias.copy_(module.bias[i])
        layers.append(layer)
    return layers


def by_hand(module: GroupedLinear, coordinator, x: torch.Tensor, dy: torch.Tensor, counts: list[int]):
    """Output and gradients (input, weight, bias) of separate layers that see their tokens only."""
    layers = separate(module, coordinator)
    ys, dxs, start = [], [], 0
    with coordinator.step():
        for layer, count in zip(layers, counts, strict=True):
            rows = slice(start, start + count)
            start += count
            if not count:
                continue
            leaf = x[rows].clone().requires_grad_()
            y = layer(leaf)
            y.backward(dy[rows])
            ys.append(y.detach())
            dxs.append(leaf.grad)
    gradients = []
    for name, _ in module.named_parameters():
        parts = [getattr(layer, name) for layer in layers]
        gradients.append(torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in parts]))
    y = torch.cat(ys) if ys else dy[:0]
    return [y, torch.cat(dxs) if dxs else x[:0], *gradients]


def run(module: GroupedLinear, coordinator, x, dy, counts) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with coordinator.step():
        y = module(x, counts)
        y.backward(dy)
        assert coordinator.scope.requested is any(counts)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(counts=st.lists(st.integers(0, 36), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_it_equals_separate_layers_bit_for_bit_for_any_counts(path, bias, dtype, counts):
    ours, theirs = FakeCoordinator(), FakeCoordinator()
    module = make(ours, len(counts), bias, path=path, offset=5, dtype=dtype)
    x, dy = randn(sum(counts), 32, dtype=dtype), randn(sum(counts), 16, seed=2, dtype=dtype)
    results = run(module, ours, x, dy, counts), by_hand(module, theirs, x, dy, counts)
    for mine, wanted in zip(*results, strict=True):
        assert mine.dtype == wanted.dtype
        assert torch.equal(mine, wanted)
    assert ours.amaxes() == theirs.amaxes()
    used = [5 + i for i, count in enumerate(counts) if count]
    assert sorted(ours.amaxes()) == sorted(f"a.expert.{i}.{role}" for i in used for role in ROLES)


@pytest.mark.parametrize("path", PATHS)
def test_it_trains_like_separate_layers_over_several_steps(path):
    """With real scales; an expert pauses in some steps, and another never runs."""
    schedule = [
        [[16, 0, 8, 0], [3, 13, 0, 0]],
        [[0, 0, 40, 0]],
        [[5, 5, 5, 0], [0, 0, 0, 0]],
        [[16, 16, 0, 0]],
    ]
    recipe = f8.DelayedScaling(amax_history_len=2)
    grouped, apart = (f8.ReductionGroupCoordinator(recipe, name=name) for name in ("grouped", "apart"))
    module = make(grouped, 4, path=path)
    layers = separate(module, apart)
    for index, microbatches in enumerate(schedule):
        for parameter in (*module.parameters(), *layers.parameters()):
            parameter.grad = None
        with grouped.step(index), apart.step(index):
            for seed, counts in enumerate(microbatches):
                x = randn(sum(counts), 32, seed=seed) * (index + 1)
                y = module(x, counts)
                y.square().sum().backward()
                parts = [
                    layer(part) for layer, part in zip(layers, x.split(counts), strict=True) if len(part)
                ]
                if parts:
                    assert torch.equal(y, torch.cat(parts))
                    torch.cat(parts).square().sum().backward()
        with torch.no_grad():
            for i, layer in enumerate(layers):
                for name, parameter in layer.named_parameters():
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    assert torch.equal(getattr(module, name).grad[i], grad)
                    parameter -= 0.1 * grad
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
        assert grouped.scales() == apart.scales()
    ours, theirs = (c.state_dict()["slots"] for c in (grouped, apart))
    assert len(ours) == 12
    for name in ours:
        assert torch.equal(ours[name]["history"], theirs[name]["history"]), name
    for coordinator in (grouped, apart):
        coordinator.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("x_grad", "w_grad", "b_grad"),
    [(True, False, False), (False, True, True), (False, True, False), (False, False, True)],
)
def test_only_needed_gradients_are_computed_and_they_are_right(path, x_grad, w_grad, b_grad):
    results = []
    for needs in ((x_grad, w_grad, b_grad), (True, True, True)):
        coordinator = FakeCoordinator()
        module = make(coordinator, path=path)
        x = randn(24, 32, grad=needs[0])
        module.weight.requires_grad_(needs[1])
        module.bias.requires_grad_(needs[2])
        with coordinator.step():
            module(x, [16, 0, 8]).square().sum().backward()
        results.append((x.grad, module.weight.grad, module.bias.grad, coordinator.amaxes()))
    (*needed, amaxes), (*full, all_amaxes) = results
    for ours, theirs, wanted in zip(needed, full, (x_grad, w_grad, b_grad), strict=True):
        assert torch.equal(ours, theirs) if wanted else ours is None
    assert amaxes == all_amaxes


def test_the_grouped_path_is_one_node_and_keeps_one_byte_per_element():
    coordinator = FakeCoordinator()
    module = make(coordinator)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with coordinator.step(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(randn(64, 32, grad=True), [16, 0, 48])
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node} == {"AccumulateGrad"}
    sizes = sorted(t.numel() for t in saved if t.numel() > 1)
    assert sizes == [16 * 32, 16 * 32, 16 * 32, 48 * 32]
    assert {t.dtype for t in saved if t.numel() > 1} == {torch.float8_e4m3fn}


def test_the_grouped_path_quantizes_an_expert_once_per_scope_and_version():
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32)
    weights = [module.weight.detach().clone()]
    with coordinator.step():
        first = module(x, [8, 0, 8])
        module.weight.data.mul_(2)  # passes the version counter by, so it shows whether the cache was used
        assert torch.equal(module(x, [8, 0, 8]), first)
        with torch.no_grad():
            module.weight.zero_()
        assert torch.equal(module(x, [16, 0, 0]), module.bias[0].expand(16, 16))
        module.weight = nn.Parameter(randn(3, 16, 32) * 4)
        weights.append(module.weight.detach())
        assert not torch.equal(module(x, [16, 0, 0]), module.bias[0].expand(16, 16))
        assert coordinator.amaxes()["a.expert.0.weight"] == max(w[0].abs().max().item() for w in weights)
        with torch.inference_mode():
            assert torch.equal(module(x, [16, 0, 0]), module(x, [16, 0, 0]))
    assert coordinator.scope.weight_cache == {}
    with coordinator.step():
        second = module(x, [8, 0, 8])
    module.weight.data.mul_(2)
    with coordinator.step():
        assert not torch.equal(module(x, [8, 0, 8]), second)


@pytest.mark.parametrize("path", PATHS)
def test_it_compiles_into_one_graph_with_the_same_bits(path):
    coordinator = FakeCoordinator()
    module = make(coordinator, path=path)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    runs = []
    for run in (module, compiled):
        coordinator.forget()
        module.zero_grad()
        x = randn(32, 32, grad=True)
        with coordinator.step():
            run(x, [16, 0, 16]).square().sum().backward()
        runs.append((x.grad, module.weight.grad, module.bias.grad, coordinator.amaxes()))
    for ours, theirs in zip(runs[0][:3], runs[1][:3], strict=True):
        assert torch.equal(ours, theirs)
    assert runs[0][3] == runs[1][3]


@pytest.mark.parametrize("path", PATHS)
def test_in_eval_mode_nothing_is_recorded_and_no_scope_is_needed(path):
    coordinator = FakeCoordinator()
    module, x = make(coordinator, path=path).eval(), randn(16, 32, grad=True)
    with coordinator.step():
        y = module(x, [8, 0, 8])
        assert coordinator.scope.weight_cache == {}
    for slot in coordinator.slots.values():
        slot.scale.fill_(3.0)
    y.sum().backward()
    assert x.grad is not None
    assert coordinator.amaxes() == {}


@pytest.mark.parametrize("path", PATHS)
def test_guards_and_scopes_are_those_of_a_linear_layer(path):
    coordinator = FakeCoordinator()
    module = make(coordinator, path=path)
    with pytest.raises(MissingScope):
        module(randn(16, 32), [8, 0, 8]).sum().backward()
    coordinator.scope.open()
    y = module(randn(16, 32), [8, 0, 8])
    coordinator.slots["a.expert.2.grad_output"].scale.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("counts", [[7, 0, 9], [0, 0, 16], [0, 0, 0]])
def test_autocast_decides_the_dtype_of_the_output_only(path, counts):
    coordinator = FakeCoordinator()
    module, x = make(coordinator, path=path), randn(sum(counts), 32, grad=True)
    with coordinator.step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x, counts)
        y.float().square().sum().backward()
    assert (y.dtype, x.grad.dtype, module.weight.grad.dtype, module.bias.grad.dtype) == (
        torch.bfloat16,
        *[torch.float32] * 3,
    )


@pytest.mark.parametrize(
    "counts", [torch.tensor([8, 0, 8]), torch.tensor([8, 0, 8], dtype=torch.int32), (8, 0, 8)]
)
def test_counts_come_as_list_or_integer_tensor(counts):
    module, x = make(FakeCoordinator()).eval(), randn(16, 32)
    assert torch.equal(module(x, counts), module(x, [8, 0, 8]))


@pytest.mark.parametrize(
    ("shape", "counts", "message"),
    [
        ((16, 32), [8, 8], "3 counts >= 0"),
        ((16, 32), [8, 0, 9], "add up to T"),
        ((16, 32), [20, -4, 0], "counts >= 0"),
        ((16, 32), torch.tensor([8.0, 0.0, 8.0]), "integer tokens_per_expert but got torch.float32"),
        ((2, 8, 32), [2, 0, 0], r"input \[T, 32\]"),
        ((16, 48), [8, 0, 8], r"shape \[\.\.\., 32\]"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_inputs_that_do_not_fit_are_refused_before_anything_is_recorded(path, shape, counts, message):
    coordinator = FakeCoordinator()
    module = make(coordinator, path=path)
    with coordinator.step(), pytest.raises(ValueError, match=message):
        module(torch.zeros(shape), counts)
    assert coordinator.amaxes() == {}


def test_each_expert_declares_itself_by_its_global_index():
    coordinator = FakeCoordinator()
    module = make(coordinator, 2, offset=6, sharded=True)
    assert sorted(coordinator.slots) == sorted(f"a.expert.{i}.{role}" for i in (6, 7) for role in ROLES)
    for i, index in enumerate((6, 7)):
        declared = coordinator.declared[f"a.expert.{index}.weight"]
        assert (declared["shape"], declared["sharded"]) == ((16, 32), True)
        assert torch.equal(declared["weight"](), module.weight[i])
    twin = copy.deepcopy(module)
    assert twin.slots[1].weight is module.slots[1].weight
    twin.load_state_dict(module.state_dict())
    assert coordinator.scope.reloaded == {"a.expert.6.weight", "a.expert.7.weight"}
    assert set(coordinator.slots.values()) == set(slots_of(module))
    source = declared["weight"]
    del module
    assert source() is None


def test_another_rank_s_experts_do_not_clash():
    coordinator = FakeCoordinator()
    make(coordinator, 2)
    make(coordinator, 2, offset=2)
    with pytest.raises(ValueError, match="taken"):
        make(coordinator, 2, offset=3)


def test_first_values_are_those_of_nn_linear():
    torch.manual_seed(5)
    module = GroupedLinear(2, 32, 16, False, coordinator=FakeCoordinator(), name="a")
    torch.manual_seed(5)
    for weight in module.weight:
        assert torch.equal(weight, nn.Linear(32, 16, False).weight)
    bias = GroupedLinear(8, 32, 16, coordinator=FakeCoordinator(), name="a").bias
    assert 0.8 * 32**-0.5 < bias.abs().max().item() <= 32**-0.5


def test_bad_arguments_are_refused():
    arguments = {"coordinator": FakeCoordinator(), "name": "a"}
    with pytest.raises(ValueError, match="path to be one of grouped, looped but got 'fast'"):
        GroupedLinear(2, 32, 16, path="fast", **arguments)
    with pytest.raises(ValueError, match="at least one local expert"):
        GroupedLinear(0, 32, 16, **arguments)
    with pytest.raises(ValueError, match="offset >= 0"):
        GroupedLinear(2, 32, 16, expert_offset=-1, **arguments)
    with pytest.raises(ValueError, match="needs a name"):
        GroupedLinear(2, 32, 16, coordinator=FakeCoordinator(), name="")


@pytest.mark.parametrize("path", PATHS)
def test_odd_features_mean_high_precision_without_slots_said_once(path, caplog):
    coordinator = FakeCoordinator()
    module = GroupedLinear(2, 20, 10, coordinator=coordinator, name="a", path=path)
    x = randn(12, 20)
    expected = [
        nn.functional.linear(p, w, b)
        for p, w, b in zip(x.split([5, 7]), module.weight, module.bias, strict=True)
    ]
    with caplog.at_level(logging.WARNING, "fp8dist"):
        for _ in range(2):
            assert torch.equal(module(x, [5, 7]), torch.cat(expected))
    assert (module.slots, coordinator.slots, len(caplog.messages)) == (None, {}, 1)
    assert "high precision" in repr(module)


@pytest.mark.parametrize("path", PATHS)
def test_odd_tokens_move_the_weight_gradient_said_once(path, caplog):
    coordinator = FakeCoordinator()
    module = make(coordinator, path=path)
    with caplog.at_level(logging.WARNING, "fp8dist"), coordinator.step():
        for _ in range(2):
            module(randn(16, 32), [7, 0, 9]).sum().backward()
    assert len(caplog.messages) == 1
    assert "weight gradient is computed in high precision" in caplog.messages[0]


@pytest.mark.parametrize("path", PATHS)
def test_odd_tokens_are_not_mentioned_where_no_weight_gradient_is_computed(path, caplog):
    coordinator = FakeCoordinator()
    module = make(coordinator, path=path).requires_grad_(False)
    with caplog.at_level(logging.WARNING, "fp8dist"), coordinator.step():
        module(randn(16, 32, grad=True), [7, 0, 9]).sum().backward()
    assert caplog.messages == []


def test_its_repr_names_experts_and_formats():
    text = repr(make(FakeCoordinator(), offset=4))
    for part in ("experts=4..6", "path=grouped", "fp8=e4m3fn/e5m2, name='a.expert.4'"):
        assert part in text
