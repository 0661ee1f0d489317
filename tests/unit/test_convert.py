"""Which layers `convert` replaces, and what it calls them."""

from __future__ import annotations

import logging

import pytest
import torch
from _fakes import FakeCoordinator
from torch import nn

from fp8dist.modules.convert import convert
from fp8dist.modules.linear import Linear


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.fc1 = nn.Linear(32, 64)
        self.fc2 = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.fc1(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(32, 48, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Wrapper(nn.Module):
    """A wrapper that keeps the model under a name of its own."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


LINEARS = ["layers.0.fc1", "layers.0.fc2", "layers.1.fc1", "layers.1.fc2", "lm_head"]


def layers(coordinator: FakeCoordinator) -> list[str]:
    """Names of the layers whose weight was declared."""
    return sorted(name.removesuffix(".weight") for name in coordinator.slots if name.endswith(".weight"))


def converted(model: nn.Module) -> list[str]:
    return sorted(name for name, module in model.named_modules() if isinstance(module, Linear))


def test_every_linear_is_replaced_in_place_and_named_by_its_path():
    coordinator, model = FakeCoordinator(), Model()
    before = dict(model.named_parameters())
    assert convert(model, coordinator) is model
    assert converted(model) == layers(coordinator) == LINEARS
    assert {f"{name}.{role}" for name in LINEARS for role in ("input", "weight", "grad_output")} == set(
        coordinator.slots
    )
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert coordinator.declared["lm_head.weight"]["shape"] == (48, 32)


def test_a_converted_model_trains():
    coordinator = FakeCoordinator()
    model = convert(Model(), coordinator)
    with coordinator.step():
        model(torch.arange(16)).sum().backward()
    assert len(coordinator.amaxes()) == 15


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), []),
        (("lm_head",), ["lm_head"]),
        (("fc1",), ["layers.0.fc1", "layers.1.fc1"]),
        (("0.fc1",), ["layers.0.fc1"]),
        (("layers.1.fc2",), ["layers.1.fc2"]),
        (("layers.0.*", "*head"), ["layers.0.fc1", "layers.0.fc2", "lm_head"]),
        (("head", "c1", "layers"), []),  # a part of a component, and a prefix, are no match
        (("no.such.layer",), []),
    ],
)
def test_skip_takes_full_names_trailing_components_and_globs(skip, left):
    coordinator, model = FakeCoordinator(), Model()
    convert(model, coordinator, skip=skip)
    assert converted(model) == layers(coordinator) == sorted(set(LINEARS) - set(left))


def test_a_prefix_makes_local_names_global_and_skip_sees_the_global_ones():
    coordinator, block = FakeCoordinator(), Block()
    convert(block, coordinator, prefix="layers.7", skip=("layers.7.fc2",))
    assert layers(coordinator) == ["layers.7.fc1"]


@pytest.mark.parametrize("as_function", [True, False])
def test_names_map_local_to_global_names(as_function):
    coordinator = FakeCoordinator()
    names = {"fc1": "layers.5.fc1", "fc2": "layers.5.fc2"}
    convert(Block(), coordinator, names=names.__getitem__ if as_function else names)
    assert layers(coordinator) == ["layers.5.fc1", "layers.5.fc2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix": "a", "names": {}}, "prefix or names but got both"),
        ({"names": {"fc1": "a"}}, "names to map 'fc2'"),
        ({"names": lambda local: "same"}, "one layer per name but got two for 'same'"),
        ({"names": lambda local: ""}, "expected a name"),
        ({"skip": "fc1"}, "skip to be a tuple of patterns but got 'fc1'"),
        ({"sharded": "fc1"}, "sharded to be a tuple"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(arguments, message):
    coordinator, block = FakeCoordinator(), Block()
    with pytest.raises(ValueError, match=message):
        convert(block, coordinator, **arguments)
    assert converted(block) == []
    assert coordinator.slots == {}


def test_two_stages_with_local_names_are_refused_and_the_second_stays_unchanged():
    coordinator, second = FakeCoordinator(), Block()
    convert(Block(), coordinator)
    with pytest.raises(ValueError, match="prefix="):
        convert(second, coordinator)
    assert converted(second) == []


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "_checkpoint_wrapped_module"])
def test_wrappers_do_not_enter_names(wrapper):
    coordinator, block = FakeCoordinator(), Block()
    block.fc1 = Wrapper(block.fc1, wrapper)
    convert(Wrapper(Wrapper(nn.ModuleDict({"block": block}), wrapper), "module"), coordinator)
    assert layers(coordinator) == ["block.fc1", "block.fc2"]


def test_only_whole_components_are_taken_for_wrappers():
    coordinator = FakeCoordinator()
    convert(nn.ModuleDict({"module_1": nn.Linear(16, 16), "my_module": nn.Linear(16, 16)}), coordinator)
    assert layers(coordinator) == ["module_1", "my_module"]


def test_subclasses_patched_and_converted_layers_are_left_alone():
    class Mine(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    coordinator = FakeCoordinator()
    patched = nn.Linear(16, 16)
    patched.forward = lambda x: x
    model = nn.Sequential(Mine(16, 16), patched, nn.Linear(16, 16))
    nn.utils.parametrizations.weight_norm(model[2])
    model.append(Linear(16, 16, coordinator=coordinator, name="done"))
    before = list(model)
    convert(model, coordinator)
    assert all(a is b for a, b in zip(model, before, strict=True))
    assert layers(coordinator) == ["done"]


def test_odd_features_stay_and_are_listed_in_one_warning(caplog):
    coordinator = FakeCoordinator()
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 32), nn.Linear(32, 10))
    with caplog.at_level(logging.WARNING, "fp8dist"):
        convert(model, coordinator)
    assert [type(m) for m in model] == [nn.Linear, Linear, nn.Linear]
    (record,) = caplog.records
    assert record.getMessage().endswith(": 0 (20 to 16), 2 (32 to 10)")


def test_tied_weights_share_the_weight_slot_of_the_first_name():
    coordinator = FakeCoordinator()
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "c": nn.Linear(16, 16)})
    model["b"].weight = model["a"].weight
    convert(model, coordinator)
    assert model["b"].weight is model["a"].weight
    assert model["b"].slots.weight is model["a"].slots.weight
    assert layers(coordinator) == ["a", "c"]
    assert {"a.input", "b.input", "a.grad_output", "b.grad_output"} <= set(coordinator.slots)


def test_a_module_with_several_paths_is_converted_once_and_replaced_at_all():
    coordinator, shared = FakeCoordinator(), nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "same": shared, "b": nn.ModuleDict({"again": shared})})
    convert(model, coordinator)
    assert isinstance(model["a"], Linear)
    assert model["same"] is model["a"]
    assert model["b"]["again"] is model["a"]
    assert layers(coordinator) == ["a"]


def test_a_root_that_is_a_linear_is_returned_converted_under_the_prefix():
    coordinator, root = FakeCoordinator(), nn.Linear(16, 16)
    new = convert(root, coordinator, prefix="head")
    assert isinstance(new, Linear)
    assert new.weight is root.weight
    assert layers(coordinator) == ["head"]
    with pytest.raises(ValueError, match="prefix="):
        convert(root, coordinator)


@pytest.mark.parametrize(
    ("sharded", "expected"),
    [
        (True, {"fc1": True, "fc2": True}),
        (False, {"fc1": False, "fc2": False}),
        (("fc2",), {"fc1": False, "fc2": True}),
    ],
)
def test_sharded_is_passed_on_by_pattern(sharded, expected):
    coordinator = FakeCoordinator()
    convert(Block(), coordinator, sharded=sharded)
    assert {name: coordinator.declared[f"{name}.weight"]["sharded"] for name in expected} == expected


def test_meta_parameters_are_allowed():
    coordinator = FakeCoordinator()
    with torch.device("meta"):
        model = Model()
    convert(model, coordinator)
    assert converted(model) == LINEARS
    assert model.lm_head.weight.device.type == "meta"


def test_mode_and_hooks_are_kept():
    coordinator, model, calls = FakeCoordinator(), Block().eval(), []
    model.fc1.register_forward_hook(lambda *_: calls.append(1))
    convert(model, coordinator)
    model(torch.zeros(16, 32))
    assert calls == [1]
    assert not model.fc1.training
