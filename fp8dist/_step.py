"""The handle that `coordinator.step()` gives, and where it was opened."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from ._header import Part, Tag
from .errors import ScopeError

if TYPE_CHECKING:
    from .coordinator import ReductionGroupCoordinator

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


class Step:
    """One optimizer step of one coordinator, a context manager.

    Attributes:
        tag: the caller's step tag, compared across ranks.
        committed: None while open, or while its reduction overlaps what comes next; afterwards whether the step
            moved the scales.
        overlap: its exit starts the reduction and does not wait for it.
        part: the slots that its commit takes.
        place: `file:line` that opened it.
    """

    def __init__(
        self,
        coordinator: ReductionGroupCoordinator,
        tag: Tag,
        part: Part = Part.BOTH,
        *,
        overlap: bool = False,
    ) -> None:
        self.tag = tag
        self.part = part
        self.overlap = overlap
        self.committed: bool | None = None
        self.place = ""
        self.abandoned = False
        self._left = False
        self._coordinator = coordinator

    def abort(self) -> None:
        """Give the step up on all ranks: nothing is committed, nobody raises, no `recover()` is needed.

        One rank's call is enough. Legal until the scope closes.

        Raises:
            ScopeError: the scope is closed already.
        """
        if self.committed is not None or self._left:
            raise ScopeError(
                "step.abort() expects an open step but its scope has closed; call it inside the `with`"
            )
        self.abandoned = True

    def __enter__(self) -> Step:
        if self.place:
            raise ScopeError(
                f"this scope was opened at {self.place} already; call coordinator.step() for every step"
            )
        self.place = caller()
        return self._coordinator._enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        self._coordinator._leave(self, error)


def phase(name: str) -> AbstractContextManager[object]:
    """A named range in a profile. Opening one costs as much as several small operations, so only under one."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def caller() -> str:
    """`file:line` of the nearest frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def origin(error: BaseException) -> str:
    """`file:line` where an exception was raised, or an empty string."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
