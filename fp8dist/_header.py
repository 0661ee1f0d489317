"""The self-check header that travels in front of the amax row: encode, decode, compare.

Pure functions over lists of int32 words; the reduction between encode and decode is an element-wise MAX.

Words::

    0          failed     world - rank of a rank that left the step by an exception, else 0
    1          abandoned  the same for step.abort()
    2          grows      the same for a rank that declared slots after the layout was agreed
    3          active     1 if any module asked for an update
    4 ...      one pair (x, -x) per compared field, see FIELDS
    ...        one pair per slot class, the digest of its scales; ranks that do not hold the class send
               (INT32_MIN, INT32_MIN), which is neutral

The MAX of `world - rank` names the lowest rank. The MAX of (x, -x) is (largest, -smallest), so every rank
sees from one collective whether all ranks sent the same value.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntFlag

INT32_MIN = -(2**31)
MASK31 = 2**31 - 1
TAG_LIMIT = 2**61
FIELDS = ("tag_kind", "tag_high", "tag_low", "layout", "recipe", "generation", "part")
FLAGS = 4

Tag = int | str | None


class Part(IntFlag):
    """Which slots a commit takes. A step takes both; updates in Transformer Engine's places take one each."""

    FORWARD = 1
    BACKWARD = 2
    BOTH = 3


@dataclass(frozen=True)
class Header:
    """What one rank says of itself when it enters the collective."""

    rank: int
    world: int
    tag: Tag
    layout: int
    recipe: int
    generation: int
    part: Part = Part.BOTH
    failed: bool = False
    abandoned: bool = False
    grows: bool = False
    active: bool = False


@dataclass(frozen=True)
class Verdict:
    """What every rank reads from the reduced header."""

    failed_rank: int | None
    abandoned_rank: int | None
    growing_rank: int | None
    active: bool
    disagreements: tuple[str, ...]
    """Names of the compared fields that differ: `tag`, `layout`, `recipe`, `generation`, `part`."""
    classes: tuple[int, ...]
    """Indices of the slot classes whose scale digests differ."""


# What nearly every step comes to, by `active`; made once, since all ranks wait while it is made.
_ALL_WELL = {active: Verdict(None, None, None, active, (), ()) for active in (False, True)}


def header_words(n_classes: int) -> int:
    """Number of int32 words of a header with that many slot classes."""
    return FLAGS + 2 * (len(FIELDS) + n_classes)


def tag_words(tag: Tag) -> tuple[int, int, int]:
    """Kind, high and low word of a step tag. A string is hashed, an integer sent exactly.

    Raises:
        ValueError: the tag is no int, str or None, or an int outside +-2**61.
    """
    if tag is None:
        return 0, 0, 0
    if isinstance(tag, bool) or not isinstance(tag, int | str):
        raise ValueError(f"a step tag is an int, a str or None; got {type(tag).__name__} {tag!r}")
    if isinstance(tag, int):
        if not -TAG_LIMIT <= tag < TAG_LIMIT:
            raise ValueError(f"a step tag lies in [-2**61, 2**61); got {tag}")
        kind, value = 1, tag + TAG_LIMIT
    else:
        kind = 2
        value = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:8], "big") >> 2
    return kind, value >> 31, value & MASK31


def flag_words(
    rank: int,
    world: int,
    *,
    failed: bool = False,
    abandoned: bool = False,
    grows: bool = False,
    active: bool = False,
) -> list[int]:
    """The words that a rank may not know before it enters the collective."""
    place = world - rank
    return [place * failed, place * abandoned, place * grows, int(active)]


def encode(header: Header) -> list[int]:
    """The words of a header, without the class digests."""
    words = flag_words(
        header.rank,
        header.world,
        failed=header.failed,
        abandoned=header.abandoned,
        grows=header.grows,
        active=header.active,
    )
    for value in (
        *tag_words(header.tag), header.layout, header.recipe, header.generation & MASK31, int(header.part)
    ):  # fmt: skip
        words += (value, -value)
    return words


def _differ(largest: int, negated_smallest: int) -> bool:
    return largest != INT32_MIN and largest != -negated_smallest


def decode(words: list[int], world: int) -> Verdict:
    """Read a reduced header of `header_words(n_classes)` words."""

    def rank(word: int) -> int | None:
        return world - word if word else None

    largest, negated_smallest = words[FLAGS::2], words[FLAGS + 1 :: 2]
    if not any(words[:3]) and largest == [-word for word in negated_smallest]:
        return _ALL_WELL[bool(words[3])]
    pairs = zip(largest, negated_smallest, strict=True)
    differ = [i for i, pair in enumerate(pairs) if _differ(*pair)]
    fields = [FIELDS[i].partition("_")[0] for i in differ if i < len(FIELDS)]
    return Verdict(
        failed_rank=rank(words[0]),
        abandoned_rank=rank(words[1]),
        growing_rank=rank(words[2]),
        active=bool(words[3]),
        disagreements=tuple(dict.fromkeys(fields)),
        classes=tuple(i - len(FIELDS) for i in differ if i >= len(FIELDS)),
    )
