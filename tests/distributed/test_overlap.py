"""A step whose reduction overlaps what comes next commits the same bits, later, and its errors come there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import World
from torch import nn

import fp8dist as f8
from fp8dist.kernels.quantize import quantize

Make = Callable[..., f8.ReductionGroupCoordinator]


@pytest.fixture(params=["gloo", "mpi"])
def make(request: pytest.FixtureRequest, world: World) -> Iterator[Make]:
    """Coordinators on both transports, dropped after the test also where they are broken."""
    made: list[f8.ReductionGroupCoordinator] = []
    group: Any = None
    if request.param == "mpi":
        from mpi4py import MPI

        group = MPI.COMM_WORLD

    def build(**options: Any) -> f8.ReductionGroupCoordinator:
        recipe = f8.DelayedScaling(amax_history_len=4)
        made.append(f8.ReductionGroupCoordinator(recipe, group, **{"timeout": 10.0, **options}))
        return made[-1]

    yield build
    for coordinator in made:
        coordinator.close()


def record(slot: f8.Slot, value: float) -> None:
    slot.record(torch.tensor([value]))
    slot.request()


def state(coordinator: f8.ReductionGroupCoordinator) -> str:
    return str(coordinator.state_dict())


def test_it_commits_the_bits_of_a_step_that_waits_with_one_collective(world: World, make: Make) -> None:
    runs = []
    for overlap in (False, True):
        coordinator = make(name=f"overlap {overlap}")
        torch.manual_seed(0)
        model = f8.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)), coordinator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(world.rank)
        losses = []
        coordinator.freeze()
        before = coordinator.stats.collectives
        for step in range(6):
            optimizer.zero_grad()
            with coordinator.step(step, overlap=overlap) as scope:
                loss = model(torch.randn(16, 32, generator=generator)).square().mean()
                loss.backward()
            assert scope.committed is (None if overlap else True)
            optimizer.step()
            losses.append(loss.item())
        coordinator.settle()
        assert scope.committed is True
        assert coordinator.stats.collectives - before == 6
        runs.append((losses, state(coordinator), [p.tolist() for p in model.parameters()]))
    assert runs[0] == runs[1]


def test_the_exit_does_not_wait_for_a_rank_that_is_late(world: World, make: Make) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step(0):
        record(slot, 1.0)
    dist.barrier()
    start = time.monotonic()
    if world.rank == 1:
        time.sleep(1.5)
    with coordinator.step(1, overlap=True):
        record(slot, 1.0 + world.rank)
    left = time.monotonic() - start
    coordinator.settle()
    settled = time.monotonic() - start
    if world.rank != 1:
        assert left < 1.0
    assert settled > 1.2
    assert coordinator.stats.generation == 2


def quantizing(coordinator: f8.ReductionGroupCoordinator, slot: f8.Slot) -> None:
    quantize(torch.ones(4), slot, record=False)


@pytest.mark.parametrize(
    "use",
    [
        quantizing,
        lambda coordinator, slot: coordinator.state_dict(),
        lambda coordinator, slot: coordinator.scales(),
        lambda coordinator, slot: coordinator.digest(),
        lambda coordinator, slot: coordinator.paused(),
        lambda coordinator, slot: coordinator.load_state_dict(coordinator.state_dict()),
        lambda coordinator, slot: coordinator.recover(),
    ],
    ids=["a cast", "state_dict", "scales", "digest", "paused", "load_state_dict", "recover"],
)
def test_whatever_uses_scales_or_state_settles_first(world: World, make: Make, use: Any) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step(0, overlap=True) as scope:
        record(slot, 2.0)
    assert coordinator.stats.generation == 0
    use(coordinator, slot)
    assert scope.committed is True
    assert coordinator.stats.generation == 1
    assert slot.scale.item() == 448.0 / 2.0


def test_an_abort_and_new_slots_are_settled_like_elsewhere(world: World, make: Make) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step(0, overlap=True) as scope:
        record(slot, 5.0)
        if world.rank == 0:
            scope.abort()
    with pytest.raises(f8.ScopeError, match="its scope has closed"):
        scope.abort()
    with coordinator.step(0, overlap=True) as grown:
        record(slot, 1.0)
        if world.rank == 1:
            record(coordinator.slot("new.input"), 3.0)
    with coordinator.step(1):
        record(slot, 1.0)
    assert (scope.committed, grown.committed) == (False, True)
    assert coordinator.stats.commits == 2
    assert ("new.input" in coordinator.scales()) == (world.rank == 1)


def test_a_raising_rank_is_told_at_the_next_entry_and_all_go_on(world: World, make: Make) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step(0):
        record(slot, 1.0)
    before = state(coordinator)
    if world.rank == 1:
        with pytest.raises(ArithmeticError), coordinator.step(1, overlap=True):
            record(slot, 9.0)
            raise ArithmeticError("bad batch")
    else:
        with coordinator.step(1, overlap=True) as scope:
            record(slot, 9.0)
        with pytest.raises(f8.PeerAborted, match=r"rank 1 left step 1 .*ArithmeticError: bad batch"):
            coordinator.step(2).__enter__()
        assert scope.committed is False
    with pytest.raises(f8.NeedsRecovery), coordinator.step(2):
        pass
    coordinator.recover()
    assert state(coordinator) == before
    with coordinator.step(1, overlap=True):
        record(slot, 2.0)
    with coordinator.step(2):
        record(slot, 2.0)
    assert coordinator.stats.generation == 3


def test_a_rank_that_fails_while_its_reduction_is_under_way_keeps_the_step(world: World, make: Make) -> None:
    """Its part has gone out, so all commit it; the next step is the first that lacks it."""
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step(0, overlap=True):
        record(slot, 4.0)
    if world.rank == 1:  # the optimizer raises
        with pytest.raises(ArithmeticError), coordinator.step(1):
            raise ArithmeticError
    else:
        with pytest.raises(f8.PeerAborted), coordinator.step(1):
            record(slot, 9.0)
    coordinator.recover()
    assert coordinator.stats.generation == 1
    assert slot.scale.item() == 448.0 / 4.0


def test_a_rank_that_never_enters_is_named_at_the_next_entry(world: World, make: Make) -> None:
    coordinator = make(timeout=1.0, stall_warning=None)
    slot = coordinator.slot("a.input")
    with coordinator.step(0):
        record(slot, 1.0)
    if world.rank == 1:
        time.sleep(2.5)
    else:
        with coordinator.step(1, overlap=True):
            record(slot, 2.0)
        with pytest.raises(f8.CollectiveTimeout, match="step 1 ") as raised, coordinator.step(2):
            pass
        assert raised.value.missing == (1,)
    coordinator._timeout = 10.0
    coordinator.recover()
    with coordinator.step(1, overlap=True):
        record(slot, 2.0)
    coordinator.settle()
    assert coordinator.stats.generation == 2


def test_closing_settles(world: World, make: Make) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step(0, overlap=True) as scope:
        record(slot, 1.0)
    coordinator.close()
    assert scope.committed is True


def test_a_recipe_without_state_has_nothing_to_overlap(world: World) -> None:
    with f8.ReductionGroupCoordinator(f8.CurrentScaling(), name="stateless") as coordinator:
        with coordinator.step(0, overlap=True) as scope:
            pass
        assert scope.committed is False
