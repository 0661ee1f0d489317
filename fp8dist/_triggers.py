"""What starts a commit where no step scope is open: the end of a backward, or the next autocast.

Scopes need nothing of this. See `ReductionGroupCoordinator(trigger=...)`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable


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
