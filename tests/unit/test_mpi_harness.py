"""The harness of the distributed tests ends every broken run soon, and its report names the rank."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest
from ranks import ROOT, environ_for_a_launcher

MPIRUN = Path(sys.executable).parent / "mpirun"
# Seconds from the import of the tests to the end of the job; far above what it takes, far below what it
# would take without the harness.
SOON = 20.0

pytestmark = pytest.mark.skipif(
    find_spec("mpi4py") is None or not MPIRUN.exists(), reason="mpi4py or an MPI library is not installed"
)


@dataclass(frozen=True)
class Run:
    code: int
    output: str
    seconds: float

    @property
    def summaries(self) -> list[str]:
        """pytest's closing lines."""
        return re.findall(r"^(?:=+ )?\d+ (?:passed|failed|error).* in [\d.]+s.*$", self.output, re.MULTILINE)


def run_under_mpi(folder: Path, body: str, ranks: int = 2, options: tuple[str, ...] = ()) -> Run:
    shutil.copy(ROOT / "tests/distributed/conftest.py", folder)
    head = (
        "import os, pathlib, signal, time\nimport pytest\nfrom mpi4py import MPI\nCOMM = MPI.COMM_WORLD\n"
        "(pathlib.Path(__file__).parent / 'imported').touch()\n"
    )
    (folder / "test_it.py").write_text(head + dedent(body))
    # An own root, so that neither this project's settings nor files above it have a say.
    (folder / "pytest.ini").write_text("[pytest]\n")
    environ = environ_for_a_launcher() | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_btl": "self,sm",
    }
    command = [MPIRUN, "-n", ranks, sys.executable, "-m", "pytest", "--with-mpi", "-p", "no:cacheprovider"]
    command += ["--color=no", "--rank-grace=1", *options, folder]
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.terminate()  # on SIGKILL mpirun would leave its ranks behind
        output, _ = process.communicate(timeout=20)
        pytest.fail(f"the run did not end:\n{output.decode(errors='replace')}")
    text = output.decode(errors="replace").replace("\r", "")
    mark = folder / "imported"  # starting is slow on a busy machine and not what is measured
    seconds = time.time() - mark.stat().st_mtime if mark.exists() else 0.0
    return Run(process.returncode, text, seconds)


def test_a_clean_run_has_one_terminal_and_one_verdict(tmp_path: Path) -> None:
    run = run_under_mpi(
        tmp_path,
        """
        def test_world(world):
            assert (COMM.rank, COMM.size) == (world.rank, world.size)
            print("noise of a test")

        def test_skipped_everywhere():
            pytest.skip("on all ranks")

        @pytest.mark.xfail
        def test_known_to_fail():
            assert COMM.size == 0

        @pytest.mark.mpi(min_size=9)
        def test_for_more_ranks():
            raise AssertionError("this needs nine ranks")

        @pytest.mark.ranks(2)
        def test_not_for_three():
            raise AssertionError("this must not be selected")
        """,
        ranks=3,
        # pytest expands the variables of both MPIs, so that every rank that writes a report has its own.
        options=("--world-size=3", f"--junitxml={tmp_path}/report-$OMPI_COMM_WORLD_RANK-$PMI_RANK.xml"),
    )
    assert run.code == 0, run.output
    assert len(run.summaries) == 1, run.output
    assert "1 passed, 2 skipped, 1 deselected, 1 xfailed" in run.summaries[0]
    assert "MPI Information" not in run.output
    assert "noise" not in run.output
    (report,) = tmp_path.glob("report-*.xml")
    assert 'tests="4"' in report.read_text()


def test_what_goes_wrong_on_one_rank_fails_the_test_everywhere_and_is_shown(tmp_path: Path) -> None:
    run = run_under_mpi(
        tmp_path,
        """
        def test_one_rank_fails():
            print(f"what rank {COMM.rank} printed")
            assert COMM.rank != 1, "not on this rank"

        @pytest.fixture
        def fragile():
            yield
            assert COMM.rank != 1, "teardown on this rank"

        def test_teardown_fails(fragile):
            pass

        def test_skip_alone():
            if COMM.rank == 1:
                pytest.skip("only here")

        def test_ranks_are_in_step_again():
            COMM.Barrier()
        """,
    )
    assert run.code != 0
    assert len(run.summaries) == 1, run.output
    assert "2 failed, 2 passed, 1 error" in run.summaries[0]
    assert "failed on rank 1 of 2" in run.output
    assert "assert COMM.rank != 1" in run.output  # rank 1's traceback, in rank 0's report
    assert "what rank 1 printed" in run.output
    assert "teardown on this rank" in run.output
    assert "outcomes differ between the 2 ranks" in run.output
    assert "rank 0: passed" in run.output
    assert re.search(r"rank 1: skipped .*only here", run.output)


