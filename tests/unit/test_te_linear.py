"""`Linear` follows Transformer Engine's own Linear: histories and scales exactly, values within GEMM rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8dist as f8

RUNS: list[dict[str, Any]] = torch.load(
    Path(__file__).parent.parent / "data" / "te_linear.pt", weights_only=True
)["linear"]


def build(run: dict[str, Any], **options: Any) -> tuple[f8.Linear, f8.ReductionGroupCoordinator]:
    recipe = f8.DelayedScaling(
        rule_set="te_fused",
        first_step="unit",
        amax_history_len=run["amax_history_len"],
        amax_compute_algo=run["amax_compute_algo"],
    )
    coordinator = f8.ReductionGroupCoordinator(recipe, **options)
    linear = f8.Linear(run["H"], run["F"], coordinator=coordinator, name="a", dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(run["weight"])
        linear.bias.copy_(run["bias"])
    return linear, coordinator


def te_history(coordinator: f8.ReductionGroupCoordinator, *names: str) -> torch.Tensor:
    """Histories in Transformer Engine's layout: the row that gathers first, then oldest to newest."""
    slots = coordinator.state_dict()["slots"]
    rows = torch.stack([slots[name]["history"] for name in names], dim=1).clamp(min=0)
    rows[0] = 0
    return rows


@pytest.mark.parametrize("how", ["a step per entry", "autocast"])
@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r['amax_compute_algo']}-{r['microbatches']}")
def test_a_linear_layer_follows_the_recording(run: dict[str, Any], how: str) -> None:
    """Transformer Engine updates in every microbatch: at the autocast's exit, and at the backward's end."""
    if how == "autocast":
        linear, coordinator = build(run, trigger="backward_end", update_every="microbatch")
        coordinator.as_default()
    else:
        linear, coordinator = build(run)
    for index, entry in enumerate(run["steps"]):
        x = entry["x"].clone().requires_grad_()
        linear.weight.grad = linear.bias.grad = None
        if how == "autocast":
            with f8.autocast():
                y = linear(x)
            y.backward(entry["dy"])
        else:
            with coordinator.step(index):
                y = linear(x)
                y.backward(entry["dy"])
        scales = coordinator.scales()
        for key, names in (("fwd", ("a.input", "a.weight")), ("bwd", ("a.grad_output",))):
            expected = entry[f"{key}_history"][:, : len(names)]
            assert torch.equal(te_history(coordinator, *names), expected), (index, key)
            assert [scales[name] for name in names] == entry[f"{key}_scale"][: len(names)].tolist(), (
                index,
                key,
            )
        for name, mine in (("y", y), ("dx", x.grad), ("dw", linear.weight.grad), ("db", linear.bias.grad)):
            # The products are equal, the order of sums is not: a few values round to the neighbour.
            difference = (mine.float() - entry[name].float()).abs()
            assert (difference == 0).float().mean() > 0.97, (index, name)
            assert difference.max() <= 2**-7 * entry[name].float().abs().max(), (index, name)
    coordinator.close()


def test_the_recording_saturates_and_flushes() -> None:
    """Guards the test above: a layer without clamp or with other scales could not follow it."""
    linear, coordinator = build(RUNS[0])
    coordinator.freeze()
    coordinator.count_casts()
    for entry in RUNS[0]["steps"]:
        with coordinator.step():
            linear(entry["x"].clone().requires_grad_()).backward(entry["dy"])
    values, saturated, flushed = coordinator.cast_counts()["a.input"]
    assert saturated > values / 2
    assert flushed > 0
