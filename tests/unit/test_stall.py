"""The stall inspector among hundreds of ranks, without a store that answers, and beside a dying process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from fp8dist import CollectiveTimeout, TransportError
from fp8dist._notes import Notes
from fp8dist._progress import Card, last_act, likely_mend, records
from fp8dist._stall import StallInspector
from fp8dist.transport import Control
from fp8dist.transport._control import Request


class Never:
    """A reduction that somebody holds up."""

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


class Rank:
    """What a coordinator has of control plane, inspector and notes, as one thread's rank of many."""

    def __init__(self, store: HashStore, rank: int, world: int, stall_warning: float | None = None) -> None:
        everyone = Control(store, "fp8dist")
        everyone._remote = True  # asked on a thread, like a store of another process
        self.control = everyone.under("main")
        self.inspector = StallInspector(
            self.control, everyone, "main", rank, tuple(range(world)), stall_warning
        )
        self.notes = Notes(self.control, "main", rank, world, communicator="c")
        self.inspector.start([rank % 4])

    def wait(self, timeout: float) -> BaseException:
        try:
            self.inspector.wait(Never(), 2, 17, timeout, lambda: self.notes.look(2))
        except CollectiveTimeout as error:
            self.notes.leave(self.inspector.rank, 17, str(error), missing=error.missing)
            return error
        except BaseException as error:
            return error
        raise AssertionError("nobody finished the reduction")

    def end(self) -> None:
        self.inspector.progress.end()
        self.control.line.stop()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Ask again and again for that long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def all_is_published(store: HashStore, world: int, missing: Sequence[int]) -> bool:
    """Whether anybody can read that all but the missing have entered scope 2, and what rank 1 has begun."""
    found = records(Control(store, "fp8dist").under("main"), world)
    entered = [record is not None and (record["serial"], record["phase"]) == (2, "exit") for record in found]
    return (
        entered.count(True) == world - len(missing) and found[1] is not None and found[1]["event"] is not None
    )


def test_a_record_that_was_made_earlier_never_overtakes_a_newer_one() -> None:
    store, busy = HashStore(), threading.Event()
    rank = Rank(store, 0, 2)
    progress = rank.inspector.progress

    def a_visit() -> None:
        busy.wait(10)
        progress.flush()

    rank.control.later(a_visit)
    progress.publish("open", 2, 17)  # goes out at once, as soon as the thread gets to it
    progress.publish("exit", 2, 17)  # with the next visit, which is before that
    busy.set()
    assert rank.control.later(lambda: None).wait(10)
    (record, _) = records(Control(store, "fp8dist").under("main"), 2)
    rank.end()
    assert record is not None and record["phase"] == "exit"


@pytest.mark.parametrize("world", [4, 300])
def test_every_waiting_rank_of_hundreds_learns_who_is_missing(world: int) -> None:
    store = HashStore()
    ranks = [Rank(store, rank, world) for rank in range(world)]
    missing = (1, world - 2)
    for number, rank in enumerate(ranks):
        rank.inspector.progress.publish("exit", 1, 16)
        rank.inspector.progress.publish("open", 2, 17, "train.py:30")
        if number not in missing:
            rank.inspector.progress.publish("exit", 2, 17, "train.py:30")
    ranks[1].inspector.progress.chunk("F", 1, 4)
    waiting = [rank for number, rank in enumerate(ranks) if number not in missing]
    assert until(lambda: all_is_published(store, world, missing)), "every tick sends what is new"
    with ThreadPoolExecutor(len(waiting)) as pool:
        start = time.monotonic()
        errors = list(pool.map(lambda rank: rank.wait(1.5), waiting))
        seconds = time.monotonic() - start
    for rank in ranks:
        rank.end()
    assert {type(error) for error in errors} == {CollectiveTimeout}
    assert {error.missing for error in errors if isinstance(error, CollectiveTimeout)} == {missing}
    for error in errors:
        assert "\nLikely mend: a rank is inside its step" in str(error)
        assert f"rank {world - 2} (host " in str(error)
        assert "it opened step 17 at train.py:30 " in str(error)
        assert "its last event is forward of stage 1, microbatch 4, " in str(error)
    assert seconds < 12.0
    tellers = {str(error).splitlines()[0] for error in errors}
    assert len(tellers) == (len(waiting) if world <= 64 else 1), "in a large group one rank tells all others"


class Silent(Control):
    """A store whose host is stopped: requests are made, answers never come."""

    @classmethod
    def of(cls, control: Control) -> Silent:
        silent = cls.__new__(cls)
        silent.__dict__.update(control.__dict__)
        return silent

    def later(self, request: Callable[[], object]) -> Request:  # type: ignore[override, type-arg]
        return Request(request)


