"""Transformer Engine's states in and out: exact both ways, continued exactly, and never unpickled."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8dist as f8
from fp8dist import te_state

DATA = Path(__file__).parent.parent / "data"
LINEAR: list[dict[str, Any]] = torch.load(DATA / "te_linear.pt", weights_only=True)["linear"]
MLP: dict[str, Any] = torch.load(DATA / "te_layernorm_mlp.pt", weights_only=True)["layernorm_mlp"][0]
MLP_GEMMS = {"a": te_state.LAYERNORM_MLP}


def recorded(entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A module's tensors as Transformer Engine had them after a step of a recording."""
    return {
        "scale_fwd": entry["fwd_scale"],
        "amax_history_fwd": entry["fwd_history"],
        "scale_bwd": entry["bwd_scale"],
        "amax_history_bwd": entry["bwd_history"],
    }


def numbered(gemms: int, length: int = 4) -> dict[str, torch.Tensor]:
    """A state in which every column is another one: row r, column c holds 100 r + c."""
    state = {}
    for direction, columns in (("fwd", 3 * gemms), ("bwd", 2 * gemms)):
        history = 100.0 * torch.arange(length)[:, None] + torch.arange(columns)
        history[0] = 0
        state |= {f"scale_{direction}": 1.0 + torch.arange(columns), f"amax_history_{direction}": history}
    return state


def linear_at(run: dict[str, Any], coordinator: f8.ReductionGroupCoordinator) -> f8.Linear:
    linear = f8.Linear(run["H"], run["F"], coordinator=coordinator, name="a", dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(run["weight"])
        linear.bias.copy_(run["bias"])
    return linear


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("run", LINEAR, ids=lambda r: f"{r['amax_compute_algo']}-{r['amax_history_len']}")
def test_an_imported_state_goes_on_as_the_recording_did(run: dict[str, Any], after: int) -> None:
    recipe = f8.DelayedScaling(
        rule_set="te_fused",
        first_step="unit",
        amax_history_len=run["amax_history_len"],
        amax_compute_algo=run["amax_compute_algo"],
    )
    coordinator = f8.ReductionGroupCoordinator(recipe)
    linear = linear_at(run, coordinator)
    coordinator.load_state_dict(te_state.from_te({"a": recorded(run["steps"][after - 1])}, generation=after))
    for entry in run["steps"][after:]:
        with coordinator.step():
            linear(entry["x"].clone().requires_grad_()).backward(entry["dy"])
        ours = te_state.to_te(coordinator.state_dict(), {"a": te_state.LINEAR})["a"]
        for key, theirs in recorded(entry).items():
            assert torch.equal(ours[key], theirs), key
    assert coordinator.stats.generation == len(run["steps"])


@pytest.mark.parametrize("after", [0, 2])
def test_a_recorded_block_comes_back_with_the_same_bits(after: int) -> None:
    theirs = recorded(MLP["steps"][after])
    state = te_state.from_te({"a": theirs}, gemms=MLP_GEMMS)
    ours = te_state.to_te(state, MLP_GEMMS)["a"]
    for key in theirs:
        assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize(
    ("gemms", "layers"),
    [
        (te_state.LINEAR, ["a"]),
        (te_state.LAYERNORM_MLP, ["a.fc1", "a.fc2"]),
        (te_state.experts(6, 3), ["a.expert.6", "a.expert.7", "a.expert.8"]),
    ],
)
def test_every_column_finds_its_slot(gemms: tuple[str, ...], layers: list[str]) -> None:
    slots = te_state.from_te({"a": numbered(len(gemms))}, gemms={"a": gemms})["slots"]
    expected = {}
    for g, layer in enumerate(layers):
        for role, column in (("input", 3 * g), ("weight", 3 * g + 1), ("grad_output", 2 * g)):
            history = [-1.0, 100.0 + column, 200.0 + column, 300.0 + column]
            expected[f"{layer}.{role}"] = (history, 1.0 + column, True)
    found = {
        name: (fields["history"].tolist(), fields["scale"].item(), fields["warm"].item())
        for name, fields in slots.items()
    }
    assert found == expected


@pytest.mark.parametrize("rule_set", ["te_fused", "te_unfused", "fp8dist"])
def test_a_state_taken_there_and_back_gives_the_same_scales(rule_set: str) -> None:
    """The row that an export drops is the one that the next commit would drop."""

    def make(name: str) -> tuple[f8.Linear, f8.ReductionGroupCoordinator]:
        torch.manual_seed(0)
        recipe = f8.DelayedScaling(rule_set=rule_set, first_step="unit", amax_history_len=3)
        coordinator = f8.ReductionGroupCoordinator(recipe, name=name)
        return f8.Linear(32, 16, coordinator=coordinator, name="a"), coordinator

    def train(linear: f8.Linear, coordinator: f8.ReductionGroupCoordinator, steps: range) -> None:
        for i in steps:
            with coordinator.step():
                linear(torch.full((16, 32), 4.0 / (i + 1))).square().sum().backward()

    linear, coordinator = make("here")
    train(linear, coordinator, range(4))
    exported = te_state.to_te(coordinator.state_dict(), {"a": te_state.LINEAR})
    twin, back = make("back")
    back.load_state_dict(te_state.from_te(exported, generation=4))
    back.freeze()
    for i in range(4, 8):
        assert back.scales() == coordinator.scales()
        train(linear, coordinator, range(i, i + 1))
        train(twin, back, range(i, i + 1))


def test_our_states_layout_is_that_of_the_layers_here() -> None:
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4))
    f8.LayerNormMLP(32, 32, coordinator=coordinator, name="mlp")
    f8.GroupedLinear(2, 32, 32, coordinator=coordinator, name="moe", expert_offset=4)
    f8.LayerNormLinear(32, 32, coordinator=coordinator, name="qkv")
    gemms = {"mlp": te_state.LAYERNORM_MLP, "moe": te_state.experts(4, 2), "qkv": te_state.LINEAR}
    modules = {name: numbered(len(parts)) for name, parts in gemms.items()}
    state = te_state.from_te(modules, gemms=gemms)
    assert sorted(state["slots"]) == sorted(coordinator.state_dict()["slots"])
    coordinator.load_state_dict(state)


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"])
@pytest.mark.parametrize(
    "value", [None, [1.0], torch.ones(3, 3, 3), torch.ones(4, 7), torch.ones(7), torch.ones(0, 3)]
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"'a' expects {key}.*gemms="):
        te_state.from_te({"a": {**numbered(1), key: value}})
    with pytest.raises(ValueError, match=f"'a' expects {key}.*gemms="):
        te_state.from_te({"a": {**numbered(1), key: numbered(1)[key].double()}})


