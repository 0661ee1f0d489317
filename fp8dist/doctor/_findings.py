"""What a check has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class Level(IntEnum):
    """How bad it is. `BAD` stops a run or makes it wrong; `WARNING` makes it slow or fragile."""

    OK = 0
    NOTE = 1
    WARNING = 2
    BAD = 3


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    """What was looked at: `torch`, `FP8 on cuda:0`, `MPI`."""
    level: Level
    seen: str
    """What was there, in one sentence or less."""
    mend: str = ""
    """What to change; empty where nothing needs to be."""

    def as_plain(self) -> dict[str, Any]:
        """For JSON; the level by its name in lower case."""
        return asdict(self) | {"level": self.level.name.lower()}


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level; `OK` of none."""
    return max((finding.level for finding in findings), default=Level.OK)
