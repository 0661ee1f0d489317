"""How each fault is done to the ranks: what every rank does in place of a good step."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from faults import record
from forkpool import LOOPBACK, serve
from torch.utils.checkpoint import checkpoint
from trial import ODD, PATIENCE, Boom, Run, T, W, usual_amaxes

import fp8dist as f8

# -- missing and late -----------------------------------------------------------------------------------------


def never(run: Run) -> None:
    if not run.odd:
        run.step(1)


def stuck_inside(run: Run) -> None:
    gone = threading.Event()
    # Until its peers have given up; the stack that they are told is taken here.
    run.step(1, at="end", do=lambda: gone.wait(T + 0.6))


def late(run: Run) -> None:
    run.step(1, at="before", do=lambda: time.sleep(2.5 * W))


def after_the_others_gave_up(run: Run) -> None:
    if run.odd:
        time.sleep(1.4 * T)
    run.strike()
    run.step(1)


def stopped_for_a_while(run: Run) -> None:
    if run.odd:
        continued = subprocess.Popen(["sh", "-c", f"sleep {3 * W}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        continued.wait()
    run.step(1)


def hold_the_gil(run: Run) -> None:
    run.step(1, at="before", do=lambda: ctypes.PyDLL(None).usleep(int(2.5e6 * W)))


def clock_set_forward(run: Run) -> None:
    real = time.time
    with mock.patch("time.time", (lambda: real() + 3600.0) if run.odd else real):
        run.step(0, tag=1)
        run.step(1, tag=2, at="before", do=lambda: time.sleep(2.5 * W))


def closes(run: Run) -> None:
    if run.odd:
        run.coordinator.close()
    else:
        run.step(1)


# -- raising --------------------------------------------------------------------------------------------------


def boom() -> None:
    raise Boom("out of luck")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def leave_the_program() -> None:
    raise SystemExit(3)


def at(where: str, do: Callable[[], None] = boom) -> Callable[[Run], None]:
    def inject(run: Run) -> None:
        with interruptible():
            run.step(1, at=where, do=do)

    return inject


def in_the_optimizer(run: Run) -> None:
    run.step(1)
    if run.odd:
        run.strike()
        boom()
    run.strike()
    run.step(2)


def in_the_update_rule(run: Run) -> None:
    if run.odd:
        with mock.patch.object(run.coordinator._table, "commit", side_effect=Boom("in the rule")):
            run.step(1)
    run.step(1)
    run.step(2)


@contextlib.contextmanager
def interruptible(after: float | None = None) -> Iterator[None]:
    """SIGINT raises, as it does by default; `after` seconds it comes."""
    handlers = {s: signal.signal(s, signal.default_int_handler) for s in (signal.SIGINT, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_REAL, after or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def interrupted_while_it_waits(run: Run) -> None:
    if run.rank == 3:
        return
    run.strike()
    with interruptible(0.4 if run.odd else None):
        run.step(1)


def interrupted_and_one_comes_later(run: Run) -> None:
    if run.rank == 3:
        time.sleep(1.2)
        run.step(1)  # all others have entered, and given up
    interrupted_while_it_waits(run)


# -- other scopes, recipes, layouts ---------------------------------------------------------------------------


def another_number(run: Run) -> None:
    run.step(1)
    run.step(1, tag=1 if run.odd else 2)


def skipped(run: Run) -> None:
    run.step(1, tag=2 if run.odd else 1)


def one_scope_more(run: Run) -> None:
    run.step(1, tag=None)
    if run.odd:
        time.sleep(0.3)
        run.strike()
        run.step(2, tag=None)
    run.coordinator.close()


def inner_scope_of_another_step(run: Run) -> None:
    def nest() -> None:
        with run.coordinator.step(7):
            pass

    run.step(1, at="start", do=nest)


def outer_scope_closed_first(run: Run) -> None:
    if not run.odd:
        return run.step(1)
    outer, inner = run.coordinator.step(1), run.coordinator.step(1)
    outer.__enter__()
    inner.__enter__()
    run.strike()
    outer.__exit__(None, None, None)


def another_shape(run: Run) -> None:
    run.coordinator.declare("b.input", shape=(8, 8) if run.odd else (4, 16))
    run.strike()
    run.step(0)


def first_step(run: Run) -> None:
    run.strike()
    run.step(0)


def another_group(run: Run) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, ODD])
    if run.rank in (0, 1):
        group = second if run.rank == 0 else first
        stray = f8.ReductionGroupCoordinator(f8.DelayedScaling(), group, name="stray", timeout=1.0)
        run.coordinators.append(stray)
        run.strike()
        stray.freeze()


def another_order(run: Run) -> None:
    both = [run.another("a"), run.another("b")]
    with both[0].step(), both[1].step():
        pass
    for coordinator in both:
        coordinator._timeout = T
    run.strike()
    first, second = both[::-1] if run.odd else both
    with first.step(7), second.step(8):
        pass


# -- state ----------------------------------------------------------------------------------------------------


def one_ulp(run: Run) -> None:
    if run.odd:
        newest = max(usual_amaxes(rank, 0)["a.input"] for rank in range(4))
        history = run.coordinator._table._states[0].history
        at = (history == newest).nonzero()
        assert len(at) == 1, "no other slot has that amax"
        history.view(torch.int32)[tuple(at[0])] += 1
    run.step(1)


def two_steps(run: Run) -> None:
    for number in (1, 2):
        run.step(number)


def on_rank(rank: int, **amaxes: float) -> Callable[[int, int], dict[str, float]]:
    """In step 1, that rank records something else."""
    return lambda me, number: usual_amaxes(me, number) | (amaxes if me == rank and number == 1 else {})


def without(*ranks: int) -> Callable[[int, int], dict[str, float]]:
    """In step 1 those ranks record nothing of their own."""
    return lambda rank, number: {} if rank in ranks and number == 1 else usual_amaxes(rank, number)


def module_more(rank: int, number: int) -> dict[str, float]:
    return usual_amaxes(rank, number) | ({"extra.input": 3.0 + number} if rank == ODD else {})


def module_dropped(rank: int, number: int) -> dict[str, float]:
    more = {} if rank == ODD and number in (1, 2) else {"b.input": 30.0 + rank - number}
    return usual_amaxes(rank, number) | more


def other_name(rank: int, number: int) -> dict[str, float]:
    """A layout of equal size: rank 2 has `b.input` where the others have `a.input`."""
    return {"b.input": 70.0 + number} if rank == ODD else usual_amaxes(rank, number)


def other_sequence(rank: int, number: int) -> dict[str, float]:
    names = sorted(["w.input", "x.input", "y.input", "z.input"], reverse=rank == ODD)
    return usual_amaxes(rank, number) | {name: 10.0 * ord(name[0]) + rank + number for name in names}


def evaluates(run: Run) -> None:
    run.model.train(not run.odd)
    run.step(1)
    run.model.train()
    run.step(2)


def nested(run: Run) -> None:
    """Rank 2 opens scopes in a scope, one of them in a running backward, and recomputes."""
    count = run.coordinator.stats.collectives

    def more() -> None:
        with run.coordinator.step(), torch.enable_grad():
            x = torch.full((16, 16), 2.0, requires_grad=True)
            checkpoint(run.model, x, use_reentrant=True).sum().backward()

    run.step(1, at="start", do=more)
    run.step(2, at="backward", do=more)
    assert run.coordinator.stats.collectives == count + 2


def on_another_thread(run: Run) -> None:
    if not run.odd:
        return two_steps(run)
    thread = threading.Thread(target=two_steps, args=[run])
    thread.start()
    thread.join(PATIENCE)


def users_collectives(run: Run) -> None:
    """The user's traffic on the default group, in and between scopes; pending ones, too."""
    total, rows = torch.ones(100), [torch.zeros(1) for _ in range(4)]
    for number in (1, 2):
        with run.coordinator.step(number):
            run.work(number)
            dist.all_gather(rows, torch.tensor([float(run.rank)]))
            pending = dist.all_reduce(total, async_op=True)
        pending.wait()
    assert total[0] == 16.0 and [row.item() for row in rows] == [0.0, 1.0, 2.0, 3.0]


