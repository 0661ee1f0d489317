"""Transport over an mpi4py communicator: one `Iallreduce` per step on a duplicate of the coordinator's own.

    user's communicator ── Ibcast, Idup: once ──▶ home: a private base and a store, kept as its attribute
                                                    │
                                                    └─ Idup, numbered ──▶ a duplicate per connected coordinator

Nonblocking collectives pair by their order on a communicator, so no rank may ever start one more or one less.
The base's duplicates are therefore numbered: group rank 0 gives a number to each communicator's name, and a rank
starts all duplicates up to the number that it needs. Those that it missed are made up for by that, and two
coordinators that connect at the same time on two threads cannot swap theirs.

`Comm.Free` is a collective and a pending reduction cannot be cancelled. So `disconnect` frees nothing: an idle
duplicate is freed at a later connect, where all ranks say that theirs is idle, too. One with pending work is
leaked with its buffers, at most one per failed step.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from typing import Any

import torch
from torch.distributed import Store

from .._header import INT32_MIN
from .._layout import format_ranks
from ..bootstrap import expected_world_size
from ..errors import CollectiveTimeout, TransportError
from ._base import Work
from ._control import Control
from ._mpi_home import (
    LONGEST_STORE_NAP,
    Home,
    deadline_after,
    home_of,
    mpi4py_mpi,
    pin,
    ranks_of,
    unpin,
    until,
)

CATCH_UP_SECONDS = 2.0
# Set by Open MPI's launcher. Without it `Revoke` exists as well, but does nothing for the peers.
_ULFM = "OMPI_MCA_mpi_ft_enable"


class _Duplicate:
    """A coordinator's own communicator, and what was started on it."""

    def __init__(self, home: Home, number: int, comm: Any) -> None:
        self.number = number
        self.comm = comm
        self.count = 0
        self.sizes: deque[int] = deque(maxlen=2)
        self.broken = False
        self._mpi = home.mpi
        self._works: list[_MpiWork] = []
        self._tolerates_failures = hasattr(comm, "Is_revoked") and os.environ.get(_ULFM) == "1"

    def start_max(self, words: torch.Tensor) -> _MpiWork:
        buffer = words
        if words.device.type != "cpu":
            buffer = torch.empty(words.shape, dtype=words.dtype, pin_memory=True).copy_(words)
        self.count += 1
        self.sizes.append(words.numel())
        try:
            request = self.comm.Iallreduce(self._mpi.IN_PLACE, buffer.numpy(), op=self._mpi.MAX)
        except self._mpi.Exception as error:
            raise self.breaks(error) from error
        self._works = [work for work in self._works if not work.over]
        self._works.append(_MpiWork(self, self._mpi, request, buffer, words))
        return self._works[-1]

    def idle(self) -> bool:
        """Whether all that was started has come to its end. Lets MPI go on with what has not."""
        return not self.broken and all(work.test() for work in self._works)

    def breaks(self, error: Any) -> TransportError:
        """The error that tells of an MPI error. Peers that wait on this communicator are freed, where MPI can."""
        self.broken = True
        failed = self._failed_ranks()
        self.revoke()
        by = f"; MPI names {format_ranks(failed)} as dead" if failed else ""
        return TransportError(f"the reduction broke: {error.Get_error_string()}{by}")

    def revoke(self) -> None:
        """End all that is pending on this communicator, on all ranks. Local; does nothing without ULFM."""
        if not self._tolerates_failures:
            return
        try:
            if not self.comm.Is_revoked():
                self.comm.Revoke()
        except (self._mpi.Exception, NotImplementedError):
            pass

    def _failed_ranks(self) -> list[int]:
        if not self._tolerates_failures:
            return []
        try:
            failed, members = self.comm.Get_failed(), self.comm.Get_group()
            return sorted(failed.Translate_ranks(None, members)) if failed.size else []
        except (self._mpi.Exception, NotImplementedError):
            return []


class _MpiWork:
    """A started reduction; `words` get the MAX where they are not what MPI works on."""

    def __init__(
        self, duplicate: _Duplicate, mpi: Any, request: Any, buffer: torch.Tensor, words: torch.Tensor
    ) -> None:
        self.over = False
        self._duplicate, self._mpi, self._request = duplicate, mpi, request
        self._buffer, self._words = buffer, words
        self._error: TransportError | None = None
        # MPI may write into the buffer long after everybody has let go of this object, and the request of an
        # in-place reduction does not hold it.
        pin(self)

    def test(self) -> bool:
        """Whether it is complete. Raises TransportError if it broke."""
        if self._error is not None:
            raise self._error
        if self.over:
            return True
        try:
            self.over = bool(self._request.Test())
        except self._mpi.Exception as error:
            self._error = self._duplicate.breaks(error)
            raise self._error from error
        if self.over:
            unpin(self)
        return self.over

    def wait(self, seconds: float) -> bool:
        """See `Work.wait`."""
        if not until(self.test, time.monotonic() + seconds):
            return False
        if self._words is not self._buffer:
            self._words.copy_(self._buffer)
        return True


