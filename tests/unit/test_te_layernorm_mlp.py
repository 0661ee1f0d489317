"""`LayerNormMLP` follows Transformer Engine's own.

Weights and incoming gradients are quantized as they are, so their histories and scales are exact. Three
tensors come out of a norm, a GELU or its derivative. Transformer Engine's kernels quantize those from
float32; this module rounds them to bfloat16 first, as torch's ops do. So their amaxes agree within half a
bfloat16 step (2**-8) and the noise of the products before them, and values within the step of FP8.
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
EXACT = {"a.fc1.weight", "a.fc2.weight", "a.fc2.grad_output"}


def build(**kwargs: Any) -> tuple[LayerNormMLP, f8.ReductionGroupCoordinator]:
    recipe = f8.DelayedScaling(rule_set="te_fused", first_step="unit", amax_history_len=4)
    coordinator = f8.ReductionGroupCoordinator(recipe)
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


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_block_follows_the_recording(checkpoint: bool) -> None:
    module, coordinator = build(checkpoint=checkpoint)
    for index, entry in enumerate(RUN["steps"]):
        x = entry["x"].clone().requires_grad_()
        module.zero_grad()
        with coordinator.step(index):
            y = module(x)
            y.backward(entry["dy"])
        scales, slots = coordinator.scales(), coordinator.state_dict()["slots"]
        for direction, columns in COLUMNS.items():
            for name, column in columns.items():
                history = te_history(slots[name]["history"])
                expected = entry[f"{direction}_history"][:, column]
                scale = entry[f"{direction}_scale"][column].item()
                if name in EXACT:
                    assert torch.equal(history, expected), (index, name)
                    assert scales[name] == scale, (index, name)
                else:
                    torch.testing.assert_close(history, expected, rtol=2**-6, atol=0)
                    assert scales[name] == pytest.approx(scale, rel=2**-6)
        grads = {name: parameter.grad for name, parameter in module.named_parameters()}
        results = {"y": (y, entry["y"]), "dx": (x.grad, entry["dx"])}
        results |= {name: (grads[name], entry["grads"][name]) for name in entry["grads"]}
        for name, (ours, theirs) in results.items():
            assert ours.dtype == theirs.dtype, (index, name)
            assert relative(ours, theirs) < 0.04, (index, name)
        assert torch.equal(grads["fc2_bias"], entry["grads"]["fc2_bias"]), index


def test_the_recording_quantizes_from_float32_and_its_gelu_is_the_tanh_approximation() -> None:
    """The reasons for the tolerances above, and for the choice of GELU."""
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
