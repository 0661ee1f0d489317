"""Lines of files that a run has left, one after the other; those of a `JsonLines` sink are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from ._record import VERSION, Record

LARGEST = 2**53  # beyond it a float cannot hold a whole number, and no run gets there


class UnknownVersion(ValueError):
    """A file of another release: to read it anyway would show wrong figures."""

    def __init__(self, path: Path, version: object) -> None:
        super().__init__(
            f"{path} expects version {VERSION} but got {version!r}; read it with the release that wrote it"
        )
        self.version = version


class Lines:
    """The JSON objects of a file, one a line; what is none is skipped and counted.

    Attributes:
        good: lines that were given out and not rejected.
        skipped: the others, but for empty ones.
        empty: lines with nothing in them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.good = self.skipped = self.empty = 0

    def __iter__(self) -> Iterator[Record]:
        return self._objects(float)

    def _objects(self, constant: Callable[[str], Any]) -> Iterator[Record]:
        """`constant` reads NaN and Infinity."""
        with self.path.open("rb") as file:
            for line in file:
                if not line.strip():
                    self.empty += 1
                    continue
                try:
                    value = json.loads(line, parse_constant=constant)
                except (ValueError, RecursionError):
                    value = None
                self.good += 1
                if isinstance(value, dict):
                    yield value
                else:
                    self.reject()

    def reject(self) -> None:
        """The line given out last is of no use."""
        self.good -= 1
        self.skipped += 1


class Records(Lines):
    """The records of a `JsonLines` sink's file that have all fields they need. Each sample follows its start."""

    def __iter__(self) -> Iterator[Record]:
        """Read the file.

        Raises:
            UnknownVersion: a start has another version.
            OSError: the file system refuses.
        """
        slots: int | None = None
        for record in self._objects(_refuse):
            starts = record.get("kind") == "start"
            if starts and record.get("version") != VERSION:
                raise UnknownVersion(self.path, record.get("version"))
            if _is_record(record, slots):
                slots = len(record["slots"]) if starts else slots
                yield record
            else:
                self.reject()


def whole(value: Any) -> TypeGuard[int]:
    """Whether it is a count, or the number of a step or a rank."""
    return type(value) is int and 0 <= value < LARGEST


_NONE = type(None)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {"rank": (int,), "world": (int,), "slots": (list,)},
    "sample": {
        "step": (int,), "time": (int, float), "rank": (int,), "generation": (int,), "commits": (int,),
        "aborts": (int,), "collectives": (int,), "wait_s": (int, float, _NONE),
    },
    "warning": {"step": (int,), "rank": (int,), "what": (str,), "slot": (str, _NONE), "message": (str,)},
}  # fmt: skip
# Lists of a sample, and whether null may stand for one, since nothing was counted.
_COLUMNS = {
    "scale": False,
    "amax": False,
    "headroom": False,
    "saturated": True,
    "flushed": True,
    "stale": False,
}


def _is_record(record: Record, slots: int | None) -> bool:
    kind = str(record.get("kind"))
    fields = _FIELDS.get(kind)
    if fields is None or not fields.keys() <= record.keys():
        return False
    if not all(_fits(record[name], kinds) for name, kinds in fields.items()):
        return False
    if kind == "start":
        return record["rank"] < record["world"] and {*map(type, record["slots"])} <= {str}
    return kind == "warning" or all(
        (counted and record.get(name) is None) or _is_column(record.get(name), slots)
        for name, counted in _COLUMNS.items()
    )


def _is_column(values: Any, slots: int | None) -> bool:
    # Types as a set, because to look at each of so many values takes too long.
    return isinstance(values, list) and len(values) == slots and {*map(type, values)} <= {int, float, _NONE}


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and (type(value) is not int or whole(value))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
