"""One rank fails: its own error at once, its peers freed by name within a second, no scale moved, and on it goes.

Ranks are forks of this process (see forkpool), so they may be killed and left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Ended, attempt, frozen, make, record
from forkpool import RankDied, run_ranks, values
from torch import nn

import fp8dist as f8

SOON = 1.0  # seconds in which a failure must have freed every peer


class Boom(Exception):
    """What the failing rank raises."""


def check_one_failed(ended: list[Ended], odd_one: int, told: str) -> None:
    """Own error on one rank, PeerAborted naming it on the others, in time; states untouched."""
    for rank, end in enumerate(ended):
        assert end.seconds < SOON, (rank, end)
        assert end.before == end.after, f"the state of rank {rank} has changed"
        assert end.refused == "NeedsRecovery", (rank, end)
        if rank == odd_one:
            assert end.error == "Boom"
            assert "call" in end.notes and "recover()" in end.notes
        else:
            assert end.error == "PeerAborted", (rank, end)
            assert end.named == odd_one
            assert told in end.text
            assert end.trained_on == "same"


@pytest.mark.parametrize("odd_one", [0, 2, 3])
@pytest.mark.parametrize(
    "where", ["before the model", "in forward", "in backward", "in a hook", "at the end"]
)
def test_a_raising_rank_frees_its_peers_and_all_go_on(odd_one: int, where: str) -> None:
    def run(rank: int, world: int) -> Ended:
        coordinator = make()
        torch.manual_seed(0)
        model = f8.convert(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), coordinator)
        failing = [False]

        def fail(*_: Any) -> None:
            if failing[0]:
                raise Boom(where)

        if where == "in forward":
            model[1].register_forward_pre_hook(fail)
        if where == "in a hook":
            model[0].weight.register_post_accumulate_grad_hook(fail)

        def step(tag: int, scale: float = 1.0) -> None:
            with coordinator.step(tag):
                if where == "before the model":
                    fail()
                y = model(torch.full((16, 16), scale))
                if where == "in backward":
                    y.register_hook(fail)
                y.sum().backward()
                if where == "at the end":
                    fail()

        step(0)

        def failing_step() -> None:
            failing[0] = rank == odd_one
            step(1, 50.0)

        end = attempt(coordinator, failing_step)
        failing[0] = False
        coordinator.recover()
        step(1, 2.0)
        step(2, 3.0)
        end.digest = coordinator.digest()
        coordinator.close()
        return end

    ended = values(run_ranks(run, world=4, timeout=30))
    for end in ended:
        end.trained_on = "same" if end.digest == ended[0].digest else "other"
    check_one_failed(ended, odd_one, "step 1 of coordinator 'main' with Boom: " + where)


def test_two_failing_ranks_keep_their_own_errors() -> None:
    def run(rank: int, world: int) -> Ended:
        coordinator = make()
        slot = coordinator.slot("a.input")
        with coordinator.step(0):
            record(slot, 1.0)

        def failing_step() -> None:
            with coordinator.step(1):
                if rank in (1, 3):
                    raise KeyError(rank)

        end = attempt(coordinator, failing_step)
        coordinator.recover()
        with coordinator.step(1):
            record(slot, 1.0)
        return end

    ended = values(run_ranks(run, world=4, timeout=20))
    assert [end.error for end in ended] == ["PeerAborted", "KeyError", "PeerAborted", "KeyError"]
    assert {ended[0].named, ended[2].named} <= {1, 3}


@pytest.mark.parametrize("moment", ["before", "while the others wait"])
def test_a_killed_rank_is_named_and_nobody_waits_for_the_timeout(moment: str) -> None:
    def run(rank: int, world: int) -> Ended:
        coordinator = make(timeout=8.0)
        slot = coordinator.slot("a.input")
        with coordinator.step(0):
            record(slot, 1.0)
        if rank == 2:
            time.sleep(0.0 if moment == "before" else 0.3)
            os.kill(os.getpid(), signal.SIGKILL)

        def waiting_step() -> None:
            with coordinator.step(1):
                record(slot, 9.0)

        return attempt(coordinator, waiting_step)

    outcomes = run_ranks(run, world=4, timeout=20)
    assert isinstance(outcomes[2].error, RankDied)
    for outcome in outcomes:
        if outcome.rank != 2:
            end = outcome.value
            assert end.error in ("TransportError", "PeerAborted"), end
            assert "ank 2" in end.text, end.text
            assert end.seconds < 3.0, end
            assert end.before == end.after


def slow_user_code(seconds: float) -> None:
    """Its name must show up in the story of those that wait."""
    time.sleep(seconds)


def test_a_rank_that_never_enters_is_named_with_its_last_act() -> None:
    def run(rank: int, world: int) -> Ended | None:
        coordinator = make(timeout=1.0, stall_warning=None)
        slot = coordinator.slot("a.input")
        with coordinator.step(16):
            record(slot, 1.0)
        if rank == 1:
            coordinator.step(17).__enter__()
            coordinator.note_chunk("F", 1, 4)
            slow_user_code(2.5)
            return None
        if rank == 3:
            time.sleep(2.5)
            return None

        def waiting_step() -> None:
            with coordinator.step(17):
                record(slot, 9.0)

        return attempt(coordinator, waiting_step)

    ended = values(run_ranks(run, world=4, timeout=20))
    for end in (ended[0], ended[2]):
        assert end.error == "CollectiveTimeout"
        assert end.missing == (1, 3)
        assert "Ranks 1, 3 have not entered" in end.text
        one, three = end.text.splitlines()[1:3]
        assert one.startswith("  rank 1 (host ")
        assert "it opened step 17 at" in one
        assert "its last event is forward of stage 1, microbatch 4, " in one
        assert "now in slow_user_code (" in one
        assert three.startswith("  rank 3 (host ")
        assert "it left step 16 " in three
        assert 0.9 < end.seconds < 2.0
        assert end.before == end.after


def test_a_late_rank_gets_an_error_at_once_and_all_recover_to_one_state() -> None:
    def run(rank: int, world: int) -> Ended:
        coordinator = make(timeout=0.8, stall_warning=None)
        slot = coordinator.slot("a.input")
        with coordinator.step(0):
            record(slot, 1.0)
        time.sleep(1.6 if rank == 2 else 0.0)

        def step() -> None:
            with coordinator.step(1):
                record(slot, 5.0 + rank)

        end = attempt(coordinator, step)
        time.sleep(0.0 if rank == 2 else 0.9)
        coordinator.recover()
        step_again = coordinator.step(1)
        with step_again:
            record(slot, 5.0 + rank)
        end.digest = coordinator.digest()
        end.history = coordinator.state_dict()["slots"]["a.input"]["history"].tolist()
        coordinator.close()
        return end

    ended = values(run_ranks(run, world=4, timeout=20))
    assert [end.error for end in ended] == [
        "CollectiveTimeout",
        "CollectiveTimeout",
        "PeerAborted",
        "CollectiveTimeout",
    ]
    assert ended[2].seconds < 0.5
    assert all(end.before == end.after for end in ended)
    assert len({end.digest for end in ended}) == 1
    assert ended[0].history[-2:] == [1.0, 8.0]


def test_a_rank_that_got_ahead_is_rolled_back_by_recover() -> None:
    """A death inside the reduction can let one rank commit alone; here its clock is set forward by hand."""

    def run(rank: int, world: int) -> Any:
        coordinator = make()
        slot = coordinator.slot("a.input")
        for step in range(3):
            with coordinator.step(step):
                record(slot, 1.0 + step)
        before = frozen(coordinator)
        if rank == 1:
            coordinator._table.row.fill_(99.0)
            coordinator._table.commit()
            coordinator._generation += 1
            assert frozen(coordinator) != before
        coordinator.recover()
        same = frozen(coordinator) == before
        with coordinator.step(3):
            record(slot, 7.0)
        return same, coordinator.digest(), coordinator.stats.generation

    results = values(run_ranks(run, world=4, timeout=20))
    assert all(same for same, _, _ in results)
    assert len(set(results)) == 1


def test_recover_refuses_a_rank_that_is_further_ahead_than_undo_reaches() -> None:
    def run(rank: int, world: int) -> str:
        coordinator = make()
        coordinator.slot("a.input")
        with coordinator.step():
            pass
        coordinator._generation += 2 * (rank == 1)
        try:
            coordinator.recover()
        except f8.RanksDisagree as error:
            return f"{error.field}: {error}"
        return "recovered"

    for text in values(run_ranks(run, world=4, timeout=20)):
        assert text.startswith("generation:")
        assert "1 on ranks 0, 2-3; 3 on rank 1" in text


def test_recover_names_a_dead_member_and_can_be_tried_again() -> None:
    def run(rank: int, world: int) -> Any:
        coordinator = make(timeout=0.7)
        coordinator.slot("a.input")
        with coordinator.step():
            pass
        if rank == 3:
            time.sleep(1.5)
        else:
            try:
                coordinator.recover()
            except f8.CollectiveTimeout as error:
                told = error.missing
            time.sleep(0.9)
        coordinator._timeout = 5.0
        coordinator.recover()
        with coordinator.step():
            pass
        coordinator.close()
        return told if rank != 3 else (3,)

    assert values(run_ranks(run, world=4, timeout=20)) == [(3,)] * 4


def test_a_rank_that_failed_before_its_scope_counts_like_the_others_after_recover() -> None:
    def run(rank: int, world: int) -> Any:
        coordinator = make(timeout=0.6, stall_warning=None)
        coordinator.slot("a.input")
        with coordinator.step(0):
            pass
        if rank == 3:
            time.sleep(0.8)
        else:
            with contextlib.suppress(f8.CollectiveTimeout), coordinator.step(1):
                pass
        coordinator._timeout = 5.0
        coordinator.recover()
        with coordinator.step(1):
            pass
        told = (3,)
        coordinator.close()
        return told

    assert values(run_ranks(run, world=4, timeout=20)) == [(3,)] * 4


def test_scopes_of_two_coordinators_in_another_order_time_out_naming_both() -> None:
    def run(rank: int, world: int) -> Ended:
        a, b = (
            make(name="a", timeout=1.0, stall_warning=None),
            make(name="b", timeout=1.0, stall_warning=None),
        )
        with a.step(), b.step():
            pass

        def crossed() -> None:
            first, second = (a, b) if rank else (b, a)
            with first.step(), second.step():
                pass

        return attempt(a, crossed)

    ended = values(run_ranks(run, world=2, timeout=20))
    # The first to give up leaves its outer scope by that error, which frees the other.
    assert {end.error for end in ended} <= {"CollectiveTimeout", "PeerAborted"}
    assert any(end.error == "CollectiveTimeout" and "same order on every rank" in end.text for end in ended)
    for end in ended:
        assert "coordinator 'a'" in end.text
        assert "coordinator 'b'" in end.text


def test_a_layout_that_grew_on_some_ranks_only_is_agreed_again_by_recover() -> None:
    """One rank dies out of the second collective of a growing step, so to say: it never starts it."""

    def run(rank: int, world: int) -> Any:
        coordinator = make(timeout=1.0, stall_warning=None)
        slot = coordinator.slot("a.input")
        with coordinator.step(0):
            record(slot, 1.0)
        if rank == 2:
            coordinator._grow = lambda step: (_ for _ in ()).throw(Boom())  # type: ignore[method-assign]

        def growing() -> None:
            with coordinator.step(1):
                record(slot, 2.0)
                if rank == 0:
                    record(coordinator.slot("new.input"), 5.0)

        end = attempt(coordinator, growing)
        vars(coordinator).pop("_grow", None)
        coordinator._timeout = 5.0
        coordinator.recover()
        with coordinator.step(1):
            record(slot, 2.0)
            if rank == 0:
                record(coordinator.slot("new.input"), 5.0)
        history = coordinator.state_dict()["slots"]["a.input"]["history"].tolist()
        return end.error, end.before == end.after, history, coordinator.class_digests().get("ranks 0-3")

    results = values(run_ranks(run, world=4, timeout=20))
    assert results[2][0] == "Boom"
    assert all(error is not None and untouched for error, untouched, _, _ in results)
    assert all(history[-2:] == [1.0, 2.0] for _, _, history, _ in results)
    assert len({digest for *_, digest in results}) == 1


LEAVER = """
import os, sys, time
import torch.distributed as dist
import fp8dist as f8
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(), timeout=60.0)
with coordinator.step(0):
    pass
