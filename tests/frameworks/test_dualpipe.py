"""DualPipe's own schedule on two gloo ranks: each holds both stages, and the pair of a stage shares its scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import Boom, Freed, Stack, attempt, check_freed, data, make, on_ranks, plain_loop, slots
from snippets import with_dualpipe
from torch import nn
from without_cuda import cuda_is_the_cpu

import fp8dist as f8

pytest.importorskip("dualpipe", reason="dualpipe is not installed")
import dualpipe

MICROBATCHES, STEPS = 4, 3
loss_fn = nn.functional.cross_entropy


def stages_of(rank: int, coordinator: f8.ReductionGroupCoordinator) -> tuple[nn.Module, nn.Module]:
    """Both stages, in the order in which this rank holds them."""
    dualpipe.set_p2p_tensor_shapes([(16, 32)])
    dualpipe.set_p2p_tensor_dtype(torch.float32)
    stages = [Stack([0], head=False), Stack([1], head=True)]
    for index, stage in enumerate(stages):
        f8.convert(stage, coordinator, prefix=f"stage{index}")
    return (stages[0], stages[1]) if rank == 0 else (stages[1], stages[0])


def halves(rank: int, step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The inputs that enter at this rank, and the labels of those that entered at the other one."""
    batches = data(MICROBATCHES * STEPS)[MICROBATCHES * step :][:MICROBATCHES]
    first, second = batches[: MICROBATCHES // 2], batches[MICROBATCHES // 2 :]
    mine, other = (first, second) if rank == 0 else (second, first)
    return torch.cat([x for x, _ in mine]), [torch.cat([y for _, y in other])]


def trained_model(rank: int, coordinator: f8.ReductionGroupCoordinator, count: int) -> Any:
    stages = stages_of(rank, coordinator)
    # The sum of a stage's gradients on its two ranks is left out, so the weights must stay.
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.0)
    steps = [halves(rank, step) for step in range(count)]
    return with_dualpipe.train(
        stages, coordinator, optimizer, steps, num_chunks=MICROBATCHES, criterion=loss_fn
    )


def test_a_step_of_the_module_is_one_step_with_the_scales_of_the_plain_loop() -> None:
    def run(rank: int, world: int) -> tuple[dict[str, bytes], list[int]]:
        with cuda_is_the_cpu():
            coordinator = make()
            trained_model(rank, coordinator, STEPS)
        return slots(coordinator), [coordinator.stats.commits, coordinator.stats.collectives - 1]

    def plain(rank: int, world: int) -> dict[str, bytes]:
        def build(coordinator: f8.ReductionGroupCoordinator) -> nn.Module:
            return nn.Sequential(*stages_of(0, coordinator))

        batches = data(MICROBATCHES * STEPS)
        windows = [batches[i : i + MICROBATCHES] for i in range(0, len(batches), MICROBATCHES)]
        return plain_loop(windows, build=build, learning_rate=0.0).slots

    ended = on_ranks(run)
    reference = on_ranks(plain, world=1)[0]
    assert len(reference) == 2 * 2 * 3
    assert [ours for ours, _ in ended] == [reference, reference]
    assert [counts for _, counts in ended] == [[STEPS, STEPS]] * 2


def test_without_gradients_it_records_and_commits_nothing() -> None:
    """The step behind it commits what was recorded, so it must commit the same with and without."""

    def run(rank: int, world: int, evaluates: bool) -> tuple[list[int], dict[str, bytes]]:
        with cuda_is_the_cpu():
            coordinator = make()
            model = trained_model(rank, coordinator, 1)
            if evaluates:
                inputs, labels = halves(rank, 1)
                with torch.no_grad():
                    model.step(inputs, num_chunks=MICROBATCHES, criterion=loss_fn, labels=labels)
            with coordinator.step():
                pass
        return [coordinator.stats.commits, coordinator.stats.collectives - 1], slots(coordinator)

    without = on_ranks(lambda rank, world: run(rank, world, False))
    assert on_ranks(lambda rank, world: run(rank, world, True)) == without
    assert [counts for counts, _ in without] == [[2, 2]] * 2


def test_a_failing_rank_frees_its_peer() -> None:
    """It fails when all its sends are done, so that its peer waits for nothing but the commit."""

    def run(rank: int, world: int) -> Freed:
        with cuda_is_the_cpu():
            coordinator = make()
            model = trained_model(rank, coordinator, 1)
            reset, calls = model._reset_states, [0]

            def fail() -> None:
                calls[0] += 1
                if rank == 1 and calls[0] == 2:  # the first call opens a step, the second one ends it
                    raise Boom("no more")
                reset()

            model._reset_states = fail
            inputs, labels = halves(rank, 1)
            return attempt(
                coordinator,
                lambda: model.step(inputs, num_chunks=MICROBATCHES, criterion=loss_fn, labels=labels),
            )

    check_freed(on_ranks(run), failing=1)


def test_another_module_or_a_second_attach_are_refused() -> None:
    def run(rank: int, world: int) -> list[str]:
        said = []
        with cuda_is_the_cpu():
            coordinator = make()
            model = trained_model(rank, coordinator, 0)
            for refused in (nn.Identity(), model):
                with pytest.raises(ValueError) as error:
                    f8.schedules.dualpipe.attach(refused, coordinator)
                said.append(str(error.value))
        return said

    for foreign, twice in on_ranks(run):
        assert "expects a DualPipe or DualPipeV but got Identity" in foreign
        assert "attached to a coordinator already" in twice
