"""What starts a commit where no step scope is open: the end of a backward, or the next autocast.

Scopes need nothing of this. See `ReductionGroupCoordinator(trigger=...)`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch.autograd import Variable

from ._scope import ScopeState
from .errors import MissingScope

if TYPE_CHECKING:
    from .coordinator import ReductionGroupCoordinator

logger = logging.getLogger("fp8dist")

Trigger = Literal["step", "backward_end", "next_autocast"]
UpdateEvery = Literal["step", "microbatch"]


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread: in a node, a hook, a recompute or a callback."""
    return torch._C._current_graph_task_id() != -1


def tracing() -> bool:
    """Whether a collective must not be issued because work is only being captured."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Final:
    """An engine callback that commits when the graph task that holds it ends."""

    def __init__(self, commit: Callable[[], None]) -> None:
        self._commit = commit
        self._passes = 2

    def __call__(self) -> None:
        # Once around, so that it runs after the final callbacks of DDP and FSDP.
        self._passes -= 1
        if self._passes:
            Variable._execution_engine.queue_callback(self)
        else:
            self._commit()


class BackwardEnd:
    """Commits once when the outermost running backward ends.

    The engine offers no way to ask for the parent of a task, but a recompute's forward runs in its parent's
    task. So whoever records first, in a recompute or in a node, queues the callback on the outermost
    task there is. Whether one is queued is told by a weak reference to it: the task alone holds it, so it dies
    with the task, also where a node raised and the callback was lost.
    """

    def __init__(self, commit: Callable[[], None]) -> None:
        self._commit = commit
        self._token: weakref.ref[_Final] | None = None

    def arm(self) -> bool:
        """Queue the commit on the running backward, once. False if none is running."""
        if not in_backward():
            return False
        if self._token is None or self._token() is None:
            final = _Final(self._run)
            self._token = weakref.ref(final)
            Variable._execution_engine.queue_callback(final)
        return True

    @property
    def lost(self) -> bool:
        """Whether a backward that was to commit has ended without doing so, because something raised."""
        return self._token is not None and self._token() is None

    def forget(self) -> None:
        """Take note of a lost one."""
        self._token = None

    def _run(self) -> None:
        self._token = None
        self._commit()


class OutsideScope:
    """Decides what a recording and a request do where no step scope is open."""

    def __init__(self, coordinator: ReductionGroupCoordinator, scope: ScopeState) -> None:
        self._coordinator = coordinator
        self._scope = scope
        self._end = BackwardEnd(self._commit)
        self._warned = False
        self._deferred = 0
        scope.implicit = coordinator.trigger != "step"
        scope.guarded = coordinator.update_every == "step"
        scope.on_record, scope.on_request = self._on_record, self._on_request

    def _on_record(self) -> None:
        self.drop_lost()
        if self._coordinator.trigger == "backward_end" and not self._deferred:
            self._end.arm()  # a recompute, whose forward runs in the very task that is to commit

    @property
    def lost(self) -> bool:
        """Whether the last backward that was to commit has raised."""
        return self._end.lost

    def drop_lost(self) -> None:
        """Forget what a backward recorded that raised, because it belongs to no step."""
        if self._end.lost:
            self._end.forget()
            self._coordinator.drop_recorded()

    def _on_request(self) -> None:
        if self._deferred or self._coordinator.trigger == "next_autocast":
            return
        if self._coordinator.trigger == "step":
            self._fall_back()
        self.arm()

    def arm(self) -> None:
        """Commit when the running backward ends.

        Raises:
            MissingScope: none is running.
        """
        if not self._end.arm():
            raise MissingScope(
                f"coordinator {self._coordinator.name!r}: an update was asked for outside a step scope and outside a "
                "backward (a deferred weight gradient?), so nothing would ever commit it; use "
                "`with coordinator.step():`"
            )

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Requests only set the flag inside, because somebody commits afterwards."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def _fall_back(self) -> None:
        """Take the end of the backward in place of the scope that is missing, and say so once."""
        self._check_uniform()
        if not self._warned:
            self._warned = True
            logger.warning(
                "coordinator %r: an FP8 module ran its backward outside a step scope; the update then runs at the end "
                "of each backward, which every rank must run equally often. Put forward and backward of one optimizer "
                "step into `with coordinator.step():`",
                self._coordinator.name,
            )
        self._scope.implicit = True

    def _check_uniform(self) -> None:
        """Ranks with other slots surely do not run the same backwards."""
        if not self._coordinator.layout_is_uniform:
            raise MissingScope(
                f"coordinator {self._coordinator.name!r}: an FP8 module in training mode ran its backward outside a "
                "step scope, and the ranks hold different slots (a pipeline?), so they do not run the same backwards. "
                "Put forward and backward of one optimizer step into `with coordinator.step():` (pipelines: "
                "schedules.attach or schedules.wrap_step)"
            )

    def _commit(self) -> None:
        coordinator = self._coordinator
        if coordinator.trigger == "step":
            coordinator.freeze()
            self._check_uniform()
        coordinator.commit_now(coordinator.backward_part, place="the end of a backward")
