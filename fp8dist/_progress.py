"""Where every rank is: what each publishes of itself, and what can be said of one that is missed."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ._header import Tag
from .errors import TransportError
from .transport import Control

SENDING = 0.25  # seconds between two records that a rank sends unasked; steps may be much shorter
TICK = 0.5  # seconds between two looks of a rank at whether somebody asks for it
RANKS_PER_TICK = 500  # so many a second at most may look, however many there are
FRAMES = 3  # of a stack, innermost first
KNOWN_BEFOREHAND = 64  # ranks; of so many the cards are fetched before anything is wrong

_ACTIONS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


class Card(NamedTuple):
    """What does not change about a rank's process."""

    host: str
    pid: int
    born: str
    """When the process started, so that its number is not taken for that of a later one."""
    space: str
    """Names the host and its process numbers: only there `pid` means this process."""
    stages: list[int]
    """Its pipeline stages."""

    @classmethod
    def own(cls, stages: Sequence[int]) -> Card:
        """Of this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _born(pid) or "", _space(), sorted(stages))

    def state(self) -> str | None:
        """`gone`, `stopped` or `alive`; None where it runs on another host."""
        if not self.born or self.space != _space():
            return None
        fields = _stat(self.pid)
        if fields is None or fields[_BORN] != self.born or fields[0] in "ZX":
            return "gone"
        return "stopped" if fields[0] in "tT" else "alive"

    def __str__(self) -> str:
        stages = f", stage{'s' * (len(self.stages) != 1)} {', '.join(map(str, self.stages))}"
        return f"host {self.host}, pid {self.pid}{stages if self.stages else ''}"


_BORN = 19  # field 22 of /proc/PID/stat, counted behind the name


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None


def _born(pid: int) -> str | None:
    fields = _stat(pid)
    return None if fields is None else fields[_BORN]


def _space() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass
class Progress:
    """What one rank publishes: where it is, at a scope's entry and exit, and what it does there.

    Waking the control plane's thread costs more than all the rest of it. So a record is sent at most four times a
    second, and by `flush` as soon as it matters: when this rank waits, or its communicator breaks.
    """

    control: Control
    """The coordinator's own part of the store."""
    rank: int
    world: int

    def __post_init__(self) -> None:
        self._now: dict[str, Any] = {}
        self._event: list[Any] | None = None
        self._told: Any = None
        self._sending = threading.Lock()
        self._sent_at = 0.0
        self._thread = 0
        self._answered = b""
        self._ends = False

    def introduce(self, stages: Sequence[int]) -> None:
        """Leave this rank's card. What it leaves later is seen later, so a peer that sees that has the card."""
        if self.world > 1:
            self.control.set(f"card/{self.rank}", json.dumps(Card.own(stages)))

    def start(self, stages: Sequence[int]) -> None:
        """Leave this rank's card, and answer questions from now on."""
        if self.world == 1:
            return
        self.introduce(stages)
        self.control.line.visit(max(TICK, self.world / RANKS_PER_TICK), self._visit)

    def end(self) -> None:
        """Answer no more."""
        self._ends = True

    def publish(self, phase: str, serial: int, tag: Tag, place: str = "") -> None:
        """Say where this rank is: `open` or `exit` of scope number `serial`."""
        if self.world == 1:
            return
        self._thread = threading.get_ident()
        self._now = {"phase": phase, "serial": serial, "tag": tag, "at": time.time(), "place": place}
        if phase == "exit":
            self._event = None
        if time.monotonic() - self._sent_at > SENDING:
            self.flush()

    def flush(self) -> None:
        """Send what has not been sent yet."""
        if self._now and (self._now, self._event) != self._told:
            self._sent_at = time.monotonic()
            self.control.later(self._send)

    def _send(self) -> None:
        # The record is made when its turn comes. One that the caller had made could wait behind a visit, which sends
        # a newer one, and then replace it.
        with self._sending:
            told = (self._now, self._event)
            if told != self._told:
                self._told = told
                self.control.set(f"progress/{self.rank}", json.dumps({**told[0], "event": told[1]}))

    def chunk(self, action: str, stage: int, microbatch: int | None) -> None:
        """Note what a schedule has begun: F, B, I or W of a microbatch."""
        self._event = [action, stage, microbatch, time.time()]

    def requested(self) -> None:
        """Note that a module has asked for an update."""
        if self._event is None:
            self._event = ["request", 0, None, time.time()]

    def _visit(self) -> bool:
        """Called on the control plane's thread."""
        if self._ends:
            return False
        self.flush()
        try:
            nonce = self.control.get(f"ask/{self.rank}")
        except TransportError:
            return False  # the store is gone; whoever needs it is told so
        if nonce is not None and nonce != self._answered:
            self._answered = nonce
            self.control.set(f"stack/{self.rank}", json.dumps([nonce.decode(), _stack(self._thread)]))
        return True


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    frames = reversed(traceback.extract_stack(frame))
    return " < ".join(
        f"{f.name} ({f.filename}:{f.lineno})" for f, _ in zip(frames, range(FRAMES), strict=False)
    )


