"""Ranks as forks of one process, for tests in which ranks fail, hang or die.

torch is imported once, in the parent; a rank costs a fork and not an import. `fn` may be a closure
over anything. Never use it in a process that has initialised MPI or CUDA: neither survives a fork.

    parent:  fork all ranks -> serve or relay the store's port -> collect outcomes -> release -> reap
    rank:    join the world -> fn(rank, world) -> report -> stay until released -> os._exit
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Literal

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
# How long a rank that is about to be killed may take to write its stacks.
STACK_SECONDS = 1.0


class RankDied(RuntimeError):
    """A rank's process ended before it reported: by a signal or by `os._exit`."""


class RankHung(RuntimeError):
    """A rank was still running at the time limit; the message holds the stacks of its threads."""


class RankFailed(RuntimeError):
    """Stands for an exception that could not travel; the message is its type and text."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: its number.
        value: what `fn` returned; None if it did not return.
        error: what it raised, or `RankDied` or `RankHung`; None if it returned.
        traceback: the error's traceback, as text.
        signal: the signal that ended the process, if one did and it was not ours.
        exit_code: what it passed to `os._exit` instead of reporting.
        seconds: from entering `fn` to its end; to the time limit for a rank that hung or died.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    signal: int | None = None
    exit_code: int | None = None
    seconds: float = 0.0


class Outcomes(list[Outcome]):
    """The outcomes of all ranks, by rank."""

    def raise_first(self) -> None:
        """Raise the error of the rank that failed first, with its rank and traceback as a note."""
        failed = [outcome for outcome in self if outcome.error is not None]
        if not failed:
            return
        first = min(failed, key=lambda outcome: (isinstance(outcome.error, RankHung), outcome.seconds))
        assert first.error is not None
        others = [outcome.rank for outcome in failed if outcome is not first]
        first.error.add_note(f"on rank {first.rank} of {len(self)}; failed later: {others or 'none'}")
        if first.traceback:
            first.error.add_note(first.traceback)
        raise first.error


def values(outcomes: Outcomes) -> list[Any]:
    """Return what `fn` returned, by rank, or raise the first error."""
    outcomes.raise_first()
    return [outcome.value for outcome in outcomes]


def run_ranks(
    fn: Callable[[int, int], Any],
    world: int = 4,
    timeout: float = 20.0,
    init: Literal["gloo"] | None = "gloo",
    store_rank: int | None = None,
    group_timeout: float | None = None,
    stay: bool = True,
    expendable: Collection[int] = (),
) -> Outcomes:
    """Run `fn(rank, world)` on forked ranks and return how each ended. Raises nothing that a rank raised.

    Args:
        fn: runs on every rank with one torch thread; its return value must pickle.
        world: number of ranks.
        timeout: seconds until every rank that still runs is killed and reported as `RankHung`.
        init: "gloo" makes the ranks a torch.distributed world first; None leaves that to `fn`.
        store_rank: the rank that serves the store; None leaves it to the parent, which outlives all ranks.
        group_timeout: seconds, of the store and of the default group's collectives; None is `timeout`.
        stay: a rank that has finished keeps its process, its sockets and its store until all have.
        expendable: ranks that nobody waits for when all others have finished, since they stop themselves.

    Returns:
        One outcome per rank.
    """
    assert init in ("gloo", None), init
    assert store_rank is None or 0 <= store_rank < world, (store_rank, world)
    limits = (timeout, timeout if group_timeout is None else group_timeout)
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[_Rank] = []
    try:
        for rank in range(world):
            ranks.append(_fork(rank, world, fn, limits, init, store_rank, stay, ranks))
        store = _connect(ranks, store_rank, limits[1]) if init else None
        outcomes = _collect(ranks, timeout, expendable)
        del store
        return outcomes
    finally:
        for child in ranks:
            child.end()


class _Rank:
    """The parent's side of one forked rank."""

    def __init__(self, rank: int, pid: int, pipe: Connection, stacks: IO[bytes]) -> None:
        self.rank = rank
        self.pid = pid
        self.pipe = pipe
        self.stacks = stacks
        self.status: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (minus the signal's number) if the process has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def end(self) -> None:
        """Kill the process if it still runs, reap it, and close what belongs to it. Idempotent."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pipe.close()
        self.stacks.close()

    def dump_stacks(self) -> str:
        """Ask a process that hangs, also in C code, for the stacks of its threads."""
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        size = 0
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, size = size, os.fstat(self.stacks.fileno()).st_size
            if size and size == before:
                break
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace") or "(no stacks: the process does not run)"


def _fork(
    rank: int,
    world: int,
    fn: Callable[[int, int], Any],
    limits: tuple[float, float],
    init: str | None,
    store_rank: int | None,
    stay: bool,
    elders: Sequence[_Rank],
) -> _Rank:
    parent_end, child_end = Pipe()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rank
    pid = os.fork()
    if pid:
        child_end.close()
        return _Rank(rank, pid, parent_end, stacks)
    # From here on nothing may escape: the child must not return into pytest or run anyone's exit handlers.
    code = 70
    try:
        parent_end.close()
        for elder in elders:  # or their pipes would stay open when the parent closes them
            elder.pipe.close()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        # Outlives the parent's own limit: it only matters if the parent was killed.
        faulthandler.dump_traceback_later(limits[0] + 10, exit=True, file=stacks)
        torch.set_num_threads(1)
        _run_rank(child_end, rank, world, fn, limits[1], init, store_rank)
        if stay:
            with contextlib.suppress(EOFError, OSError):
                child_end.recv()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_rank(
    pipe: Connection,
    rank: int,
    world: int,
    fn: Callable[[int, int], Any],
    group_timeout: float,
    init: str | None,
    store_rank: int | None,
) -> None:
    """Join the world, run `fn` and send (value, error, traceback, seconds)."""
    value: Any = None
    error: BaseException | None = None
    text = ""
    start = time.monotonic()
    try:
        if init:
            _join(pipe, rank, world, group_timeout, store_rank)
        start = time.monotonic()
        value = fn(rank, world)
    except BaseException as raised:
        error, text = raised, traceback.format_exc()
    seconds = time.monotonic() - start
    try:
        message = pickle.dumps(("outcome", value, _pack(error), text, seconds))
    except Exception as raised:
        failure = RankFailed(f"the value that fn returned does not pickle: {raised}")
        message = pickle.dumps(("outcome", None, _pack(failure), traceback.format_exc(), seconds))
    pipe.send_bytes(message)


def _join(pipe: Connection, rank: int, world: int, group_timeout: float, store_rank: int | None) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve
    limit = timedelta(seconds=group_timeout)
    if rank == store_rank:
        store = serve(world, limit)
        pipe.send_bytes(pickle.dumps(("port", store.port)))
    else:
        store = dist.TCPStore(LOOPBACK, pipe.recv(), world, timeout=limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def serve(world: int | None, limit: timedelta) -> dist.TCPStore:
    """A store on an IPv4 socket, whose clients are in every hosts file.

    Of its own socket torch's server sees IPv6 addresses, and it asks the resolver for their names: a lost answer
    would stop a test for five seconds.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, world, is_master=True, timeout=limit, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _connect(ranks: Sequence[_Rank], store_rank: int | None, group_timeout: float) -> dist.TCPStore | None:
    """Tell the ranks the store's port. The parent makes its own store now, so that no rank inherits it."""
    store = None
    if store_rank is None:
        limit = timedelta(seconds=group_timeout)
        store = serve(None, limit)
        port = store.port
    else:
        server = ranks[store_rank].pipe
        if not server.poll(group_timeout):
            return None
        kind, port = pickle.loads(server.recv_bytes())[:2]
        assert kind == "port", f"rank {store_rank} could not serve the store: {port}"
    for child in ranks:
        if child.rank != store_rank:
            with contextlib.suppress(OSError):  # it died; its outcome will say so
                child.pipe.send(port)
    return store


def _collect(ranks: Sequence[_Rank], timeout: float, expendable: Collection[int]) -> Outcomes:
    """Wait for every rank's report, death or the time limit; then release those that stayed."""
    start = time.monotonic()
    awaited = {child.rank for child in ranks} - set(expendable)
    done: dict[int, Outcome] = {}
    with selectors.DefaultSelector() as selector:
        for child in ranks:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        while not awaited <= done.keys() and (left := start + timeout - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                child = key.data
                selector.unregister(child.pipe)
                done[child.rank] = _receive(child, time.monotonic() - start)
    for child in ranks:
        if child.rank not in done:
            text = f"rank {child.rank} of {len(ranks)} was still running after {timeout:g} s; its stacks:\n"
            done[child.rank] = Outcome(
                child.rank, error=RankHung(text + child.dump_stacks()), seconds=time.monotonic() - start
            )
            child.end()
    for child in ranks:
        with contextlib.suppress(OSError):
            child.pipe.send("leave")
    _wait_for_exits(ranks)
    return Outcomes(done[rank] for rank in range(len(ranks)))


def _wait_for_exits(ranks: Sequence[_Rank]) -> None:
    """Give released ranks a moment to leave by themselves; `end` kills the rest."""
    deadline = time.monotonic() + 2.0
    while any(child.poll() is None for child in ranks) and time.monotonic() < deadline:
        time.sleep(0.002)


def _receive(child: _Rank, seconds: float) -> Outcome:
    """Read one rank's report, or find out how its process ended."""
    try:
        message = child.pipe.recv_bytes()
    except (EOFError, OSError):
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        child.status = code
        if code < 0:
            error = RankDied(f"rank {child.rank} was ended by {signal.Signals(-code).name}")
            return Outcome(child.rank, error=error, signal=-code, seconds=seconds)
        error = RankDied(f"rank {child.rank} left with exit code {code} and no report")
        return Outcome(child.rank, error=error, exit_code=code, seconds=seconds)
    _, value, packed, text, seconds = pickle.loads(message)
    return Outcome(child.rank, value=value, error=_unpack(packed), traceback=text, seconds=seconds)


def _pack(error: BaseException | None) -> bytes | str | None:
    """Make an exception travel. Plain pickling calls `cls(*args)`, which keyword-only arguments break."""
    if error is None:
        return None
    try:
        packed = pickle.dumps((type(error), error.args, error.__dict__))
        _unpack(packed)
    except Exception:  # a class local to a function, or an attribute that does not pickle
        return f"{type(error).__name__}: {error}"
    return packed


def _unpack(packed: bytes | str | None) -> BaseException | None:
    if packed is None:
        return None
    if isinstance(packed, str):
        return RankFailed(packed)
    cls, args, attributes = pickle.loads(packed)
    error = cls.__new__(cls, *args)
    error.__dict__.update(attributes)
    return error
