"""Control plane: small named values that ranks leave for each other. No call here waits for a peer.

All requests run on a thread of their own, one per coordinator, in the order in which they were made. A store whose
host is stopped never answers, and a rank that asked it itself could neither keep its deadline nor be interrupted.
A healthy one can be silent for seconds, too: torch's server asks the resolver for the name of each new client,
and answers nobody meanwhile.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from ..errors import TransportError

T = TypeVar("T")

logger = logging.getLogger("fp8dist")

PATIENCE = 20.0  # seconds until a store that does not answer counts as broken; a resolver may take 5 or 10
STOP_SECONDS = 1.0  # how long the end of the process waits for the thread


def _broken(error: Exception, where: str) -> TransportError:
    return TransportError(
        f"the store that the ranks talk through{where} is gone ({type(error).__name__}: {error}); the process that "
        "hosts it (usually rank 0 or the launcher's agent) has probably died: look at its log first"
    )


class Request(Generic[T]):
    """Something to ask the store, and its answer once there is one."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._answered = threading.Event()
        self._answer: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Ask. Never raises."""
        try:
            self._answer = self._ask()
        except BaseException as error:
            self._error = error
        self._answered.set()

    def wait(self, seconds: float) -> bool:
        """Wait at most that long; True once it was answered."""
        return self._answered.wait(seconds)

    def result(self) -> T:
        """The answer; raises what asking raised."""
        if self._error is not None:
            raise self._error
        return cast(T, self._answer)


class Line:
    """The thread that asks. It starts with the first request, and ends with the coordinator or the process.

    Between requests it calls a visitor about every `interval` seconds, if it was given one.

    Attributes:
        thread: None before the first request.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Request[Any] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self._stop: weakref.finalize[..., Any] | None = None
        self._pid = os.getpid()
        self._visits: tuple[float, Callable[[], bool]] | None = None

    def send(self, request: Request[Any]) -> None:
        """Run `request` on the thread, behind those that were sent before."""
        self._start()
        self._requests.put(request)

    def visit(self, interval: float, visitor: Callable[[], bool]) -> None:
        """Call `visitor` about every `interval` seconds, between requests, until it returns False."""
        self._visits = interval, visitor
        self.send(Request(lambda: None))  # wakes a thread that waits without a limit

    def stop(self) -> None:
        """End the thread; waits a little for a request that is being answered."""
        if self._stop is not None:
            self._stop()

    def _start(self) -> None:
        if self.thread is not None and self._pid == os.getpid():
            return
        self._pid = os.getpid()
        me = weakref.ref(self)  # a line that is dropped must end its thread
        self.thread = threading.Thread(
            target=_serve, args=(self._requests, me), name="fp8dist-control", daemon=True
        )
        self.thread.start()
        # At the end of the process, too: a thread that comes back from C++ when Python is half gone aborts it.
        self._stop = weakref.finalize(self, _end, self._requests, self.thread)

    def next_visit(self) -> float | None:
        """Seconds until the visitor is due, or None."""
        return None if self._visits is None else self._visits[0]

    def call_visitor(self) -> None:
        """Call the visitor, and forget one that is done."""
        if self._visits is None:
            return
        try:
            goes_on = self._visits[1]()
        except Exception:  # whoever waits for an answer must not lose this thread to it
            logger.exception("the control plane's visitor failed and is not called again")
            goes_on = False
        if not goes_on:
            self._visits = None


def _serve(requests: queue.SimpleQueue[Request[Any] | None], line: weakref.ref[Line]) -> None:
    due: float | None = None
    while True:
        owner = line()
        interval = owner.next_visit() if owner is not None else None
        del owner
        if interval is None:
            due = None
        elif due is None:
            due = time.monotonic() + interval
        try:
            request = requests.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except queue.Empty:
            due = None
            owner = line()
            if owner is None:
                return
            owner.call_visitor()
            del owner
            continue
        if request is None:
            return
        request.run()


