"""What modules may know of the coordinator: may I record, and 'I recorded something'."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

import torch

from .errors import MissingScope

T = TypeVar("T")


class Phase(Enum):
    """Whether amaxes are recorded right now."""

    CLOSED = "closed"  # no scope: current scales are used, nothing is recorded
    PAUSED = "paused"  # an adapter shut the gate (evaluation, a schedule's hidden metadata pass)
    RECORDING = "recording"  # a scope is open, or another trigger commits, and the gate is open


class ScaleTape:
    """The scales that one checkpointed region used, in order, for its recompute.

    Attributes:
        written: the first forward is over.
        outer: the tape of the region around it, while it runs.
    """

    def __init__(self) -> None:
        self.written = False
        self.outer: ScaleTape | None = None
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next = 0

    def play(self, scale: torch.Tensor, warm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale to use: the given one the first time, which is kept, and the kept one the second time."""
        if not self.written:
            if self.outer is not None:
                scale, warm = self.outer.play(scale, warm)
            self._scales.append((scale.clone(), warm.clone()))
            return scale, warm
        kept = self._scales[self._next]
        self._next += 1
        return kept

    @property
    def replaying(self) -> bool:
        """Whether this region, or one around it, runs for the second time."""
        return self.written or (self.outer is not None and self.outer.replaying)

    def rewind(self) -> None:
        """Start over; a recompute may have stopped early."""
        self._next = 0


class ScopeState:
    """The request handle that slots share with their coordinator.

    It belongs to the coordinator and not to a thread: a backward can run on a pool thread where
    thread-locals of the caller are invisible. It knows no process group.

    Attributes:
        serial: counts opened scopes; keys everything that is valid for one scope only.
        requested: a module's backward recorded something since the last commit.
        recorded: a module recorded something since the last commit.
        weight_cache: quantized weights of the open scope, by slot name. Emptied when it closes.
        reused: weight slots that the scope before this one used more than once.
        reloaded: weight slots whose module has loaded other weights since the last scope opened.
        stateless: the recipe has no state to update, so nothing is recorded and requests are void.
        enabled: modules compute in FP8. Only autocast ever clears it.
        calibrating: modules compute in high precision and record all the same.
        tape: the scales of the checkpointed region that runs, where they move between its two forwards.
        implicit: amaxes are recorded although no scope is open, since something else commits.
        guarded: an update between a forward and its backward is an error, and autograd may say so.
        settle: finishes an update that is still under way; whoever uses a scale outside a scope calls it first.
        on_first_request: called at the first request since a commit.
        on_record: called at every recording, where a trigger has to know of it.
        on_request: called at a request outside a scope; None refuses those.
    """

    def __init__(self, *, stateless: bool = False) -> None:
        self.serial = 0
        self.requested = False
        self.recorded = False
        self.weight_cache: dict[str, Any] = {}
        self.reused: frozenset[str] = frozenset()
        self.reloaded: set[str] = set()
        self._uses: Counter[str] = Counter()
        self.stateless = stateless
        self.enabled = True
        self.calibrating = False
        self.tape: ScaleTape | None = None
        self.implicit = False
        self.guarded = True
        self.settle: Callable[[], None] | None = None
        self.on_first_request: Callable[[], None] | None = None
        self.on_record: Callable[[], None] | None = None
        self.on_request: Callable[[], None] | None = None
        self._open = False
        self._paused = 0
        self._lock = threading.Lock()

    @property
    def phase(self) -> Phase:
        """The phase that holds now, on every thread."""
        if self._paused:
            return Phase.PAUSED
        return Phase.RECORDING if self._open or self.implicit else Phase.CLOSED

    @property
    def recording(self) -> bool:
        """True where an amax seen now belongs into its slot."""
        return (self._open or self.implicit) and not (self._paused or self.stateless or self.replaying)

    @property
    def replaying(self) -> bool:
        """True in the recompute of a region whose first forward kept its scales."""
        return self.tape is not None and self.tape.replaying

    @property
    def caching(self) -> bool:
        """True where a quantized weight may be kept: inside a scope, whose scales do not move."""
        return self._open and self.recording

    def record(self) -> None:
        """Note that a module is about to record. Whoever records calls it first."""
        if self.on_record is not None and not self._open:
            self.on_record()
        self.recorded = True

    def request(self) -> None:
        """Flag that something was recorded in a backward. Idempotent, legal on any thread.

        Raises:
            MissingScope: no scope is open and nothing else would ever commit the amaxes.
        """
        if self.stateless or self._paused:
            return
        if not self._open:
            if self.on_request is None:
                raise MissingScope(
                    "an FP8 module in training mode ran its backward outside a step scope, so its amaxes would be "
                    "lost and its scales would never move; put forward and backward of one optimizer step into "
                    "`with coordinator.step():` (pipelines: schedules.attach or schedules.wrap_step), or call "
                    "`.eval()` on the module if this is no training"
                )
            self.on_request()
        if not self.requested:
            self.requested = True
            if self.on_first_request is not None:
                self.on_first_request()

    def used(self, name: str) -> None:
        """Count a use of a weight that is not kept for the scope."""
        self._uses[name] += 1

    def open(self) -> None:
        """Enter the outermost scope."""
        self.serial += 1
        self._open = True

    def close(self) -> None:
        """Leave the outermost scope."""
        self._open = False
        again = {name for name, count in self._uses.items() if count > 1}
        self.reused = frozenset(again | (self.reused & self.weight_cache.keys()))
        self._uses.clear()
        self.weight_cache.clear()

    def committed(self) -> None:
        """Start to collect for the next commit."""
        self.requested = self.recorded = False

    def replayable(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function` for a checkpoint: its second run quantizes with the scales of its first, and records nothing.

        In a step scope, and with an update per step, scales do not move in between: then it is `function` itself.
        """
        if self._open or self.guarded:
            return function
        tape, mode = ScaleTape(), (self.enabled, self.calibrating)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> T:
            if tape.written:
                # It records nothing, but its nested backward must not be taken for the outermost one.
                self.record()
            with self._in_mode(mode), self._taping(tape):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _in_mode(self, mode: tuple[bool, bool]) -> Iterator[None]:
        """A recompute runs outside of the autocast that its first forward ran in."""
        before = (self.enabled, self.calibrating)
        self.enabled, self.calibrating = mode
        try:
            yield
        finally:
            self.enabled, self.calibrating = before

    @contextmanager
    def _taping(self, tape: ScaleTape) -> Iterator[None]:
        outer, self.tape = self.tape, tape
        tape.outer = outer
        tape.rewind()
        try:
            yield
        finally:
            self.tape = outer
            tape.outer = None
            tape.written = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Shut the gate: no recording, requests are void. Nests."""
        with self._lock:
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Open the gate inside `paused()`, for the part of a schedule that is real work."""
        with self._lock:
            before, self._paused = self._paused, 0
        try:
            yield
        finally:
            with self._lock:
                self._paused = before