def innocent_group(run: Run) -> None:
    """A group of the user's own, with a reduction pending while the step fails, and used afterwards."""
    group, total = dist.new_group(), torch.ones(1)
    pending = dist.all_reduce(total, group=group, async_op=True)
    try:
        run.step(1, at="end", do=boom)
    finally:
        pending.wait()
        dist.all_reduce(total, group=group)
        assert total.item() == 16.0


def forked_child(run: Run) -> None:
    with run.coordinator.step(1) as opened:
        run.work(1)
        if run.odd:
            told = in_a_forked_child(run, opened).splitlines()
            for place, text in zip(("step", "leave", "recover", "close"), told, strict=False):
                assert re.match(
                    rf"{place}: .* by process {os.getpid()}.* in process \d+, forked from it", text
                )
            assert told[4:] == ["dropped"], told
    run.step(2)


def in_a_forked_child(run: Run, opened: f8.Step) -> str:
    """What a forked copy of this process is told when it uses the coordinator, in which a scope is open."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for place, use in (
                ("step", lambda: run.step(2)),
                ("leave", lambda: opened.__exit__(None, None, None)),
                ("recover", run.coordinator.recover),
                ("close", run.coordinator.close),
            ):
                try:
                    use()
                except f8.Fp8DistError as error:
                    os.write(writer, f"{place}: {error}\n".encode())
            run.drop()  # as an exception does that leaves its `with`
            os.write(writer, b"dropped")
        finally:
            os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + 5.0
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with os.fdopen(reader) as told:
        return told.read()


def made_in_another_order(run: Run) -> None:
    both = {name: run.another(name) for name in ("yx" if run.odd else "xy")}
    with both["x"].step(), both["y"].step():
        record(both["x"].slot("a.input"), 2.0)
        record(both["y"].slot("a.input"), 7.0)
    assert {name: c.scales()["a.input"] for name, c in both.items()} == {"x": 224.0, "y": 64.0}
    two_steps(run)


def two_raise(run: Run) -> None:
    if run.rank == 1:
        with run.coordinator.step(1):
            raise KeyError("rank 1 is out of luck")
    with run.coordinator.step(1):
        if run.odd:
            raise Boom("rank 2 is out of luck")


def absent_from_recover(run: Run) -> None:
    with contextlib.suppress(Boom, f8.PeerAborted):
        run.step(1, at="end", do=boom)
    run.strike()
    if not run.odd:
        run.coordinator._timeout = 0.8
        run.coordinator.recover()


# -- processes that die or stop -------------------------------------------------------------------------------


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(where: str) -> Callable[[Run], None]:
    return at(where, die)


def killed_waiting(run: Run) -> None:
    if run.odd:
        threading.Timer(0.3, die).start()
    if run.rank == 3:
        time.sleep(0.6)
    run.step(1)


def killed_reducing(run: Run) -> None:
    if run.odd:
        start = run.coordinator._transport.start_max

        def start_and_die(words: torch.Tensor) -> None:
            start(words)
            die()

        run.coordinator._transport.start_max = start_and_die
    if run.rank == 3:
        time.sleep(0.3)  # the reduction cannot be complete
    run.step(1)


def killed_committing(run: Run) -> None:
    with mock.patch.object(run.coordinator._table, "commit", die) if run.odd else contextlib.nullcontext():
        run.step(1)
    run.strike()
    run.step(2)


def killed_afterwards(run: Run) -> None:
    run.step(1)
    if run.odd:
        die()
    run.strike()
    run.step(2)


def exits(run: Run) -> None:
    run.step(1)
    if run.odd:
        os._exit(0)
    run.strike()
    run.step(2)


def stopped(run: Run) -> None:
    if run.odd:
        os.kill(os.getpid(), signal.SIGSTOP)
    run.step(1)


def without_a_store(run: Run) -> None:
    """The coordinator's store is served by a process of its own, which dies after the first step."""
    pid, port = fork_a_store() if run.rank == 0 else (0, 0)
    told = [port]
    dist.broadcast_object_list(told)
    store = dist.TCPStore(LOOPBACK, told[0], is_master=False, timeout=timedelta(seconds=10))
    run.drop()
    run.build(run.fault.recipe, store=store)
    run.step(1)
    run.place.together()
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    run.place.together()
    run.step(2)
    run.strike()
    run.coordinator.recover()


def fork_a_store() -> tuple[int, int]:
    """A process that serves a store until it is killed; its number and the store's port."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = serve(None, timedelta(seconds=10))
            os.write(writer, str(store.port).encode())
            time.sleep(30)
        finally:
            os._exit(0)
    port = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    return pid, port
