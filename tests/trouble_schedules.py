"""Schedules of trouble on four ranks, as values: a recipe, who holds which slots, and what happens.

The repr of a `Schedule`, evaluated, is the schedule again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import fp8dist as f8

WORLD = 4
EVERYONE = tuple(range(WORLD))

Amax = tuple[str, float]
RuleSet = Literal["fp8dist", "te_fused", "te_unfused"]


class Brief:
    """A repr without the fields that have their default."""

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True, repr=False)
class Rule(Brief):
    """What of a recipe changes the update."""

    length: int = 4
    algo: Literal["max", "most_recent"] = "max"
    idle: Literal["age", "hold"] = "age"
    non_finite: Literal["absent", "freeze"] = "absent"
    first_step: Literal["current", "unit"] = "current"
    rule_set: RuleSet = "fp8dist"
    margin: int = 0
    e4m3: bool = False

    def recipe(self) -> f8.DelayedScaling:
        """The library's recipe."""
        return f8.DelayedScaling(
            fp8_format=f8.Format.E4M3 if self.e4m3 else f8.Format.HYBRID,
            margin=self.margin,
            amax_history_len=self.length,
            amax_compute_algo=self.algo,
            idle=self.idle,
            non_finite=self.non_finite,
            first_step=self.first_step,
            rule_set=self.rule_set,
        )


@dataclass(frozen=True, repr=False)
class Act(Brief):
    """What one rank does in one step, in the order of the fields. It records only what it has declared.

    `lost` says after which of the step's collectives an interrupt hits the rank although its peers have what they
    need: the case in which some ranks commit and some do not. 0: it does not.
    """

    late: int = 0  # milliseconds
    tag: int | str | None = None
    nested: bool = False
    fail: str = ""
    fail_first: bool = False
    abort: bool = False
    new: tuple[str, ...] = ()
    records: tuple[Amax, ...] = ()
    paused: tuple[Amax, ...] = ()
    request: bool = True
    lost: int = 0


@dataclass(frozen=True, repr=False)
class Step(Brief):
    """One step; the acts by rank."""

    acts: tuple[Act, ...]


@dataclass(frozen=True, repr=False)
class Evaluate(Brief):
    """Records without a scope, and in a pause: nothing may come of it."""

    ranks: tuple[int, ...]
    amax: float


@dataclass(frozen=True, repr=False)
class Save(Brief):
    """All ranks' states become one checkpoint; of what several hold the lowest rank's is kept."""


@dataclass(frozen=True, repr=False)
class Load(Brief):
    """These ranks go back to a checkpoint; nothing happens while there is none."""

    checkpoint: int = -1
    ranks: tuple[int, ...] = EVERYONE


@dataclass(frozen=True, repr=False)
class Drift(Brief):
    """One bit of a slot changes on one rank: of its scale, or of the history's row of that age."""

    rank: int
    name: str
    row: int | None = None


@dataclass(frozen=True, repr=False)
class Recover(Brief):
    """All ranks call `recover()`."""

    heal_from: int | None = None


@dataclass(frozen=True, repr=False)
class Reopen(Brief):
    """All ranks close, and create the coordinator anew; these ranks with a checkpoint's state, unless it is None."""

    checkpoint: int | None = -1
    ranks: tuple[int, ...] = EVERYONE


Event = Step | Evaluate | Save | Load | Drift | Recover | Reopen


@dataclass(frozen=True, repr=False)
class Schedule(Brief):
    """A recipe, the slots that each rank declares at first, and what happens."""

    rule: Rule
    slots: tuple[tuple[str, ...], ...]
    events: tuple[Event, ...]
