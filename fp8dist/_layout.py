"""Which slots exist on which ranks: what a rank declares, and the union that all ranks agree on.

Pure: the handshake that carries these values is `_negotiate.agree`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import LayoutMismatch

MAX_LISTED = 16  # entries or ranks that a message prints


@dataclass(frozen=True)
class Entry:
    """One rank's claim about one slot."""

    name: str
    shape: tuple[int, ...] | None = None
    """Global shape of the tensor where it is known."""
    stage: int | None = None
    """Pipeline stage that holds the module, known once a schedule is attached."""
    fingerprint: str | None = None
    """Digest of an unsharded weight's values: replicas have equal ones, other layers do not."""


@dataclass(frozen=True)
class Layout:
    """The agreed union: the order of the amax row, and who holds what.

    Attributes:
        names: every slot of the group, in row order: forward slots before gradients, then by class, then by
            name.
        class_of: class index of each name. A class is a set of ranks that hold the same names.
        holders: the ranks of each class.
    """

    names: tuple[str, ...]
    class_of: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    @cached_property
    def digest(self) -> int:
        """31 bits over names, order and holders."""
        text = json.dumps([self.names, self.class_of, self.holders])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF

    @cached_property
    def position(self) -> dict[str, int]:
        """Row index of each name."""
        return {name: i for i, name in enumerate(self.names)}

    def label(self, class_index: int) -> str:
        """How a class is printed: the ranks that share its slots."""
        return self._labels[class_index]

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        return tuple(format_ranks(ranks) for ranks in self.holders)


EMPTY = Layout((), (), ())


def is_backward(name: str) -> bool:
    """Whether a slot holds gradients; these have their own FP8 format and ring."""
    return name.endswith(".grad_output")


def format_ranks(ranks: Sequence[int]) -> str:
    """`ranks 0-3, 6`; at most 16 runs are printed."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:MAX_LISTED])
    more = f" and {len(runs) - MAX_LISTED} more runs" if len(runs) > MAX_LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def pack(value: Any) -> bytes:
    """Canonical compressed JSON, equal for equal values."""
    return zlib.compress(json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), 1)


def unpack(data: bytes) -> Any:
    """Inverse of `pack`."""
    return json.loads(zlib.decompress(data))


def entries_to_plain(entries: Sequence[Entry]) -> list[list[Any]]:
    """Entries as JSON values, sorted by name."""
    return [[e.name, e.shape, e.stage, e.fingerprint] for e in sorted(entries, key=lambda e: e.name)]


def entries_from_plain(plain: Sequence[Sequence[Any]]) -> list[Entry]:
    """Inverse of `entries_to_plain`."""
    return [
        Entry(name, None if shape is None else tuple(shape), stage, fingerprint)
        for name, shape, stage, fingerprint in plain
    ]


_MENDS = {
    "stage": "these are different layers with one name: build stages with global names, or give "
    "convert(..., prefix=...) or convert(..., names=...)",
    "shape": "different tensors carry one name: give convert(..., prefix=...) or names=..., or declare shards "
    "with sharded=",
    "fingerprint": "the weights differ: either different layers carry one name (give prefix= or names=), or the "
    "weight is sharded (declare it with sharded=), or replicas start from different values (broadcast them first)",
}


def merge(declared: Sequence[tuple[Sequence[Entry], Sequence[int]]]) -> Layout:
    """Union of the declarations, each given once with the ranks that made it.

    Raises:
        LayoutMismatch: one name with two stages, shapes or weights. The message lists the entries.
    """
    seen: dict[str, list[tuple[Entry, int]]] = {}
    for index, (entries, _) in enumerate(declared):
        for entry in entries:
            seen.setdefault(entry.name, []).append((entry, index))
    problems: list[str] = []
    for name, claims in sorted(seen.items()):
        for field in ("stage", "shape", "fingerprint"):
            values: dict[Any, list[int]] = {}
            for entry, index in claims:
                value = getattr(entry, field)
                if value is not None:
                    values.setdefault(value, []).extend(declared[index][1])
            if len(values) > 1:
                said = "; ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in values.items())
                problems.append(f"{name}: {field} {said}\n    ({_MENDS[field]})")
                break
    if problems:
        more = f"\n  ... and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise LayoutMismatch(
            f"the ranks give {len(problems)} slot name(s) different meanings:\n  "
            + "\n  ".join(problems[:MAX_LISTED])
            + more
        )
    groups = {name: tuple(sorted({i for _, i in claims})) for name, claims in seen.items()}
    holders = {
        group: tuple(sorted(r for i in group for r in declared[i][1])) for group in set(groups.values())
    }
    classes = sorted(holders, key=lambda group: holders[group])
    index_of = {group: i for i, group in enumerate(classes)}
    names = sorted(groups, key=lambda name: (is_backward(name), index_of[groups[name]], name))
    return Layout(
        tuple(names),
        tuple(index_of[groups[name]] for name in names),
        tuple(holders[group] for group in classes),
    )


def layout_to_plain(layout: Layout) -> dict[str, Any]:
    """A layout as JSON values."""
    return {"names": layout.names, "class_of": layout.class_of, "holders": layout.holders}


def layout_from_plain(plain: Mapping[str, Any]) -> Layout:
    """Inverse of `layout_to_plain`."""
    return Layout(
        tuple(plain["names"]), tuple(plain["class_of"]), tuple(tuple(ranks) for ranks in plain["holders"])
    )
