"""Experts: what they compute, on one rank or spread over replicas, also where some get no bytes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forkpool import run_ranks, values
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from gpt import experts
from gpt.checkpoint import find_start
from gpt.config import Ranks, TrainConfig
from gpt.corpus import Corpus
from gpt.model import GPTConfig, build_stage, parameter_names
from gpt.training import TrainResult, train

TEXT = b"the quick brown fox jumps over the lazy dog. " * 30
SHAPE = GPTConfig(layers=2, hidden=16, heads=2, seq_len=8, experts=4, own_experts=range(4))
BASE = TrainConfig(
    layers=4, hidden=16, heads=2, seq_len=16, batch=8, microbatches=2, steps=3, clip=0.5, amax_history_len=2,
    eval_every=1, sample="the", sample_bytes=5, experts=4, device="cpu",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def moe(top_k: int) -> experts.Experts:
    stage = build_stage(dataclasses.replace(SHAPE, top_k=top_k), 0, 1)
    module = stage.layers["1"].mlp
    assert isinstance(module, experts.Experts)
    assert not isinstance(stage.layers["0"].mlp, experts.Experts)
    return module


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_each_byte_gets_the_weighted_sum_of_its_likeliest_experts(top_k: int) -> None:
    module = moe(top_k)
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    y = module(x)
    for row, result in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        probabilities = (module.router.weight @ row).softmax(0)
        expected = torch.zeros(16)
        for expert in probabilities.argsort(descending=True)[:top_k]:
            inner = F.gelu(module.up.weight[expert] @ row + module.up.bias[expert])
            out = module.down.weight[expert] @ inner + module.down.bias[expert]
            expected += probabilities[expert] * out
        torch.testing.assert_close(result, expected)


def test_an_expert_has_the_same_weights_wherever_it_is() -> None:
    whole = build_stage(SHAPE, 0, 1)
    part = build_stage(dataclasses.replace(SHAPE, own_experts=range(2, 4)), 0, 1)
    for name, parameter in part.named_parameters():
        theirs = whole.get_parameter(name)
        assert parameter.equal(theirs[2:4] if experts.is_expert(name, parameter) else theirs), name
    matrices = [m for p in whole.parameters() if p.dim() == 3 for m in p.unbind()]
    assert len({matrix.flatten()[0].item() for matrix in matrices}) == len(matrices) == 8
    names = parameter_names(dataclasses.replace(SHAPE, own_experts=range(2, 4)))
    assert [name for name in names if "up.bias" in name] == [
        "layers.0.mlp.up.bias", *(f"layers.1.mlp.up.bias.expert.{i}" for i in range(4)),
    ]  # fmt: skip


def run(config: TrainConfig, forced: int | None = None) -> list[TrainResult]:
    def route(self: experts.Experts, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = self.router(flat).float().softmax(-1)[:, forced : forced + 1]
        return gates, torch.full_like(gates, forced, dtype=torch.int64)

    def on_rank(rank: int, world: int) -> TrainResult:
        ranks = Ranks(rank, world, rank, world)
        if forced is not None:
            experts.Experts.route = route  # in a fork, so nobody else sees it
        return train(config, ranks, corpus=Corpus(TEXT), start=find_start(config, ranks))

    return values(
        run_ranks(on_rank, world=config.world, timeout=60.0, init="gloo" if config.world > 1 else None)
    )


def curve(result: TrainResult) -> list[tuple[float, float | None, float | None]]:
    return [(record.loss, record.gradient_norm, record.eval_loss) for record in result.steps]


@pytest.mark.parametrize("forced", [None, 3])
@pytest.mark.parametrize(
    "values",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "top_k": 2},
        {"precision": "fp8"},
        {"precision": "fp8", "top_k": 1, "activation_checkpoint": "full"},
        {"precision": "fp8", "pp": 2},
    ],
    ids=["fp32", "bf16-top2", "fp8", "fp8-recomputed", "fp8-pp"],
)
def test_experts_on_other_ranks_train_like_own_ones(values: dict[str, Any], forced: int | None) -> None:
    """Forced to the last expert, all bytes of all ranks go to one rank, and the other's experts have none."""
    if forced is not None:
        values = values | {"top_k": 1}
    config = dataclasses.replace(BASE, dp=2, **values)
    spread, own = run(dataclasses.replace(config, ep=2), forced), run(config, forced)
    assert len({tuple(curve(result)) for result in spread}) == 1
    # Only the order differs in which the bytes of replicas are added up.
    tolerance = 1e-5 if config.precision == "fp32" else 3e-3
    for ours, theirs in zip(curve(spread[0]), curve(own[0]), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    if config.precision != "fp8":
        return
    assert all(result.fp8.ranks_agree and result.fp8.collectives == config.steps for result in spread)
    slots = {name: slot for result in spread for name, slot in result.fp8.state["slots"].items()}
    used = {name for name, slot in slots.items() if ".expert." in name and (slot["history"] >= 0).any()}
    if forced is not None:
        assert used == {name for name in slots if f".expert.{forced}." in name} != set()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_experts_are_resumed_on_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    config = dataclasses.replace(
        BASE, precision="fp32", dp=2, steps=4, warmup_steps=1, checkpoint_dir=tmp_path
    )
    whole = run(dataclasses.replace(config, ep=before, checkpoint_every=3))[0]
    (tmp_path / "step-00000004").rename(tmp_path / "lost")
    resumed = run(dataclasses.replace(config, ep=after))[0]
    assert [record.step for record in resumed.steps] == [3]
    assert curve(resumed)[0] == pytest.approx(curve(whole)[3], rel=1e-5)
