"""Tests that need a real torchrun: each starts one, as a subprocess with a time limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import pytest
from ranks import environ_for_a_launcher

Torchrun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def torchrun(tmp_path: Path) -> Torchrun:
    """Return a function that runs the text of a program on `ranks` ranks of torchrun on this host.

    `options` are torchrun's own, `arguments` the program's.
    """

    def run(
        program: str,
        ranks: int = 2,
        timeout: float = 90.0,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "program.py"
        script.write_text(dedent(program))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        process = subprocess.Popen(
            [*command, *options, str(script), *arguments],
            cwd=tmp_path,
            env=environ_for_a_launcher(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # the agent ends its ranks; SIGKILL would leave them behind
            output, _ = process.communicate(timeout=40)
            pytest.fail(f"torchrun did not end within {timeout:g} s:\n{output}")
        return subprocess.CompletedProcess(command, process.returncode, output)

    return run
