"""Accelerate: an accumulation window is one step, and `save_state` takes the scales along."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Boom, Freed, Trained, attempt, check_freed, data, make, net, on_ranks, plain_loop, trained
from snippets import with_accelerate
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate import Accelerator

from fp8dist.integrations.accelerate import attach

loss_fn = nn.functional.cross_entropy


def loader_of(count: int) -> DataLoader[Any]:
    """A loader over microbatches that are made already."""
    rows = [(x[i], y[i]) for x, y in data(count) for i in range(len(x))]
    return DataLoader(rows, batch_size=16, shuffle=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("accumulate", "microbatches"), [(1, 3), (2, 4), (3, 5)])
def test_a_window_is_one_step_with_the_scales_of_the_plain_loop(accumulate: int, microbatches: int) -> None:
    """5 microbatches in windows of 3 leave a shorter window at the end of the loader."""

    def run(rank: int, world: int) -> tuple[Trained, Trained]:
        coordinator = make()
        model = net(coordinator)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with_accelerate.train(
            accelerator, model, coordinator, optimizer, loader_of(world * microbatches), loss_fn
        )
        mine = data(world * microbatches)[rank::world]
        windows = [mine[i : i + accumulate] for i in range(0, len(mine), accumulate)]
        # Accelerate divides by the full length also in a window that is shorter.
        return trained(coordinator, model), plain_loop(windows, ddp=True, scale=lambda _: 1 / accumulate)

    for ours, reference in on_ranks(run):
        assert ours == reference
        assert ours.collectives == ours.commits == -(-microbatches // accumulate)


def one_process() -> tuple[Any, ...]:
    coordinator = make()
    model = net(coordinator)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    attach(accelerator, coordinator, optimizer)
    return accelerator, model, coordinator, optimizer


def test_the_commit_comes_before_the_optimizer_step() -> None:
    def run(rank: int, world: int) -> list[int]:
        accelerator, model, coordinator, optimizer = one_process()
        seen = []
        optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append(coordinator.stats.commits))
        for x, y in data(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(x), y))
                optimizer.step()
        return seen

    assert on_ranks(run, world=1) == [[1, 2]]


def test_a_skipped_optimizer_step_commits_at_the_end_of_the_window_and_evaluation_does_not() -> None:
    def run(rank: int, world: int) -> list[int]:
        accelerator, model, coordinator, _ = one_process()
        seen = []
        for x, y in data(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(x), y))
            seen.append(coordinator.stats.commits)
        model.eval()
        with torch.no_grad():
            model(data(1)[0][0])
        return [*seen, coordinator.stats.commits, coordinator.stats.collectives - 1]

    assert on_ranks(run, world=1) == [[0, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize("microbatch", [0, 1])
def test_a_failing_rank_frees_its_peer(microbatch: int) -> None:
    """It fails behind its backward, so that the peer does not wait for gradients; also before its window is full."""

    def run(rank: int, world: int) -> Freed:
        coordinator = make()
        model = net(coordinator)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        attach(accelerator, coordinator, optimizer)
        local = model.module  # without the gradients' all-reduce, which is outside of our reach

        def steps(fail: bool) -> None:
            for index, (x, y) in enumerate(data(2)):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_fn(local(x), y))
                    if fail and rank == 1 and index == microbatch:
                        raise Boom("no more")
                    optimizer.step()
                    optimizer.zero_grad()

        steps(fail=False)
        ended = attempt(coordinator, lambda: steps(fail=True))
        coordinator.recover()
        if rank == 1 and microbatch == 0:
            accelerator.step -= 1  # Accelerate counts microbatches by itself, also one that failed
        steps(fail=False)
        return ended

    check_freed(on_ranks(run), failing=1)


def test_resuming_equals_never_having_stopped(tmp_path: Path) -> None:
    def run(rank: int, world: int) -> tuple[Trained, Trained]:
        batches = data(world * 6)[rank::world]

        def build(name: str) -> tuple[Any, ...]:
            coordinator = make(name)
            model = net(coordinator)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
            attach(accelerator, coordinator, optimizer)
            return accelerator, model, coordinator, optimizer

        def steps(built: tuple[Any, ...], part: slice) -> None:
            accelerator, model, _, optimizer = built
            for x, y in batches[part]:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_fn(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()

        first = build("first")
        steps(first, slice(0, 4))
        first[0].save_state(str(tmp_path))
        steps(first, slice(4, 6))
        again = build("again")
        again[0].load_state(str(tmp_path))
        steps(again, slice(4, 6))
        one, other = trained(first[2], first[1]), trained(again[2], again[1])
        assert other.commits == 1  # of its own
        return one, replace(other, commits=one.commits, collectives=one.collectives)

    for stopped, resumed in on_ranks(run):
        assert stopped == resumed


def test_an_accelerator_without_optimizer_or_attached_twice_is_refused() -> None:
    def run(rank: int, world: int) -> list[str]:
        accelerator, _, coordinator, optimizer = one_process()
        said = []
        for optimizers in ([], [optimizer]):
            with pytest.raises(ValueError) as error:
                attach(accelerator, coordinator, *optimizers)
            said.append(str(error.value))
        return said

    ((nothing, twice),) = on_ranks(run, world=1)
    assert "got none" in nothing
    assert "attached to a coordinator already" in twice
