"""Transport over `torch.distributed`: gloo for CPU words, nccl for CUDA words.

The communicator is built directly on a store prefix whose name all members have agreed on. Neither
`new_group` nor its counters are involved, so creating coordinators in another order on another rank
cannot pair the wrong communicators.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from .._header import INT32_MIN
from ..errors import TransportError
from ._base import Work
from ._control import Control

CATCH_UP_SECONDS = 2.0
# Seconds. A reduction takes less than the first if all ranks are there, and after a nap the GPU has had nothing to do.
NO_NAPS = 0.0005
LONGEST_NAP = 0.0002
_FOREVER = 10.0 * 365 * 86400


class _GlooWork:
    """gloo's `wait(timeout)` gives up without touching the collective, so waiting in slices is safe."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # It broke, or it completed just after the time was up: asked again, it tells at once.
            try:
                self._work.wait()
            except RuntimeError as error:
                raise TransportError(f"the reduction broke: {_plain(error)}") from error
        return True


def _plain(error: Exception) -> str:
    """What happened, without the transport's advice that follows it."""
    return str(error).partition(". This is typically")[0]


class _StagedWork:
    """A gloo reduction of a CPU copy of CUDA words."""

    def __init__(self, work: _GlooWork, staged: torch.Tensor, words: torch.Tensor) -> None:
        self._work, self._staged, self._words = work, staged, words

    def wait(self, seconds: float) -> bool:
        if not self._work.wait(seconds):
            return False
        self._words.copy_(self._staged)
        return True


class _NcclWork:
    """nccl's `wait()` only orders streams, so completion is polled on the host."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, seconds: float) -> bool:
        start = time.monotonic()
        while not self._work.is_completed():
            waited = time.monotonic() - start
            if waited > seconds:
                return False
            time.sleep(0 if waited < NO_NAPS else LONGEST_NAP)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportError(f"the reduction broke: {error}") from error
        return True


class TorchTransport:
    """One member of a `torch.distributed` group.

    Args:
        global_ranks: default-group ranks of the members, by group rank.
        rank: own group rank.
        store: where ranks meet; the default group's store, or the user's.
        nccl: reduce CUDA words with nccl; otherwise they are staged through gloo.
    """

    def __init__(self, global_ranks: Sequence[int], rank: int, store: Store, *, nccl: bool) -> None:
        self.global_ranks = tuple(global_ranks)
        self.rank = rank
        self.control = Control(store, "fp8dist")
        self.collectives = 0
        self._store = store
        self._nccl = nccl
        self._group: Any = None
        self._on_device = False
        self._device = torch.device("cpu")
        self._count = 0
        self._sizes: deque[int] = deque(maxlen=2)
        self._last: Any = None
        self._max = dist.AllreduceOptions()
        self._max.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)

    def connect(self, communicator: str, device: torch.device, timeout: float | None) -> None:
        """See `Transport.connect`.

        Raises:
            TransportError: a member did not connect in time.
        """
        self.disconnect()
        seconds = _FOREVER if timeout is None else timeout
        store = PrefixStore(f"fp8dist/communicator/{communicator}", self._store)
        size = len(self.global_ranks)
        self._device = device
        self._on_device = device.type == "cuda" and self._nccl
        self._count, self._last = 0, None
        self._sizes.clear()
        try:
            if self._on_device:
                # Its watchdog ends the process at this timeout; ours must come first.
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=10 * seconds)
                self._group = dist.ProcessGroupNCCL(store, self.rank, size, options)
            else:
                # Longer than our deadline, since reaching it poisons the communicator.
                self._group = dist.ProcessGroupGloo(
                    store, self.rank, size, timedelta(seconds=2 * seconds + 5)
                )
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} could not connect to the {size} members of the update communicator: {error}"
            ) from error

        # A gloo group's destructor waits for its pending work, so a rank that fails while its peers are late
        # could not even exit (seen: it hung for the whole timeout). Only an idle group is given back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    @property
    def started(self) -> list[int]:
        """See `Transport.started`."""
        return [self._count, *self._sizes]

    def catch_up(self, started: list[int]) -> None:
        """See `Transport.catch_up`. The values are neutral."""
        behind = started[0] - self._count
        for size in started[len(started) - behind :] if behind > 0 else ():
            self.start_max(torch.full((size,), INT32_MIN, dtype=torch.int32, device=self._device))
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while self._last is not None and not self._last.is_completed() and time.monotonic() < deadline:
            time.sleep(0.002)

    def start_max(self, words: torch.Tensor) -> Work:
        """See `Transport.start_max`."""
        assert words.dtype == torch.int32 and words.is_contiguous() and self._group is not None
        self.collectives += 1
        self._count += 1
        self._sizes.append(words.numel())
        try:
            sent = words if self._on_device or words.device.type == "cpu" else words.cpu()
            self._last = self._group.allreduce([sent], self._max)
        except RuntimeError as error:
            raise TransportError(f"the reduction could not start: {error}") from error
        if self._on_device:
            return _NcclWork(self._last)
        work = _GlooWork(self._last)
        return work if sent is words else _StagedWork(work, sent, words)

    def disconnect(self) -> None:
        """See `Transport.disconnect`."""
        group, self._group = self._group, None
        if group is None:
            return
        idle = self._last is None or self._last.is_completed()
        if self._on_device:
            # Abort frees a reduction that peers never entered; nccl warns of groups that are just dropped.
            group.shutdown() if idle else group.abort()
            idle = True
        if idle:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
