"""The training program on several ranks: the bits of one process, also after a resume in another layout."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forkpool import run_ranks, values

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from gpt.checkpoint import find_start
from gpt.config import Ranks, TrainConfig
from gpt.corpus import Corpus
from gpt.training import TrainResult, train

TEXT = b"the quick brown fox jumps over the lazy dog. " * 30
BASE = TrainConfig(
    precision="fp8", layers=4, hidden=16, heads=2, seq_len=16, batch=8, microbatches=4, steps=3, clip=0.5,
    amax_history_len=2, eval_every=2, sample="the quick", sample_bytes=6, device="cpu",
)  # fmt: skip
SPLIT_RANKS = {"interleaved1f1b": 2, "loopedbfs": 2, "interleavedzerobubble": 2, "zbv": 2, "dualpipev": 2}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def changed(config: TrainConfig, **values: Any) -> TrainConfig:
    return dataclasses.replace(config, **values)


def run(config: TrainConfig) -> list[TrainResult]:
    """Train on forked ranks (or in this process), from the newest checkpoint; the result of each rank."""

    def on_rank(rank: int, world: int) -> TrainResult:
        ranks = Ranks(rank, world, rank, world)
        return train(config, ranks, corpus=Corpus(TEXT), start=find_start(config, ranks))

    if config.world == 1:
        return [on_rank(0, 1)]
    return values(run_ranks(on_rank, world=config.world, timeout=60.0))


def curve(result: TrainResult) -> list[tuple[float, float | None, float | None]]:
    """What must have equal bits: loss, gradient norm and held-out loss of each step."""
    return [(record.loss, record.gradient_norm, record.eval_loss) for record in result.steps]


def pipelined(schedule: str, **values: Any) -> TrainConfig:
    return changed(BASE, schedule=schedule, pp=2, chunks=SPLIT_RANKS.get(schedule, 1), **values)


@pytest.mark.parametrize("precision", ["fp8", "fp32"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", *SPLIT_RANKS])
def test_every_schedule_trains_and_evaluates_like_one_process(schedule: str, precision: str) -> None:
    config = pipelined(schedule, precision=precision)
    (alone,) = run(changed(config, pp=1, chunks=1))
    results = run(config)
    assert [curve(result) for result in results] == [curve(alone)] * 2
    assert [result.text for result in results] == [alone.text, None]
    norms = [record.gradient_norm for record in alone.steps]
    assert all(
        norm is not None and norm > config.clip for norm in norms
    )  # so clipping is part of what is equal
    assert [record.eval_loss is None for record in alone.steps] == [True, False, False]
    if precision == "fp8":
        assert all(result.fp8.ranks_agree and result.fp8.commits == config.steps for result in results)
        states = [result.fp8.state["slots"] for result in results]
        for name, slot in alone.fp8.state["slots"].items():
            held = [state[name] for state in states if name in state]
            assert held, name
            assert all(torch.equal(slot["history"], other["history"]) for other in held), name


@pytest.mark.parametrize("part", ["full", "attention", "mlp"])
@pytest.mark.parametrize("schedule", ["alone", "1f1b", "interleavedzerobubble", "dualpipev"])
def test_computing_activations_again_changes_no_bit(schedule: str, part: str) -> None:
    config = BASE if schedule == "alone" else pipelined(schedule)
    alone, again = run(changed(config, pp=1, chunks=1)), run(changed(config, activation_checkpoint=part))
    assert [curve(result) for result in again] == [curve(alone[0])] * config.world
    assert all(result.fp8.commits == result.fp8.collectives == config.steps for result in again)


LAYOUTS = {
    "alone": changed(BASE, pp=1),
    "1f1b": pipelined("1f1b"),
    "interleaved1f1b": pipelined("interleaved1f1b"),
    "zbv": pipelined("zbv"),
    "replicas": changed(BASE, dp=2, microbatches=2),
    "both": changed(BASE, dp=2, pp=2, microbatches=2),
}
LONG = {"steps": 5, "checkpoint_every": 2, "warmup_steps": 2}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, TrainResult]]:
    """By layout: a folder whose newest checkpoint is of step 4, and the whole run that wrote it."""
    runs = {}
    for name in ("alone", "interleaved1f1b", "replicas"):
        folder = tmp_path_factory.mktemp(name)
        whole = run(changed(LAYOUTS[name], **LONG, checkpoint_dir=folder))[0]
        (folder / "step-00000005").rename(folder / "lost")
        runs[name] = folder, whole
    return runs


@pytest.mark.parametrize("before", ["alone", "interleaved1f1b", "replicas"])
@pytest.mark.parametrize("after", list(LAYOUTS))
def test_a_resumed_run_goes_on_where_the_whole_one_went(
    interrupted: dict[str, tuple[Path, TrainResult]], before: str, after: str
) -> None:
    folder, whole = interrupted[before]
    config = changed(LAYOUTS[after], **LONG | {"checkpoint_every": 0}, checkpoint_dir=folder)
    results = run(config)
    assert all([record.step for record in result.steps] == [4] for result in results)
    assert len({tuple(curve(result)) for result in results}) == 1
    if config.dp == LAYOUTS[before].dp:  # the same order of additions
        assert curve(results[0]) == curve(whole)[4:]
    else:
        for ours, theirs in zip(curve(results[0]), curve(whole)[4:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp8", "fp32"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ddp_and_fsdp_share_gradients_like_the_own_all_reduce(mode: str, precision: str) -> None:
    config = changed(BASE, dp=2, microbatches=2, precision=precision)
    wrapped, own = run(changed(config, dp_mode=mode)), run(config)
    assert [result.losses for result in wrapped] == [result.losses for result in own]
    for ours, theirs in zip(wrapped, own, strict=True):
        norms = [[record.gradient_norm for record in result.steps] for result in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-9)  # a sharded gradient is summed in parts
        assert ours.text == theirs.text
        if precision == "fp8":
            assert ours.fp8.collectives == config.steps
            assert ours.fp8.ranks_agree


@pytest.mark.parametrize(
    ("layout", "precision", "tolerance"),
    [
        ({}, "fp32", 1e-5),
        ({}, "bf16", 2e-3),
        ({}, "fp8", 2e-3),
        ({"pp": 2}, "fp8", 2e-3),
        ({"dp": 2, "microbatches": 2}, "fp8", 2e-3),
    ],
)
def test_split_layers_train_like_whole_ones(layout: dict[str, int], precision: str, tolerance: float) -> None:
    config = changed(BASE, hidden=32, precision=precision, eval_every=1, **layout)
    split, whole = run(changed(config, tp=2)), run(config)
    assert len({tuple(curve(result)) for result in split}) == 1
    for ours, theirs in zip(curve(split[0]), curve(whole[0]), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    if precision == "fp8":
        assert all(result.fp8.ranks_agree and result.fp8.collectives == config.steps for result in split)


@pytest.mark.parametrize(
    ("before", "after"), [("tp", "alone"), ("alone", "tp"), ("fsdp", "tp"), ("tp", "fsdp")]
)
def test_sharded_weights_and_moments_are_resumed_in_another_split(
    before: str, after: str, tmp_path: Path
) -> None:
    base = changed(BASE, hidden=32, precision="fp32", microbatches=2, **LONG, checkpoint_dir=tmp_path)
    layouts = {"alone": {}, "tp": {"tp": 2}, "fsdp": {"dp": 2, "dp_mode": "fsdp"}}
    whole = run(changed(base, **layouts[before]))[0]
    (tmp_path / "step-00000005").rename(tmp_path / "lost")
    resumed = run(changed(base, **layouts[after], checkpoint_every=0))[0]
    assert [record.step for record in resumed.steps] == [4]
    assert curve(resumed)[0] == pytest.approx(curve(whole)[4], rel=1e-5)


def test_ranks_that_find_different_checkpoints_do_not_start(
    interrupted: dict[str, tuple[Path, TrainResult]],
) -> None:
    folder, _ = interrupted["replicas"]
    config = changed(LAYOUTS["replicas"], **LONG, checkpoint_dir=folder)

    def on_rank(rank: int, world: int) -> None:
        start = find_start(config, Ranks()) if rank == 0 else None  # another host, which sees another folder
        with pytest.raises(
            RuntimeError, match=f"this one found {4 if rank == 0 else 0} in .*must see the same"
        ):
            train(config, Ranks(rank, world, rank, world), corpus=Corpus(TEXT), start=start)

    values(run_ranks(on_rank, world=2, timeout=30.0))
