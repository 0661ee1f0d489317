"""One page that tells what a run did: which layers saturate, which rank was slow, who failed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Report", "build_report"]


@dataclass(frozen=True)
class Report:
    """A finished page.

    Attributes:
        html: all of it, one self-contained file.
        headlines: the verdicts at its top, one line of plain text each, the worst first.
        problems: how many of them are problems.
    """

    html: str
    headlines: tuple[str, ...]
    problems: int


def build_report(directory: Path | str) -> Report:
    """Make the page of a run from the files in its directory, as far as they are there.

    Args:
        directory: with `monitor-rank<R>.jsonl`, `metrics.jsonl`, `metrics-fp32.jsonl`, `summary.json`, and the
            flight recorder's dumps in it or in its folder `flight`.

    Returns:
        The page, which the caller writes where it is wanted.

    Raises:
        ValueError: no such directory, nothing readable in it, or a file of another version.
    """
    from ._findings import Level
    from ._page import render
    from ._read import read_run
    from ._text import clean

    html, verdicts = render(read_run(Path(directory)))
    return Report(
        html,
        tuple(f"{v.level.value}: {clean(v.text)}" for v in verdicts),
        sum(v.level is Level.PROBLEM for v in verdicts),
    )
