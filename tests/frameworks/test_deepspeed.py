"""DeepSpeed's pipeline engine on two gloo ranks: one commit per `train_batch`, before the optimizer inside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from common import Boom, Freed, attempt, check_freed, data, make, net, on_ranks, plain_loop, slots, weights
from snippets import with_deepspeed
from torch import nn

import fp8dist as f8

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="deepspeed is not installed")
import deepspeed
import deepspeed.ops
from deepspeed.pipe import PipelineModule, TiedLayerSpec

MICROBATCHES, STEPS = 4, 3


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would compile a reduction through shared memory, for a minute; gloo does without."""
    known = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", known)


def pipeline(coordinator: f8.ReductionGroupCoordinator, layers: list[Any] | None = None) -> Any:
    """The net of `common` as a pipeline of two stages, converted with the names that it has in one process."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = PipelineModule(
        layers=layers or list(net(None)),
        num_stages=2,
        loss_fn=nn.functional.cross_entropy,
        partition_method="uniform",
    )
    return f8.convert(model, coordinator)


def trained_engine(
    coordinator: f8.ReductionGroupCoordinator,
    batches: Iterator[Any],
    steps: int,
    layers: list[Any] | None = None,
) -> Any:
    model = pipeline(coordinator, layers)
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": 10**6,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return with_deepspeed.train(model, coordinator, optimizer, config, batches, steps)


def test_a_train_batch_is_one_step_with_the_scales_of_the_plain_loop() -> None:
    def run(rank: int, world: int) -> tuple[dict[str, bytes], list[bytes], list[int]]:
        coordinator = make()
        engine = trained_engine(coordinator, iter(data(MICROBATCHES * STEPS)), STEPS)
        stats = coordinator.stats
        return slots(coordinator), weights(engine.module), [stats.commits, stats.collectives - 1]

    def plain(rank: int, world: int) -> tuple[dict[str, bytes], list[bytes]]:
        batches = data(MICROBATCHES * STEPS)
        windows = [batches[i : i + MICROBATCHES] for i in range(0, len(batches), MICROBATCHES)]
        result = plain_loop(windows, ddp=False, scale=lambda length: 1 / length)
        return result.slots, result.weights

    (first, first_weights, counts), (second, second_weights, _) = on_ranks(run)
    assert {name.split(".")[0] for name in first} == {"0"}
    assert {name.split(".")[0] for name in second} == {"2"}
    assert on_ranks(plain, world=1) == [({**first, **second}, first_weights + second_weights)]
    assert counts == [STEPS, STEPS]


def test_the_commit_comes_before_the_optimizer_step_and_evaluation_has_none() -> None:
    def run(rank: int, world: int) -> list[int]:
        coordinator = make()
        batches = iter(data(MICROBATCHES * 5))
        engine = trained_engine(coordinator, batches, steps=1)
        seen = []
        engine.optimizer.register_step_pre_hook(lambda *_: seen.append(coordinator.stats.commits))
        engine.train_batch(data_iter=batches)
        engine.eval_batch(batches)
        engine.eval_batch(batches)
        engine.train_batch(data_iter=batches)
        return [*seen, coordinator.stats.commits, coordinator.stats.collectives - 1]

    assert on_ranks(run) == [[2, 3, 3, 3]] * 2


def test_another_engine_of_the_process_is_left_alone() -> None:
    def run(rank: int, world: int) -> bool:
        engine = trained_engine(make(), iter(data(MICROBATCHES)), steps=1)
        kind = type(engine)
        untouched = all(f.__module__ == kind.__module__ for f in kind._INSTRUCTION_MAP.values())
        return untouched and kind.train_batch.__module__ == kind.__module__

    assert on_ranks(run) == [True, True]


class Failing(nn.Module):
    """Raises in the backward of the first stage's input, which is the last thing that a stage does."""

    def __init__(self, inner: nn.Module, fails: Callable[[], bool]) -> None:
        super().__init__()
        self.inner = inner
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)

        def check(grad: torch.Tensor) -> None:
            if self.fails():
                raise Boom("no more")

        y.register_hook(check)
        return y


def test_a_failing_rank_frees_its_peer() -> None:
    """The first stage fails in its last backward: by then the last stage waits for nothing but the commit."""
    calls = [0]

    def fails() -> bool:
        calls[0] += 1
        return calls[0] == 2 * MICROBATCHES  # the last backward of the second step

    def run(rank: int, world: int) -> Freed:
        layers = [Failing(nn.Linear(32, 64), fails), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 3)]
        coordinator = make()
        batches = iter(data(MICROBATCHES * 2))
        engine = trained_engine(coordinator, batches, steps=1, layers=layers)
        return attempt(coordinator, lambda: engine.train_batch(data_iter=batches))

    check_freed(on_ranks(run), failing=0)


def test_what_is_no_pipeline_or_attached_twice_or_tied_and_converted_is_refused() -> None:
    def run(rank: int, world: int) -> list[str]:
        said = []
        coordinator = make()
        engine = trained_engine(coordinator, iter(()), steps=0)
        tied = [TiedLayerSpec("tied", nn.Linear, 32, 32), nn.GELU(), TiedLayerSpec("tied", nn.Linear, 32, 32)]
        other = make("tied")
        attempts: list[Callable[[], Any]] = [
            lambda: f8.schedules.deepspeed.attach(nn.Linear(2, 2), coordinator),
            lambda: f8.schedules.deepspeed.attach(engine, coordinator),
            lambda: trained_engine(other, iter(()), 0, [*tied, nn.Linear(32, 3)]),
        ]
        for refused in attempts:
            with pytest.raises(ValueError) as error:
                refused()
            said.append(str(error.value))
        return said

    for foreign, twice, tied in on_ranks(run):
        assert "expects a PipelineEngine but got Linear" in foreign
        assert "attached to a coordinator already" in twice
        assert "tied Linear" in tied
        assert "skip=" in tied
