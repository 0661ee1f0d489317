"""`fp8dist doctor` on ranks that a launcher has started."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

Torchrun = Callable[..., "CompletedProcess[str]"]


def test_launched_ranks_measure_together_and_the_first_one_speaks(torchrun: Torchrun) -> None:
    done = torchrun(
        """
        import sys
        from fp8dist.cli import app

        sys.argv = ["fp8dist", "doctor", "--json"]
        app()
        """
    )
    assert done.returncode == 0, done.stdout
    plain = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert plain["group"]["world"] == 2
    assert {finding["level"] for finding in plain["findings"]} <= {"ok", "note", "warning"}
