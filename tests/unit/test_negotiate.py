"""Agreement through the store: all learn one result, a missing rank is named, and a retry works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fp8dist._negotiate import Negotiator
from fp8dist.errors import CollectiveTimeout, LayoutMismatch, RanksDisagree
from fp8dist.transport import Control


def negotiators(world: int, store: dist.Store | None = None) -> list[Negotiator]:
    store = store or dist.HashStore()
    return [
        Negotiator(
            Control(store, f"group of {world}"), tuple(range(world)), rank, "main", Control(store, "cards")
        )
        for rank in range(world)
    ]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls at once; an exception is a result."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def collect(brought: list[tuple[Any, list[int]]]) -> Any:
    return sorted([payload, ranks] for payload, ranks in brought)


def agree(n: Negotiator, payload: Any, decide: Any = collect, timeout: float = 5.0) -> Callable[[], Any]:
    return lambda: n.agree("topic", payload, decide, timeout)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_rank_learns_the_same_result(world: int) -> None:
    results = together([agree(n, n.rank % 2) for n in negotiators(world)])
    expected = [[v, [r for r in range(world) if r % 2 == v]] for v in (0, 1) if v < world]
    assert results == [expected] * world


def test_agreements_follow_each_other_on_one_topic() -> None:
    ns = negotiators(3)
    for round_number in range(5):
        results = together([agree(n, round_number) for n in ns])
        assert results == [[[round_number, [0, 1, 2]]]] * 3


@pytest.mark.parametrize("error", [LayoutMismatch("no"), RanksDisagree("no", field="recipe")])
def test_an_error_of_the_decision_is_raised_on_every_rank(error: Exception) -> None:
    def refuse(_: Any) -> Any:
        raise error

    ns = negotiators(3)
    results = together([agree(n, 0, refuse) for n in ns])
    assert all(type(r) is type(error) and str(r) == "no" for r in results)
    assert together([agree(n, 1) for n in ns]) == [[[1, [0, 1, 2]]]] * 3


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_rank_is_named_on_all_others_and_a_retry_succeeds(missing: int) -> None:
    ns = negotiators(4)
    came = [n for n in ns if n.rank != missing]
    results = together([agree(n, 0, timeout=0.4) for n in came])
    assert all(isinstance(r, CollectiveTimeout) for r in results)
    assert all(r.missing == (missing,) for r in results), results
    assert together([agree(n, 1) for n in ns]) == [[[1, [0, 1, 2, 3]]]] * 4


def test_a_rank_that_gave_up_and_came_back_is_awaited_by_the_others() -> None:
    """Its first entry lies in the store still; the others must not finish without it."""
    ns = negotiators(3)
    assert isinstance(together([agree(ns[2], 0, timeout=0.1)])[0], CollectiveTimeout)

    def late() -> Any:
        threading.Event().wait(0.5)
        return ns[2].agree("topic", 0, collect, 5.0)

    results = together([agree(ns[0], 0), agree(ns[1], 0), late])
    assert results == [[[0, [0, 1, 2]]]] * 3


def test_another_group_under_the_same_name_is_told_at_once() -> None:
    store = dist.HashStore()
    mine, theirs = negotiators(2, store)[0], negotiators(3, store)[1]
    mine.post_card()
    theirs.post_card()
    results = together([agree(mine, 0), agree(theirs, 0)])
    for result in results:
        assert isinstance(result, RanksDisagree)
        assert result.field == "group"
        assert "ranks 0-1" in str(result)
        assert "ranks 0-2" in str(result)
