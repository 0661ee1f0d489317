"""What has been committed: it is settled first, then saved, loaded, compared and read.

The layer between the protocol of one update and the scopes that start updates.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _state
from ._protocol import UpdateProtocol, named
from ._slot_table import Columns, CommitWatcher
from ._step import Step, origin
from .errors import Fp8DistError, NeedsRecovery, ScopeError
from .recipe import Recipe
from .transport import Transport, Work


@dataclass(frozen=True)
class Stats:
    """Plain numbers of one coordinator on one rank.

    Attributes:
        commits: steps that moved the scales.
        collectives: reductions started, counted by the transport. `freeze()` runs one to seed weights; a
            step runs one, or two if the layout grew in it.
        aborts: steps that moved nothing because some rank gave up or failed.
        generation: commits behind the current scales; differs from `commits` after a load or a rollback.
        nonfinite_amaxes: infinite or NaN amaxes seen.
        last_wait_s: seconds this rank waited for the last collective.
    """

    commits: int
    collectives: int
    aborts: int
    generation: int
    nonfinite_amaxes: int
    last_wait_s: float


@dataclass(frozen=True)
class Readings:
    """What a monitor reads of one rank at once. To take it waits for no GPU."""

    names: list[str]
    """Own slots, forward ones first; the same list until the layout changes."""
    scale: torch.Tensor
    """float32 [n], a copy."""
    warm: torch.Tensor
    """bool [n] on the CPU, a copy; False where casts use no scale of an earlier step."""
    nonfinite: torch.Tensor
    """int64 [n], infinite and NaN amaxes since the layout changed."""
    casts: torch.Tensor | None
    """int64 [n, 3], a copy: values, saturated, flushed to zero since `count_casts()`; None if not counted."""
    generation: int
    commits: int
    aborts: int
    collectives: int


class CommittedState(UpdateProtocol):
    """State of one rank between updates. Arguments as for `UpdateProtocol`."""

    def __init__(
        self,
        recipe: Recipe,
        transport: Transport,
        name: str,
        stall_warning: float | None,
        timeout: float | None,
        flight_dir: Path | None,
    ) -> None:
        super().__init__(recipe, transport, name, stall_warning, timeout, flight_dir)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._open: list[Step] = []
        self._overlapped: tuple[Step, Work] | None = None  # left, and not committed yet
        self._state_loaded = False
        self._waiting_columns: Columns | None = None
        self._closed = False

    @property
    def pending(self) -> bool:
        """Whether a backward has asked for an update that has not run."""
        return self._scope.requested and not self._open

    @property
    def in_scope(self) -> bool:
        """Whether a step scope is open."""
        return bool(self._open)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def settle(self) -> None:
        """Finish the last step if its reduction still overlaps: wait, and commit it on all ranks or on none.

        Everything that uses scales or state does this by itself.

        Raises:
            Fp8DistError: as the exit of `step` does.
        """
        with self._lock:
            overlapped, self._overlapped = self._overlapped, None
            self._scope.settle = None
            if overlapped is not None:
                self._finish_or_break(*overlapped)

    def _finish_or_break(self, step: Step, work: Work | None = None) -> None:
        with self._breaking(step):
            self._finish(step, work)

    @contextmanager
    def _breaking(self, step: Step) -> Iterator[None]:
        """A step that cannot be finished blocks later ones until `recover()`."""
        try:
            yield
        except BaseException as cause:
            step.committed = False
            self._broken = cause
            self._aborts += 1
            self._note_error(cause, step.tag)
            self._scope.committed()
            if not isinstance(cause, Fp8DistError):  # KeyboardInterrupt in the wait, a rule that raised
                self._notes.leave(self._transport.rank, step.tag, named(cause), origin(cause))
            raise

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Named plain tensors, the same on every rank that shares the names. Never commits.

        Inside a scope it is the last committed state, so resuming repeats the step.

        Returns:
            `{"generation": int64 [], "slots": {name: {"history": float32 [L] oldest first, -1 where
            absent; "scale": float32 []; "warm": bool []}}}`.
        """
        with self._lock:
            self.settle()
            if self.pending:
                raise ScopeError(
                    f"coordinator {self.name!r} has recorded amaxes that are not committed yet; call flush() on every "
                    "rank before saving"
                )
            return _state.to_plain(self._generation, _state.current(self._table, self._waiting_columns))

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over a state of `state_dict()`, matched by name; names of other ranks are passed over.

        Declare the slots first (`convert`). Every rank loads, from one checkpoint.

        Args:
            state: what `state_dict` gave.
            strict: every own slot must be there; otherwise those that are not start afresh.

        Raises:
            ValueError: a slot is missing (strict), or a field has another shape or dtype or holds what no run
                writes; nothing is changed.
            ScopeError: a scope is open.
        """
        with self._lock:
            self._check_open_for_use()
            self.settle()
            if self._open:
                raise ScopeError(
                    f"load_state_dict() expects no open scope but one was opened at {self._open[0].place}"
                )
            own = _state.loadable(self._table, strict=strict)
            generation, columns = _state.from_plain(state, own, self.recipe, strict=strict)
            if strict and not own and state["slots"] and len(self._transport.global_ranks) == 1:
                raise ValueError(
                    "load_state_dict() expects declared slots but got none; convert the model first"
                )
            self.drop_recorded()  # by a run that is left now
            self._autocasts = 0
            if self._table.bound:
                self._table.load(columns)
            else:
                self._waiting_columns = columns
            self._generation = generation
            self._state_loaded = True

    @property
    def place(self) -> tuple[int, int]:
        """Own rank in the group, and the number of its ranks."""
        return self._transport.rank, len(self._transport.global_ranks)

    def moment(self) -> str:
        """A text that is equal on all ranks at one point of a run, and never comes again at a later step.

        It tells which files of a checkpoint belong together.

        Raises:
            ScopeError: the ranks have not met yet.
        """
        if not self._table.bound:
            raise ScopeError(
                f"coordinator {self.name!r} expects the ranks to have met before it is saved; call freeze() on every "
                "rank first"
            )
        return f"{self._notes.communicator}-{self._serial}"

    # -- what other people read ------------------------------------------------------------------------------

    def digest(self) -> int:
        """One int, equal on all ranks that hold equal state of equal slots."""
        text = repr(sorted(self.class_digests().items()))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def class_digests(self) -> dict[str, int]:
        """Digest of scales and histories by the set of ranks that share them, e.g. `{"ranks 0-1": 123}`.

        Labels that two ranks have in common must have equal digests on both.
        """
        self.settle()
        if not self._table.bound:
            return {}
        return {self._table.layout.label(c): value for c, value in self._table.full_digests().items()}

    @property
    def stats(self) -> Stats:
        """Plain numbers; a snapshot."""
        return Stats(
            commits=self._commits,
            collectives=self._transport.collectives,
            aborts=self._aborts,
            generation=self._generation,
            nonfinite_amaxes=self._table.nonfinite,
            last_wait_s=self._last_wait,
        )

    @property
    def payload_words(self) -> int:
        """int32 words (4 bytes each) that one step's collective sends: header and amax row."""
        return self._payload.numel()

    def scales(self) -> dict[str, float]:
        """Current scale of every own slot."""
        self.settle()
        if not self._table.bound:
            return {}
        columns = self._table.export()
        return dict(zip(columns.names, columns.scale.tolist(), strict=True))

    def count_casts(self, on: bool = True) -> None:
        """Count what each cast saturates and flushes to zero, from zero.

        It costs two passes per tensor; on a GPU none, but for tensors that are no matrices and for experts.
        """
        self._table.count_casts(on)

    def cast_counts(self) -> dict[str, tuple[int, int, int]]:
        """Per slot: values cast, saturated, flushed to zero, since `count_casts()`."""
        return {
            name: (int(c[0]), int(c[1]), int(c[2]))
            for name, slot in self._table.slots.items()
            if (c := slot.casts) is not None
        }

    def readings(self) -> Readings:
        """Scales and counts of all own slots, after the last step is settled; see there for errors."""
        with self._lock:
            self.settle()
            names, scale, warm = self._table.scales_now()
            return Readings(
                names=names,
                scale=scale,
                warm=warm,
                nonfinite=self._table.nonfinite_by_slot(),
                casts=self._table.casts(),
                generation=self._generation,
                commits=self._commits,
                aborts=self._aborts,
                collectives=self._transport.collectives,
            )

    def watch_commits(self, watcher: CommitWatcher | None) -> None:
        """Let `watcher` see the reduced amaxes of every commit from now on, or nobody.

        Raises:
            ValueError: somebody watches already.
        """
        with self._lock:
            if watcher is not None and self._table.on_commit is not None:
                raise ValueError(
                    f"coordinator {self.name!r} expects one monitor at a time but has one already; close() it first"
                )
            self._table.on_commit = watcher

    @property
    def last_wait_s(self) -> float:
        """Seconds this rank waited for the last collective. Unlike `stats`, to ask it never waits for a GPU."""
        return self._last_wait

    @property
    def stages(self) -> list[int]:
        """Pipeline stages of this rank that are named so far."""
        return self._declared.stages

    # -- checks ----------------------------------------------------------------------------------------------

    @property
    def _is_forked_copy(self) -> bool:
        return os.getpid() != self._pid and len(self._transport.global_ranks) > 1

    def _check_process(self) -> None:
        if self._is_forked_copy:
            raise ScopeError(
                f"coordinator {self.name!r} expects to be used by process {self._pid}, which created it, but got a "
                f"call in process {os.getpid()}, forked from it; leave it alone there (data workers need none)"
            )

    def _check_open_for_use(self) -> None:
        self._check_process()
        if self._closed:
            raise ScopeError(f"coordinator {self.name!r} is closed; create a new one")

    def _check_usable(self) -> None:
        self._check_open_for_use()
        self.settle()
        if self._broken is not None:
            raise NeedsRecovery(
                f"coordinator {self.name!r} expects recover() on every rank before the next scope, because an earlier "
                f"step failed with {type(self._broken).__name__}: {str(self._broken)[:300]}"
            ) from self._broken
