"""Where the coordinators on one mpi4py communicator meet: a private duplicate of it, and a store.

mpi4py is imported only where the user has handed over one of its objects, since importing it starts MPI.

Every MPI call that waits for peers is a nonblocking one whose request is tested again and again: a blocking call
keeps no deadline, is deaf to Ctrl-C, and in some builds burns the core that the late rank needs.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore

from .._layout import format_ranks
from ..bootstrap import _own_address, serve_store
from ..errors import CollectiveTimeout, TransportError
from ._control import Control

SPINS = 300  # looks before the first nap; most reductions end within them
LONGEST_NAP = 0.001
LONGEST_STORE_NAP = 0.02
STORE_SECONDS = 60.0  # to reach the store of rank 0
OFFER_BYTES = 1024

T = TypeVar("T")
_yield: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0.0))


def is_from_mpi4py(group: Any) -> bool:
    """Whether this is an object of mpi4py. Does not import it."""
    return any(kind.__module__.partition(".")[0] == "mpi4py" for kind in type(group).__mro__)


def ranks_of(comm: Any) -> tuple[int, ...]:
    """The numbers in `MPI.COMM_WORLD` of a communicator's ranks. Local.

    Raises:
        ValueError: it is no intracommunicator, this rank is no member, or some rank is not of this world.
    """
    mpi = mpi4py_mpi()
    if not isinstance(comm, mpi.Comm):
        raise ValueError(
            f"group expects an intracommunicator but got mpi4py's {type(comm).__name__}; pass a communicator, e.g. "
            "MPI.COMM_WORLD or one made by its Split or Create"
        )
    if comm == mpi.COMM_NULL:
        raise ValueError(
            "group expects a communicator that this rank belongs to but got MPI.COMM_NULL (Split's answer to the color "
            "MPI.UNDEFINED, and Create's to ranks that are no members); create the coordinator on members only"
        )
    if comm.is_inter:
        raise ValueError(
            "group expects an intracommunicator but got an intercommunicator; make one of its two groups: comm.Merge()"
        )
    members, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    ranks = tuple(members.Translate_ranks(None, world))
    members.Free()
    world.Free()
    if mpi.UNDEFINED in ranks:
        raise ValueError(
            "group expects ranks of MPI.COMM_WORLD but got a communicator with processes of another world (spawned or "
            "connected later); start all ranks with one mpirun"
        )
    return ranks


def mpi4py_mpi() -> Any:
    """The module `mpi4py.MPI`. Only for who holds one of its objects."""
    from mpi4py import MPI

    return MPI


@functools.cache
def _keyval() -> int:
    """The key of our attribute; duplicates do not inherit it."""
    return int(mpi4py_mpi().Comm.Create_keyval())


def deadline_after(timeout: float | None) -> float:
    """The moment at which a wait of `timeout` seconds ends."""
    return float("inf") if timeout is None else time.monotonic() + timeout


def until(
    ask: Callable[[], T], deadline: float, *, spins: int = SPINS, longest_nap: float = LONGEST_NAP
) -> T | None:
    """Ask again and again, until the answer is true or the time is up; None then."""
    nap = 0.0
    while not (answer := ask()):
        if time.monotonic() >= deadline:
            return None
        if spins > 0:
            spins -= 1
            _yield()
        else:
            time.sleep(nap)
            nap = min(nap + 0.00002, longest_nap)
    return answer


def pin(thing: object) -> None:
    """Keep an object although nobody refers to it, since a pending MPI call will write into it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def unpin(thing: object) -> None:
    """End what `pin` began; the call has ended."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


class Home:
    """What the coordinators on one communicator share: a private duplicate of it, and a store to meet in.

    Two nonblocking collectives are started on the user's communicator, and never more. When the time of a
    rank is up they stay pending, and its next attempt goes on waiting for these two: new ones would be
    paired with the first ones of late ranks.

    Attributes:
        base: the private duplicate.
        store: where the ranks meet.
        retired: idle duplicates of coordinators that have left them, by number.
    """

    def __init__(self, comm: Any, given: Store | None) -> None:
        self.mpi = mpi4py_mpi()
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.store: Store | None = None
        self.retired: dict[int, Any] = {}
        self._board: Control | None = None
        self._served: Store | None = None
        self._failure = ""
        self._lock = threading.Lock()
        self._numbers = self._started = 0  # numbers handed out, duplicates made
        self._made: dict[int, Any] = {}
        self._under_way: tuple[Any, Any] | None = None
        self._offer = bytearray(OFFER_BYTES)
        self._worst = np.zeros(1, dtype=np.int32)
        self._verdict: Any = None
        self._met = False
        if self.rank == 0:
            offer = json.dumps({"token": secrets.token_hex(8)} | self._make_offer(given)).encode()
            self._offer[: len(offer)] = offer
            self._accept(given)
        pin(self)
        self._told = comm.Ibcast([self._offer, self.mpi.BYTE], root=0)
        self.base, self._duplicated = comm.Idup()

    def meet(self, given: Store | None, timeout: float | None) -> None:
        """Wait until all ranks have come and reached the store.

        Raises:
            CollectiveTimeout: some rank has not come.
            TransportError: on every rank, if any has not reached the store.
        """
        if self._met:
            return
        deadline = deadline_after(timeout)
        if not until(self._told.Test, deadline):
            raise self._late(timeout)
        if self._board is None and not self._failure:
            self._accept(given)
        if not until(self._duplicated.Test, deadline):
            raise self._late(timeout)
        if self._verdict is None:
            self.base.Set_errhandler(self.mpi.ERRORS_RETURN)
            self._worst[0] = self.size - self.rank if self._failure else 0
            self._verdict = self.base.Iallreduce(self.mpi.IN_PLACE, self._worst, op=self.mpi.MAX)
        if not until(self._verdict.Test, deadline):
            raise self._late(timeout)
        self._met, self._board = True, None
        unpin(self)
        if self._worst[0]:
            self.base.Free()
            failed = self.size - int(self._worst[0])
            why = f": {self._failure}" if self._failure else ", see its error"
            raise TransportError(
                f"expected all {self.size} ranks of the communicator at one store but rank {failed} has not reached it "
                f"(this is rank {self.rank}){why}; see that rank 0 may open a TCP port that the other hosts reach"
            )

    def _make_offer(self, given: Store | None) -> dict[str, Any]:
        """What rank 0 tells the others about the store."""
        if given is not None:
            return {"kind": "given"}
        if self._torch_store() is not None:
            return {"kind": "torch"}
        if self.size == 1:
            self._served = HashStore()
            return {"kind": "served"}
        # Its port is open on all addresses, so every rank takes the one that leads to it from its host.
        self._served, address = serve_store("127.0.0.1", self.size, timedelta(seconds=STORE_SECONDS))
        if self._served is None:
            return {"kind": "none", "why": str(address)[:300]}
        host = self.mpi.Get_processor_name()
        return {"kind": "served", "host": host, "address": _own_address(), "port": address[1]}

    def _torch_store(self) -> Store | None:
        """The store of torch's default group, if that has all ranks of this world and so has the communicator."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if not dist.get_world_size() == self.size == self.mpi.COMM_WORLD.size:
            return None
        return dist.distributed_c10d._get_default_store()

    def _accept(self, given: Store | None) -> None:
        """Reach the store that rank 0 has named, and say so there. A failure is kept, for all must hear of it."""
        offer = json.loads(self._offer.rstrip(b"\0"))
        try:
            self.store = self._reach(offer, given)
            board = Control(self.store, "fp8dist").under(f"mpi/{offer['token']}")
            board.set(f"here/{self.rank}", "here")
            self._board = board
        except (OSError, RuntimeError) as error:
            self._failure = str(error) or type(error).__name__

    def _reach(self, offer: dict[str, Any], given: Store | None) -> Store:
        if self._served is not None:
            return self._served
        if offer["kind"] == "served":
            here = offer["host"] == self.mpi.Get_processor_name()
            return TCPStore(
                "127.0.0.1" if here else offer["address"],
                offer["port"],
                self.size,
                is_master=False,
                timeout=timedelta(seconds=STORE_SECONDS),
                wait_for_workers=False,
            )
        if offer["kind"] == "none":
            raise TransportError(f"rank 0 could not open one ({offer['why']})")
        store = given if offer["kind"] == "given" else self._torch_store()
        if store is None:
            what = "store=" if offer["kind"] == "given" else "torch.distributed initialised"
            raise TransportError(f"rank 0 has {what} and rank {self.rank} has not; do the same on every rank")
        return store

    def _late(self, timeout: float | None) -> CollectiveTimeout:
        missing: tuple[int, ...] = ()
        who = "rank 0, or a rank that passes its word on, did not come"
        if self._board is not None:
            try:
                missing = tuple(r for r in range(self.size) if not self._board.check([f"here/{r}"]))
                who = f"{format_ranks(missing)} did not come" if missing else "a process is stopped or dead"
            except TransportError as error:
                who = f"who is missing cannot be said ({error})"
        return CollectiveTimeout(
            f"the first coordinator on an MPI communicator expects all its {self.size} ranks within {timeout:g} s but "
            f"{who} (this is rank {self.rank}); create it on every rank of the communicator, and look at the log of "
            "the missing one. A new attempt goes on waiting",
            missing=missing,
        )

    # -- duplicates ----------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """The number of the next duplicate. Group rank 0 hands them out."""
        with self._lock:
            self._numbers += 1
            return self._numbers - 1

    def duplicate(self, number: int, deadline: float) -> Any:
        """Duplicate `number`, or None if the time is up before all ranks have come.

        All before it that this rank has not made are made, too: one after the other, since Open MPI mixes up
        those that several threads have under way.
        """
        if until(lambda: self._advance(number), deadline) is None:
            return None
        with self._lock:
            return self._made.pop(number)

    def _advance(self, number: int) -> bool:
        """One look at the duplicate under way; whether `number` is there."""
        with self._lock:
            if self._under_way is None and self._started <= number:
                self._under_way = self.base.Idup()
                pin(self._under_way)
            if self._under_way is not None and self._under_way[1].Test():
                unpin(self._under_way)
                comm = self._made[self._started] = self._under_way[0]
                comm.Set_errhandler(self.mpi.ERRORS_RETURN)
                self._under_way = None
                self._started += 1
            return self._started > number

    def retire(self, number: int, comm: Any) -> None:
        """Keep an idle duplicate until all ranks can free it."""
        with self._lock:
            self.retired[number] = comm

    def free(self, numbers: list[int]) -> None:
        """Free duplicates that are retired on all ranks."""
        with self._lock:
            for number in numbers:
                if number in self.retired:
                    self.retired.pop(number).Free()


def home_of(comm: Any, given: Store | None, timeout: float | None) -> Home:
    home: Home | None = comm.Get_attr(_keyval())
    try:
        if home is None:
            home = Home(comm, given)
            comm.Set_attr(_keyval(), home)
        home.meet(given, timeout)
    except mpi4py_mpi().Exception as error:
        raise TransportError(
            f"MPI could not duplicate the communicator: {error.Get_error_string()}"
        ) from error
    except TransportError:
        comm.Delete_attr(_keyval())  # all ranks raise it, so all start anew at the next attempt
        raise
    return home