def test_layers_of_several_products_must_be_named() -> None:
    with pytest.raises(ValueError, match=r"1 GEMM.*LAYERNORM_MLP"):
        te_state.from_te({"a": numbered(2)})


def test_layers_with_histories_of_several_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"amax_history_len.*\[4, 5\]"):
        te_state.from_te({"a": numbered(1), "b": numbered(1, length=5)})


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_pending_amaxes_are_never_dropped_unasked(direction: str) -> None:
    state = numbered(1)
    state[f"amax_history_{direction}"][0, 0] = 9.0
    with pytest.raises(ValueError, match=f"row 0 of amax_history_{direction}"):
        te_state.from_te({"a": state})
    assert te_state.from_te({"a": state}, drop_pending=True)["slots"].keys() == (
        te_state.from_te({"a": numbered(1)})["slots"].keys()
    )
    assert state[f"amax_history_{direction}"][0, 0] == 9.0


def test_an_export_of_a_layer_that_is_not_there_is_refused() -> None:
    state = te_state.from_te({"a": numbered(1)})
    with pytest.raises(ValueError, match=r"b\.input"):
        te_state.to_te(state, {"b": te_state.LINEAR})


# -- `_extra_state` -------------------------------------------------------------------------------------------


class Trap:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (self.trace,)


def as_bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["tensor", "bytes", "stream"])
@pytest.mark.parametrize("written_with", ["pickle", "torch.save"])
def test_a_pickle_is_refused_unopened_and_the_way_out_is_told(
    tmp_path: Path, written_with: str, form: str
) -> None:
    trace = tmp_path / "ran"
    content = {**numbered(1), "recipe": Trap(str(trace))}
    stream = io.BytesIO()
    if written_with == "pickle":
        pickle.dump(content, stream)
    else:
        torch.save(content, stream)
    data = stream.getvalue()
    given = {"tensor": as_bytes_tensor(data), "bytes": data, "stream": io.BytesIO(data)}[form]
    with pytest.raises(ValueError, match=r"is a pickle(.|\n)*scaling_fwd(.|\n)*weights_only=True"):
        te_state.from_te({"a": given})
    assert not trace.exists()
    pickle.loads(pickle.dumps(Trap(str(trace))))
    assert trace.exists(), "the trap does not work"


def test_plain_tensors_written_by_torch_save_are_read() -> None:
    stream = io.BytesIO()
    torch.save({**numbered(1), "extra_fp8_variables": {"num_gemms": 1}}, stream)
    for given in (as_bytes_tensor(stream.getvalue()), stream):
        state = te_state.from_te({"a": given})
        expected = te_state.from_te({"a": numbered(1)})
        for name, fields in expected["slots"].items():
            for field, value in fields.items():
                assert torch.equal(state["slots"][name][field], value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.empty(0, dtype=torch.uint8), "did not compute in FP8"),
        (torch.ones(3), "tensor of torch.float32"),
        ([1, 2], "has a list"),
        (b"no state at all", "cannot|pickle"),
    ],
)
def test_other_states_are_refused(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        te_state.from_te({"layers.3": given})
