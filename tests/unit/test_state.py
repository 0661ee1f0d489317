"""The state as named tensors: complete from the start, copies only, refused as a whole where it does not fit."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

import fp8dist as f8

L = 3
SLOTS = [f"{layer}.{role}" for layer in (0, 2) for role in ("input", "weight", "grad_output")]


def make(**options: Any) -> f8.ReductionGroupCoordinator:
    recipe = options.pop("recipe", None) or f8.DelayedScaling(amax_history_len=L)
    return f8.ReductionGroupCoordinator(recipe, **options)


def build(**options: Any) -> tuple[nn.Module, f8.ReductionGroupCoordinator]:
    torch.manual_seed(0)
    coordinator = make(**options)
    return f8.convert(
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), coordinator
    ), coordinator


def train(model: nn.Module, coordinator: f8.ReductionGroupCoordinator, steps: range) -> None:
    for i in steps:
        with coordinator.step():
            model(torch.full((16, 16), 1.0 + i)).square().sum().backward()


def bits(state: dict[str, Any]) -> dict[str, Any]:
    """A state that compares with ==, also where it holds NaN."""
    return {
        "generation": int(state["generation"]),
        **{
            f"{name}.{field}": value.reshape(-1).view(torch.uint8).tolist()
            for name, fields in state["slots"].items()
            for field, value in fields.items()
        },
    }


def raw_state(columns: dict[str, list[float]], scale: float = 2.0) -> dict[str, Any]:
    entries = {
        name: {"history": torch.tensor(h), "scale": torch.tensor(scale), "warm": torch.tensor(True)}
        for name, h in columns.items()
    }
    return {"generation": torch.tensor(7), "slots": entries}


# -- what a state holds ---------------------------------------------------------------------------------------


def test_a_process_that_has_not_met_the_others_tells_its_slots() -> None:
    _, coordinator = build()
    state = coordinator.state_dict()
    assert sorted(state["slots"]) == sorted(SLOTS)
    for fields in state["slots"].values():
        assert fields["history"].tolist() == [-1.0] * L
        assert (fields["scale"].item(), fields["warm"].item()) == (1.0, False)


def test_a_loaded_state_is_given_back_before_the_first_step() -> None:
    model, coordinator = build()
    train(model, coordinator, range(2))
    _, resumed = build(name="resumed")
    resumed.load_state_dict(coordinator.state_dict())
    assert bits(resumed.state_dict()) == bits(coordinator.state_dict())


@pytest.mark.parametrize("when", ["declared", "loaded", "trained"])
def test_writing_into_a_state_changes_no_coordinator(when: str) -> None:
    model, coordinator = build()
    if when == "loaded":
        coordinator.load_state_dict(raw_state({name: [-1.0, 1.0, 2.0] for name in SLOTS}))
    if when == "trained":
        train(model, coordinator, range(1))
    before = bits(coordinator.state_dict())
    for fields in coordinator.state_dict()["slots"].values():
        for value in fields.values():
            value.fill_(1)
    assert bits(coordinator.state_dict()) == before


def test_a_slot_declared_after_the_agreement_is_in_the_state() -> None:
    model, coordinator = build()
    train(model, coordinator, range(1))
    coordinator.slot("new.grad_output")
    entry = coordinator.state_dict()["slots"]["new.grad_output"]
    assert (entry["history"].tolist(), entry["warm"].item()) == ([-1.0] * L, False)


def test_the_models_own_state_is_that_of_nn_linear() -> None:
    model, coordinator = build()
    train(model, coordinator, range(1))
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_a_recipe_without_state_saves_none_and_takes_any() -> None:
    model, coordinator = build(recipe=f8.CurrentScaling())
    assert coordinator.state_dict()["slots"] == {}
    coordinator.load_state_dict(raw_state({name: [-1.0, 1.0, 2.0] for name in SLOTS}))
    train(model, coordinator, range(1))


# -- loading --------------------------------------------------------------------------------------------------

ONE = "2.input"
DAMAGES: dict[str, tuple[Any, str]] = {
    "no mapping": (lambda s: [], "list"),
    "no generation": (lambda s: s.pop("generation"), "'generation'"),
    "generation is a float": (lambda s: s.update(generation=torch.tensor(1.0)), "'generation'.*float32"),
    "generation is negative": (lambda s: s.update(generation=torch.tensor(-1)), "'generation'.*-1"),
    "no slots": (lambda s: s.pop("slots"), "'slots'"),
    "slots is a tensor": (lambda s: s.update(slots=torch.ones(1)), "'slots'"),
    "a slot is missing": (lambda s: s["slots"].pop(ONE), r"no entry.*2\.input"),
    "a slot is a tensor": (lambda s: s["slots"].update({ONE: torch.ones(1)}), ONE),
    **{
        f"no {field}": ((lambda f: lambda s: s["slots"][ONE].pop(f))(field), f"2\\.input.*'{field}'.*nothing")
        for field in ("history", "scale", "warm")
    },
    **{
        f"{field} {value!r}": (
            (lambda f, v: lambda s: s["slots"][ONE].update({f: v}))(field, value),
            f"2\\.input.*'{field}'.*{told}",
        )
        for field, value, told in (
            ("history", torch.zeros(L + 4), r"\(7,\).*amax_history_len"),
            ("history", torch.zeros(L, dtype=torch.float64), "float64"),
            ("history", torch.zeros(L, 1), r"\(3, 1\)"),
            ("history", torch.tensor([0.0, -2.0, 1.0]), r"-2\.0"),
            ("history", torch.tensor([0.0, -torch.inf, 1.0]), "-inf"),
            ("scale", torch.ones(1), r"\(1,\)"),
            ("scale", torch.tensor(1), "int64"),
            ("scale", torch.tensor(torch.nan), "nan"),
            ("scale", torch.tensor(torch.inf), "inf"),
            ("scale", torch.tensor(-1.0), r"-1\.0"),
            ("scale", torch.tensor(0.0), r"0\.0"),
            ("warm", torch.tensor(1.0), "float32"),
            ("warm", "yes", "str"),
        )
    },
}


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_does_not_fit_is_refused_by_field_and_changes_nothing(damage: str, bound: bool) -> None:
    model, coordinator = build()
    if bound:
        train(model, coordinator, range(2))
    before = bits(coordinator.state_dict())
    state = copy.deepcopy(coordinator.state_dict())
    for fields in state["slots"].values():  # so that a load of anything would show
        fields["scale"].mul_(3)
    change, told = DAMAGES[damage]
    changed = change(state)
    with pytest.raises(ValueError, match=told):
        coordinator.load_state_dict(changed if damage == "no mapping" else state)
    assert bits(coordinator.state_dict()) == before


amaxes = st.one_of(
    st.just(-1.0), st.floats(min_value=0, width=32), st.just(float("nan")), st.just(float("inf"))
)
scales = st.floats(min_value=2.0**-126, max_value=2.0**127, width=32)


@given(history=st.lists(amaxes, min_size=L, max_size=L), scale=scales)
@settings(max_examples=60, deadline=None)
def test_every_state_that_a_run_can_write_comes_back(history: list[float], scale: float) -> None:
    with make(recipe=f8.DelayedScaling(amax_history_len=L, non_finite="freeze")) as coordinator:
        coordinator.slot("a.input")
        coordinator.load_state_dict(raw_state({"a.input": history}, scale))
        coordinator.freeze()
        assert bits(coordinator.state_dict()) == bits(raw_state({"a.input": history}, scale))


def test_names_of_other_ranks_are_passed_over() -> None:
    coordinator = make()
    coordinator.slot("a.input")
    coordinator.load_state_dict(raw_state({"a.input": [-1.0, 3.0, 4.0], "b.input": [0.0, 1.0, 2.0]}))
    coordinator.freeze()
    assert sorted(coordinator.state_dict()["slots"]) == ["a.input"]
    assert coordinator.state_dict()["slots"]["a.input"]["history"].tolist() == [-1.0, 3.0, 4.0]


@pytest.mark.parametrize("bound", [True, False])
def test_without_strict_a_missing_slot_starts_afresh(bound: bool) -> None:
    coordinator = make()
    for name in ("a.input", "b.input"):
        slot = coordinator.slot(name)
        if bound:
            with coordinator.step():
                slot.record(torch.tensor([5.0]))
    coordinator.load_state_dict(raw_state({"a.input": [-1.0, 3.0, 4.0]}), strict=False)
    coordinator.freeze()
    slots = coordinator.state_dict()["slots"]
    assert slots["a.input"]["history"].tolist() == [-1.0, 3.0, 4.0]
    assert slots["b.input"]["history"].tolist() == [-1.0] * L
    assert not slots["b.input"]["warm"]


def test_a_slot_that_the_ranks_have_not_agreed_on_cannot_be_loaded_silently() -> None:
    coordinator = make()
    coordinator.slot("a.input")
    coordinator.freeze()
    coordinator.slot("b.input")
    state = raw_state({name: [-1.0, 3.0, 4.0] for name in ("a.input", "b.input")})
    with pytest.raises(ValueError, match=r"b\.input.*before the first step"):
        coordinator.load_state_dict(state)
    coordinator.load_state_dict(state, strict=False)
    with coordinator.step():
        pass
    assert coordinator.state_dict()["slots"]["a.input"]["history"].tolist() == [3.0, 4.0, -1.0]
    coordinator.load_state_dict(state)
    assert coordinator.state_dict()["slots"]["b.input"]["history"].tolist() == [-1.0, 3.0, 4.0]


def test_loading_before_the_model_is_converted_is_refused() -> None:
    with pytest.raises(ValueError, match="convert the model first"):
        make().load_state_dict(raw_state({"a.input": [-1.0, 3.0, 4.0]}))


def test_what_was_recorded_before_a_load_does_not_enter_the_loaded_state() -> None:
    model, coordinator = build(trigger="next_autocast")
    coordinator.as_default()
    x = torch.full((16, 16), 1.0)
    with f8.autocast():
        y = model(x)
    y.sum().backward()
    coordinator.flush()
    state = coordinator.state_dict()
    with f8.autocast():
        y = model(100 * x)
    y.sum().backward()
    coordinator.load_state_dict(state)
    coordinator.flush()
    assert bits(coordinator.state_dict()) == bits(state)
    coordinator.close()


# -- torch.distributed.checkpoint -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("bound", [True, False])
def test_torch_distributed_checkpoint_saves_and_loads_in_place(tmp_path: Path, bound: bool) -> None:
    model, coordinator = build()
    assert isinstance(coordinator, Stateful)
    train(model, coordinator, range(2))
    dcp.save({"model": model, "fp8": coordinator}, checkpoint_id=tmp_path)
    fresh_model, fresh = build(name="fresh")
    if bound:
        train(fresh_model, fresh, range(7, 8))
    dcp.load({"model": fresh_model, "fp8": fresh}, checkpoint_id=tmp_path)
    assert bits(fresh.state_dict()) == bits(coordinator.state_dict())
    train(model, coordinator, range(2, 4))
    train(fresh_model, fresh, range(2, 4))
    assert bits(fresh.state_dict()) == bits(coordinator.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_slot_that_is_not_in_the_checkpoint_needs_a_partial_load_and_starts_afresh(tmp_path: Path) -> None:
    old = make(name="old")
    with old.step():
        old.slot("a.input").record(torch.tensor([5.0]))
    dcp.save({"fp8": old}, checkpoint_id=tmp_path)
    new = make(name="new")
    new.slot("a.input"), new.slot("b.input")
    before = bits(new.state_dict())
    with pytest.raises((RuntimeError, CheckpointException), match=r"b\.input"):
        dcp.load({"fp8": new}, checkpoint_id=tmp_path)
    assert bits(new.state_dict()) == before
    dcp.load({"fp8": new}, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    new.freeze()
    slots = new.state_dict()["slots"]
    assert slots["a.input"]["history"].tolist() == [-1.0, -1.0, 5.0]
    assert slots["b.input"]["history"].tolist() == [-1.0] * L


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_entry_of_a_checkpoint_is_a_tensor(tmp_path: Path) -> None:
    """Anything else would be pickled."""
    model, coordinator = build()
    train(model, coordinator, range(1))
    dcp.save({"fp8": coordinator, "idle": make(name="idle")}, checkpoint_id=tmp_path)
    entries = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {type(entry).__name__ for entry in entries.values()} == {"TensorStorageMetadata"}
    assert len(entries) == 2 + 3 * len(SLOTS)


# -- the documentation ----------------------------------------------------------------------------------------

GUIDE = Path(__file__).parent.parent.parent / "docs" / "checkpointing.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_code_in_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, as one program."""
    text = GUIDE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("```") // 2 >= 5
    monkeypatch.chdir(tmp_path)
    program: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), program)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "run"]
