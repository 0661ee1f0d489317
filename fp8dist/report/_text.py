"""Strings of a run, fit for a page. Escaping is the template's business, not done here."""

from __future__ import annotations

from markupsafe import Markup

LONGEST = 200


def clean(value: object) -> str:
    """One line of printable characters: no control characters, no marks that turn the direction of text."""
    text = " ".join(str(value)[: 4 * LONGEST].split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def shorten(value: object, length: int) -> str:
    """At most `length` characters; the middle goes first, since names differ at both ends."""
    text = clean(value)
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[head + 1 - length :]}"


def breakable(value: object) -> Markup:
    """Cleaned and escaped, with the dots of a name as the places where a line may end."""
    return Markup("<wbr>").join(f"{part}." for part in clean(value).split("."))[:-1]


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts `layers.2` before `layers.10`."""
    parts = name.replace("-", ".").split(".")
    return tuple((0, int(p), "") if p.isascii() and p.isdigit() and len(p) < 18 else (1, 0, p) for p in parts)
