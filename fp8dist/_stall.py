"""Waiting with names: who has not entered the collective, and what each of those did last."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._header import Tag
from ._layout import format_ranks
from .errors import CollectiveTimeout, TransportError
from .transport import Control, Work

logger = logging.getLogger("fp8dist")

SLICE = 0.1  # seconds between two looks at the store; bounds how long an abort can stay unseen


@dataclass
class StallInspector:
    """Publishes where this rank is, and waits for reductions on its behalf.

    One record per rank and coordinator, overwritten at scope entry and at scope exit (about 7 us each, no
    reply is awaited). Peers' records are read only after a wait has become suspicious.
    """

    control: Control
    """The coordinator's own part of the store."""
    everyone: Control
    """The part of the store where coordinators list themselves."""
    name: str
    rank: int
    global_ranks: Sequence[int]
    stall_warning: float | None

    def list_coordinator(self) -> None:
        """Enter this coordinator into the list that `story` looks through. One member does it."""
        index = self.everyone.count("coordinators", 1)
        entry = {"name": self.name, "prefix": self.control.prefix, "ranks": list(self.global_ranks)}
        self.everyone.set(f"coordinator/{index}", json.dumps(entry))

    def publish(self, phase: str, serial: int, tag: Tag, place: str = "") -> None:
        """Say where this rank is: `open` or `exit` of scope number `serial`."""
        if len(self.global_ranks) > 1:
            record = {"phase": phase, "serial": serial, "tag": tag, "at": time.time(), "place": place}
            self.control.set(f"progress/{self.rank}", json.dumps(record))

    def wait(
        self, work: Work, serial: int, tag: Tag, timeout: float | None, look: Callable[[], None]
    ) -> float:
        """Wait for `work`; return the seconds it took.

        Args:
            work: the started reduction.
            serial: which scope of this coordinator it closes.
            tag: its step tag, for messages.
            timeout: seconds, None waits for ever.
            look: called about every 0.1 s while the work is pending; raises to stop waiting.

        Raises:
            CollectiveTimeout: names the ranks that have not entered.
            TransportError: the communicator broke.
        """
        start = time.monotonic()
        warned = self.stall_warning is None
        while not work.wait(SLICE):
            look()
            waited = time.monotonic() - start
            if timeout is not None and waited > timeout:
                missing, story = self.story(serial)
                raise CollectiveTimeout(
                    f"coordinator {self.name!r}, rank {self.rank}: the update of step {_step(tag, serial)} expects "
                    f"all {len(self.global_ranks)} ranks within {timeout:g} s. {story}\nNo rank commits this step; "
                    "call recover() on every rank once all of them can, or restart from a checkpoint",
                    missing=missing,
                )
            if not warned and waited > (self.stall_warning or 0.0):
                warned = True
                logger.warning(
                    "coordinator %r, rank %d has waited %.1f s in the update of step %s. %s",
                    self.name, self.rank, waited, _step(tag, serial), self.story(serial)[1],
                )  # fmt: skip
        return time.monotonic() - start

    def story(self, serial: int) -> tuple[tuple[int, ...], str]:
        """Ranks that have not entered collective `serial`, and a line for each about its last act."""
        missing, lines = [], []
        try:
            elsewhere = self._waiting_elsewhere()
            for rank in range(len(self.global_ranks)):
                record = self._record(self.control, rank)
                if record is not None and record["serial"] >= serial and record["phase"] == "exit":
                    continue
                missing.append(rank)
                lines.append(f"  rank {rank}: {_last_act(record, serial)}{elsewhere.get(rank, '')}")
        except TransportError as error:
            return (), f"Who is missing cannot be said: {error}"
        if not missing:
            return (), "All ranks have entered; the network or a dying rank holds it up."
        more = "" if len(lines) <= 16 else f"\n  ... and {len(lines) - 16} more"
        have = "has" if len(missing) == 1 else "have"
        return tuple(missing), (
            f"{format_ranks(missing).capitalize()} {have} not entered:\n" + "\n".join(lines[:16]) + more
        )

    def _record(self, control: Control, rank: int) -> dict[str, Any] | None:
        data = control.get(f"progress/{rank}")
        return None if data is None else json.loads(data)

    def _waiting_elsewhere(self) -> dict[int, str]:
        """Of each member that waits in another coordinator's exit: which one. Scopes opened in another order
        on another rank end like this."""
        found = {}
        for index in range(1, self.everyone.count("coordinators") + 1):
            data = self.everyone.get(f"coordinator/{index}")
            if data is None:
                continue
            other = json.loads(data)
            if other["prefix"] == self.control.prefix:
                continue
            board = self.everyone.under(other["prefix"].removeprefix(self.everyone.prefix + "/"))
            for other_rank, global_rank in enumerate(other["ranks"]):
                record = self._record(board, other_rank)
                if record is None or record["phase"] != "exit" or global_rank not in self.global_ranks:
                    continue
                found[self.global_ranks.index(global_rank)] = (
                    f"; it was last seen in the exit of coordinator {other['name']!r} (step "
                    f"{_step(record['tag'], record['serial'])}): open the scopes of several coordinators in the "
                    "same order on every rank"
                )
        return found


def _step(tag: Tag, serial: int) -> str:
    return f"{tag!r}" if tag is not None else f"number {serial} (no tag)"


def _last_act(record: dict[str, Any] | None, serial: int) -> str:
    if record is None:
        return "it has not opened any scope"
    ago = f"{max(0.0, time.time() - record['at']):.1f} s ago"
    step = _step(record["tag"], record["serial"])
    where = f" at {record['place']}" if record["place"] else ""
    if record["phase"] == "open":
        return f"it opened step {step}{where} {ago} and is still inside (forward, backward or the schedule's P2P)"
    behind = "" if record["serial"] == serial - 1 else f" ({serial - record['serial']} scopes behind)"
    return f"it left step {step} {ago} and has opened no scope since{behind}"
