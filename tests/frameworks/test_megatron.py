"""Megatron-Core's own forward-backward functions, in one process and as 1F1B on two gloo ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from common import Boom, Freed, Stack, attempt, check_freed, data, make, on_ranks, plain_loop, slots, weights
from snippets import with_megatron, with_megatron_names
from torch import nn
from without_cuda import cuda_is_the_cpu

import fp8dist as f8

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

MICROBATCHES, STEPS = 4, 3


def stage_of(rank: int, world: int, coordinator: f8.ReductionGroupCoordinator) -> nn.Module:
    """One stage, or the whole, of two blocks and a head as a Megatron model, converted with global names."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=1, pipeline_model_parallel_size=world,
        pipeline_dtype=torch.float32, batch_p2p_comm=False, use_cpu_initialization=True,
    )  # fmt: skip

    class Stage(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            self.decoder = Stack(range(2)[rank:] if rank else range(2)[: 3 - world], head=rank == world - 1)
            self.model_type = ModelType.encoder_or_decoder

        def set_input_tensor(self, tensor: Any) -> None:
            self.received = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.decoder(x if self.received is None else self.received)
            return y

    return with_megatron_names.convert(Stage(), coordinator)


def forward_step(batches: Iterator[Any], stage: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    x, y = next(batches)
    # Megatron's activations are (sequence, batch, hidden).
    out = stage(x.unsqueeze(1))
    return out, lambda result: (nn.functional.cross_entropy(result.squeeze(1), y), {})


def arguments(batches: Iterator[Any], **more: Any) -> dict[str, Any]:
    sizes = {"num_microbatches": MICROBATCHES, "seq_length": 16, "micro_batch_size": 1}
    return {"forward_step_func": forward_step, "data_iterator": batches, **sizes, **more}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_call_is_one_step_with_the_scales_of_the_plain_loop(stages: int) -> None:
    def run(rank: int, world: int) -> tuple[dict[str, bytes], list[bytes], list[int]]:
        with cuda_is_the_cpu():
            coordinator = make()
            stage = stage_of(rank, world, coordinator)
            optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
            batches = iter(data(MICROBATCHES * STEPS))
            with_megatron.train(stage, coordinator, optimizer, STEPS, **arguments(batches))
        stats = coordinator.stats
        return slots(coordinator), weights(stage), [stats.commits, stats.collectives - 1]

    def plain(rank: int, world: int) -> tuple[dict[str, bytes], list[bytes]]:
        def build(coordinator: f8.ReductionGroupCoordinator) -> nn.Module:
            return f8.convert(Stack(range(2), head=True), coordinator, prefix="decoder")

        batches = data(MICROBATCHES * STEPS)
        windows = [batches[i : i + MICROBATCHES] for i in range(0, len(batches), MICROBATCHES)]
        result = plain_loop(windows, scale=lambda length: 1 / length, build=build)
        return result.slots, result.weights

    ended = on_ranks(run, world=stages)
    merged = {name: content for ours, _, _ in ended for name, content in ours.items()}
    assert len(merged) == sum(len(ours) for ours, _, _ in ended) == 2 * 2 * 3
    assert on_ranks(plain, world=1) == [(merged, [part for _, moved, _ in ended for part in moved])]
    assert [counts for _, _, counts in ended] == [[STEPS, STEPS]] * stages


@pytest.mark.parametrize("stages", [1, 2])
def test_forward_only_records_and_commits_nothing(stages: int) -> None:
    """The step behind it commits what was recorded, so it must commit the same with and without."""

    def run(rank: int, world: int, evaluates: bool) -> tuple[list[int], dict[str, bytes]]:
        with cuda_is_the_cpu():
            coordinator = make()
            stage = stage_of(rank, world, coordinator)
            optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
            step = with_megatron.train(
                stage, coordinator, optimizer, 1, **arguments(iter(data(MICROBATCHES)))
            )
            if evaluates:
                step(model=stage, **arguments(iter(data(MICROBATCHES, seed=8)), forward_only=True))
            with coordinator.step():
                pass
        return [coordinator.stats.commits, coordinator.stats.collectives - 1], slots(coordinator)

    without = on_ranks(lambda rank, world: run(rank, world, False), world=stages)
    assert on_ranks(lambda rank, world: run(rank, world, True), world=stages) == without
    assert [counts for counts, _ in without] == [[2, 2]] * stages


def test_a_failing_rank_frees_its_peer() -> None:
    """The first stage fails behind its last microbatch, when the last stage waits for nothing but the commit."""

    def run(rank: int, world: int) -> Freed:
        with cuda_is_the_cpu():
            coordinator = make()
            stage = stage_of(rank, world, coordinator)
            optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
            step = with_megatron.train(
                stage, coordinator, optimizer, 1, **arguments(iter(data(MICROBATCHES)))
            )

            def fail(*_: Any, **__: Any) -> None:
                if rank == 0:
                    raise Boom("no more")

            stage.config.finalize_model_grads_func = fail
            return attempt(
                coordinator,
                lambda: step(model=stage, **arguments(iter(data(MICROBATCHES)), forward_only=False)),
            )

    check_freed(on_ranks(run), failing=0)


def test_the_signature_is_kept_and_a_second_call_with_the_optimizer_is_no_step() -> None:
    """Zero-bubble forks call the same function again with `optimizer=` to validate what the optimizer did."""

    def run(rank: int, world: int) -> list[int]:
        coordinator = make()
        slot = coordinator.slot("layer.input")

        def forward_backward(*, forward_only: bool = False, optimizer: Any = None) -> None:
            slot.record(torch.ones(1))

        step = f8.schedules.megatron.attach(forward_backward, coordinator)
        counts = []
        for call in ({}, {"forward_only": True}, {"optimizer": object()}, {"optimizer": None}):
            step(**call)
            counts.append(coordinator.stats.commits)
        for real in (
            schedules.forward_backward_no_pipelining,
            schedules.forward_backward_pipelining_without_interleaving,
            schedules.forward_backward_pipelining_with_interleaving,
        ):
            signature = inspect.signature(real)
            assert inspect.signature(f8.schedules.megatron.attach(real, coordinator)) == signature
            assert signature.parameters["forward_only"].kind is inspect.Parameter.KEYWORD_ONLY
        return counts

    assert on_ranks(run, world=1) == [[1, 1, 1, 2]]
