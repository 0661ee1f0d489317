"""How the ranks of one reduction group update together: the steps of the protocol, without scopes and triggers.

agree (through the store) ─▶ reduce: header + row, one MAX ─▶ judge ─▶ commit, or nothing on any rank
                                   │ a rank fails: a note, and the same reduction with its flag up
                                   ▼
                              bring together: lowest generation, new communicator
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import _decisions
from ._amax import ABSENT
from ._declarations import Declarations
from ._drift import Member
from ._flight import FlightRecorder
from ._header import FLAGS, INT32_MIN, Header, Tag, Verdict, decode, encode, flag_words
from ._layout import format_ranks, layout_from_plain
from ._negotiate import Negotiator
from ._notes import MENDS, NOTE_GRACE, Notes
from ._scope import ScopeState
from ._slot_table import SlotTable
from ._stall import StallInspector
from ._step import Step, origin, phase
from ._weights import seed_amax
from .errors import CollectiveTimeout, RanksDisagree, TransportError
from .recipe import Recipe
from .transport import Transport, Work

logger = logging.getLogger("fp8dist")

FIRST_STEP_FACTOR = 3  # a first step may compile; it gets that many timeouts


class UpdateProtocol:
    """One rank's part in the updates of a reduction group: agree, reduce, commit or abort, recover.

    The layer under `ReductionGroupCoordinator`: it knows no scopes and no triggers, and leaves locking to it.

    Args:
        recipe: how scales are made.
        transport: reaches the group's ranks.
        name: of the coordinator.
        stall_warning: seconds until a waiting rank says who is missing, or None.
        timeout: seconds until it gives up, or None.
        flight_dir: where errors dump the flight recorder, or None.
    """

    def __init__(
        self,
        recipe: Recipe,
        transport: Transport,
        name: str,
        stall_warning: float | None,
        timeout: float | None,
        flight_dir: Path | None,
    ) -> None:
        self.recipe = recipe
        self.name = name
        self._recipe_digest = recipe.digest()
        self._reduces_amaxes = not recipe.stateless and bool(getattr(recipe, "reduce_amax", True))
        self._timeout = timeout
        self._transport = transport
        self._scope = ScopeState(stateless=recipe.stateless)
        self._table = SlotTable(recipe, self._scope)
        self._declared = Declarations()
        self._commits = self._aborts = self._generation = self._serial = 0
        self._last_wait = 0.0
        self._last_exit = time.monotonic()
        self._broken: BaseException | None = None
        self._pending: Work | None = None
        self._sent: list[int] = []  # the plain header of this step's reduction, as this rank writes it
        self._told: dict[str, int | str] = {}  # what the flight recorder says of it
        self.flight_dir = flight_dir
        self.flight = FlightRecorder(
            _recorder_name(name, transport), transport.rank, len(transport.global_ranks)
        )
        self._join(stall_warning)

    def _join(self, stall_warning: float | None) -> None:
        """Claim the name on this rank and set up the control plane."""
        ranks, rank = self._transport.global_ranks, self._transport.rank
        everyone = self._transport.control
        if self._timeout is not None:
            everyone.patience = min(everyone.patience, max(2.0, self._timeout))
        cards = everyone.under(f"cards/{self.name}")
        if cards.check([str(ranks[rank])]):
            raise ValueError(
                f"a coordinator named {self.name!r} exists on rank {ranks[rank]} already; give each coordinator of a "
                "process its own name=, or close() the earlier one first. If a launcher that keeps its store, as "
                "torchrun does, has started this process anew, put each start's keys under a PrefixStore of its own"
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
        self._scope.on_first_request = self._note_request
        if rank == 0 and len(ranks) > 1:
            self._stall.list_coordinator()

    def _note_request(self) -> None:
        self._stall.progress.requested()
        self.flight.record("request", self._serial)

    # -- agreeing on the layout ---------------------------------------------------------------------------

    def _agree_and_connect(self) -> None:
        """The first agreement: who holds which slots, and a communicator."""
        device = self._declared.device()
        # Before the agreement, so that all ranks know all others once they have agreed.
        self._stall.progress.introduce(self._declared.stages)
        agreed = self._agree_layout(self._long_timeout())
        self._connect(agreed["communicator"], device)
        self._table.bind(layout_from_plain(agreed["layout"]), self._transport.rank, device)
        self._note_connection(agreed["communicator"])

    def _agree_layout(self, timeout: float | None) -> dict[str, Any]:
        payload = self._declared.payload(self.recipe, self._recipe_digest, self._table.layout.position)
        agreed: dict[str, Any] = self._negotiator.agree("layout", payload, _decisions.layout, timeout)
        return agreed

    def _connect(self, communicator: str, device: torch.device) -> None:
        self._transport.connect(communicator, device, self._timeout)
        self._notes.communicator = communicator
        self._stall.start(self._declared.stages)

    def _note_connection(self, communicator: str) -> None:
        self.flight.record(
            "connect",
            communicator=communicator,
            layout=f"{self._table.layout.digest:#x}",
            recipe=f"{self._recipe_digest:#x}",
        )

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
            self._stall.progress.publish("exit", self._serial, "freeze")
            self._wait(self._transport.start_max(words), "freeze")
        self._table.seed(names, amaxes)

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

    # -- one update ---------------------------------------------------------------------------------------

    def _finish(self, step: Step, work: Work | None = None) -> None:
        """Prepare (one MAX, started here unless it is under way), then commit or abort."""
        with phase("fp8dist::reduce"):
            self._wait(self._start(step) if work is None else work, step.tag)
            verdict = self._verdict()
        self._judge(verdict, step)
        self._scope.committed()
        if verdict.abandoned_rank is not None:
            self._table.reset_row(step.part)
            self._aborts += 1
            step.committed = False
            self.flight.record("abort", self._serial, step.tag, rank=verdict.abandoned_rank)
            return
        with phase("fp8dist::commit"):
            if verdict.growing_rank is not None:
                self.flight.record("grow", self._serial, step.tag, rank=verdict.growing_rank)
                self._grow(step)
            self._table.commit(step.part)
        self._commits += 1
        self._generation += 1
        step.committed = True
        self.flight.record(
            "commit", self._serial, step.tag, generation=self._generation, wait_s=self._last_wait
        )

    def _verdict(self) -> Verdict:
        world = len(self._transport.global_ranks)
        # What a rank alone says is known here; a GPU would only get to it when it has done the whole step.
        return decode(self._sent if world == 1 else self._table.read_header(), world)

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
            grows=self._grows,
            active=self._scope.requested,
        )

    def _prepare_exit(self, step: Step) -> None:
        """Do before the step what its exit can do without it, because there all ranks wait for the slowest."""
        self._table.refresh_digests(self._generation)
        header = self._header(step)
        self._sent = encode(header)
        self._told = self._flight_header(header)
        self._table.prepare(step.part)

    def _start(self, step: Step) -> Work:
        """Start the one collective of the step."""
        if self._timeout is not None and time.monotonic() - self._last_exit > self._timeout:
            with contextlib.suppress(TransportError):  # the reduction itself needs no store
                self._notes.look(self._serial)  # peers that waited for this rank may have given up
        active = self._scope.requested
        self._sent[:FLAGS] = flag_words(
            self._transport.rank,
            len(self._transport.global_ranks),
            abandoned=step.abandoned,
            grows=self._grows,
            active=active,
        )
        self._table.fill_header(self._sent, compare=self._reduces_amaxes)
        # Before the start, which may block: nccl connects in the first one.
        self._stall.progress.publish("exit", self._serial, step.tag, step.place)
        self.flight.record("enter", self._serial, step.tag, **self._told, active=int(active))
        return self._transport.start_max(self._payload)

    @property
    def _grows(self) -> bool:
        return self._declared.relabelled or self._table.has_new_slots

    def _flight_header(self, header: Header) -> dict[str, int | str]:
        """What `blame` compares. Digests that lie on a GPU stay there."""
        digests = self._table.digests.of_class if self._table.digests and self._reduces_amaxes else {}
        label = self._table.layout.label
        return {
            "generation": header.generation,
            "layout": f"{header.layout:#x}",
            "recipe": f"{header.recipe:#x}",
            "part": header.part.name or "",
            **{f"scales of {label(c)}": f"{digest:#x}" for c, digest in digests.items()},
        }

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
        self._stall.progress.flush()  # the others want to know who has entered
        with contextlib.suppress(TransportError):  # the process that died may have been the store's
            self._notes.look_for(NOTE_GRACE, self._serial)
        missing, story = self._stall.story(self._serial)
        # A rank may die when it has entered, and one that is late may be blameless.
        suspects = (*self._stall.cards.gone(), *missing)
        # Only the neighbours of a dead rank notice it; the note frees the others.
        if suspects:
            self._notes.leave(suspects[0], tag, "a lost connection, its process has probably died")
        else:
            self._notes.leave(
                self._transport.rank, tag, "a lost connection, some other rank's process has probably died"
            )
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
        if verdict.disagreements:
            layout = self._table.layout
            values = {
                "tag": repr(step.tag),
                "layout": layout.digest,
                "recipe": self._recipe_digest,
                "generation": self._generation,
                "part": step.part.name,
            }
            raise self._notes.disagreement(verdict.disagreements[0], values, self._serial, step.tag)
        if verdict.classes:
            raise self._drifted_apart(verdict.classes[0], step.tag)

    def _drifted_apart(self, c: int, tag: Tag) -> RanksDisagree:
        """The error that names the slots of class `c` whose scales or histories differ, and the ranks."""
        layout = self._table.layout
        names, digests, scales = self._table.members_of_class(c)
        board = self._notes.board(f"drift/{self._serial}")
        found = ""
        with contextlib.suppress(TransportError):  # that they differ is known without the store
            found = Member(board, self._transport.rank, layout.holders[c], names, digests, scales).search()
        return RanksDisagree(
            f"coordinator {self.name!r}, step {tag!r}: {layout.label(c)} expect equal scales and histories of their "
            f"{len(names)} slots but these differ: {found or 'which, could not be found out'}. No rank commits the "
            f"step (this is rank {self._transport.rank}). {MENDS['scales']}",
            field="scales",
        )

    def drop_recorded(self) -> None:
        """Forget what was recorded since the last commit, because it belongs to no step."""
        self._table.reset_row()
        self._scope.committed()

    def _long_timeout(self) -> float | None:
        return None if self._timeout is None else FIRST_STEP_FACTOR * self._timeout

    # -- failing and recovering ---------------------------------------------------------------------------

    def _note_error(self, error: BaseException, tag: Tag = None) -> None:
        """Keep an error for `blame`, and what led to it if there is a place for that."""
        self.flight.record("error", self._serial, tag, type=type(error).__name__, message=str(error)[:2000])
        if self.flight_dir is not None:
            self.flight.dump(self.flight_dir, f"{type(error).__name__} in step {tag!r}")

    def _fail(self, step: Step, error: BaseException) -> None:
        """Tell the peers that this rank left by `error`, without waiting for anybody."""
        if self.recipe.stateless:
            return
        self._broken = error
        self._aborts += 1
        self._note_error(error, step.tag)
        self._notes.leave(self._transport.rank, step.tag, named(error), origin(error))
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

    def _bring_together(self, heal_from: int | None) -> None:
        """Back to the lowest generation of any rank, on a new communicator. A collective."""
        payload = {
            "heal_from": heal_from,
            "generation": self._generation,
            "undoable": int(self._table.can_undo),
            "layout": self._table.layout.digest,
            "started": self._transport.started,
            "scopes": self._serial,
        }
        agreed = self._negotiator.agree("recover", payload, _decisions.recovery, self._timeout)
        self._transport.catch_up(agreed["started"])
        self._serial = agreed["scopes"]  # a rank may have failed before it opened the scope
        if self._transport.rank in agreed["ahead"]:
            undone = self._table.undo()
            assert undone, "the undo record was there when the ranks agreed"
            self._generation -= 1
        brought = self._relayout() if agreed["relayout"] else None
        self._connect(agreed["communicator"], self._table.device)
        self._note_connection(agreed["communicator"])
        self._table.replace_words()
        if brought is not None and self._reduces_amaxes:
            self._take_over(*brought)
        if heal_from is not None:
            self._heal(heal_from, agreed["level"])
            self._generation = agreed["generation"]
        self._pending = None
        self._broken = None
        self.flight.record("recover", self._serial, generation=self._generation)

    def _relayout(self) -> tuple[list[int], torch.Tensor]:
        """The failed step grew the layout, and some ranks did not get to know: agree again.

        Returns:
            Rows of the slots that this rank has had no state of, and the state that it had of all others.
        """
        layout = layout_from_plain(self._agree_layout(self._timeout)["layout"])
        new = self._table.slots.keys() - set(self._table.export().names)
        unknown = [i for i, name in enumerate(layout.names) if name in new]
        words = self._table.columns_as_words(layout.names)  # before `bind` gives new slots a state
        self._table.bind(layout, self._transport.rank, self._table.device)
        return unknown, words

    def _take_over(self, unknown: list[int], words: torch.Tensor) -> None:
        """Slots that are new to this rank, but not to the others, get the others' state."""
        self._stall.progress.publish("exit", self._serial, "recover")
        self._wait(self._transport.start_max(words), "recover")
        if unknown:
            self._table.load_words([self._table.layout.names[i] for i in unknown], words[unknown])
            self._table.reset_row()

    def _heal(self, rank: int, level: Sequence[int]) -> None:
        """Take over one rank's state, in one collective.

        Args:
            rank: whose.
            level: the ranks of its generation. Of what it does not hold the lowest of these gives its own.
        """
        layout, me = self._table.layout, self._transport.rank
        givers = []
        for ranks in layout.holders:
            fitting = [holder for holder in ranks if holder in level] or ranks
            givers.append(rank if rank in ranks else fitting[0])
        words = self._table.columns_as_words(layout.names)
        mine = torch.tensor([givers[c] == me for c in layout.class_of], device=words.device)
        words[~mine] = INT32_MIN
        if self._reduces_amaxes:
            self._stall.progress.publish("exit", self._serial, "heal")
            self._wait(self._transport.start_max(words), "heal")
        self._table.load_words(layout.names, words)
        self._table.reset_row()


def _recorder_name(name: str, transport: Transport) -> str:
    """Two groups may have coordinators of one name, and write into one directory."""
    ranks = transport.global_ranks
    return name if ranks == tuple(range(len(ranks))) else f"{name} of {format_ranks(ranks)}"


def named(error: BaseException) -> str:
    """Type and text of an error, for other ranks."""
    return f"{type(error).__name__}: {str(error)[:500]}"
