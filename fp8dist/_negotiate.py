"""Agreement of all ranks through the store: each brings a payload, one rank decides, all learn the result.

Used where lengths are not agreed yet (layout, communicator), so no collective may be used. It can be
repeated after a timeout: every attempt of a rank carries a fresh nonce, a result lists the nonces it was
made from, and the decider decides anew while it still waits for acknowledgements and a rank comes back.

    entry (every rank) → result (group rank 0) → ack (every rank) → done (group rank 0)
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._layout import format_ranks, pack, unpack
from .errors import CollectiveTimeout, Fp8DistError, LayoutMismatch, RanksDisagree
from .transport._control import Control

Decide = Callable[[list[tuple[Any, list[int]]]], Any]
"""Gets each distinct payload with the ranks that brought it; returns the result as JSON values."""

_ERRORS: dict[str, Callable[[str, str], Fp8DistError]] = {
    "LayoutMismatch": lambda text, _: LayoutMismatch(text),
    "RanksDisagree": lambda text, field: RanksDisagree(text, field=field),
}


@dataclass
class Negotiator:
    """Agreements of one coordinator.

    Args:
        control: the coordinator's own part of the store.
        global_ranks: default-group ranks of the members, by group rank.
        rank: own group rank.
        name: the coordinator's name, for messages.
    """

    control: Control
    global_ranks: Sequence[int]
    rank: int
    name: str
    cards: Control | None = None
    """Where each rank says which group it was given; None where there is only one rank."""

    def post_card(self) -> None:
        """Say which ranks this rank takes for the group, so that peers with another group notice."""
        if self.cards is not None:
            self.cards.set(str(self.global_ranks[self.rank]), pack(list(self.global_ranks)))

    def agree(self, topic: str, payload: Any, decide: Decide, timeout: float | None) -> Any:
        """Bring `payload`, return the result that group rank 0 decided.

        Args:
            topic: what is agreed, `layout`, `recover` or `close`; all ranks name the same.
            payload: JSON values.
            decide: may raise LayoutMismatch or RanksDisagree, which then every rank raises.
            timeout: seconds for the whole, None waits for ever.

        Raises:
            CollectiveTimeout: not all ranks came in time; it names the missing ones.
        """
        here = self.control.under(topic)
        blob = pack(payload)
        digest = hashlib.sha256(blob).hexdigest()
        if not here.check([f"blob/{digest}"]):
            here.set(f"blob/{digest}", blob)
        nonce = secrets.token_hex(6)
        here.set(f"entry/{self.rank}", f"{nonce} {digest}")
        clock = _Clock(timeout)
        return (
            self._lead(here, topic, decide, clock)
            if self.rank == 0
            else self._follow(here, topic, nonce, clock)
        )

    def _lead(self, here: Control, topic: str, decide: Decide, clock: _Clock) -> Any:
        decided: dict[int, str] = {}
        previous = here.get("result")
        stale = set(unpack(previous)["entries"].values()) if previous else set()
        result: dict[str, Any] = {}
        while True:
            values = here.get_many([f"entry/{rank}" for rank in range(len(self.global_ranks))])
            entries = {rank: value.decode() for rank, value in enumerate(values or [])}
            if values is not None and not stale & set(entries.values()):
                if entries != decided:
                    decided = entries
                    result = self._decide(here, entries, decide)
                    here.set("result", pack(result))
                acks = here.get_many([f"ack/{rank}" for rank in range(1, len(self.global_ranks))])
                if acks is not None and all(ack.decode() == result["id"] for ack in acks):
                    here.set("done", result["id"])
                    return _unwrap(result)
            self._wait(here, topic, clock)

    def _decide(self, here: Control, entries: dict[int, str], decide: Decide) -> dict[str, Any]:
        groups: dict[str, list[int]] = {}
        for rank, entry in sorted(entries.items()):
            groups.setdefault(entry.split()[1], []).append(rank)
        result: dict[str, Any] = {"id": secrets.token_hex(6), "entries": entries}
        brought = [(unpack(here.get(f"blob/{digest}") or b""), ranks) for digest, ranks in groups.items()]
        try:
            result["value"] = decide(brought)
        except Fp8DistError as error:
            result["error"] = [type(error).__name__, str(error), getattr(error, "field", "")]
        return result

    def _follow(self, here: Control, topic: str, nonce: str, clock: _Clock) -> Any:
        acknowledged = ""
        result: dict[str, Any] = {}
        while True:
            data = here.get("result")
            if data is not None:
                seen = unpack(data)
                if seen["id"] != acknowledged and seen["entries"].get(str(self.rank), "").startswith(nonce):
                    result, acknowledged = seen, seen["id"]
                    here.set(f"ack/{self.rank}", acknowledged)
            if acknowledged and (here.get("done") or b"").decode() == acknowledged:
                return _unwrap(result)
            self._wait(here, topic, clock)

    def _entries(self, here: Control) -> dict[int, str]:
        found = {rank: here.get(f"entry/{rank}") for rank in range(len(self.global_ranks))}
        return {rank: value.decode() for rank, value in found.items() if value is not None}

    def _wait(self, here: Control, topic: str, clock: _Clock) -> None:
        """Sleep a little; look for a peer with another group; give up at the deadline."""
        if clock.second_passed():
            self._compare_cards()
        if clock.expired():
            missing = self._missing(here)
            late = tuple(missing)
            raise CollectiveTimeout(
                f"coordinator {self.name!r}: agreement on {topic!r} expects all {len(self.global_ranks)} ranks "
                f"within {clock.timeout:g} s but {format_ranks(late) if late else 'some rank'} did not come "
                f"(this is rank {self.rank}); see that every rank of the group reaches this call, "
                "and look at the log of the missing one",
                missing=late,
            )
        time.sleep(clock.nap())

    def _missing(self, here: Control) -> list[int]:
        result = unpack(here.get("result") or pack({"entries": {}}))
        stale = set(result["entries"].values())
        mine = self._entries(here).get(self.rank)
        if mine in stale:  # decided, but somebody has not acknowledged it
            acks = {rank: here.get(f"ack/{rank}") for rank in range(1, len(self.global_ranks))}
            return [rank for rank, ack in acks.items() if ack is None or ack.decode() != result["id"]]
        entries = self._entries(here)
        return [r for r in range(len(self.global_ranks)) if r not in entries or entries[r] in stale]

    def _compare_cards(self) -> None:
        if self.cards is None:
            return
        mine = list(self.global_ranks)
        for rank in mine:
            card = self.cards.get(str(rank))
            if card is not None and unpack(card) != mine:
                raise RanksDisagree(
                    f"coordinator {self.name!r} was given the group {format_ranks(mine)} on rank "
                    f"{mine[self.rank]} but {format_ranks(unpack(card))} on rank {rank}; create it with the same "
                    "group on all its members, and give groups that overlap coordinators of different name=",
                    field="group",
                )


class _Clock:
    """Deadline, naps that grow from 0.5 to 20 ms, and a tick a second."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout if timeout is not None else float("inf")
        self._start = self._tick = time.monotonic()
        self._nap = 0.0005

    def expired(self) -> bool:
        return time.monotonic() - self._start > self.timeout

    def second_passed(self) -> bool:
        if time.monotonic() - self._tick < min(1.0, self.timeout / 2):
            return False
        self._tick = time.monotonic()
        return True

    def nap(self) -> float:
        self._nap = min(self._nap * 1.5, 0.02)
        return self._nap


def _unwrap(result: dict[str, Any]) -> Any:
    if "error" in result:
        kind, text, field_name = result["error"]
        raise _ERRORS[kind](text, field_name)
    return result["value"]
