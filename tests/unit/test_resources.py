"""Five hundred steps leave nothing behind: no tensors, no Python objects, no callbacks, no cached weights."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8dist as f8

WIDTH, TOKENS, STEPS, EVERY = 16, 16, 500, 100


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


Forward = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def plain(net: Net) -> Forward:
    return net.body


def recomputed(net: Net) -> Forward:
    return partial(checkpoint, net.body, use_reentrant=False)


def recomputed_reentrant(net: Net) -> Forward:
    return partial(checkpoint, net.body, use_reentrant=True)


def compiled(net: Net) -> Forward:
    # Not backend="eager": there torch itself keeps a class and its tensors per call of an autograd.Function.
    return torch.compile(net.body, backend="aot_eager", fullgraph=True)


def fill_ring(coordinator: f8.ReductionGroupCoordinator) -> None:
    """The flight recorder keeps a fixed number of events; from here on each new one drops an old one."""
    for _ in range(5000):
        coordinator.flight.record("open", 1, None, place="here")


def census() -> tuple[Counter[str], int]:
    """Living objects by type, and the bytes that tensors hold."""
    gc.collect()
    objects = gc.get_objects()
    storages = {
        o.untyped_storage()._cdata: o.untyped_storage().nbytes() for o in objects if type(o) is torch.Tensor
    }
    kinds = Counter(type(o).__name__ for o in objects)
    del kinds["UntypedStorage"]  # counting made them
    return kinds, sum(storages.values())


@pytest.mark.parametrize("how", [plain, recomputed, recomputed_reentrant, compiled])
def test_steps_leave_nothing_behind(how: Callable[[Net], Forward]) -> None:
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4)) as coordinator:
        torch.manual_seed(0)
        net = f8.convert(Net(), coordinator)
        fill_ring(coordinator)
        forward = how(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(number: int) -> weakref.ref[torch.Tensor]:
            x = torch.randn(TOKENS, WIDTH, requires_grad=True)
            with coordinator.step(number):
                for _ in range(2):
                    y = forward(x)
                    y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return weakref.ref(y)

        seen = []
        for number in range(STEPS):
            alive = step(number)
            if (number + 1) % EVERY == 0:
                assert alive() is None
                seen.append(census())
        assert coordinator.stats.commits == STEPS
        assert coordinator._scope.weight_cache == {}
    for kind, count in seen[-1][0].items():
        assert count <= seen[1][0][kind] + 5, kind  # one a step, or one in a dozen steps, would be many more
    assert seen[-1][1] == seen[1][1]


def test_steps_that_fail_leave_nothing_behind() -> None:
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4)) as coordinator:
        net = f8.convert(Net(), coordinator)
        fill_ring(coordinator)

        def fail(gradient: torch.Tensor) -> None:
            raise ArithmeticError("in a hook")

        def step(number: int) -> None:
            x = torch.randn(TOKENS, WIDTH, requires_grad=True)
            with pytest.raises(ArithmeticError), coordinator.step(number):
                y = recomputed(net)(x)
                y.register_hook(fail)
                y.square().mean().backward()
            coordinator.recover()

        seen = []
        for number in range(90):
            step(number)
            if (number + 1) % 30 == 0:
                seen.append(census())
        assert coordinator._scope.weight_cache == {}
    for kind, count in seen[-1][0].items():
        assert count <= seen[0][0][kind] + 5, kind
    assert seen[-1][1] == seen[0][1]


def test_a_dropped_model_and_coordinator_are_freed() -> None:
    def build() -> list[weakref.ref[object]]:
        with f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4)) as coordinator:
            net = f8.convert(Net(), coordinator)
            for number in range(2):
                with coordinator.step(number):
                    net.body(torch.randn(TOKENS, WIDTH)).sum().backward()
            return [weakref.ref(o) for o in (net, net.first, net.first.weight, coordinator)]

    alive = build()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
