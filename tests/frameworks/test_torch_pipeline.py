"""The page's snippet for torch's own schedules. All that `attach` promises is tested in tests/distributed."""

from __future__ import annotations

import torch
from common import Stack, data, make, on_ranks, plain_loop, slots, weights
from snippets import with_torch_pipeline
from torch import nn
from torch.distributed.pipelining import PipelineStage

import fp8dist as f8

MICROBATCHES, STEPS = 4, 3


def windows() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    batches = data(MICROBATCHES * STEPS)
    return [batches[i : i + MICROBATCHES] for i in range(0, len(batches), MICROBATCHES)]


def test_a_step_of_the_schedule_is_one_step_with_the_scales_of_the_plain_loop() -> None:
    def run(rank: int, world: int) -> tuple[dict[str, bytes], list[bytes], list[int]]:
        coordinator = make()
        module = f8.convert(Stack([rank], head=rank == 1), coordinator, prefix=f"stage{rank}")
        stage = PipelineStage(module, rank, world, torch.device("cpu"))
        batches = [
            (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])) for window in windows()
        ]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        with_torch_pipeline.train(stage, coordinator, optimizer, batches, nn.functional.cross_entropy)
        stats = coordinator.stats
        return slots(coordinator), weights(module), [stats.commits, stats.collectives - 1]

    def plain(rank: int, world: int) -> tuple[dict[str, bytes], list[bytes]]:
        def build(coordinator: f8.ReductionGroupCoordinator) -> nn.Module:
            stages = [Stack([index], head=index == 1) for index in range(2)]
            return nn.Sequential(
                *(f8.convert(stage, coordinator, prefix=f"stage{i}") for i, stage in enumerate(stages))
            )

        # The schedule divides gradients by the number of microbatches when all are summed, and not the losses.
        result = plain_loop(windows(), build=build, learning_rate=0.05 / MICROBATCHES)
        return result.slots, result.weights

    (first, first_weights, counts), (second, second_weights, _) = on_ranks(run)
    assert on_ranks(plain, world=1) == [({**first, **second}, first_weights + second_weights)]
    assert counts == [STEPS, STEPS]
