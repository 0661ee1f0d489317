"""A scope whose ends lie in different calls: callbacks come twice, out of order, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from common import Boom, make

import fp8dist as f8
from fp8dist.schedules._window import Window


@pytest.fixture
def coordinator() -> Iterator[f8.ReductionGroupCoordinator]:
    coordinator = make("window")
    coordinator.slot("layer.input")
    coordinator.freeze()
    yield coordinator
    coordinator.close()  # refused where a scope is open


def record(coordinator: f8.ReductionGroupCoordinator) -> None:
    coordinator.slot("layer.input").record(torch.ones(1))


def test_a_window_opens_once_and_commits_once(coordinator: f8.ReductionGroupCoordinator) -> None:
    window = Window(coordinator)
    for tag in (3, 4):  # the second one is a microbatch of the same step
        window.open(tag)
        record(coordinator)
    for _ in range(2):
        window.close()
    assert coordinator.stats.commits == 1
    window.open(4)
    window.close()
    assert coordinator.stats.commits == 2


def test_cancelling_commits_nothing_and_needs_no_recovery(coordinator: f8.ReductionGroupCoordinator) -> None:
    window = Window(coordinator)
    window.open()
    record(coordinator)
    for _ in range(2):
        window.cancel()
    assert coordinator.stats.commits == 0
    window.open()
    window.close()
    assert coordinator.stats.commits == 1


@pytest.mark.parametrize("leave", [lambda window: None, lambda window: window.close()])
def test_a_guarded_call_leaves_a_scope_that_nobody_else_left(
    coordinator: f8.ReductionGroupCoordinator, leave: Callable[[Window], None]
) -> None:
    window = Window(coordinator)

    def step() -> str:
        window.open()
        record(coordinator)
        leave(window)
        return "done"

    assert window.guarded(step)() == "done"
    assert coordinator.stats.commits == 1


def test_a_guarded_call_that_raises_commits_nothing(coordinator: f8.ReductionGroupCoordinator) -> None:
    window = Window(coordinator)

    def step() -> None:
        window.open()
        record(coordinator)
        raise Boom("no more")

    with pytest.raises(Boom):
        window.guarded(step)()
    assert coordinator.stats.commits == 0
    with pytest.raises(f8.NeedsRecovery):
        window.open()
    coordinator.recover()
    window.open()
    window.close()
    assert coordinator.stats.commits == 1
