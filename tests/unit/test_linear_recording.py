"""The FP8 linear layer in a step: what it records and when, its weight cache and its guards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _fakes import FakeCoordinator, randn, train
from _fakes import make_linear as make
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8dist as f8
from fp8dist._amax import ABSENT
from fp8dist.errors import MissingScope

ROLES = ("input", "weight", "grad_output")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gate", ["closed", "paused", "recording"])
def test_amaxes_are_recorded_in_training_with_an_open_scope_and_gate_only(training, gate):
    coordinator = FakeCoordinator()
    module = make(coordinator).train(training)
    x, dy = randn(16, 32, grad=True), randn(16, 16, seed=2)
    scope = coordinator.scope
    if gate != "closed":
        scope.open()
    if gate == "paused":
        with scope.paused():
            module(x).backward(dy)
    elif gate == "closed" and training:
        y = module(x)
        with pytest.raises(MissingScope, match="outside a step scope"):
            y.backward(dy)
    else:
        module(x).backward(dy)
    expected = {}
    if training and gate == "recording":
        expected = {
            f"a.{r}": t.abs().max().item() for r, t in zip(ROLES, (x, module.weight, dy), strict=True)
        }
    assert coordinator.amaxes() == expected
    assert scope.requested is (training and gate == "recording")
    assert (x.grad is None) is (training and gate == "closed")


def test_a_forward_without_grad_records_in_training():
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32)
    with coordinator.step(), torch.no_grad():
        module(x)
    assert coordinator.amaxes() == {
        "a.input": x.abs().max().item(),
        "a.weight": module.weight.abs().max().item(),
    }
    assert not coordinator.scope.requested


def test_microbatches_record_the_largest_amax_in_any_order():
    batches = [(randn(16, 32, seed=s) * s, randn(16, 16, seed=s + 9) * (4 - s)) for s in (1, 2, 3)]
    recorded = []
    for order in (batches, batches[::-1]):
        coordinator = FakeCoordinator()
        module = make(coordinator)
        with coordinator.step():
            for x, dy in order:
                train(module, x, dy)
        recorded.append(coordinator.amaxes())
    assert recorded[0] == recorded[1]
    assert recorded[0]["a.input"] == max(x.abs().max().item() for x, _ in batches)
    assert recorded[0]["a.grad_output"] == max(dy.abs().max().item() for _, dy in batches)


def test_a_stateless_recipe_records_nothing_and_needs_no_scope():
    coordinator = FakeCoordinator(stateless=True)
    train(make(coordinator), randn(16, 32), randn(16, 16))
    assert coordinator.amaxes() == {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_neither_results_nor_amaxes(reentrant):
    runs = []
    for recompute in (True, False):
        coordinator = FakeCoordinator()
        module = make(coordinator)
        x = randn(16, 32, grad=True)
        with coordinator.step():
            y = checkpoint(module, x, use_reentrant=reentrant) if recompute else module(x)
            y.square().sum().backward()
        runs.append((y.detach(), x.grad, module.weight.grad, coordinator.amaxes()))
    for ours, theirs in zip(*(run[:3] for run in runs), strict=True):
        assert torch.equal(ours, theirs)
    assert runs[0][3] == runs[1][3]
    assert len(runs[0][3]) == 3


def test_a_nan_reaches_output_and_amax():
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32)
    x[3, 4] = float("nan")
    with coordinator.step():
        y = module(x)
    assert torch.isnan(y[3]).all()
    assert not torch.isnan(y[:3]).any()
    assert np.isnan(coordinator.amaxes()["a.input"])


# --- the weight cache: `.data` writes pass the version counter by, so they show whether the cache was used


def test_a_weight_is_quantized_once_per_scope():
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32)
    with coordinator.step():
        first = module(x)
        module.weight.data.mul_(2)
        assert torch.equal(module(x), first)
    with coordinator.step():
        assert not torch.equal(module(x), first)


@pytest.mark.parametrize("case", ["no scope", "paused", "eval"])
def test_there_is_no_weight_cache_outside_a_recording_scope(case):
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32)
    scope = coordinator.scope
    with coordinator.step():
        module(x)  # fills the cache
        if case == "eval":
            module.eval()
        if case == "paused":
            with scope.paused():
                module.weight.data.zero_()
                assert torch.equal(module(x), module.bias.expand(16, 16))
        if case == "eval":
            module.weight.data.zero_()
            assert torch.equal(module(x), module.bias.expand(16, 16))
    if case == "no scope":
        first = module(x)
        module.weight.data.zero_()
        assert not torch.equal(module(x), first)
    assert scope.weight_cache == {}


def test_a_weight_that_changes_inside_a_scope_is_quantized_again():
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32)
    with coordinator.step():
        module(x)
        with torch.no_grad():
            module.weight.zero_()
        assert torch.equal(module(x), module.bias.expand(16, 16))


def test_another_weight_of_the_same_version_is_not_taken_for_the_cached_one():
    coordinator = FakeCoordinator()
    module, x = make(coordinator), randn(16, 32)
    zeros = nn.Parameter(torch.zeros(16, 32))
    with torch.no_grad():
        while zeros._version < module.weight._version:
            zeros.zero_()
    assert zeros._version == module.weight._version
    with coordinator.step():
        module(x)
        module.weight = zeros
        assert torch.equal(module(x), module.bias.expand(16, 16))


def test_a_weight_is_kept_no_longer_than_what_its_first_use_has_recorded():
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(), name="kept")
    module, x = make(coordinator), randn(16, 32)
    with coordinator.step():
        module(x)
        quantized = coordinator.request_handle.weight_cache["a.weight"].quantized
        module(x)
        assert coordinator.request_handle.weight_cache["a.weight"].quantized is quantized
        coordinator._table.reset_row()
        module(x)
        assert module.slots.weight.amax.item() == module.weight.abs().max().item()
    coordinator.close()


def test_inference_mode_in_a_scope_does_not_poison_the_cache():
    coordinator = FakeCoordinator()
    module = make(coordinator)
    with coordinator.step():
        with torch.inference_mode():
            module(randn(16, 32))
        module(randn(16, 32, grad=True)).sum().backward()
    assert module.weight.grad is not None


# --- guards


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("role", ROLES)
def test_an_update_between_a_forward_and_its_backward_raises(warm, role):
    coordinator = FakeCoordinator(warm=warm)
    module = make(coordinator)
    coordinator.scope.open()
    y = module(randn(16, 32))
    coordinator.slots[f"a.{role}"].scale.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert coordinator.slots["a.grad_output"].amax.item() == ABSENT


def test_recording_between_a_forward_and_its_backward_is_harmless():
    coordinator = FakeCoordinator()
    module, other = make(coordinator), make(coordinator, name="b")
    with coordinator.step():
        y = module(randn(16, 32))
        train(other, randn(16, 32), randn(16, 16))
        train(module, randn(16, 32) * 5, randn(16, 16))
        y.sum().backward()


def test_in_eval_mode_an_update_between_forward_and_backward_is_harmless():
    coordinator = FakeCoordinator()
    module, x = make(coordinator).eval(), randn(16, 32, grad=True)
    y = module(x)
    for slot in coordinator.slots.values():
        slot.scale.fill_(3.0)
    y.sum().backward()
    assert x.grad is not None