if rank == 0:
    store.wait(["gone"])  # busy elsewhere, as a stage that waits for an activation is
else:
    with coordinator.step(1):
        raise ValueError("boom")
"""


def test_a_rank_that_raises_can_exit_while_its_peers_are_busy_elsewhere() -> None:
    """Its last reduction is pending then; no destructor may wait for that until a timeout."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVER, str(rank), str(store.port)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        _, told = ranks[1].communicate(timeout=50)  # nearly all of it imports; the timeout is 60
        assert ranks[1].returncode == 1
        assert "ValueError: boom" in told
        assert "call" in told and "recover()" in told
        assert ranks[0].poll() is None, "its peer is where it was"
        store.set("gone", "")
        ranks[0].communicate(timeout=30)
        assert ranks[0].returncode == 0
    finally:
        for rank in ranks:
            rank.kill()


def test_an_interrupt_in_the_wait_is_raised_soon_and_told_to_the_others() -> None:
    def run(rank: int, world: int) -> Ended:
        coordinator = make(timeout=8.0, stall_warning=None)
        slot = coordinator.slot("a.input")
        with coordinator.step(0):
            record(slot, 1.0)
        if rank == 3:
            time.sleep(1.5)
        if rank == 1:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.4)

        def waiting_step() -> None:
            with coordinator.step(1):
                record(slot, 9.0)

        return attempt(coordinator, waiting_step)

    ended = values(run_ranks(run, world=4, timeout=20))
    assert ended[1].error == "KeyboardInterrupt"
    assert ended[1].seconds < 1.4
    for rank in (0, 2):
        assert ended[rank].error == "PeerAborted"
        assert ended[rank].named == 1
        assert "KeyboardInterrupt" in ended[rank].text
    assert all(end.before == end.after for end in ended[:3])
