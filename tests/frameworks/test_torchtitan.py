"""torchtitan's own `train_step`, `forward_backward_step` and optimizers, in a trainer that is built by hand.

A trainer of a whole run needs a GPU. With pipeline parallelism torchtitan passes microbatches to `schedule.step`, which
torch learned behind 2.13, so the test's schedule joins them first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from common import Boom, Freed, Stack, attempt, check_freed, data, make, on_ranks, plain_loop, slots
from snippets import with_torchtitan
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fp8dist as f8

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

PIPELINE_MICROBATCHES, STEPS = 4, 2


def import_titan() -> ModuleType:
    """Its trainer imports kernels for GPUs, which nothing here calls; without triton a stand-in must do."""
    import_module("torch._inductor.compile_fx")  # before there is something that looks like triton
    missing = [name for name in ("triton", "triton.language") if name not in sys.modules]
    try:
        sys.modules.update({name: MagicMock() for name in missing})
        import_module("torchtitan.components.optimizer")
        return import_module("torchtitan.trainer")
    finally:
        for name in missing:
            del sys.modules[name]


titan = import_titan()


class Joining(Schedule1F1B):
    """Takes a list of microbatches, as newer schedules do."""

    def step(self, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **rest: Any) -> Any:
        inputs = () if arg_mbs is None else (torch.cat([x for (x,) in arg_mbs]),)
        return super().step(*inputs, target=None if target_mbs is None else torch.cat(target_mbs), **rest)


def trainer_of(parts: list[nn.Module], accumulate: int, stage: PipelineStage | None = None) -> Any:
    """A trainer with as much of its state as a step needs."""
    from torchtitan.components.optimizer import OptimizersContainer

    class Optimizers(OptimizersContainer):  # type: ignore[misc]
        def __init__(self) -> None:
            parameters = [p for part in parts for p in part.parameters()]
            self.optimizers = [torch.optim.SGD(parameters, lr=0.05)]
            self.model_parts = parts
            self._post_init(parameters)

    microbatches = 1 if stage is None else PIPELINE_MICROBATCHES
    total = accumulate * microbatches

    def loss_fn(pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(pred, labels) / total
        return loss if stage is not None else (loss, None)

    trainer = titan.Trainer.__new__(titan.Trainer)
    trainer.__dict__.update(
        model_parts=parts,
        optimizers=Optimizers(),
        loss_fn=loss_fn,
        config=SimpleNamespace(
            training=SimpleNamespace(disable_cuda_graphs=True, max_norm=1e9),
            parallelism=SimpleNamespace(spmd_backend="default"),
        ),
        model_config=None,
        lr_schedulers=MagicMock(),
        metrics_processor=SimpleNamespace(should_log=lambda step: False),
        checkpointer=MagicMock(),
        parallel_dims=SimpleNamespace(
            pp_enabled=stage is not None,
            dp_enabled=False,
            cp_enabled=False,
            tp_enabled=False,
            ep_enabled=False,
            get_optional_mesh=lambda _: None,
        ),
        gradient_accumulation_steps=accumulate,
        num_pipeline_parallel_microbatches=microbatches,
        device=torch.device("cpu"),
        train_context=nullcontext,
        ntokens_seen=0,
        step=0,
    )
    trainer.fwd_bwd_fn = trainer._forward_backward_body
    if stage is not None:
        trainer.pp_has_first_stage, trainer.pp_has_last_stage = stage.is_first, stage.is_last
        trainer.pp_schedule = Joining(stage, PIPELINE_MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
        trainer.validator = SimpleNamespace(pp_schedule=trainer.pp_schedule)
    return trainer


def stage_of(rank: int, world: int, coordinator: f8.ReductionGroupCoordinator) -> PipelineStage:
    module = f8.convert(Stack([rank], head=rank == world - 1), coordinator, prefix=f"stage{rank}")
    return PipelineStage(module, rank, world, torch.device("cpu"))


def batches_of(count: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    return iter([({"input": x}, y) for x, y in data(count)])


def plain(rank: int, world: int, length: int) -> dict[str, bytes]:
    def build(coordinator: f8.ReductionGroupCoordinator) -> nn.Module:
        stages = [Stack([index], head=index == 1) for index in range(2)]
        return nn.Sequential(
            *(f8.convert(stage, coordinator, prefix=f"stage{i}") for i, stage in enumerate(stages))
        )

    batches = data(length * STEPS)
    windows = [batches[i : i + length] for i in range(0, len(batches), length)]
    return plain_loop(windows, scale=lambda length: 1 / length, build=build).slots


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_train_step_of_a_pipeline_is_one_step_with_the_scales_of_the_plain_loop(accumulate: int) -> None:
    def run(rank: int, world: int) -> tuple[dict[str, bytes], list[int], bool]:
        coordinator = make()
        stage = stage_of(rank, world, coordinator)
        trainer = trainer_of([stage.submod], accumulate, stage)
        with_torchtitan.train(
            trainer, coordinator, batches_of(STEPS * accumulate * PIPELINE_MICROBATCHES), STEPS
        )
        stats = coordinator.stats
        shared = trainer.validator.pp_schedule is trainer.pp_schedule
        return slots(coordinator), [stats.commits, stats.collectives - 1], shared

    ended = on_ranks(run)
    reference = on_ranks(lambda rank, world: plain(rank, world, accumulate * PIPELINE_MICROBATCHES), world=1)
    assert [{**ended[0][0], **ended[1][0]}] == reference
    assert [rest for _, *rest in ended] == [[[STEPS, STEPS], True]] * 2


def one_part(accumulate: int) -> tuple[Any, f8.ReductionGroupCoordinator]:
    coordinator = make()
    model = nn.Sequential(Stack([0], head=False), Stack([1], head=True))
    for index, stage in enumerate(model):
        f8.convert(stage, coordinator, prefix=f"stage{index}")
    return trainer_of([model], accumulate), coordinator


@pytest.mark.parametrize("accumulate", [1, 4])
def test_without_a_pipeline_it_is_the_same(accumulate: int) -> None:
    def run(rank: int, world: int) -> tuple[dict[str, bytes], list[int]]:
        trainer, coordinator = one_part(accumulate)
        seen: list[int] = []
        trainer.optimizers.optimizers[0].register_step_pre_hook(
            lambda *_: seen.append(coordinator.stats.commits)
        )
        with_torchtitan.train(trainer, coordinator, batches_of(STEPS * accumulate), STEPS)
        return slots(coordinator), [coordinator.stats.collectives - 1, *seen]

    ((ours, counts),) = on_ranks(run, world=1)
    assert [ours] == on_ranks(lambda rank, world: plain(rank, world, accumulate), world=1)
    assert counts == [STEPS, *range(1, STEPS + 1)]


def test_a_failing_rank_frees_its_peer() -> None:
    """It fails behind its forwards and backwards, when its peer waits for nothing but the commit."""

    def run(rank: int, world: int) -> Freed:
        coordinator = make()
        stage = stage_of(rank, world, coordinator)
        trainer = trainer_of([stage.submod], 1, stage)
        with_torchtitan.train(trainer, coordinator, batches_of(PIPELINE_MICROBATCHES), steps=1)

        def fail() -> None:
            if rank == 0:
                raise Boom("no more")

        trainer.checkpointer.maybe_wait_for_staging = fail  # called before the optimizers
        return attempt(coordinator, lambda: trainer.train_step(batches_of(PIPELINE_MICROBATCHES)))

    check_freed(on_ranks(run), failing=0)


def test_the_end_of_the_data_needs_no_recovery() -> None:
    """torchtitan ends a run by an exception out of `train_step`, before the first forward."""

    def run(rank: int, world: int) -> int:
        trainer, coordinator = one_part(1)
        with_torchtitan.train(trainer, coordinator, batches_of(1), steps=1)
        with pytest.raises(StopIteration):
            trainer.train_step(iter(()))
        with coordinator.step():
            pass
        return coordinator.stats.commits

    assert on_ranks(run, world=1) == [2]


def test_a_second_attach_is_refused() -> None:
    def run(rank: int, world: int) -> str:
        trainer, coordinator = one_part(1)
        f8.schedules.torchtitan.attach(trainer, coordinator)
        with pytest.raises(ValueError) as error:
            f8.schedules.torchtitan.attach(trainer, coordinator)
        return str(error.value)

    assert "attached to a coordinator already" in on_ranks(run, world=1)[0]
