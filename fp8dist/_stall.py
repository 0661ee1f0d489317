"""Waiting with names: who has not entered the collective, and what each of those did last."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._header import Tag
from ._layout import format_ranks
from ._progress import (
    KNOWN_BEFOREHAND,
    Cards,
    Progress,
    ask_for_stacks,
    last_act,
    likely_mend,
    records,
    stacks,
    step_name,
    waiting_elsewhere,
)
from .errors import CollectiveTimeout, Fp8DistError, TransportError
from .transport import Control, Work
from .transport._control import Request

logger = logging.getLogger("fp8dist")

SLICE = 0.1  # seconds between two looks at the store; bounds how long an abort can stay unseen
RANKS_PER_SLICE = 256  # more ranks look less often, since one store answers them all
SIGNS_OF_LIFE = 0.5  # seconds between two looks at the processes of this host
TELLING = 2.0  # seconds that finding out what to tell may take
HEARING = 10.0  # seconds that others give the rank which tells them
LINES = 16  # ranks that a story describes


@dataclass
class StallInspector:
    """Waits for reductions on this rank's behalf, and says who holds them up.

    The store is asked on the control plane's thread, so that a silent one costs no deadline.
    """

    control: Control
    """The coordinator's own part of the store."""
    everyone: Control
    """The part of the store where coordinators list themselves."""
    name: str
    rank: int
    global_ranks: Sequence[int]
    stall_warning: float | None

    def __post_init__(self) -> None:
        world = len(self.global_ranks)
        self.progress = Progress(self.control, self.rank, world)
        self.cards = Cards(self.control, world)
        self._slice = SLICE * max(1.0, world / RANKS_PER_SLICE)

    def list_coordinator(self) -> None:
        """Enter this coordinator into the list that `story` looks through. One member does it."""

        def enter() -> None:
            index = self.everyone.count("coordinators", 1)
            entry = {"name": self.name, "prefix": self.control.prefix, "ranks": list(self.global_ranks)}
            self.everyone.set(f"coordinator/{index}", json.dumps(entry))

        self.control.later(enter)

    def start(self, stages: Sequence[int]) -> None:
        """The ranks have connected: say who this one is, and learn who the others are."""
        self.progress.start(stages)
        self.control.later(self.cards.refetch)

    def wait(
        self, work: Work, serial: int, tag: Tag, timeout: float | None, look: Callable[[], None]
    ) -> float:
        """Wait for `work`; return the seconds it took.

        Args:
            work: the started reduction.
            serial: which scope of this coordinator it closes.
            tag: its step tag, for messages.
            timeout: seconds, None waits for ever.
            look: asks the store for news, on another thread, about every 0.1 s; raises to stop waiting.

        Raises:
            CollectiveTimeout: names the ranks that have not entered.
            TransportError: the communicator broke, or a process of this host that takes part is gone.
        """
        start = time.monotonic()
        if work.wait(self._slice):
            return time.monotonic() - start
        self.progress.flush()
        watch = _Watch(self, serial, tag, timeout, look, start)
        while not work.wait(self._slice):
            watch.look(work)
        return time.monotonic() - start

    def tells(self, serial: int) -> bool:
        """Whether this rank shall find out who is missing; in large groups one does it for all."""
        if len(self.global_ranks) <= KNOWN_BEFOREHAND:
            return True
        return self.control.count(f"telling/{serial}", 1) == 1

    def inquire(self, serial: int) -> bool:
        """Ask the missing ranks for their stacks, if it is this rank's part to tell. On the control thread."""
        if not self.tells(serial):
            return False
        self.cards.fetch()
        ask_for_stacks(self.control, self._missing(serial), secrets.token_hex(4))
        return True

    def _missing(self, serial: int) -> list[int]:
        found = records(self.control, len(self.global_ranks))
        return [
            rank
            for rank, record in enumerate(found)
            if record is None or record["serial"] < serial or record["phase"] != "exit"
        ]

    def story(self, serial: int) -> tuple[tuple[int, ...], str]:
        """Ranks that have not entered collective `serial`, and a line for each about its last act."""
        try:
            missing = self._missing(serial)
            if not missing:
                held_up = "All ranks have entered; the network or a dying rank holds it up."
                return (), self.known_here(held_up)[1]
            elsewhere = waiting_elsewhere(self.everyone, self.control, self.global_ranks)
            told = missing[:LINES]
            answers = stacks(self.control, told)
            found = records(self.control, len(self.global_ranks))
        except TransportError as error:
            return self.known_here(f"Who is missing cannot be said: {error}")
        lines = []
        for rank in told:
            state = self.cards.state(rank)
            alive = f"; its process is {state}" if state in ("gone", "stopped") else ""
            stack = answers.get(rank, ("", ""))[1]
            now = f"; now in {stack}" if stack and not alive else ""
            act = last_act(found[rank], serial)
            lines.append(f"  {self.cards.describe(rank)}: {act}{alive}{elsewhere.get(rank, '')}{now}")
        more = "" if len(missing) <= LINES else f"\n  ... and {len(missing) - LINES} more"
        have = "has" if len(missing) == 1 else "have"
        mend = likely_mend([found[rank] for rank in told], [self.cards.state(rank) for rank in told])
        return tuple(missing), (
            f"{format_ranks(missing).capitalize()} {have} not entered:\n"
            + "\n".join(lines)
            + more
            + f"\nLikely mend: {mend}"
        )

    def known_here(self, why: str) -> tuple[tuple[int, ...], str]:
        """What can be said without the store: which processes of this host are gone or stopped."""
        states = self.cards.not_alive()
        lines = [f"\n  {self.cards.describe(rank)}: its process is {state}" for rank, state in states.items()]
        return tuple(states), why + "".join(lines)


