"""Commits without a scope, between ranks: equal backwards meet, an idle rank joins or is named in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import World
from torch import nn

import fp8dist as f8

pytestmark = pytest.mark.ranks(2)
Make = Callable[..., f8.ReductionGroupCoordinator]


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    """Coordinators that are dropped after the test, also where they are broken."""
    made: list[f8.ReductionGroupCoordinator] = []

    def build(trigger: str, **options: Any) -> f8.ReductionGroupCoordinator:
        options = {"timeout": 10.0, "stall_warning": None, **options}
        made.append(
            f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4), trigger=trigger, **options)
        )
        return made[-1]

    yield build
    for coordinator in made:
        coordinator.close()


def model(coordinator: f8.ReductionGroupCoordinator) -> nn.Module:
    torch.manual_seed(0)
    return f8.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), coordinator)


def work(m: nn.Module, scale: float) -> None:
    m(torch.full((16, 16), scale)).sum().backward()


def history(coordinator: f8.ReductionGroupCoordinator, name: str) -> list[float]:
    return coordinator.state_dict()["slots"][name]["history"].tolist()


def agree(value: Any, world: World) -> bool:
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return all(v == values[0] for v in values)


@pytest.mark.parametrize("trigger", ["backward_end", "step"])
def test_equal_backwards_commit_together(world: World, make: Make, trigger: str) -> None:
    coordinator = make(trigger)
    m = model(coordinator)
    for step in range(3):
        before = coordinator.stats.collectives
        work(m, 1.0 + step + world.rank)
        assert coordinator.stats.collectives - before == (
            2 if step == 0 else 1
        )  # the first one seeds weights
    assert coordinator.stats.commits == 3
    # The fallback for a missing scope records activations from its second backward on.
    expected = [2.0, 3.0, 4.0] if trigger == "backward_end" else [-1.0, 3.0, 4.0]
    assert history(coordinator, "0.input")[1:] == expected
    assert agree(coordinator.digest(), world)


def test_a_rank_without_a_backward_is_named_in_time(world: World, make: Make) -> None:
    coordinator = make("backward_end", timeout=1.0)
    m = model(coordinator)
    work(m, 1.0)
    before = coordinator.digest()
    if world.rank == 0:
        with pytest.raises(f8.CollectiveTimeout, match="Rank 1 has not entered") as raised:
            work(m, 5.0)
        assert raised.value.missing == (1,)
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(f8.PeerAborted, match="rank 0"):  # its next backward is told at once
            work(m, 5.0)
    assert coordinator.digest() == before
    coordinator.recover()
    m.zero_grad()
    work(m, 2.0)
    assert coordinator.stats.commits == 2
    assert agree(coordinator.digest(), world)


def test_a_backward_outside_a_scope_is_refused_where_ranks_hold_other_names(world: World, make: Make) -> None:
    coordinator = make("step")
    torch.manual_seed(world.rank)
    stage = f8.convert(nn.Linear(16, 16), coordinator, prefix=f"layers.{world.rank}")
    for _ in range(2):  # found out at the first agreement, and known from then on
        with pytest.raises(f8.MissingScope, match=r"coordinator\.step\(\)"):
            work(stage, 1.0)
    with coordinator.step():
        work(stage, 1.0)
    assert coordinator.stats.commits == 1


def test_next_autocast_joins_without_a_backward(world: World, make: Make) -> None:
    coordinator = make("next_autocast").as_default()
    m = model(coordinator)
    coordinator.freeze()
    for step in range(4):
        with f8.autocast():
            y = m(torch.full((16, 16), 1.0 + step + world.rank)) if (step + world.rank) % 2 else None
        if y is not None:
            y.sum().backward()
    assert coordinator.stats.commits == 3
    coordinator.flush()
    assert coordinator.stats.commits == 4
    # In step s, the rank that ran is the one of other parity.
    assert history(coordinator, "0.input") == [2.0, 2.0, 4.0, 4.0]
    assert agree(coordinator.digest(), world)


def test_an_exception_in_an_autocast_frees_the_peers(world: World, make: Make) -> None:
    coordinator = make("backward_end", update_every="microbatch").as_default()
    m = model(coordinator)
    with f8.autocast():
        m(torch.ones(16, 16))
    before = coordinator.digest()
    expected = KeyError if world.rank == 1 else f8.PeerAborted
    with pytest.raises(expected), f8.autocast():
        m(torch.ones(16, 16) * 9)
        if world.rank == 1:
            raise KeyError("boom")
    assert coordinator.digest() == before
    coordinator.recover()
    with f8.autocast():
        m(torch.ones(16, 16))
    assert agree(coordinator.digest(), world)


def test_a_forward_update_that_meets_a_backward_update_is_told(world: World, make: Make) -> None:
    coordinator = make("backward_end", update_every="microbatch").as_default()
    coordinator.slot("a.input")
    coordinator.freeze()
    with pytest.raises(f8.RanksDisagree, match="same part but have FORWARD on rank 0; BACKWARD on rank 1"):
        f8.reduce_and_update_quantization_state(forward=world.rank == 0)
