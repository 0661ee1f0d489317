"""Adds up the junit reports of several pytest runs and prints one closing line as pytest does.

    python tests/summary.py START NAME=STATUS=REPORT ...

START is the time of the start, in seconds since the epoch. STATUS is the exit status of the run. A run that
wrote no report, or failed without a failed test in its report, counts as one failure. The exit status is 0
only if every run ended with 0 and something passed.
"""

from __future__ import annotations

import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ORDER = ("failed", "passed", "skipped", "xfailed", "error")


def count(report: Path) -> Counter[str] | None:
    """Count a report's tests by outcome; None if there is no readable report."""
    try:
        cases = list(ET.parse(report).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return None
    return Counter(_outcome(case) for case in cases)


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    if "failure" in kinds:
        return "failed"
    if "error" in kinds:
        return "error"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def describe(counts: Counter[str]) -> str:
    """Write counts as pytest does: `2 failed, 121 passed`."""
    parts = [f"{counts[name]} {name}" for name in ORDER if counts[name]]
    return ", ".join(parts) or "no tests ran"


def main(arguments: list[str], clock: Callable[[], float] = time.time) -> int:
    """Print a line per run and the closing line; return the exit status."""
    seconds = clock() - float(arguments[0])
    total: Counter[str] = Counter()
    good = True
    for argument in arguments[1:]:
        name, status, report = argument.split("=", 2)
        counts = count(Path(report))
        note = ""
        if counts is None:
            counts, note = Counter(failed=1), " (it ended without a report)"
        elif status != "0" and not counts["failed"] + counts["error"]:
            counts["failed"] += 1
            note = " (it failed outside of its tests)"
        good = good and status == "0" and not note
        total += counts
        print(f"{name}: {describe(counts)}, exit status {status}{note}")
    print(f"== {describe(total)} in {seconds:.2f}s ==")
    return 0 if good and total["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