class Cards:
    """The cards of a group's ranks, each fetched once."""

    def __init__(self, control: Control, world: int) -> None:
        self._control, self._world = control, world
        self._cards: dict[int, Card] = {}

    def fetch(self) -> None:
        """Get those that are not known yet."""
        missing = [rank for rank in range(self._world) if rank not in self._cards]
        if missing:
            values = self._control.get_each([f"card/{rank}" for rank in missing])
            found = {
                rank: Card(*json.loads(value)) for rank, value in zip(missing, values, strict=True) if value
            }
            self._cards.update(found)

    def refetch(self) -> None:
        """Forget all of them, since ranks have connected anew, and fetch them if there are few."""
        self._cards.clear()
        if 1 < self._world <= KNOWN_BEFOREHAND:
            self.fetch()

    def describe(self, rank: int) -> str:
        """`rank 3 (host a, pid 17, stages 1, 3)`."""
        card = self._cards.get(rank)
        return f"rank {rank}" if card is None else f"rank {rank} ({card})"

    def state(self, rank: int) -> str | None:
        """`gone`, `stopped` or `alive`; None where that is not known."""
        card = self._cards.get(rank)
        return None if card is None else card.state()

    def gone(self) -> list[int]:
        """Ranks whose processes are known to have ended."""
        return [rank for rank, state in self.not_alive().items() if state == "gone"]

    def not_alive(self) -> dict[int, str]:
        """Ranks whose processes are known to be gone or stopped."""
        states = {rank: self.state(rank) for rank in list(self._cards)}
        return {rank: state for rank, state in states.items() if state in ("gone", "stopped")}


def ask_for_stacks(control: Control, ranks: Sequence[int], nonce: str) -> None:
    """Ask ranks where they are; their control threads answer within a tick or two."""
    for rank in ranks:
        control.set(f"ask/{rank}", nonce)


def records(control: Control, world: int) -> list[dict[str, Any] | None]:
    """What each rank published last."""
    values = control.get_each([f"progress/{rank}" for rank in range(world)])
    return [None if value is None else json.loads(value) for value in values]


def stacks(control: Control, ranks: Sequence[int]) -> dict[int, tuple[str, str]]:
    """What ranks have answered last: the question's nonce, and a stack."""
    values = control.get_each([f"stack/{rank}" for rank in ranks])
    return {
        rank: tuple(json.loads(value)) for rank, value in zip(ranks, values, strict=True) if value is not None
    }


def waiting_elsewhere(everyone: Control, own: Control, global_ranks: Sequence[int]) -> dict[int, str]:
    """Of each member that waits in another coordinator's exit: which one.

    Scopes opened in another order on another rank end like this.
    """
    found = {}
    for index in range(1, everyone.count("coordinators") + 1):
        data = everyone.get(f"coordinator/{index}")
        if data is None:
            continue
        other = json.loads(data)
        if other["prefix"] == own.prefix:
            continue
        board = everyone.under(other["prefix"].removeprefix(everyone.prefix + "/"))
        for global_rank, record in zip(other["ranks"], records(board, len(other["ranks"])), strict=True):
            if record is None or record["phase"] != "exit" or global_rank not in global_ranks:
                continue
            found[global_ranks.index(global_rank)] = (
                f"; it was last seen in the exit of coordinator {other['name']!r} (step "
                f"{step_name(record['tag'], record['serial'])}): open the scopes of several coordinators in the "
                "same order on every rank"
            )
    return found


def step_name(tag: Tag, serial: int) -> str:
    """How messages call a step."""
    return f"{tag!r}" if tag is not None else f"number {serial} (no tag)"


def last_act(record: dict[str, Any] | None, serial: int) -> str:
    """What a rank did last that has not entered collective `serial`."""
    if record is None:
        return "it has not opened any scope"
    step = step_name(record["tag"], record["serial"])
    where = f" at {record['place']}" if record["place"] else ""
    if record["phase"] == "open":
        event = record.get("event")
        return (
            f"it opened step {step}{where} {_ago(record['at'])} and is still inside (forward, backward or the "
            f"schedule's P2P)" + ("" if event is None else f"; its last event is {_event(event)}")
        )
    behind = "" if record["serial"] == serial - 1 else f" ({serial - record['serial']} scopes behind)"
    return f"it left step {step} {_ago(record['at'])} and has opened no scope since{behind}"


def likely_mend(found: Sequence[dict[str, Any] | None], states: Sequence[str | None]) -> str:
    """What to do about ranks that are missing, from what they published last and how their processes are."""
    if "gone" in states:
        return "a process has ended; its log tells why, and the launcher restarts from a checkpoint"
    if "stopped" in states:
        return "a process is stopped (a debugger, a full terminal, SIGSTOP); send it SIGCONT"
    if any(record is not None and record["phase"] == "open" for record in found):
        return (
            "a rank is inside its step: see where (its stack, its last event), and at the ranks that its schedule "
            "receives from"
        )
    return "a rank has not opened this step: every rank opens one scope per optimizer step, also ranks without data"


def _event(event: list[Any]) -> str:
    action, stage, microbatch, at = event
    if action == "request":
        return f"a backward's request, {_ago(at)}"
    number = "" if microbatch is None else f", microbatch {microbatch}"
    return f"{_ACTIONS.get(action, action)} of stage {stage}{number}, {_ago(at)}"


def _ago(at: float) -> str:
    return f"{max(0.0, time.time() - at):.1f} s ago"
