"""What a pipeline rank does in one step, as values: an action is a tuple, a program is a tuple of actions.

The text form of an action is torch's own, `<stage><kind><microbatch>`: `2F0`, `1SEND_B3`. Three kinds are added::

    open      the step's scope opens
    exit      it closes, with its one collective
    2UPDATE0  a collective inside the backward of stage 2, microbatch 0, as without a scope
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does. The values are torch's."""

    OPEN = "open"
    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - torch's letter for the backward of the inputs
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UPDATE = "UPDATE"
    EXIT = "exit"


COMPUTE = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))
BACKWARDS = frozenset((Kind.B, Kind.I))  # what gives the stage before its gradient
SENDS = frozenset((Kind.SEND_F, Kind.SEND_B))
RECEIVES = frozenset((Kind.RECV_F, Kind.RECV_B))
COLLECTIVES = frozenset((Kind.UPDATE, Kind.EXIT))


class Action(NamedTuple):
    """One thing that a rank does; stage and microbatch are -1 where the kind has none."""

    kind: Kind
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        return self.kind.value if self.stage < 0 else f"{self.stage}{self.kind.value}{self.microbatch}"


Program = tuple[Action, ...]


class Message(NamedTuple):
    """An activation (`F`) or a gradient (`B`) on its way into a stage."""

    direction: str
    stage: int
    microbatch: int

    @property
    def source(self) -> int:
        """The stage that it comes from."""
        return self.stage - 1 if self.direction == "F" else self.stage + 1

    @property
    def noun(self) -> str:
        """What it carries."""
        return "activation" if self.direction == "F" else "gradient"

    @property
    def what(self) -> str:
        """In words."""
        return f"{self.noun} of microbatch {self.microbatch} from stage {self.source}"


def needs(action: Action, n_stages: int) -> Message | None:
    """What a compute action cannot start without."""
    if action.kind is Kind.F and action.stage > 0:
        return Message("F", action.stage, action.microbatch)
    if action.kind in BACKWARDS and action.stage < n_stages - 1:
        return Message("B", action.stage, action.microbatch)
    return None


def gives(action: Action, n_stages: int) -> Message | None:
    """What a compute action makes for its neighbour, or what a send sends."""
    if action.kind in (Kind.F, Kind.SEND_F) and action.stage < n_stages - 1:
        return Message("F", action.stage + 1, action.microbatch)
    if action.kind in (*BACKWARDS, Kind.SEND_B) and action.stage > 0:
        return Message("B", action.stage - 1, action.microbatch)
    return None


def with_messages(compute: Sequence[Program], placement: Sequence[int]) -> tuple[Program, ...]:
    """Receive right before each compute action, and send right behind it, wherever the neighbour is another rank.

    Args:
        compute: the compute actions of each rank.
        placement: the rank of each stage.
    """
    n_stages = len(placement)
    programs = []
    for rank, actions in enumerate(compute):
        program: list[Action] = []
        for action in actions:
            wanted, made = needs(action, n_stages), gives(action, n_stages)
            if wanted is not None and placement[wanted.source] != rank:
                kind = Kind.RECV_F if wanted.direction == "F" else Kind.RECV_B
                program.append(Action(kind, action.stage, action.microbatch))
            program.append(action)
            if made is not None and placement[made.stage] != rank:
                kind = Kind.SEND_F if made.direction == "F" else Kind.SEND_B
                program.append(Action(kind, action.stage, action.microbatch))
        programs.append(tuple(program))
    return tuple(programs)


def check_messages(programs: Sequence[Program], placement: Sequence[int]) -> None:
    """What torch would stumble over, or would silently get wrong, before any question of waiting.

    Raises:
        ValueError: a compute action whose receive was not posted before it, a send of what is not computed yet, or
            two ranks that send and receive in different orders (messages of two ranks are matched by order).
    """
    n_stages = len(placement)
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, program in enumerate(programs):
        posted: set[Message] = set()
        made: set[Message] = set()
        for action in program:
            if action.kind in RECEIVES:
                message = Message(action.kind.value[-1], action.stage, action.microbatch)
                if not 0 <= message.source < n_stages:
                    raise ValueError(
                        f"expected a stage with a neighbour to receive from but got {action} on rank {rank}"
                    )
                posted.add(message)
                received[placement[message.source], rank].append(message)
            elif action.kind in SENDS:
                given = gives(action, n_stages)
                if given not in made or given is None:
                    raise ValueError(
                        f"expected what is sent to be computed before but got {action} on rank {rank}"
                    )
                sent[rank, placement[given.stage]].append(given)
            elif action.kind in COMPUTE:
                wanted, given = needs(action, n_stages), gives(action, n_stages)
                if wanted is not None and placement[wanted.source] != rank and wanted not in posted:
                    raise ValueError(f"expected a receive before {action} but got none on rank {rank}")
                made.update(() if given is None else (given,))
    _check_order(sent, received)


def _check_order(
    sent: Mapping[tuple[int, int], Sequence[Message]], received: Mapping[tuple[int, int], Sequence[Message]]
) -> None:
    for pair, messages in received.items():
        for one, other in zip(sent.get(pair, ()), messages, strict=False):
            if one != other:
                source, target = pair
                raise ValueError(
                    f"expected rank {target} to receive the {one.what} next, which rank {source} sends, but got a "
                    f"receive of the {other.what}; messages between two ranks are matched by order"
                )


def stages_of(actions: Iterable[Action]) -> tuple[int, ...]:
    """The stages that a program computes, ascending."""
    return tuple(sorted({action.stage for action in actions if action.kind in COMPUTE}))