@pytest.mark.parametrize("where", ["body", "setup"])
def test_a_rank_that_raises_before_a_collective_ends_the_job(tmp_path: Path, where: str) -> None:
    run = run_under_mpi(
        tmp_path,
        f"""
        def fail_on_one_rank(where):
            if where == {where!r} and COMM.rank == 1:
                raise ValueError("no barrier for me")

        @pytest.fixture
        def first():
            fail_on_one_rank("setup")

        def test_barrier(first):
            fail_on_one_rank("body")
            COMM.Barrier()
        """,
        ranks=3,
    )
    assert run.code != 0
    assert run.seconds < SOON, run.output
    assert "failed on rank 1 of 3" in run.output
    assert "ValueError: no barrier for me" in run.output
    assert "fail_on_one_rank" in run.output  # the traceback
    assert "ranks [0, 2] of 3 did not finish" in run.output
    assert "test_it.py::test_barrier" in run.output


def test_a_rank_that_hangs_is_named_with_its_stack_at_its_time_limit(tmp_path: Path) -> None:
    run = run_under_mpi(
        tmp_path,
        """
        def sleep_for_ever():
            time.sleep(600)

        @pytest.mark.timeout(2)
        def test_hang():
            if COMM.rank == 1:
                sleep_for_ever()
        """,
    )
    assert run.code != 0
    assert run.seconds < SOON, run.output
    assert "rank 1 of 2 has not finished" in run.output
    assert "rank 0 of 2 has not finished" not in run.output
    assert "sleep_for_ever" in run.output
    assert "test_it.py::test_hang after 2 s" in run.output


def test_a_rank_that_cannot_even_run_its_watchdog_is_named_by_the_others(tmp_path: Path) -> None:
    run = run_under_mpi(
        tmp_path,
        """
        @pytest.mark.timeout(2)
        def test_stopped():
            if COMM.rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
        """,
    )
    assert run.code != 0
    assert run.seconds < SOON, run.output
    assert "ranks [0] of 2 did not finish" in run.output


def test_a_rank_that_dies_ends_the_job(tmp_path: Path) -> None:
    run = run_under_mpi(
        tmp_path,
        """
        def test_kill():
            if COMM.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            COMM.Barrier()
        """,
    )
    assert run.code != 0
    assert run.seconds < SOON, run.output
    assert not any("passed" in line for line in run.summaries)


@pytest.mark.parametrize(
    "difference",
    [
        "@pytest.mark.parametrize('n', [COMM.rank])\ndef test_other(n): pass",
        "if COMM.rank == 1: raise OSError('cannot be collected')\ndef test_other(): pass",
    ],
    ids=["other tests", "an error while collecting"],
)
def test_ranks_that_collect_other_tests_run_none(tmp_path: Path, difference: str) -> None:
    run = run_under_mpi(tmp_path, difference)
    assert run.code != 0
    assert run.seconds < SOON, run.output
    assert "expected the same tests on all ranks" in run.output
    assert "test_other[1]" in run.output or "cannot be collected" in run.output
    assert "passed" not in run.output


def test_an_exit_of_one_rank_ends_all(tmp_path: Path) -> None:
    run = run_under_mpi(
        tmp_path,
        """
        def test_leave():
            if COMM.rank == 1:
                pytest.exit("I leave", returncode=0)

        def test_after():
            pass
        """,
    )
    assert run.code != 0
    assert run.seconds < SOON, run.output
    assert "end of the session" in run.output


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    run = run_under_mpi(tmp_path, "def test_nothing(): pass", ranks=2, options=("--world-size=3",))
    assert run.code != 0
    assert "expected a world of 3 ranks (--world-size) but MPI has 2" in run.output
    assert run.summaries == []


def test_singletons_under_a_foreign_mpirun_are_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/distributed/conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text("def test_nothing(): pass\n")
    # What a process sees whose mpirun speaks a protocol that its MPI library does not.
    environ = environ_for_a_launcher() | {"OMPI_MCA_btl": "self,sm"}
    code = "import os, mpi4py.MPI, pytest; os.environ['PMI_SIZE'] = '4'; raise SystemExit(pytest.main())"
    command = [sys.executable, "-c", code, "--with-mpi", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 4
    assert "expected a world of 4 ranks (mpirun) but MPI has 1" in done.stderr
