"""What modules may know of the coordinator: is a scope open, may I record, and 'I recorded something'."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from .errors import MissingScope


class Phase(Enum):
    """Whether amaxes are recorded right now."""

    CLOSED = "closed"  # no scope: current scales are used, nothing is recorded, a request is an error
    PAUSED = "paused"  # an adapter shut the gate (evaluation, a schedule's hidden metadata pass)
    RECORDING = "recording"  # a scope is open and so is the gate


class ScopeState:
    """The request handle that slots share with their coordinator.

    It belongs to the coordinator and not to a thread: a backward can run on a pool thread where
    thread-locals of the caller are invisible. It knows no process group and no autograd engine.

    Attributes:
        serial: counts opened scopes; keys everything that is valid for one scope only.
        requested: a module's backward recorded something in the open scope.
        weight_cache: quantized weights of the open scope, by slot name. Emptied when it closes.
        reloaded: weight slots whose module has loaded other weights since the last scope opened.
        stateless: the recipe has no state to update, so nothing is recorded and requests are void.
    """

    def __init__(self, *, stateless: bool = False) -> None:
        self.serial = 0
        self.requested = False
        self.weight_cache: dict[str, Any] = {}
        self.reloaded: set[str] = set()
        self.stateless = stateless
        self._open = False
        self._paused = 0
        self._lock = threading.Lock()

    @property
    def phase(self) -> Phase:
        """The phase that holds now, on every thread."""
        if self._paused:
            return Phase.PAUSED
        return Phase.RECORDING if self._open else Phase.CLOSED

    @property
    def recording(self) -> bool:
        """True where an amax seen now belongs into its slot."""
        return self._open and not self._paused and not self.stateless

    def request(self) -> None:
        """Flag that something was recorded. Idempotent, legal on any thread, outside a backward too.

        Raises:
            MissingScope: no scope is open, so nothing would ever commit the amaxes.
        """
        if self.stateless or self._paused:
            return
        if not self._open:
            raise MissingScope(
                "an FP8 module in training mode ran its backward outside a step scope, so its amaxes would be "
                "lost and its scales would never move; put forward and backward of one optimizer step into "
                "`with coordinator.step():` (pipelines: schedules.attach or schedules.wrap_step), or call "
                "`.eval()` on the module if this is no training"
            )
        self.requested = True

    def open(self) -> None:
        """Enter the outermost scope."""
        self.serial += 1
        self.requested = False
        self._open = True

    def close(self) -> None:
        """Leave the outermost scope."""
        self._open = False
        self.weight_cache.clear()

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
