"""The seam between coordinator and communication: one MAX of int32 words, and a control plane."""

from __future__ import annotations

from typing import Protocol

import torch

from ._control import Control


class Work(Protocol):
    """A started reduction."""

    def wait(self, seconds: float) -> bool:
        """Wait at most that long; True once the words hold the MAX.

        Raises:
            TransportError: the communicator broke.
        """
        ...


class Transport(Protocol):
    """Data plane of one coordinator, on a communicator of its own.

    Attributes:
        rank: own rank in the group.
        global_ranks: default-group ranks of the members, by group rank.
        control: store prefix of the library; the coordinator goes below it with its name.
        collectives: reductions started so far. The proof of "one collective per step".
    """

    rank: int
    global_ranks: tuple[int, ...]
    control: Control
    collectives: int

    @property
    def started(self) -> list[int]:
        """`[number, size before last, last size]` of the present communicator."""
        ...

    def connect(self, communicator: str, device: torch.device, timeout: float | None) -> None:
        """Build the communicator with that name; replaces an earlier one. Every rank calls it."""
        ...

    def start_max(self, words: torch.Tensor) -> Work:
        """Start an element-wise MAX over all ranks, in place on contiguous int32 words."""
        ...

    def catch_up(self, started: list[int]) -> None:
        """Enter the reductions that peers have started and this rank has not, so that theirs can end."""
        ...

    def disconnect(self) -> None:
        """Drop the communicator. Local, never waits for a peer."""
        ...