class MpiTransport:
    """One member of an mpi4py intracommunicator. The first one on a communicator is a collective over its ranks.

    CUDA words are always staged through a pinned CPU copy: nothing in the MPI standard tells whether a build
    can read GPU memory, a wrong guess crashes, and the words of a step are few.

    MPI must be initialised for calls from the threads that open scopes (`MPI.THREAD_MULTIPLE`, which is
    mpi4py's default, allows all).

    Args:
        comm: the user's communicator. It must live as long as the transport, and is used only while the first
            transport on it is made.
        store: where ranks meet. None: the store of torch's default group if that and `comm` have all ranks of
            `MPI.COMM_WORLD`, else one that rank 0 serves. All transports on one communicator share that one.
        timeout: seconds for all ranks to come, None waits for ever.

    Attributes:
        rank: own rank in `comm`.
        global_ranks: ranks in `MPI.COMM_WORLD` of the members. torch.distributed, where it is initialised as
            well, may number the same processes otherwise.

    Raises:
        ValueError: unfit communicator, or MPI does not see the ranks that the launcher started.
        CollectiveTimeout: a rank did not come.
        TransportError: on every rank, if any could not reach the store.
    """

    def __init__(self, comm: Any, store: Store | None, timeout: float | None) -> None:
        self.global_ranks = ranks_of(comm)
        promised = expected_world_size()
        if mpi4py_mpi().COMM_WORLD.size == 1 and promised is not None and promised > 1:
            raise ValueError(
                f"expected an MPI world of {promised} ranks, as the launcher says, but got a world of 1 on every rank; "
                "start them with the mpirun that lies beside this python, since mpi4py loads that MPI, or pass a "
                "torch.distributed ProcessGroup"
            )
        self._home = home_of(comm, store, timeout)
        found = store if store is not None else self._home.store
        assert found is not None
        self.rank: int = comm.rank
        self.control = Control(found, "fp8dist")
        self.collectives = 0
        self._duplicate: _Duplicate | None = None
        self._device = torch.device("cpu")

    @property
    def started(self) -> list[int]:
        """See `Transport.started`."""
        return [self._duplicate.count, *self._duplicate.sizes] if self._duplicate is not None else [0]

    def connect(self, communicator: str, device: torch.device, timeout: float | None) -> None:
        """See `Transport.connect`.

        Raises:
            CollectiveTimeout: a rank did not come.
            TransportError: MPI could not make the communicator.
        """
        self.disconnect()
        self._device = device
        deadline = deadline_after(timeout)
        number, unused = self._agree(communicator, deadline, timeout)
        try:
            self._home.free(unused)
            comm = self._home.duplicate(number, deadline)
            if comm is None:
                raise CollectiveTimeout(
                    f"rank {self.rank}: making the update communicator expects all {len(self.global_ranks)} ranks "
                    f"within {timeout:g} s; all have begun but some did not end, so a process is stopped or dead: look "
                    "at its log, then call recover() on every rank"
                )
        except self._home.mpi.Exception as error:
            raise TransportError(
                f"rank {self.rank} could not connect to the {len(self.global_ranks)} members of the update "
                f"communicator: {error.Get_error_string()}"
            ) from error
        self._duplicate = _Duplicate(self._home, number, comm)

    def _agree(self, communicator: str, deadline: float, timeout: float | None) -> tuple[int, list[int]]:
        """The number of the duplicate to take, and of those to free. No rank starts before all have come."""
        board = self.control.under(f"mpi/{communicator}")
        board.set(f"here/{self.rank}", json.dumps(sorted(self._home.retired)))
        keys = [f"here/{rank}" for rank in range(len(self.global_ranks))]

        def go() -> bytes | None:
            if self.rank == 0 and (values := board.get_many(keys)) is not None:
                unused = set.intersection(*(set(json.loads(value)) for value in values))
                board.set("go", json.dumps([self._home.new_number(), sorted(unused)]))
            return board.get("go")

        answer = until(go, deadline, spins=0, longest_nap=LONGEST_STORE_NAP)
        if answer is None:
            missing = tuple(rank for rank, key in enumerate(keys) if not board.check([key]))
            raise CollectiveTimeout(
                f"rank {self.rank}: making the update communicator expects all {len(keys)} ranks within {timeout:g} s "
                f"but {format_ranks(missing) if missing else 'rank 0'} did not come; look at its log",
                missing=missing or (0,),
            )
        number, unused_everywhere = json.loads(answer)
        return number, unused_everywhere

    def start_max(self, words: torch.Tensor) -> Work:
        """See `Transport.start_max`."""
        assert words.dtype == torch.int32 and words.is_contiguous() and self._duplicate is not None
        self.collectives += 1
        return self._duplicate.start_max(words)

    def catch_up(self, started: list[int]) -> None:
        """See `Transport.catch_up`. The values are neutral."""
        duplicate = self._duplicate
        if duplicate is None or duplicate.broken:
            return
        behind = started[0] - duplicate.count
        try:
            for size in started[len(started) - behind :] if behind > 0 else ():
                self.start_max(torch.full((size,), INT32_MIN, dtype=torch.int32, device=self._device))
            until(duplicate.idle, time.monotonic() + CATCH_UP_SECONDS)
        except TransportError:
            return  # it is given up anyway

    def disconnect(self) -> None:
        """See `Transport.disconnect`."""
        duplicate, self._duplicate = self._duplicate, None
        if duplicate is None:
            return
        try:
            idle = duplicate.idle()
        except TransportError:
            idle = False
        if idle:
            self._home.retire(duplicate.number, duplicate.comm)
        else:
            duplicate.revoke()
