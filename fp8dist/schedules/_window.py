"""A step scope whose two ends lie in different calls of a framework, so that no `with` can hold it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from .._header import Tag
from .._step import Step
from ..coordinator import ReductionGroupCoordinator

P = ParamSpec("P")
R = TypeVar("R")


class Window:
    """At most one open scope of a coordinator. Every method does nothing where there is nothing to do.

    Frameworks call back more often than once per optimizer step (each microbatch, each epoch), so `open` keeps a
    scope that is open already, and the ways to leave it bear to be called twice.
    """

    def __init__(self, coordinator: ReductionGroupCoordinator) -> None:
        self._coordinator = coordinator
        self._step: Step | None = None

    def open(self, tag: Tag = None) -> None:
        """Open the scope of an optimizer step, unless it is open; see `coordinator.step` for errors."""
        if self._step is None:
            step = self._coordinator.step(tag)
            step.__enter__()
            self._step = step

    def close(self) -> None:
        """Commit, before the optimizer moves the weights; see `coordinator.step` for errors."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def cancel(self) -> None:
        """Leave a scope whose gradients no optimizer will use: it commits nothing on any rank, and nobody raises."""
        if self._step is not None:
            self._step.abort()
            self.close()

    def fail(self, error: BaseException) -> None:
        """Leave the scope because of `error`, so that the other ranks are told and do not wait."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An exception that comes by leaves the scope. The end of the block does not."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def guarded(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn`, after which the scope is left: by its exception, or by a commit where nothing else committed."""

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.failing():
                result = fn(*args, **kwargs)
                self.close()
            return result

        return run
