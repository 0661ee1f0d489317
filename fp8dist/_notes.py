"""What ranks tell each other beside the collective: that one failed, gave up or closed, and values that differ.

All notes belong to one communicator, so a recovery, which builds a new one, leaves the old notes behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._decisions import said
from ._header import Tag
from ._layout import pack, unpack
from .errors import CollectiveTimeout, PeerAborted, RanksDisagree, TransportError
from .transport import Control

logger = logging.getLogger("fp8dist")

CLOSING_GRACE = 1.0  # seconds that close() waits for the peers to close, too
DISAGREEMENT_GRACE = 1.0  # seconds to wait for every rank's value once all know that they differ
NOTE_GRACE = 0.5  # seconds to wait for the note of a rank whose failure shows already

MENDS = {
    "tag": "Some rank is at another step: see that all ranks skip and repeat the same steps.",
    "layout": "Create the coordinator anew on every rank.",
    "recipe": "Build the recipe from the same configuration on every rank.",
    "part": "Some rank commits its forward slots where others commit gradients: run the same autocasts and backwards.",
    "generation": "Load the same checkpoint on every rank.",
    "scopes": "Some rank skipped a step or ran one more: every rank opens one scope per optimizer step.",
    "scales": "They have drifted apart (memory corruption, or a state loaded on some ranks only): load one checkpoint "
    "on every rank, or let every rank call recover(heal_from=RANK) with a rank that is right.",
}


@dataclass
class Notes:
    """The notes of one coordinator, as one rank leaves and reads them."""

    control: Control
    """The coordinator's own part of the store."""
    name: str
    rank: int
    world: int
    communicator: str = ""
    """Whose notes; empty before the first one is built."""

    def leave(
        self, rank: int, tag: Tag, what: str, place: str = "", missing: Sequence[int] | None = None
    ) -> None:
        """Say that `rank` left a step. One note for the whole group; the first one stays.

        Args:
            rank: who left.
            tag: the step.
            what: by what.
            place: where.
            missing: it gave up waiting for these ranks; None if it failed itself.
        """
        key = f"failed/{self.communicator}"
        note = pack({"rank": rank, "tag": tag, "what": what, "place": place, "missing": missing})

        def write() -> None:
            try:
                if self.control.get(key) is None:
                    self.control.set(key, note)
            except TransportError as also:
                logger.debug("no note could be left: %s", also)

        self.control.later(write)  # a rank that fails does not wait for a store

    def look(self, serial: int) -> None:
        """Raise if some rank has left a note, or has closed the coordinator before scope `serial`.

        Raises:
            PeerAborted: a rank failed, or gave up waiting for this one.
            CollectiveTimeout: a rank gave up waiting for others.
            RanksDisagree: a rank ran fewer scopes.
        """
        data, first = self.control.get_each(
            [f"failed/{self.communicator}", f"closed/{self.communicator}/first"]
        )
        if data is not None:
            note = unpack(data)
            missing = note.pop("missing")
            if missing is not None and self.rank not in missing:
                raise CollectiveTimeout(note["what"], missing=tuple(missing))
            raise self.peer_aborted(**note)
        if first is not None and int(first.split()[1]) < serial:
            rank, count = first.decode().split()
            raise RanksDisagree(
                f"coordinator {self.name!r}: all ranks expect to run equally many scopes but rank {rank} closed it "
                f"after {count} and rank {self.rank} is in number {serial}. {MENDS['scopes']}",
                field="scopes",
            )

    def look_for(self, seconds: float, serial: int) -> None:
        """`look` again and again for that long, because a note may be on its way."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look(serial)
            time.sleep(0.01)

    def peer_aborted(self, rank: int, tag: Tag = None, what: str = "", place: str = "") -> PeerAborted:
        """The error that tells of another rank's failure."""
        how = (f" with {what}" if what else "") + (f" at {place}" if place else "")
        return PeerAborted(
            f"rank {rank} left step {tag!r} of coordinator {self.name!r}{how}; no rank commits it (this is rank "
            f"{self.rank}, its state is unchanged). Mend the cause on rank {rank}, or let every rank catch its error "
            "and call recover()",
            rank=rank,
            step=tag,
            place=place,
        )

    def disagreement(self, field: str, values: Mapping[str, Any], serial: int, tag: Tag) -> RanksDisagree:
        """The error that names each rank's value of a field; every rank brings its `values`."""
        board = self.control.under(f"disagree/{self.communicator}/{serial}")
        board.set(str(self.rank), pack(values))
        groups = self._gather(board, DISAGREEMENT_GRACE)
        by_value: dict[str, list[int]] = {}
        for rank in range(self.world):
            value = unpack(groups[rank])[field] if rank in groups else "unknown"
            by_value.setdefault(str(value), []).append(rank)
        return RanksDisagree(
            f"coordinator {self.name!r}, step {tag!r}: all ranks expect the same {field} but have {said(by_value)}; no "
            f"rank commits the step (this is rank {self.rank}). {MENDS[field]}",
            field=field,
        )

    def board(self, name: str) -> Control:
        """A part of the store for one purpose on the present communicator."""
        return self.control.under(f"{name}/{self.communicator}")

    def close(self, scopes: int) -> None:
        """Post how many scopes this rank ran, and compare with the peers that close as well.

        The wait is short and may end early: several coordinators may close in another order on another rank,
        and who has a scope more is told where it waits for it, by `look`.

        Raises:
            RanksDisagree: the counts differ.
        """
        board = self.control.under(f"closed/{self.communicator}")
        board.set(str(self.rank), str(scopes))
        if board.get("first") is None:
            board.set("first", f"{self.rank} {scopes}")
        by_count: dict[str, list[int]] = {}
        for rank, count in self._gather(board, CLOSING_GRACE).items():
            by_count.setdefault(count.decode(), []).append(rank)
        if len(by_count) > 1:
            raise RanksDisagree(
                f"coordinator {self.name!r} closes; all ranks expect to have run equally many scopes but ran "
                f"{said(by_count)}. {MENDS['scopes']}",
                field="scopes",
            )

    def _gather(self, board: Control, seconds: float) -> dict[int, bytes]:
        """What the ranks have posted, after waiting at most `seconds` for all of them."""
        keys = [str(rank) for rank in range(self.world)]
        deadline = time.monotonic() + seconds
        while not board.check(keys) and time.monotonic() < deadline:
            time.sleep(0.002)
        values = {rank: board.get(str(rank)) for rank in range(self.world)}
        return {rank: value for rank, value in values.items() if value is not None}