class _Watch:
    """One wait that takes longer than it should."""

    def __init__(
        self,
        inspector: StallInspector,
        serial: int,
        tag: Tag,
        timeout: float | None,
        look: Callable[[], None],
        start: float,
    ) -> None:
        self._inspector, self._serial, self._tag, self._timeout = inspector, serial, tag, timeout
        self._control, self._look = inspector.control, look
        self._start = self._looked_for_life = start
        self._news: Request[None] | None = None
        self._inquiry: Request[bool] | None = None
        self._silent = False
        warning = inspector.stall_warning
        self._warns_at = warning
        self._deadline = timeout
        # Stacks take a moment to come in, and should be there when they are wanted.
        moments = [0.6 * seconds for seconds in (warning, timeout) if seconds is not None]
        self._inquires_at = min(moments, default=None)

    def look(self, work: Work) -> None:
        """What a waiting rank does about ten times a second."""
        self._hear()
        now = time.monotonic()
        waited = now - self._start
        if now - self._looked_for_life > SIGNS_OF_LIFE:
            self._looked_for_life = now
            self._look_for_dead(work)
        if self._inquires_at is not None and waited > self._inquires_at:
            self._inquires_at = None
            self._inquiry = self._control.later(lambda: self._inspector.inquire(self._serial))
        if self._deadline is not None and waited > self._deadline:
            self._give_up(waited)
        if self._warns_at is not None and waited > self._warns_at:
            self._warns_at = None
            if self._is_teller():
                logger.warning(
                    "coordinator %r, rank %d has waited %.1f s in the update of step %s. %s",
                    self._inspector.name, self._inspector.rank, waited,
                    step_name(self._tag, self._serial), self._story()[1],
                )  # fmt: skip

    def _hear(self) -> None:
        """Raise what the last look has found, and look again."""
        if self._news is not None and not self._news.wait(0):
            return
        news, self._news = self._news, None
        if news is not None:
            try:
                news.result()
            except TransportError as error:
                logger.debug("no news: %s", error)  # the reduction itself does not need the store
        self._news = self._control.later(self._look)

    def _look_for_dead(self, work: Work) -> None:
        cards = self._inspector.cards
        dead = cards.gone()
        # A rank may leave the reduction, and its process end, a little earlier than this one notices.
        if dead and not work.wait(SLICE):
            self._hear()
            raise TransportError(f"the process of {cards.describe(dead[0])} is gone")

    def _is_teller(self) -> bool:
        if self._inquiry is None or not self._answered(self._inquiry):
            return True  # the store is silent, and each rank says what it knows
        try:
            return self._inquiry.result()
        except (Fp8DistError, RuntimeError):
            return True

    def _answered(self, request: Request[Any]) -> bool:
        """Whether the store answers; once it has been silent for long, it is not waited for again."""
        answered = request.wait(0 if self._silent else TELLING)
        self._silent = not answered
        return answered

    def _story(self) -> tuple[tuple[int, ...], str]:
        inspector = self._inspector
        request = self._control.later(lambda: inspector.story(self._serial))
        if not self._answered(request):
            return inspector.known_here("Who is missing cannot be said: the store does not answer.")
        return request.result()

    def _give_up(self, waited: float) -> None:
        inspector = self._inspector
        assert self._timeout is not None
        if waited < self._timeout + HEARING and not self._is_teller():
            return  # who tells leaves a note for all
        missing, story = self._story()
        world = len(inspector.global_ranks)
        raise CollectiveTimeout(
            f"coordinator {inspector.name!r}, rank {inspector.rank}: the update of step "
            f"{step_name(self._tag, self._serial)} expects all {world} ranks within {self._timeout:g} s. {story}\n"
            "No rank commits this step; call recover() on every rank once all of them can, or restart from a "
            "checkpoint",
            missing=missing,
        )
