"""One coordinator per process and reduction group: the step scope, and the one collective at its end.

open ─▶ forward/backward of all microbatches (modules record, flag) ─▶ exit
                                                                        │ header + row, one MAX
         any rank failed: PeerAborted ◀── verdict from the header ◀─────┤
         ranks disagree:  RanksDisagree                                 │
         step.abort():    nothing changes                               ▼
                                                   commit: history, scales, generation + 1
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import torch
from torch.distributed import Store

from ._committed import CommittedState
from ._declarations import WeightSource, slots_of
from ._header import Part, Tag, tag_words
from ._scope import ScopeState
from ._slots import Slot
from ._step import Step, phase
from ._triggers import OutsideScope, Trigger, UpdateEvery
from .errors import Fp8DistError, ScopeError, TransportError
from .recipe import Recipe
from .transport import ranks_of, resolve

logger = logging.getLogger("fp8dist")


class ReductionGroupCoordinator(CommittedState):
    """Reduces and updates all scales of this process, once per optimizer step.

    Args:
        recipe: how scales are made; equal on all ranks.
        group: the ranks that take the MAX together. None: all ranks (right for any mix of data, tensor,
            context, pipeline and expert parallelism, since slots meet by name); or a `ProcessGroup`, a
            one-dimensional `DeviceMesh`, or an mpi4py intracommunicator, whose ranks then reduce through MPI, with or
            without `torch.distributed`.
        name: tells coordinators of one process apart; required from the second one on.
        store: where ranks meet; default: the store of the default group. A store of your own must be fresh
            for every launch.
        stall_warning: seconds after which a waiting rank logs who is missing; None never warns. Ranks say where they
            are every half second at the least (two seconds among a thousand); what a shorter one tells may be old.
        timeout: seconds after which it raises `CollectiveTimeout`; None waits for ever. The first step gets
            three times that, since it may compile.
        flight_dir: where the flight recorder (the newest 4096 events of this rank) is written when an error
            leaves a step or one of these methods, one file per rank; read it with `fp8dist blame`. None: only
            `dump_flight()` writes it.
        trigger: what commits outside a step scope (inside one, its exit always does):

            * `step`: nothing should be there; a backward outside a scope is committed at its end, with one
              warning, where all ranks hold the same names, and is `MissingScope` otherwise;
            * `backward_end`: the end of each outermost backward;
            * `next_autocast`: the next top-level `autocast` entry, and `flush()`.

            The last two need equal names and equal backwards on all ranks.
        update_every: `step` commits all slots together. `microbatch` reproduces Transformer Engine's
            trajectories: forward slots at each exit of `autocast`, gradient slots by the trigger.

    Raises:
        ValueError: unfit group, name taken, or `torch.distributed` not initialised under a launcher.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: Any = None,
        *,
        name: str = "main",
        store: Store | None = None,
        stall_warning: float | None = 30.0,
        timeout: float | None = 300.0,
        flight_dir: str | Path | None = None,
        trigger: Trigger = "step",
        update_every: UpdateEvery = "step",
    ) -> None:
        if not isinstance(recipe, Recipe):
            raise ValueError(
                f"recipe expects a DelayedScaling or CurrentScaling but got {type(recipe).__name__} {recipe!r}"
            )
        for what, value, choices in (
            ("trigger", trigger, get_args(Trigger)),
            ("update_every", update_every, get_args(UpdateEvery)),
        ):
            if value not in choices:
                raise ValueError(f"{what} expects one of {', '.join(choices)} but got {value!r}")
        for what, seconds in (("stall_warning", stall_warning), ("timeout", timeout)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{what} expects seconds > 0 or None but got {seconds!r}")
        if not name or "/" in name:
            raise ValueError(f"name expects a non-empty string without '/' but got {name!r}")
        directory = None if flight_dir is None else Path(flight_dir)
        super().__init__(recipe, resolve(group, store, timeout), name, stall_warning, timeout, directory)
        self.trigger = trigger
        self.update_every = update_every
        self._autocasts = 0  # entered since the last commit; all ranks enter the same ones
        self._outside = OutsideScope(self, self._scope)

    # -- declaring slots ---------------------------------------------------------------------------------

    def slot(self, name: str) -> Slot:
        """The slot of that name; made if there is none. For modules that are not ours.

        Args:
            name: global name ending in `.input`, `.weight` or `.grad_output`. Ranks that use the same name
                share one scale.
        """
        with self._lock:
            existing = self._table.slots.get(name)
            return existing if existing is not None else self.declare(name, shape=None)

    def declare(
        self,
        name: str,
        *,
        shape: tuple[int, ...] | None,
        weight: WeightSource | None = None,
        sharded: bool = False,
    ) -> Slot:
        """A new slot. Local; the ranks agree at `freeze()`, or within the next step's collective.

        Args:
            name: global name ending in its role.
            shape: global shape of the tensor where it is known; compared between ranks.
            weight: for a weight's slot, gives the tensor as it is now: the first scale is taken from its
                values. None from it: the tensor is gone.
            sharded: this rank holds a part of the weight although the tensor does not tell.

        Raises:
            ValueError: the name is taken on this rank, or does not end in a role.
        """
        with self._lock:
            self._check_open_for_use()
            if name in self._table.slots:
                raise ValueError(
                    f"slot {name!r} belongs to another module of this process already; two modules cannot share one "
                    "name: give convert(..., prefix=...) or names=..., e.g. one prefix per pipeline stage"
                )
            slot = self._table.declare(name)
            self._declared.add(name, shape, weight, sharded)
            return slot

    def undeclare(self, name: str) -> None:
        """Take back a slot that was declared since the last agreement and is not used.

        Raises:
            ValueError: there is no such slot, or the ranks have agreed on it already.
        """
        with self._lock:
            if name not in self._table.slots or name in self._table.layout.position:
                raise ValueError(f"slot {name!r} expects to be declared and not agreed on yet")
            del self._table.slots[name]
            self._declared.remove(name)

    def label_stage(self, module: torch.nn.Module, stage: int) -> None:
        """Say that the slots held by `module` belong to a pipeline stage; compared at the next agreement.

        Raises:
            ValueError: another stage of this process holds one of them, too.
        """
        with self._lock:
            for slot in slots_of(module):
                if self._table.slots.get(slot.name) is slot:
                    self._declared.label(slot, stage, agreed=self._table.bound)

    # -- agreeing on the layout --------------------------------------------------------------------------

    def freeze(self) -> None:
        """Agree with all ranks on the slots, connect, and give weights their first scales. A collective.

        Optional: the first step does it. Call it when the model is where it trains.

        Raises:
            LayoutMismatch: one name means different things on different ranks.
            RanksDisagree: recipes or groups differ.
            CollectiveTimeout: a rank did not come.
            ValueError: a weight is on the meta device, or weights lie on several devices.
        """
        with self._lock:
            self._check_usable()
            if self._table.bound or self.recipe.stateless:
                return
            with phase("fp8dist::freeze"), self._noting_errors():
                self._agree_and_connect()
                if self._waiting_columns is not None:
                    self._table.load(self._waiting_columns)
                    self._waiting_columns = None
                self._seed_weights()
                self._scope.reloaded.clear()  # the seeds are of the weights as they are
                self._last_exit = time.monotonic()

    # -- the step scope ----------------------------------------------------------------------------------

    def step(self, tag: Tag = None, *, overlap: bool = False) -> Step:
        """The scope of one optimizer step: forward and backward of all microbatches, before the optimizer.

        Scopes nest; only the outermost reduces. Leaving it normally takes part in exactly one collective,
        whatever ran inside. Leaving it by an exception commits nothing on any rank.

        Args:
            tag: the caller's step number or a string; ranks that name different ones raise `RanksDisagree`.
                None is not compared.
            overlap: the exit starts the reduction and returns; it is waited for, and committed or refused, at the
                next entry, at the first use of a scale before that, or by `settle()`. So the optimizer step runs
                meanwhile, and errors of this exit come there, when the optimizer has stepped already. In a nested
                scope it has no effect.

        Raises:
            ValueError: unfit tag (at once); a nested scope with another tag (on entry).
            NeedsRecovery: an earlier step failed (on entry).
            PeerAborted: another rank left by an exception (on exit).
            RanksDisagree: tags, layouts, recipes, generations or scales differ (on exit).
            CollectiveTimeout: a rank did not come (on exit).
        """
        tag_words(tag)
        return Step(self, tag, overlap=overlap)

    def _enter(self, step: Step) -> Step:
        with self._lock:
            self._check_usable()
            if self._open:
                outer = self._open[0]
                if step.tag is not None and step.tag != outer.tag:
                    raise ValueError(
                        f"a nested scope expects the outer scope's tag {outer.tag!r} but got {step.tag!r}; if no "
                        f"nesting was meant, the scope opened at {outer.place} was never closed"
                    )
                self._open.append(step)
                return outer
            self._begin(step)
            self._open.append(step)
            self._scope.open()
            return step

    def _begin(self, step: Step) -> None:
        self.freeze()
        self._forget_reloaded_weights()
        self._serial += 1
        if not self.recipe.stateless:
            self._prepare_exit(step)
            self._stall.progress.publish("open", self._serial, step.tag, step.place)
            self.flight.record("open", self._serial, step.tag, place=step.place)

    def _leave(self, step: Step, error: BaseException | None) -> None:
        if self._is_forked_copy and error is not None:
            return  # the scope is its parent's
        self._check_process()
        with self._lock:
            if step not in self._open:
                raise ScopeError(
                    "this scope is not open; use each coordinator.step() in one `with` statement"
                )
            if step is not self._open[0]:
                self._open.remove(step)
                return
            unpaired = self._open[-1] if len(self._open) > 1 else None
            self._open.clear()
            self._scope.close()
            step.committed = False
            if error is not None:
                self._fail(step, error)
            elif unpaired is not None:
                error = ScopeError(
                    f"the outer scope (opened at {step.place}) closes while the one opened at {unpaired.place} is "
                    "still open; nest them with `with`, on one thread"
                )
                self._fail(step, error)
                raise error
            elif not self.recipe.stateless:
                if step.overlap:
                    with self._breaking(step):
                        self._overlapped = step, self._start(step)
                    step.committed = None
                    self._scope.settle = self.settle
                else:
                    self._finish_or_break(step)

    # -- commits without a scope -------------------------------------------------------------------------

    def commit_now(self, part: Part = Part.BOTH, *, place: str = "") -> None:
        """Reduce and commit what was recorded, outside of any scope. A collective; see `step` for errors.

        Args:
            part: the slots to take.
            place: what started it, for messages.
        """
        with self._lock:
            self._check_usable()
            if self._open:
                raise ScopeError(
                    f"an update expects no open scope but one was opened at {self._open[0].place}"
                )
            if self.recipe.stateless:
                return
            step = Step(self, None, part)
            step.place = place
            self._begin(step)
            self._finish_or_break(step)

    def give_up(self, error: BaseException, part: Part, *, place: str) -> None:
        """Tell the peers that this rank will not come to the update of `part`, because of `error`.

        With several ranks a `recover()` on all of them is then needed. A single process just forgets what it
        recorded.
        """
        with self._lock:
            if len(self._transport.global_ranks) == 1 or not self._table.bound:
                self._table.reset_row()
                self._scope.committed()
                return
            step = Step(self, None, part)
            step.place = place
            self._serial += 1
            self._fail(step, error)

    def arm_backward_end(self) -> None:
        """Commit when the running backward ends.

        Raises:
            MissingScope: none is running.
        """
        self._outside.arm()

    def deferring_requests(self) -> AbstractContextManager[None]:
        """Within it requests only set the flag: the caller commits afterwards."""
        return self._outside.deferring()

    def as_default(self) -> ReductionGroupCoordinator:
        """Make this the coordinator that Transformer Engine's names act on, see `fp8dist.compat`.

        Raises:
            ValueError: the process has another default that is not closed.
        """
        from .compat import set_default

        set_default(self)
        return self

    @property
    def request_handle(self) -> ScopeState:
        """What modules hold of this coordinator: may I record, and 'I recorded something'."""
        return self._scope

    def spans(self, group: Any) -> bool:
        """Whether `group` has the members of this coordinator."""
        return ranks_of(group) == self._transport.global_ranks

    @property
    def layout_is_uniform(self) -> bool:
        """Whether, as far as is known, all ranks hold the same slots."""
        return len(self._table.layout.holders) <= 1

    def drop_lost(self) -> None:
        """Forget what a backward recorded that was to commit at its end and raised."""
        self._outside.drop_lost()

    @property
    def pending(self) -> bool:
        """Whether a backward has asked for an update that has not run."""
        return super().pending and not self._outside.lost

    def enter_training_autocast(self) -> None:
        """A top-level autocast opens: with `next_autocast`, commit what came since the one before it.

        Requested or not, since the ranks that had no backward must join, too.
        """
        if self.trigger == "next_autocast":
            self.flush()
            self._autocasts = 1

    def flush(self) -> None:
        """With `next_autocast`, commit what came since the last autocast opened. A collective.

        Call it on every rank before saving and at the end; it does nothing where no autocast was entered since.
        """
        if self._autocasts:
            self._autocasts = 0
            self.commit_now(self.backward_part, place="flush()")

    @property
    def backward_part(self) -> Part:
        """The slots that an update after a backward takes."""
        return Part.BOTH if self.update_every == "step" else Part.BACKWARD

    def paused(self) -> AbstractContextManager[None]:
        """Within it nothing is recorded and no update is asked for: evaluation, a schedule's hidden passes."""
        self.settle()
        return self._scope.paused()

    def resumed(self) -> AbstractContextManager[None]:
        """Within it recording goes on inside `paused()`: the real work of a schedule."""
        return self._scope.resumed()

    def _forget_reloaded_weights(self) -> None:
        """Weights that were loaded without the coordinator's state make their slots cold again."""
        names, self._scope.reloaded = self._scope.reloaded, set()
        if names and not self._state_loaded:
            self._table.forget(sorted(names))
        self._state_loaded = False

    # -- failing and recovering --------------------------------------------------------------------------

    def recover(self, *, heal_from: int | None = None) -> None:
        """Bring all ranks back to one state after a failed step. A collective: every rank calls it.

        Every rank goes to the lowest generation that any rank has (a death inside the reduction can leave
        some one commit ahead), and a new communicator is built. The step can then be repeated or skipped.

        Args:
            heal_from: group rank whose scales and histories all ranks take over, after `RanksDisagree` has told
                that they have drifted apart; slots that it does not hold come from the lowest rank that does.
                The same on every rank. None: every rank keeps its own.

        Raises:
            RanksDisagree: ranks name different `heal_from`.
            ValueError: `heal_from` is no rank of the group.
            CollectiveTimeout: a rank did not come (it names them); dead ranks cannot be recovered from, let
                the launcher restart from a checkpoint.
            ScopeError: a scope is open on this rank.
        """
        with self._lock:
            self._check_open_for_use()
            if self._open:
                raise ScopeError(
                    f"recover() expects no open scope but one was opened at {self._open[0].place}"
                )
            world = len(self._transport.global_ranks)
            if heal_from is not None and not 0 <= heal_from < world:
                raise ValueError(f"heal_from expects a rank in [0, {world}) but got {heal_from}")
            if not self._table.bound:
                self._broken = None
                return
            with suppress(Fp8DistError):  # what it says of the last step is what all are here to mend
                self.settle()
            with self._noting_errors():
                self._bring_together(heal_from)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._note_error(error)
            raise

    def note_chunk(self, action: str, stage: int, microbatch: int | None = None) -> None:
        """Note what a pipeline schedule has begun; a stall's message and the flight recorder tell it.

        Args:
            action: `F`, `B`, `W` (weight gradients) or `I` (input gradients).
            stage: index of the stage.
            microbatch: its number, if it is known.
        """
        self._stall.progress.chunk(action, stage, microbatch)
        number = {} if microbatch is None else {"microbatch": microbatch}
        self.flight.record("chunk", self._serial, action=action, stage=stage, **number)

    def dump_flight(self, directory: str | Path, reason: str = "asked for") -> Path:
        """Write this rank's flight recorder into `directory`; see `fp8dist blame`.

        Returns:
            The path of the file. A file system that refuses is logged and not raised.
        """
        return self.flight.dump(directory, reason)

    # -- closing -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Compare scope counts with the peers, then drop the communicator and the name.

        Every rank calls it, but it waits at most a second for the others.

        Raises:
            RanksDisagree: some rank ran more scopes than another.
            ScopeError: a scope was left open, or this is a forked child.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                return
            if self._open:
                raise ScopeError(
                    f"close() expects no open scope but the one opened at {self._open[0].place} was never left; its "
                    "step was not committed and peers wait for it"
                )
            self.settle()
            self._closed = True
            self.flight.record("close", self._serial, scopes=self._serial)
            try:
                if self._broken is None and self._table.bound:
                    with self._noting_errors():
                        self._notes.close(self._serial)
            except TransportError as error:
                logger.warning("coordinator %r closes without its peers: %s", self.name, error)
            finally:
                self._drop()

    def _drop(self) -> None:
        if self._is_forked_copy:
            return  # the connections are its parent's, and to give them back would wait for threads that it has not
        self._stall.progress.end()
        self._transport.disconnect()
        self._release()
        self._transport.control.line.stop()

    def __enter__(self) -> ReductionGroupCoordinator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._closed = True
            self._drop()
        else:
            self.close()
