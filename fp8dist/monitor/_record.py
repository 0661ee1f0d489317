"""The records that sinks get: plain dictionaries, and what all sinks need to read them.

    {"kind": "start", "version": 1, "rank", "world", "host", "name", "recipe": {}, "time", "slots": [], "stages": []}
    {"kind": "sample", "step", "time", "rank", "generation", "commits", "aborts", "collectives", "wait_s", "loss",
     "numbers": {}, "scale": [], "amax": [], "headroom": [], "saturated": [] or None, "flushed": [] or None,
     "stale": [], "nonfinite": []}
    {"kind": "warning", "step", "time", "rank", "what", "slot": name or None, "message"}

Lists of a sample are in the order of `slots` of the newest start record; a new one comes when the slots change. Numbers
are finite; None stands for what is not known, not finite, or did not happen.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Protocol

import numpy as np

from ..recipe import Recipe

VERSION = 1
Record = dict[str, Any]


class Sink(Protocol):
    """Where records go. Whatever it raises switches it off, with one warning; training goes on."""

    def write(self, record: Record) -> None:
        """Take one record; must not change it."""

    def close(self) -> None:
        """No more records come."""


def plain(values: np.ndarray) -> list[float | None]:
    """Numbers as JSON has them: None for what is not finite; float32 by its shortest digits."""
    # By way of text, since as a double the float32 next to 0.1 would take 18 digits.
    numbers = map(float, values.astype(np.str_)) if values.dtype == np.float32 else values.tolist()
    finite = np.isfinite(values)
    if finite.all():
        return list(numbers)
    return [number if known else None for number, known in zip(numbers, finite.tolist(), strict=True)]


def column(record: Record, field: str) -> np.ndarray:
    """A list of a sample as float64 [slots], NaN for what is not known."""
    values = record[field]
    if values is None:
        return np.full(len(record["scale"]), np.nan)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def worst(record: Record, count: int) -> list[int]:
    """Indices of the slots of a sample that need attention most: saturating, flushing, little headroom."""
    saturated, flushed, headroom = (
        np.nan_to_num(column(record, field), nan=unknown)
        for field, unknown in (("saturated", 0.0), ("flushed", 0.0), ("headroom", np.inf))
    )
    order = np.lexsort((headroom, -flushed, -saturated))
    return [int(i) for i in order[:count]]


def extremes(record: Record) -> dict[str, float]:
    """Over all slots of a sample, the worst of each column, such as `saturated_max`; without those not known."""
    found = {}
    for field, word in (("headroom", "min"), ("saturated", "max"), ("flushed", "max"), ("stale", "max")):
        values = column(record, field)
        known = values[np.isfinite(values)]
        if known.size:
            found[f"{field}_{word}"] = float(known.min() if word == "min" else known.max())
    return found


def recipe_as_plain(recipe: Recipe) -> Record:
    """Class and fields of a recipe; functions by their names."""

    def shown(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(getattr(value, "__qualname__", type(value).__name__))

    fields = {field.name: shown(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}
    return {"class": type(recipe).__name__, **fields}


def check_positive_int(what: str, value: object) -> None:
    """Raise ValueError unless `value` is an int >= 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} expects an int >= 1 but got {value!r}")