def _end(requests: queue.SimpleQueue[Request[Any] | None], thread: threading.Thread) -> None:
    requests.put(None)
    if thread is not threading.current_thread():
        thread.join(STOP_SECONDS)


class Control:
    """`set`, `get` and `check` under a prefix of a torch `Store`.

    The store's own `get` blocks on a missing key and holds the client's lock meanwhile, so only keys that
    exist are fetched. A clone of the store keeps this traffic apart from other users of the client.

    Attributes:
        prefix: of all keys.
        line: the thread that asks, shared by all parts of one coordinator.
        patience: seconds to wait for an answer.
    """

    def __init__(self, store: Store, prefix: str, patience: float = PATIENCE) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._pid = os.getpid()
        base = _base(store)
        self._remote = isinstance(base, TCPStore)
        self._where = f" ({base.host}:{base.port})" if isinstance(base, TCPStore) else ""
        self.prefix = prefix
        self.patience = patience
        self.line = Line()

    def under(self, prefix: str) -> Control:
        """The same store below a longer prefix."""
        child = Control.__new__(Control)
        child.__dict__.update(self.__dict__)
        child.prefix = f"{self.prefix}/{prefix}"
        return child

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _ask(self, request: Callable[[Store], T]) -> T:
        asked = self.later(lambda: request(self._store))
        try:
            if asked.wait(self.patience):
                return asked.result()
        except DistError as error:
            raise _broken(error, self._where) from error
        raise TransportError(
            f"the store that the ranks talk through{self._where} has not answered for {self.patience:g} s; the process "
            "that hosts it (usually rank 0 or the launcher's agent) is stopped or cannot be reached"
        )

    def later(self, request: Callable[[], T]) -> Request[T]:
        """Start `request`, which may use this store, behind all earlier ones; it is not waited for."""
        self._check_process()
        asked = Request(request)
        if self._remote and threading.current_thread() is not self.line.thread:
            self.line.send(asked)
        else:  # no other process can hold it up; or it is part of a request
            asked.run()
        return asked

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                f"process {os.getpid()} was forked from {self._pid} and shares its connection to the store, which only "
                f"the latter may use; create a coordinator in the process that trains"
            )

    def set(self, key: str, value: bytes | str) -> None:
        """Leave a value; overwrites. Nothing is awaited: if the store is gone, the next question says so."""
        full = self._key(key)
        self.later(
            lambda: self._store.set(full, cast(str, value))
        )  # takes bytes, too; its stub does not say so

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        full = [self._key(key) for key in keys]
        return self._ask(lambda store: bool(store.check(full)))

    def get(self, key: str) -> bytes | None:
        """The value, or None if there is none."""
        values = self.get_many([key])
        return None if values is None else values[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes] | None:
        """All values, or None if any is missing."""
        full = [self._key(key) for key in keys]
        return self._ask(lambda store: _fetch(store, full))

    def get_each(self, keys: Sequence[str]) -> list[bytes | None]:
        """Each value, or None in its place."""
        full = [self._key(key) for key in keys]

        def fetch(store: Store) -> list[bytes | None]:
            values = _fetch(store, full)
            if values is not None:
                return list(values)
            return [value[0] if (value := _fetch(store, [key])) else None for key in full]

        return self._ask(fetch)

    def count(self, key: str, increment: int = 0) -> int:
        """Add to a counter and return it."""
        return self._ask(lambda store: int(store.add(self._key(key), increment)))

    def delete(self, key: str) -> None:
        """Remove a value; quiet where the store cannot or is gone."""
        try:
            self._ask(lambda store: store.delete_key(self._key(key)))
        except (TransportError, RuntimeError, NotImplementedError):
            return


def _fetch(store: Store, keys: list[str]) -> list[bytes] | None:
    if not store.check(keys):
        return None
    if len(keys) == 1:
        return [bytes(store.get(keys[0]))]
    return [bytes(value) for value in store.multi_get(keys)]


def _base(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
