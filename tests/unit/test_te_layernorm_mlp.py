"""`LayerNormMLP` follows Transformer Engine's own: histories and scales exactly, values within GEMM rounding.

One tensor comes out of a sum, that of the norm's mean and variance, and it may differ in the last place of
float32. All others are exact, also those behind a GELU or its derivative, which are quantized from float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fp8dist as f8
from fp8dist.modules.layernorm_mlp import LayerNormMLP

RUN: dict[str, Any] = torch.load(
    Path(__file__).parent.parent / "data" / "te_layernorm_mlp.pt", weights_only=True
)["layernorm_mlp"][0]

# Columns of the recording (the others are outputs and input gradients, which nobody quantizes).
COLUMNS = {
    "fwd": {"a.fc1.input": 0, "a.fc1.weight": 1, "a.fc2.input": 3, "a.fc2.weight": 4},
    "bwd": {"a.fc1.grad_output": 0, "a.fc2.grad_output": 2},
}
BEHIND_THE_NORM = "a.fc1.input"


def build(
    *, trigger: str = "step", update_every: str = "step", **kwargs: Any
) -> tuple[LayerNormMLP, f8.ReductionGroupCoordinator]:
    recipe = f8.DelayedScaling(rule_set="te_fused", first_step="unit", amax_history_len=4)
    coordinator = f8.ReductionGroupCoordinator(recipe, trigger=trigger, update_every=update_every)
    module = LayerNormMLP(
        RUN["H"], RUN["F"], coordinator=coordinator, name="a", dtype=torch.bfloat16, **kwargs
    )
    module.load_state_dict(RUN["state"])
    return module, coordinator


def te_history(history: torch.Tensor) -> torch.Tensor:
    """In Transformer Engine's layout: the row that gathers first, then oldest to newest."""
    history = history.clamp(min=0)
    history[0] = 0
    return history


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


@pytest.mark.parametrize("how", ["a step per entry", "autocast"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_block_follows_the_recording(checkpoint: bool, how: str) -> None:
    if how == "autocast":
        module, coordinator = build(checkpoint=checkpoint, trigger="backward_end", update_every="microbatch")
        coordinator.as_default()
    else:
        module, coordinator = build(checkpoint=checkpoint)
    for index, entry in enumerate(RUN["steps"]):
        x = entry["x"].clone().requires_grad_()
        module.zero_grad()
        if how == "autocast":
            with f8.autocast():
                y = module(x)
            y.backward(entry["dy"])
        else:
            with coordinator.step(index):
                y = module(x)
                y.backward(entry["dy"])
        scales, slots = coordinator.scales(), coordinator.state_dict()["slots"]
        for direction, columns in COLUMNS.items():
            for name, column in columns.items():
                history = te_history(slots[name]["history"])
                expected = entry[f"{direction}_history"][:, column]
                scale = entry[f"{direction}_scale"][column].item()
                rounding = 2**-23 if name == BEHIND_THE_NORM else 0
                torch.testing.assert_close(history, expected, rtol=rounding, atol=0)
                assert scales[name] == pytest.approx(scale, rel=rounding, abs=0), (index, name)
        grads = {name: parameter.grad for name, parameter in module.named_parameters()}
        results = {"y": (y, entry["y"]), "dx": (x.grad, entry["dx"])}
        results |= {name: (grads[name], entry["grads"][name]) for name in entry["grads"]}
        for name, (ours, theirs) in results.items():
            assert ours.dtype == theirs.dtype, (index, name)
            assert relative(ours, theirs) < 2**-7, (index, name)
        assert torch.equal(grads["fc2_bias"], entry["grads"]["fc2_bias"]), index
    coordinator.close()


def test_the_recording_quantizes_from_float32_and_its_gelu_is_the_tanh_approximation() -> None:
    """A module that rounds to bfloat16 first, or takes the other GELU, could not follow it."""
    state = {name: value.float() for name, value in RUN["state"].items()}
    fc1_input, fc2_input = (RUN["steps"][0]["fwd_history"][-1, i].item() for i in (0, 3))
    x = RUN["steps"][0]["x"].float()
    norm = F.layer_norm(x, (RUN["H"],), state["layer_norm_weight"], state["layer_norm_bias"])
    assert norm.abs().max().item() == fc1_input != norm.bfloat16().abs().max().item()
    operands = (
        t.to(torch.float8_e4m3fn).float() for t in (norm, state["fc1_weight"])
    )  # the first scale is 1
    hidden = F.linear(*operands, state["fc1_bias"]).bfloat16().float()
    tanh, exact = (F.gelu(hidden, approximate=kind).abs().max().item() for kind in ("tanh", "none"))
    assert tanh == pytest.approx(fc2_input, rel=1e-6)
    assert exact != pytest.approx(fc2_input, rel=1e-5)
