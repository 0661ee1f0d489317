"""Which slots have drifted apart, and on which ranks. Runs only after a header has told that some have.

Two rounds through the store instead of all digests from all ranks: each holder posts digests of blocks of slots, the
lowest holder picks the blocks that differ, and only their slots are told one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._layout import format_ranks, pack, unpack
from .transport import Control

GRACE = 2.0  # seconds for each round; a rank that does not answer is left out
BLOCKS = 4  # blocks that are looked into; there is no need to name everything
NAMED = 8  # slots that the message names


@dataclass(frozen=True)
class Member:
    """One rank's part in the search, for the slots of one class.

    Attributes:
        control: a part of the store for this search alone.
        rank: own group rank.
        holders: the ranks that hold the class.
        names: its slots, in the order of the layout.
        digests: of each slot's scale and history as this rank has them; empty on a rank that holds none.
        scales: of each slot, for the message.
    """

    control: Control
    rank: int
    holders: Sequence[int]
    names: Sequence[str]
    digests: Sequence[int]
    scales: Sequence[float]

    def search(self) -> str:
        """What differs, the same text on every rank; empty if the search was cut short."""
        if self.rank in self.holders:
            size = max(1, math.isqrt(len(self.names)))
            # One differing slot makes a differing sum; several might cancel out, once in 2**32.
            blocks = [sum(self.digests[i : i + size]) for i in range(0, len(self.names), size)]
            self.control.set(f"blocks/{self.rank}", pack(blocks))
            leads = self.rank == self.holders[0]
            if leads:
                chosen = _differing(self._gather("blocks"))[:BLOCKS]
                self.control.set("chosen", pack([size, chosen]))
            asked = self._await("chosen")
            if asked is None:
                return ""
            size, chosen = unpack(asked)
            slots = [
                i for block in chosen for i in range(block * size, min(len(self.names), (block + 1) * size))
            ]
            self.control.set(
                f"slots/{self.rank}", pack([[i, self.digests[i], self.scales[i]] for i in slots])
            )
            if leads:
                self.control.set("text", self._text(self._gather("slots")))
        text = self._await("text", rounds=3)
        return "" if text is None else text.decode()

    def _text(self, posted: dict[int, list[list[float]]]) -> str:
        lines = []
        for row in zip(*posted.values(), strict=True):
            by_digest: dict[float, list[int]] = {}
            scale_of = {}
            for rank, (_, digest, scale) in zip(posted, row, strict=True):
                by_digest.setdefault(digest, []).append(rank)
                scale_of[rank] = scale
            if len(by_digest) == 1:
                continue
            most = max(by_digest.values(), key=len)
            others = [ranks for ranks in by_digest.values() if ranks is not most]
            told = "; ".join(
                f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} scale {scale_of[ranks[0]]!r}"
                for ranks in others
            )
            same = "" if any(scale_of[r[0]] != scale_of[most[0]] for r in others) else " and another history"
            lines.append(
                f"{self.names[int(row[0][0])]!r}: {told}{same}, {format_ranks(most)} {scale_of[most[0]]!r}"
            )
        more = f"; and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        return "; ".join(lines[:NAMED]) + more

    def _gather(self, what: str) -> dict[int, list[Any]]:
        keys = [f"{what}/{rank}" for rank in self.holders]
        _wait_until(lambda: self.control.check(keys), GRACE)
        values = self.control.get_each(keys)
        return {
            rank: unpack(value) for rank, value in zip(self.holders, values, strict=True) if value is not None
        }

    def _await(self, key: str, rounds: int = 2) -> bytes | None:
        _wait_until(lambda: self.control.check([key]), rounds * GRACE)
        return self.control.get(key)


def _differing(posted: dict[int, list[int]]) -> list[int]:
    return [i for i, values in enumerate(zip(*posted.values(), strict=True)) if len(set(values)) > 1]


def _wait_until(there: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not there() and time.monotonic() < deadline:
        time.sleep(0.002)