def test_a_silent_store_costs_no_deadline_and_what_is_known_here_is_told() -> None:
    store = HashStore()
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        inspector = ranks[1].inspector
        deadline = time.monotonic() + 5
        while len(inspector.cards._cards) < 3 and time.monotonic() < deadline:
            inspector.control.later(inspector.cards.fetch).wait(1)
        own = Card.own([])
        card = own._replace(pid=stopped.pid, born=_born(stopped.pid))
        inspector.cards._cards[0] = card
        inspector.control = Silent.of(inspector.control)
        start = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="the store does not answer") as raised:
            inspector.wait(Never(), 2, 17, 0.8, lambda: None)
        assert time.monotonic() - start < 6.0
        assert f"rank 0 (host {own.host}, pid {stopped.pid}): its process is stopped" in str(raised.value)
        assert raised.value.missing == (0,)
    finally:
        stopped.kill()
        stopped.wait(10)
        for rank in ranks:
            rank.end()


def _born(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2].split()[19]


def test_a_peer_of_this_host_whose_process_is_gone_is_an_error_before_the_deadline() -> None:
    store = HashStore()
    rank = Rank(store, 0, 2)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    card = Card.own([3])._replace(pid=gone.pid, born=_born(gone.pid))
    gone.wait(10)
    rank.control.later(lambda: None).wait(5)
    rank.inspector.cards._cards[1] = card
    start = time.monotonic()
    with pytest.raises(
        TransportError, match=rf"process of rank 1 \(host .*, pid {gone.pid}, stage 3\) is gone"
    ):
        rank.inspector.wait(Never(), 2, 17, 60.0, lambda: None)
    assert time.monotonic() - start < 5.0
    rank.end()


def test_a_late_rank_is_warned_of_once_and_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    ranks = [Rank(store, rank, 2, stall_warning=1.5) for rank in range(2)]
    done = threading.Event()

    class Late:
        def wait(self, seconds: float) -> bool:
            return done.wait(seconds)

    def slow_user_code() -> None:
        ranks[1].inspector.progress.publish("open", 2, 17, "train.py:30")
        done.wait(3.0)

    late = threading.Thread(target=slow_user_code)
    late.start()
    ranks[0].inspector.progress.publish("exit", 2, 17)
    threading.Timer(3.0, done.set).start()
    with caplog.at_level(logging.WARNING, "fp8dist"):
        ranks[0].inspector.wait(Late(), 2, 17, 30.0, lambda: None)
    late.join(5)
    for rank in ranks:
        rank.end()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "has waited 1." in said
    assert "Rank 1 has not entered" in said
    assert "slow_user_code (" in said


def test_what_a_missing_rank_did_last_is_said_plainly() -> None:
    now = time.time()
    record = {"phase": "exit", "serial": 3, "tag": None, "at": now - 2, "place": ""}
    assert last_act(None, 4) == "it has not opened any scope"
    assert last_act(record, 4).startswith("it left step number 3 (no tag) 2.0 s ago and has opened no scope")
    assert last_act(record, 6).endswith("(3 scopes behind)")
    open_ = {**record, "phase": "open", "tag": 7, "place": "a.py:1", "event": ["W", 2, 5, now - 1]}
    assert "its last event is weight gradients of stage 2, microbatch 5, 1.0 s ago" in last_act(open_, 3)


@pytest.mark.parametrize(
    ("phases", "states", "mend"),
    [
        (["open"], ["gone"], "restarts from a checkpoint"),
        (["open", "exit"], ["alive", "stopped"], "send it SIGCONT"),
        (["exit", "open"], ["alive", None], "inside its step"),
        (["exit", None], [None, None], "one scope per optimizer step"),
    ],
)
def test_the_likely_mend_fits_what_is_known(
    phases: list[str | None], states: list[str | None], mend: str
) -> None:
    found = [None if phase is None else {"phase": phase} for phase in phases]
    assert mend in likely_mend(found, states)


DYING = """
import sys, time
from torch.distributed import TCPStore
from fp8dist.transport import Control
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
control = Control(store, "x")
control.line.visit(0.5, lambda: True)
control.set("a", "1")
assert control.get("a") == b"1"
control.later(lambda: time.sleep(30))   # a request that is not answered in time
sys.exit(7)
"""


def test_the_control_thread_does_not_keep_a_dying_process_alive() -> None:
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 7, ended.stderr
    assert "terminate" not in ended.stderr
    assert time.monotonic() - start < 25.0
