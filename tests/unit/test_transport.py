"""Waiting in slices: a reduction that completes as a slice ends is complete, and only a broken one is an error."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fp8dist.errors import TransportError
from fp8dist.transport.local import LocalTransport
from fp8dist.transport.torch_dist import _GlooWork


class Work:
    """gloo's work, whose waits end as scripted: an error's text, or None."""

    def __init__(self, *waits: str | None, completed: bool) -> None:
        self.waits, self.completed = list(waits), completed

    def wait(self, timeout: timedelta | None = None) -> bool:
        ended = self.waits.pop(0)
        if ended is not None:
            raise RuntimeError(ended)
        return True

    def is_completed(self) -> bool:
        return self.completed


def test_a_reduction_that_completes_in_time_is_complete() -> None:
    assert _GlooWork(Work(None, completed=True)).wait(0.1)


def test_a_pending_reduction_is_no_error() -> None:
    assert not _GlooWork(Work("Operation timed out!", completed=False)).wait(0.1)


def test_a_reduction_that_completes_as_the_slice_ends_is_complete() -> None:
    assert _GlooWork(Work("Operation timed out!", None, completed=True)).wait(0.1)


def test_a_broken_reduction_is_told_without_the_transports_advice() -> None:
    broken = "Connection closed by peer. This is typically caused by something. Good luck!"
    work = _GlooWork(Work("Operation timed out!", broken, completed=True))
    with pytest.raises(TransportError, match=r"broke: Connection closed by peer$"):
        work.wait(0.1)


def test_gloo_itself_keeps_a_reduction_alive_over_timed_out_waits() -> None:
    """The behaviour that the slices rely on, asked of torch: one rank alone, whose peer comes later."""
    store = dist.HashStore()
    groups: list[dist.ProcessGroupGloo] = []

    def join(rank: int) -> None:
        groups.append(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20)))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    words = [torch.full((4,), i, dtype=torch.int32) for i in range(2)]
    first = _GlooWork(groups[0].allreduce([words[0]], options))
    for _ in range(5):
        assert not first.wait(0.02)
    second = _GlooWork(groups[1].allreduce([words[1]], options))
    assert first.wait(10.0)
    assert second.wait(10.0)
    assert words[0].tolist() == words[1].tolist() == [1, 1, 1, 1]


def test_a_single_process_counts_its_collectives() -> None:
    transport = LocalTransport()
    words = torch.tensor([3, -1], dtype=torch.int32)
    assert transport.start_max(words).wait(0.0)
    assert words.tolist() == [3, -1]
    assert transport.collectives == 1
