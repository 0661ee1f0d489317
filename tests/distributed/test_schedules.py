"""Under every pipeline schedule the scales, histories, losses and weights are those of one process, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import World
from pipelines import LAYERS, RECIPE, SCHEDULES, Part, Run, assert_equal_bits, run_alone, run_pipeline

import fp8dist as f8

STEPS = 10


@pytest.fixture(scope="module")
def own_group(world: World) -> dist.ProcessGroup:
    """A group of this rank alone, for references."""
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    return groups[world.rank]


@pytest.fixture(scope="module")
def reference(own_group: dist.ProcessGroup) -> Run:
    return run_alone(own_group, STEPS)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved1f1b"])
def test_a_schedule_equals_one_process(world: World, reference: Run, name: str) -> None:
    run = run_pipeline(name, world.rank, world.size, STEPS)
    assert run.collectives == [1] * STEPS
    assert_equal_bits(run, reference, world.rank == world.size - 1)


def test_looped_bfs_equals_one_process_that_accumulates_in_reverse(
    world: World, own_group: dist.ProcessGroup
) -> None:
    run = run_pipeline("loopedbfs", world.rank, world.size, STEPS)
    assert run.collectives == [1] * STEPS
    assert_equal_bits(run, run_alone(own_group, STEPS, reverse=True), world.rank == world.size - 1)


def test_all_slots_of_the_model_are_compared(world: World, reference: Run) -> None:
    """Guards the comparison above: each rank has real histories, and all scales have moved."""
    assert len(reference.slots[-1]) == LAYERS * 2 * 3
    assert all(history[-1] > 0 for history, _ in reference.slots[-1].values())
    moved = [reference.slots[0][n][1] != reference.slots[-1][n][1] for n in reference.slots[0]]
    assert all(moved)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_evaluation_runs_no_collective_and_leaves_no_trace(world: World, name: str) -> None:
    """An eval before every step also makes torch repeat its hidden pass on uninitialised memory."""
    plain = run_pipeline(name, world.rank, world.size, 3)
    evaluated = run_pipeline(name, world.rank, world.size, 3, evaluate=True)
    assert evaluated.slots == plain.slots
    assert evaluated.losses == plain.losses
    assert evaluated.collectives == [1] * 3


@pytest.mark.parametrize("name", ["1f1b", "interleaved1f1b"])
def test_a_rank_without_fp8_layers_joins_every_step(
    world: World, own_group: dist.ProcessGroup, name: str
) -> None:
    chunks = SCHEDULES[name][1]
    per_stage = LAYERS // (world.size * chunks)
    mine = [world.size - 1 + chunk * world.size for chunk in range(chunks)]
    bare = [f"layers.{stage * per_stage + k}" for stage in mine for k in range(per_stage)]
    skip = tuple(f"{layer}.*" for layer in bare)
    run = run_pipeline(name, world.rank, world.size, 4, skip=skip)
    assert run.collectives == [1] * 4
    if world.rank == world.size - 1:
        assert run.slots[-1] == {}
    assert_equal_bits(run, run_alone(own_group, 4, skip=skip), world.rank == world.size - 1)


def test_local_names_in_two_stages_are_refused_on_every_rank(world: World) -> None:
    """Every stage calls its layer "layers.0"; merging them would give different layers one scale."""
    coordinator = f8.ReductionGroupCoordinator(RECIPE, timeout=5.0)
    part = f8.convert(Part([0]), coordinator)
    coordinator.label_stage(part, world.rank)
    with pytest.raises(
        f8.LayoutMismatch, match=r"layers\.0\.fc\.input: stage 0 on rank 0; 1 on rank 1.*\n.*prefix="
    ):
        coordinator.freeze()
    coordinator.close()


def test_a_prefix_tells_local_names_apart(world: World) -> None:
    with f8.ReductionGroupCoordinator(RECIPE, timeout=5.0) as coordinator:
        part = f8.convert(Part([0]), coordinator, prefix=f"stages.{world.rank}")
        coordinator.label_stage(part, world.rank)
        coordinator.freeze()
        assert f"stages.{world.rank}.layers.0.fc.input" in coordinator.scales()


def test_other_weights_under_one_name_are_refused_on_every_rank(world: World) -> None:
    """Without stages, equal shapes hide that these are different layers; the values tell."""
    coordinator = f8.ReductionGroupCoordinator(RECIPE, timeout=5.0)
    torch.manual_seed(world.rank)
    model = f8.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), coordinator)
    with pytest.raises(f8.LayoutMismatch, match=r"0\.weight: fingerprint"):
        coordinator.freeze()
    with torch.no_grad():  # what DDP does at construction
        dist.broadcast(model[0].weight, 0)
    coordinator.freeze()
    coordinator.close()


def test_sharded_weights_may_differ(world: World) -> None:
    with f8.ReductionGroupCoordinator(RECIPE, timeout=5.0) as coordinator:
        torch.manual_seed(world.rank)
        model = f8.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), coordinator, sharded=True)
        coordinator.freeze()
        amax = torch.tensor([model[0].weight.abs().max().item()])
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        assert coordinator.scales()["0.weight"] == torch.div(torch.tensor(448.0), amax).item()
