"""One coordinator per process and reduction group: the step scope, and the one collective at its end.

open ─▶ forward/backward of all microbatches (modules record, flag) ─▶ exit
                                                                        │ header + row, one MAX
         any rank failed: PeerAborted ◀── verdict from the header ◀─────┤
         ranks disagree:  RanksDisagree                                 │
         step.abort():    nothing changes                               ▼
                                                   commit: history, scales, generation + 1
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch.distributed import Store

from . import _decisions, _state
from ._amax import ABSENT
from ._declarations import Declarations, WeightSource, slots_of
from ._header import INT32_MIN, Header, Part, Tag, Verdict, decode, encode, tag_words
from ._layout import layout_from_plain
from ._negotiate import Negotiator
from ._notes import NOTE_GRACE, Notes
from ._scope import ScopeState
from ._slot_table import Columns, SlotTable
from ._slots import Slot
from ._stall import StallInspector
from ._step import Step, origin, phase
from ._triggers import OutsideScope, Trigger, UpdateEvery
from ._weights import seed_amax
from .errors import CollectiveTimeout, Fp8DistError, NeedsRecovery, ScopeError, TransportError
from .recipe import Recipe
from .transport import Transport, Work, resolve

logger = logging.getLogger("fp8dist")

FIRST_STEP_FACTOR = 3  # a first step may compile; it gets that many timeouts


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


class ReductionGroupCoordinator:
    """Reduces and updates all scales of this process, once per optimizer step.

    Args:
        recipe: how scales are made; equal on all ranks.
        group: the ranks that take the MAX together. None: all ranks (right for any mix of data, tensor,
            context, pipeline and expert parallelism, since slots meet by name); or a `ProcessGroup`, or a
            one-dimensional `DeviceMesh`.
        name: tells coordinators of one process apart; required from the second one on.
        store: where ranks meet; default: the store of the default group. A store of your own must be fresh
            for every launch.
        stall_warning: seconds after which a waiting rank logs who is missing; None never warns.
        timeout: seconds after which it raises `CollectiveTimeout`; None waits for ever. The first step gets
            three times that, since it may compile.
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
        self.recipe = recipe
        self._recipe_digest = recipe.digest()
        self._reduces_amaxes = not recipe.stateless and bool(getattr(recipe, "reduce_amax", True))
        self.name = name
        self.trigger = trigger
        self.update_every = update_every
        self._timeout = timeout
        self._transport: Transport = resolve(group, store)
        self._scope = ScopeState(stateless=recipe.stateless)
        self._table = SlotTable(recipe, self._scope)
        self._declared = Declarations()
        self._lock = threading.RLock()
        self._open: list[Step] = []
        self._commits = self._aborts = self._generation = self._serial = 0
        self._last_wait = 0.0
        self._last_exit = time.monotonic()
        self._broken: BaseException | None = None
        self._pending: Work | None = None
        self._state_loaded = False
        self._waiting_columns: Columns | None = None
        self._closed = False
        self._autocasts = 0  # entered since the last commit; all ranks enter the same ones
        self._outside = OutsideScope(self, self._scope)
        self._join(stall_warning)

    def _join(self, stall_warning: float | None) -> None:
        """Claim the name on this rank and set up the control plane."""
        ranks, rank = self._transport.global_ranks, self._transport.rank
        everyone = self._transport.control
        cards = everyone.under(f"cards/{self.name}")
        if cards.check([str(ranks[rank])]):
            raise ValueError(
                f"a coordinator named {self.name!r} exists on rank {ranks[rank]} already; give each coordinator of a "
                "process its own name=, or close() the earlier one first"
            )
        members = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:12]
        self._control = everyone.under(f"{self.name}/{members}")
        self._negotiator = Negotiator(self._control, ranks, rank, self.name, cards)
        self._negotiator.post_card()
        # A coordinator that is dropped without close() must give its name back, too.
        self._release = weakref.finalize(self, cards.delete, str(ranks[rank]))
        self._release.atexit = False
        self._notes = Notes(self._control, self.name, rank, len(ranks))
        self._stall = StallInspector(self._control, everyone, self.name, rank, ranks, stall_warning)
        if rank == 0 and len(ranks) > 1:
            self._stall.list_coordinator()

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
            device = self._declared.device()
            with phase("fp8dist::freeze"):
                agreed = self._agree_layout(self._long_timeout())
                self._connect(agreed["communicator"], device)
                self._table.bind(layout_from_plain(agreed["layout"]), self._transport.rank, device)
                if self._waiting_columns is not None:
                    self._table.load(self._waiting_columns)
                    self._waiting_columns = None
                self._seed_weights()
                self._scope.reloaded.clear()  # the seeds are of the weights as they are
                self._last_exit = time.monotonic()

    def _agree_layout(self, timeout: float | None) -> dict[str, Any]:
        payload = self._declared.payload(self.recipe, self._recipe_digest, self._table.layout.position)
        agreed: dict[str, Any] = self._negotiator.agree("layout", payload, _decisions.layout, timeout)
        return agreed

    def _connect(self, communicator: str, device: torch.device) -> None:
        self._transport.connect(communicator, device, self._timeout)
        self._notes.communicator = communicator

    def _seed_weights(self) -> None:
        """Scales of cold weights from the MAX of their values over the holders; one collective."""
        if self._table.born_warm:
            return
        layout = self._table.layout
        names = [name for name in layout.names if name.endswith(".weight")]
        if not names:
            return
        amaxes = torch.full((len(names),), ABSENT, device=self._table.device)
        weights = self._declared.weights()
        for i, name in enumerate(names):
            if name in weights and not bool(self._table.slots[name].warm[0]):
                amaxes[i] = seed_amax(weights[name]).to(amaxes.device)
        if self._reduces_amaxes:
            words = amaxes.view(torch.int32)
            self._stall.publish("exit", self._serial, "freeze")
            self._wait(self._transport.start_max(words), "freeze")
        self._table.seed(names, amaxes)

    # -- the step scope ----------------------------------------------------------------------------------

    def step(self, tag: Tag = None) -> Step:
        """The scope of one optimizer step: forward and backward of all microbatches, before the optimizer.

        Scopes nest; only the outermost reduces. Leaving it normally takes part in exactly one collective,
        whatever ran inside. Leaving it by an exception commits nothing on any rank.

        Args:
            tag: the caller's step number or a string; ranks that name different ones raise `RanksDisagree`.
                None is not compared.

        Raises:
            ValueError: unfit tag (at once); a nested scope with another tag (on entry).
            NeedsRecovery: an earlier step failed (on entry).
            PeerAborted: another rank left by an exception (on exit).
            RanksDisagree: tags, layouts, recipes, generations or scales differ (on exit).
            CollectiveTimeout: a rank did not come (on exit).
        """
        tag_words(tag)
        return Step(self, tag)

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
            self._table.refresh_digests()  # here and not at the exit, where all ranks wait for the slowest
            self._stall.publish("open", self._serial, step.tag, step.place)

    def _leave(self, step: Step, error: BaseException | None) -> None:
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
                self._finish_or_break(step)

    def _finish_or_break(self, step: Step) -> None:
        """Finish the step; a step that cannot be finished blocks later ones until `recover()`."""
        try:
            self._finish(step)
        except BaseException as cause:
            self._broken = cause
            self._aborts += 1
            self._scope.committed()
            if not isinstance(cause, Fp8DistError):  # KeyboardInterrupt in the wait, a rule that raised
                self._notes.leave(self._transport.rank, step.tag, _named(cause), origin(cause))
            raise

    def _finish(self, step: Step) -> None:
        """Prepare (one MAX), then commit or abort."""
        with phase("fp8dist::reduce"):
            verdict = self._reduce(step)
        self._judge(verdict, step)
        self._scope.committed()
        if verdict.abandoned_rank is not None:
            self._table.reset_row(step.part)
            self._aborts += 1
            return
        with phase("fp8dist::commit"):
            if verdict.growing_rank is not None:
                self._grow(step)
            self._table.commit(step.part)
        self._commits += 1
        self._generation += 1
        step.committed = True

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

    @property
    def in_scope(self) -> bool:
        """Whether a step scope is open."""
        return bool(self._open)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def spans(self, group: Any) -> bool:
        """Whether `group` has the members of this coordinator."""
        return resolve(group, None).global_ranks == self._transport.global_ranks

    @property
    def layout_is_uniform(self) -> bool:
        """Whether, as far as is known, all ranks hold the same slots."""
        return len(self._table.layout.holders) <= 1

    def drop_recorded(self) -> None:
        """Forget what was recorded since the last commit, because it belongs to no step."""
        self._table.reset_row()
        self._scope.committed()

    def drop_lost(self) -> None:
        """Forget what a backward recorded that was to commit at its end and raised."""
        self._outside.drop_lost()

    @property
    def pending(self) -> bool:
        """Whether a backward has asked for an update that has not run."""
        return self._scope.requested and not self._open and not self._outside.lost

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
        return self._scope.paused()

    def resumed(self) -> AbstractContextManager[None]:
        """Within it recording goes on inside `paused()`: the real work of a schedule."""
        return self._scope.resumed()

    def _header(self, step: Step, *, failed: bool = False) -> Header:
        return Header(
            rank=self._transport.rank,
            world=len(self._transport.global_ranks),
            tag=step.tag,
            layout=self._table.layout.digest,
            recipe=self._recipe_digest,
            generation=self._generation,
            part=step.part,
            failed=failed,
            abandoned=step.abandoned,
            grows=self._declared.relabelled or self._table.has_new_slots,
            active=self._scope.requested,
        )

    def _reduce(self, step: Step) -> Verdict:
        """The one collective of the step."""
        if self._timeout is not None and time.monotonic() - self._last_exit > self._timeout:
            self._notes.look(self._serial)  # peers that waited for this rank may have given up
        header = self._header(step)
        self._table.fill_header(encode(header), compare=self._reduces_amaxes)
        self._stall.publish("exit", self._serial, step.tag, step.place)
        work = self._transport.start_max(self._payload)
        self._table.prepare(step.part)
        self._wait(work, step.tag)
        return decode(self._table.header.tolist(), header.world)

    @property
    def _payload(self) -> torch.Tensor:
        """What one collective sends; without a reduction of amaxes it is the header alone."""
        return self._table.words if self._reduces_amaxes else self._table.header

    def _wait(self, work: Work, tag: Tag) -> None:
        self._pending = work  # an abandoned reduction may still write; its words stay alive until recover()
        timeout = self._long_timeout() if self._commits == 0 else self._timeout
        look = functools.partial(self._notes.look, self._serial)
        try:
            self._last_wait = self._stall.wait(work, self._serial, tag, timeout, look)
        except CollectiveTimeout as error:
            # A rank that comes later must not commit alone what the others gave up.
            self._notes.leave(self._transport.rank, tag, str(error), missing=error.missing)
            raise
        except TransportError as error:
            self._explain_break(error, tag)
        self._pending = None
        self._last_exit = time.monotonic()

    def _explain_break(self, error: TransportError, tag: Tag) -> None:
        """A broken connection is the shadow of a rank that failed: find its note, or name who is missing."""
        self._notes.look_for(NOTE_GRACE, self._serial)
        missing, story = self._stall.story(self._serial)
        suspect = missing[0] if missing else self._transport.rank
        # Only the neighbours of a dead rank notice it; the note frees the others.
        self._notes.leave(suspect, tag, "a lost connection, its process has probably died")
        raise TransportError(
            f"coordinator {self.name!r}, rank {self._transport.rank}: the update of step {tag!r} broke, probably "
            f"because a process died. {story}\n({error})"
        ) from error

    def _judge(self, verdict: Verdict, step: Step) -> None:
        """Raise on every rank what the header tells every rank."""
        if verdict.failed_rank is not None or verdict.disagreements or verdict.classes:
            self._table.reset_row()
        if verdict.failed_rank is not None:
            self._notes.look_for(NOTE_GRACE, self._serial)
            raise self._notes.peer_aborted(verdict.failed_rank)
        if verdict.disagreements or verdict.classes:
            layout, digests = self._table.layout, self._table.class_words[::2].tolist()
            mine = [c for c in verdict.classes if digests[c] != INT32_MIN]
            values = {
                "tag": repr(step.tag),
                "layout": layout.digest,
                "recipe": self._recipe_digest,
                "generation": self._generation,
                "part": step.part.name,
                "scales": ", ".join(f"{digests[c]:#x} for those of {layout.label(c)}" for c in mine)
                or "none of them",
            }
            field = verdict.disagreements[0] if verdict.disagreements else "scales"
            raise self._notes.disagreement(field, values, self._serial, step.tag)

    # -- growing -----------------------------------------------------------------------------------------

    def _grow(self, step: Step) -> None:
        """Some rank has new slots: agree again, and reduce what is new in a second collective.

        A rank that newly holds a name that others held already takes over their state in that reduction.
        """
        old = self._table.layout
        agreed = self._agree_layout(self._timeout)
        new = layout_from_plain(agreed["layout"])
        before = {name: old.holders[c] for name, c in zip(old.names, old.class_of, strict=True)}
        changed = [
            name
            for name, c in zip(new.names, new.class_of, strict=True)
            if before.get(name) != new.holders[c]
        ]
        row, positions = self._table.row.clone(), old.position
        words = self._table.columns_as_words(changed)
        if changed and self._reduces_amaxes:
            self._wait(self._transport.start_max(words), step.tag)
        self._table.bind(new, self._transport.rank, self._table.device)
        carried = [name for name in new.names if name in positions]
        if carried:
            to = torch.tensor([new.position[name] for name in carried], device=row.device)
            source = torch.tensor([positions[name] for name in carried], device=row.device)
            self._table.row[to] = row[source]
        if changed:
            self._table.load_words(changed, words)
        self._declared.relabelled = False

    def _forget_reloaded_weights(self) -> None:
        """Weights that were loaded without the coordinator's state make their slots cold again."""
        names, self._scope.reloaded = self._scope.reloaded, set()
        if names and not self._state_loaded:
            self._table.forget(sorted(names))
        self._state_loaded = False

    # -- failing and recovering --------------------------------------------------------------------------

    def _fail(self, step: Step, error: BaseException) -> None:
        """Tell the peers that this rank left by `error`, without waiting for anybody."""
        if self.recipe.stateless:
            return
        self._broken = error
        self._aborts += 1
        self._notes.leave(self._transport.rank, step.tag, _named(error), origin(error))
        if len(self._transport.global_ranks) > 1:
            self._table.reset_row()
            self._table.fill_header(encode(self._header(step, failed=True)), compare=self._reduces_amaxes)
            words = self._payload.clone()  # it may be read long after this rank has gone on
            try:
                self._pending = self._transport.start_max(words)
            except TransportError as also:
                logger.debug("the abort of step %r could not be sent: %s", step.tag, also)
        self.drop_recorded()
        error.add_note(
            f"fp8dist: rank {self._transport.rank} left step {step.tag!r} (scope opened at {step.place}) by this "
            "exception, so no rank commits it. Peers that wait in the scope's exit get PeerAborted at once; peers "
            "inside the schedule's own communication are out of reach and wait for its timeout. To go on, every "
            "rank catches its error and calls coordinator.recover()."
        )

    def recover(self) -> None:
        """Bring all ranks back to one state after a failed step. A collective: every rank calls it.

        Every rank goes to the lowest generation that any rank has (a death inside the reduction can leave
        some one commit ahead), and a new communicator is built. The step can then be repeated or skipped.

        Raises:
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
            if not self._table.bound:
                self._broken = None
                return
            payload = {
                "generation": self._generation,
                "undoable": int(self._table.can_undo),
                "layout": self._table.layout.digest,
                "started": self._transport.started,
                "scopes": self._serial,
            }
            agreed = self._negotiator.agree("recover", payload, _decisions.recovery, self._timeout)
            self._transport.catch_up(agreed["started"])
            self._serial = agreed["scopes"]  # a rank may have failed before it opened the scope
            if self._generation > agreed["generation"]:
                undone = self._table.undo()
                assert undone, "the undo record was there when the ranks agreed"
                self._generation -= 1
            if agreed["relayout"]:  # the failed step grew the layout, and some ranks did not get to know
                plain = self._agree_layout(self._timeout)["layout"]
                self._table.bind(layout_from_plain(plain), self._transport.rank, self._table.device)
            self._connect(agreed["communicator"], self._table.device)
            self._table.replace_words()
            self._pending = None
            self._broken = None

    # -- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Named plain tensors, the same on every rank that shares the names. Never commits.

        Inside a scope it is the last committed state, so resuming repeats the step.

        Returns:
            `{"generation": int64 [], "slots": {name: {"history": float32 [L] oldest first, -1 where
            absent; "scale": float32 []; "warm": bool []}}}`.
        """
        if self.pending:
            raise ScopeError(
                f"coordinator {self.name!r} has recorded amaxes that are not committed yet; call flush() on every rank "
                "before saving"
            )
        columns = self._table.export() if self._table.bound else None
        return _state.to_plain(self._generation, columns)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over a state of `state_dict()`, matched by name; names of other ranks are passed over.

        Args:
            state: what `state_dict` gave.
            strict: every own slot must be there.

        Raises:
            ValueError: a slot is missing (strict), or a field has another shape or dtype; nothing is changed.
            ScopeError: a scope is open.
        """
        with self._lock:
            self._check_open_for_use()
            if self._open:
                raise ScopeError(
                    f"load_state_dict() expects no open scope but one was opened at {self._open[0].place}"
                )
            generation, columns = _state.from_plain(
                state, list(self._table.slots), self.recipe.history_len, strict=strict
            )
            if self._table.bound:
                self._table.load(columns)
            else:
                self._waiting_columns = columns
            self._generation = generation
            self._state_loaded = True

    def digest(self) -> int:
        """One int, equal on all ranks that hold equal state of equal slots."""
        text = repr(sorted(self.class_digests().items()))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def class_digests(self) -> dict[str, int]:
        """Digest of scales and histories by the set of ranks that share them, e.g. `{"ranks 0-1": 123}`.

        Labels that two ranks have in common must have equal digests on both.
        """
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
        if not self._table.bound:
            return {}
        columns = self._table.export()
        return dict(zip(columns.names, columns.scale.tolist(), strict=True))

    def count_casts(self, on: bool = True) -> None:
        """Count what each cast saturates and flushes to zero, from zero; costs two passes per tensor."""
        self._table.count_casts(on)

    def cast_counts(self) -> dict[str, tuple[int, int, int]]:
        """Per slot: values cast, saturated, flushed to zero, since `count_casts()`."""
        return {
            name: (int(c[0]), int(c[1]), int(c[2]))
            for name, slot in self._table.slots.items()
            if (c := slot.casts) is not None
        }

    # -- closing -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Compare scope counts with the peers, then drop the communicator and the name.

        Every rank calls it, but it waits at most a second for the others.

        Raises:
            RanksDisagree: some rank ran more scopes than another.
            ScopeError: a scope was left open.
        """
        with self._lock:
            if self._closed:
                return
            if self._open:
                raise ScopeError(
                    f"close() expects no open scope but the one opened at {self._open[0].place} was never left; its "
                    "step was not committed and peers wait for it"
                )
            self._closed = True
            try:
                if self._broken is None and self._table.bound:
                    self._notes.close(self._serial)
            except TransportError as error:
                logger.warning("coordinator %r closes without its peers: %s", self.name, error)
            finally:
                self._transport.disconnect()
                self._release()

    def __enter__(self) -> ReductionGroupCoordinator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._closed = True
            self._transport.disconnect()
            self._release()
        else:
            self.close()

    def _check_open_for_use(self) -> None:
        if self._closed:
            raise ScopeError(f"coordinator {self.name!r} is closed; create a new one")

    def _check_usable(self) -> None:
        self._check_open_for_use()
        if self._broken is not None:
            raise NeedsRecovery(
                f"coordinator {self.name!r} expects recover() on every rank before the next scope, because an earlier "
                f"step failed with {type(self._broken).__name__}: {str(self._broken)[:300]}"
            ) from self._broken

    def _long_timeout(self) -> float | None:
        return None if self._timeout is None else FIRST_STEP_FACTOR * self._timeout


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
