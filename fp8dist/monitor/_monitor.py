"""The monitor of one coordinator: which steps are sampled, and how a sample becomes records.

step N-1  arm: keep the scales that step N will cast with, count its casts
step N    take: one copy of all columns to the host, asynchronous on a GPU
step N+1  deliver: headroom, findings, records to the sinks (on the CPU already in step N)
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from .._committed import Readings
from .._header import Part
from .._layout import is_backward
from ..coordinator import ReductionGroupCoordinator
from ..errors import ScopeError
from ._advice import Adviser
from ._record import VERSION, Record, Sink, check_positive_int, plain, recipe_as_plain
from ._sampling import NEVER, Columns, Landing, Sightings, Transfer

logger = logging.getLogger("fp8dist")

LOGGED = 3  # findings of one sample that are logged; sinks get all
Number = float | int | torch.Tensor


@dataclass
class _Sample:
    """One that is under way, with what was known when it was taken."""

    step: int
    time: float
    moved: bool
    """A commit has happened in the sampled step."""
    readings: Readings
    wait: float | None
    numbers: dict[str, float | None]
    """`None` for those that come with the transfer."""
    on_device: list[str]
    transfer: Transfer


class Monitor:
    """Samples a coordinator's slots every few steps and hands plain records to sinks.

    It runs no collective and changes no state: each rank writes what it knows, and `read_run` or `fp8dist report` puts
    the ranks together. Steps that are not sampled never wait for a GPU.

    Args:
        coordinator: whose slots are watched; one monitor each.
        sinks: get the records, in this order. One that raises is switched off, with one warning.
        every: a sample is taken at each such call of `step`. A sampled step takes about a quarter longer on a CPU.
        count_casts: count in the sampled step what casts saturate and flush to zero; a CPU then reads every cast tensor
            twice more. It takes `coordinator.count_casts()` over. False leaves both out: under `torch.compile`, where
            counting is a second variant of each module to compile, or in a captured graph, which counts nothing.

    Raises:
        ValueError: unfit arguments, or the coordinator has a monitor already.
    """

    def __init__(
        self,
        coordinator: ReductionGroupCoordinator,
        sinks: Sequence[Sink] = (),
        every: int = 50,
        *,
        count_casts: bool = True,
    ) -> None:
        if not isinstance(coordinator, ReductionGroupCoordinator):
            raise ValueError(
                f"coordinator expects a ReductionGroupCoordinator but got {type(coordinator).__name__}"
            )
        check_positive_int("every", every)
        for sink in sinks:
            if not callable(getattr(sink, "write", None)) or not callable(getattr(sink, "close", None)):
                raise ValueError(f"sinks expects objects with write(record) and close() but got {sink!r}")
        self.every = every
        self._coordinator = coordinator
        self._count_casts = count_casts
        self._sinks = list(sinks)
        self._rank, self._world = coordinator.place
        self._calls = 0
        self._seen = Sightings()
        self._landing = Landing()
        self._wait_before = (0.0, 0)
        self._armed: Readings | None = None
        self._pending: _Sample | None = None
        self._names: Sequence[str] | None = None  # of the last start record
        self._adviser = Adviser([], coordinator.recipe)
        self._fp8_max = np.empty(0)
        self._closed = False
        coordinator.watch_commits(self._see)
        if every == 1:
            self._arm()

    def _see(self, names: Sequence[str], amaxes: torch.Tensor, part: Part) -> None:
        try:
            self._seen.see(names, amaxes, part, self._coordinator.last_wait_s)
        except Exception as error:  # out of memory, say; a commit must not fail on one rank alone
            logger.warning("monitor, rank %d: a commit was not seen: %s", self._rank, error)

    # -- what the training loop calls --------------------------------------------------------------------

    def step(self, *, step: int, loss: Number | None = None, **numbers: Number) -> None:
        """Say that an optimizer step is over; call it once after each, outside the step scope.

        Args:
            step: its number.
            loss: of the step, a number or a tensor of one element. A tensor is read in sampled steps only.
            **numbers: more of that kind, such as `lr=` or `tokens_per_s=`.

        Raises:
            ValueError: a value is neither a number nor a tensor of one element, or the monitor is closed.
            ScopeError: a step scope is open.
            Fp8DistError: in sampled steps after a scope with `overlap=True`, what that step's exit would raise.
        """
        if self._closed:
            raise ValueError("monitor.step() expects an open monitor but it was closed; create a new one")
        given = numbers if loss is None else {**numbers, "loss": loss}
        _check_numbers(step, given)
        if self._coordinator.in_scope:
            raise ScopeError(
                "monitor.step() expects no open scope but coordinator.step() is still open; call it after the `with` "
                "block and the optimizer step"
            )
        self._calls += 1
        self._deliver(wait=False)
        if self._armed is not None:
            self._take(step, given)
        if (self._calls + 1) % self.every == 0:
            self._arm()

    def close(self) -> None:
        """Write what is under way, stop counting and watching, close the sinks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._coordinator.watch_commits(None)
        if self._armed is not None and self._count_casts:
            self._coordinator.count_casts(False)
        self._deliver(wait=True)
        for sink in self._sinks:
            self._try(sink, None)
        self._sinks = []

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What went wrong must not be hidden by a device that gives nothing any more.
        with nullcontext() if error is None else suppress(Exception):
            self.close()

    # -- from a step to records --------------------------------------------------------------------------

    def _arm(self) -> None:
        """The next step is sampled."""
        self._armed = self._coordinator.readings()
        if self._count_casts:
            self._coordinator.count_casts()

    def _take(self, step: int, given: dict[str, Number]) -> None:
        before = self._armed
        assert before is not None
        after = self._coordinator.readings()
        self._armed = None
        if self._count_casts:
            self._coordinator.count_casts(False)
        if after.names is not before.names:  # the ranks have agreed on other slots meanwhile
            self._arm()
            return
        self._deliver(wait=True)  # the sample before this one, a whole period old
        on_device = {key: x for key, x in given.items() if isinstance(x, torch.Tensor) and x.is_cuda}
        wait, commits = self._seen.wait - self._wait_before[0], self._seen.commits - self._wait_before[1]
        self._wait_before = (self._seen.wait, self._seen.commits)
        self._pending = _Sample(
            step=int(step),
            time=time.time(),
            moved=after.generation != before.generation,
            readings=after,
            wait=wait / commits if commits else None,
            numbers={key: None if key in on_device else _number(x) for key, x in given.items()},
            on_device=list(on_device),
            transfer=Transfer.start(before, after, self._seen, list(on_device.values()), self._landing),
        )
        self._deliver(wait=False)

    def _deliver(self, *, wait: bool) -> None:
        """Write the sample that is under way, if it has arrived."""
        sample = self._pending
        if sample is None:
            return
        if wait:
            sample.transfer.wait()
        elif not sample.transfer.ready():
            return
        self._pending = None
        names = sample.readings.names
        if names is not self._names:
            self._begin(names)
        columns, scalars = sample.transfer.result()
        for key, value in zip(sample.on_device, scalars, strict=True):
            sample.numbers[key] = _number(value)
        headroom = columns.headroom(self._fp8_max)
        if not sample.moved:
            headroom.fill(np.nan)
        self._send(self._record(sample, columns, headroom))
        warnings = list(self._warnings(sample, columns, headroom))
        for warning in warnings:
            self._send(warning)
        for warning in warnings[:LOGGED]:
            logger.warning("rank %d, step %d: %s", self._rank, sample.step, warning["message"])
        if len(warnings) > LOGGED:
            logger.warning("rank %d, step %d: and %d more", self._rank, sample.step, len(warnings) - LOGGED)

    def _begin(self, names: Sequence[str]) -> None:
        """The first sample, or one of other slots than before."""
        self._names = names
        recipe = self._coordinator.recipe
        self._adviser = Adviser(names, recipe)
        self._fp8_max = np.array([recipe.fp8_format.fp8_max(is_backward(name)) for name in names])
        self._send(
            {
                "kind": "start",
                "version": VERSION,
                "rank": self._rank,
                "world": self._world,
                "host": socket.gethostname(),
                "name": self._coordinator.name,
                "recipe": recipe_as_plain(recipe),
                "time": time.time(),
                "slots": list(names),
                "stages": self._coordinator.stages,
            }
        )

    def _record(self, sample: _Sample, columns: Columns, headroom: np.ndarray) -> Record:
        now = sample.readings
        numbers = dict(sample.numbers)
        return {
            "kind": "sample",
            "step": sample.step,
            "time": sample.time,
            "rank": self._rank,
            "generation": now.generation,
            "commits": now.commits,
            "aborts": now.aborts,
            "collectives": now.collectives,
            "wait_s": sample.wait,
            "loss": numbers.pop("loss", None),
            "numbers": numbers,
            "scale": plain(columns.scale),
            "amax": plain(np.where(columns.amax >= 0, columns.amax, np.float32(np.nan))),
            "headroom": plain(np.round(headroom, 4) + 0.0),
            "saturated": None if columns.saturated is None else plain(columns.saturated),
            "flushed": None if columns.flushed is None else plain(columns.flushed),
            "stale": np.where(columns.stale < 0, columns.stale - NEVER, columns.stale).tolist(),
            "nonfinite": columns.nonfinite.tolist(),
        }

    def _warnings(self, sample: _Sample, columns: Columns, headroom: np.ndarray) -> Iterator[Record]:
        for what, slot, message in self._adviser.findings(columns, headroom):
            yield {
                "kind": "warning",
                "step": sample.step,
                "time": sample.time,
                "rank": self._rank,
                "what": what,
                "slot": slot,
                "message": message,
            }

    def _send(self, record: Record) -> None:
        self._sinks = [sink for sink in self._sinks if self._try(sink, record)]

    def _try(self, sink: Sink, record: Record | None) -> bool:
        """Hand a record to a sink, or close it (None); whether it has done it."""
        try:
            if record is None:
                sink.close()
            else:
                sink.write(record)
        except Exception as error:  # whatever a sink does, training goes on
            logger.warning(
                "monitor, rank %d: %s failed and is switched off, training goes on: %s: %s",
                self._rank, type(sink).__name__, type(error).__name__, error,
            )  # fmt: skip
            if record is not None:
                with suppress(Exception):
                    sink.close()
            return False
        return True


def _check_numbers(step: object, given: dict[str, Number]) -> None:
    if not isinstance(step, int | np.integer):
        raise ValueError(f"step expects an int but got {type(step).__name__} {step!r}")
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            if value.numel() == 1 and not value.is_complex():
                continue
            got = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        elif isinstance(value, float | int | np.number):
            continue
        else:
            got = f"{type(value).__name__} {value!r}"
        raise ValueError(f"{name} expects a number or a tensor of one element but got {got}")


def _number(value: Number) -> float | None:
    number = float(value.detach() if isinstance(value, torch.Tensor) else value)
    return number if math.isfinite(number) else None
