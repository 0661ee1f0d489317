"""Transport of a single process: the MAX over one rank is the rank's own words."""

from __future__ import annotations

import torch
from torch.distributed import HashStore

from ._base import Work
from ._control import Control


class _Done:
    def wait(self, seconds: float) -> bool:
        return True


class LocalTransport:
    """One rank that meets nobody; it counts its collectives like the others do."""

    def __init__(self) -> None:
        self.rank = 0
        self.global_ranks: tuple[int, ...] = (0,)
        self.control = Control(HashStore(), "fp8dist")
        self.collectives = 0

    @property
    def started(self) -> list[int]:
        """See `Transport.started`."""
        return [0]

    def connect(self, communicator: str, device: torch.device, timeout: float | None) -> None:
        """Nothing to connect."""

    def start_max(self, words: torch.Tensor) -> Work:
        """See `Transport.start_max`."""
        self.collectives += 1
        return _Done()

    def catch_up(self, started: list[int]) -> None:
        """Nobody waits."""

    def disconnect(self) -> None:
        """Nothing to drop."""
