"""A few faults of the matrix on real processes, under mpirun (MPI transport) and torchrun (gloo).

What the launcher does when a rank ends is part of what is seen: plain mpirun, and torchrun, end the others.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from matrix import DEADLY, ENDS, FAULTS
from ranks import ROOT, environ_for_a_launcher
from report import Row
from report import record as note
from trial import Fault, Seen, check_told, row

MPIRUN = Path(sys.executable).parent / "mpirun"
SOON = (
    15.0  # seconds from the fault to the end of the job, on a busy machine; nothing waits for a timeout of 60
)

pytestmark = pytest.mark.timeout(180)  # to start four ranks takes five seconds, or fifty on a busy machine
needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or not MPIRUN.exists(), reason="mpi4py or an MPI library is not installed"
)
MPI_ENVIRON = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_osc": "^ucx",
}

# One rank: a good step, the fault, and a file with what it saw. Survivors of a fault end the job by themselves.
PROGRAM = """
import dataclasses, os, pickle, signal, sys, time
import torch
import torch.distributed as dist
from matrix import DEADLY, ENDS, FAULTS
from trial import Place, Run

transport, name, timeout, folder = sys.argv[1:]
torch.set_num_threads(1)
fault = next(f for f in (*FAULTS, *DEADLY, ENDS) if f.name == name)
raises = fault in FAULTS
fault = dataclasses.replace(fault, timeout=float(timeout))

if transport == "mpirun":
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    assert comm.size == 4
    rank, pids, group = comm.rank, comm.allgather(os.getpid()), comm
else:
    dist.init_process_group("gloo")
    rank, pids, group = dist.get_rank(), [], None
run = Run(fault, Place(rank, transport, group), [rank])
run.step(0)
comm.Barrier() if transport == "mpirun" else dist.barrier()
if rank == 0:
    open(f"{folder}/struck", "w").close()
if name == ENDS.name:
    fault.inject(run)
    print(f"rank {rank} is done", flush=True)
    sys.exit()
if raises:
    fault.inject(run)  # its exception ends the program
    raise AssertionError("no exception")
run.struck = time.monotonic()
seen = run.suffer()
with open(f"{folder}/{rank}.part", "wb") as file:
    pickle.dump(seen, file)
os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.seen")
time.sleep(1.0)  # the others have something to say, too
if transport == "mpirun" and rank == min(set(range(4)) - set(fault.odd)):
    for odd in fault.odd:  # it may be stopped
        try:
            os.kill(pids[odd], signal.SIGKILL)
        except ProcessLookupError:
            pass
os._exit(0)
"""


@dataclass(frozen=True)
class Job:
    """How a launcher ended, and what its ranks have left behind."""

    code: int
    output: str
    seconds: float
    """From the fault to the end of the job."""
    seen: dict[int, Seen]


Launch = Callable[..., Job]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A function that runs one fault on four ranks of a launcher."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = environ_for_a_launcher() | MPI_ENVIRON | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    environ["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests' / 'faults'}"

    def run(fault: Fault, transport: str, *options: str, timeout: float = 60.0) -> Job:
        command = [sys.executable, "program.py", transport, fault.name, str(timeout), str(tmp_path)]
        if transport == "mpirun":
            command = [str(MPIRUN), "-n", "4", *options, *command]
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
            command = [*launcher, *command[1:]]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()  # on SIGKILL mpirun would leave its ranks behind
            output, _ = process.communicate(timeout=20)
            pytest.fail(f"the job did not end:\n{output.decode(errors='replace')}")
        struck = tmp_path / "struck"
        assert struck.exists(), output.decode(errors="replace")
        seconds = time.time() - struck.stat().st_mtime
        seen = {int(p.stem): pickle.loads(p.read_bytes()) for p in tmp_path.glob("*.seen")}
        return Job(process.returncode, output.decode(errors="replace").replace("\r", ""), seconds, seen)

    return run


def named(name: str) -> Fault:
    return next(fault for fault in (*FAULTS, *DEADLY) if fault.name == name)


def line(fault: Fault, transport: str, own: str, peers: str, job: Job) -> Row:
    """A row about what the launcher did."""
    state, goes_on = "as the last commit left it, in a process that is ended", "a restart"
    if fault is ENDS:
        state, goes_on = "committed", "–"
    return Row(fault.name, fault.what, transport, own, peers, job.seconds, state, goes_on)


@needs_mpi
def test_plain_mpirun_ends_the_job_and_names_the_dead_rank(
    launch: Launch, request: pytest.FixtureRequest
) -> None:
    fault = named("killed while it waits")
    job = launch(fault, "mpirun")
    assert job.code != 0 and job.seconds < SOON, job
    assert re.search(r"rank 2 with PID \d+ on node \S+ exited on signal 9", " ".join(job.output.split())), (
        job.output
    )
    for rank in job.seen:  # who was fast enough
        check_told(fault, rank, job.seen)
    told = line(
        fault, "mpirun, MPI", "dead", "the launcher ends them, and says that rank 2 died of signal 9", job
    )
    note(request.config.getoption("--reliability"), told)


@needs_mpi
def test_survivors_under_ulfm_are_told_who_died(launch: Launch, request: pytest.FixtureRequest) -> None:
    fault = named("killed while it waits")
    job = launch(fault, "mpirun", "--with-ft", "ulfm")
    assert job.seconds < SOON, job
    assert sorted(job.seen) == [0, 1, 3], job.output
    for rank in job.seen:
        check_told(fault, rank, job.seen)
    told = row(fault, "mpirun with ULFM, MPI", job.seen, died="dead")
    note(request.config.getoption("--reliability"), told)


@needs_mpi
def test_a_stopped_rank_under_mpirun_is_named_by_the_timeout(
    launch: Launch, request: pytest.FixtureRequest
) -> None:
    fault = named("stopped for good")
    job = launch(fault, "mpirun", timeout=fault.timeout)
    assert job.seconds < SOON, job
    assert sorted(job.seen) == [0, 1, 3], job.output
    for rank in job.seen:
        check_told(fault, rank, job.seen)
    note(request.config.getoption("--reliability"), row(fault, "mpirun, MPI", job.seen, died="stopped"))


@needs_mpi
def test_a_rank_that_exits_under_mpirun_holds_nobody_up(
    launch: Launch, request: pytest.FixtureRequest
) -> None:
    fault = named("exits")
    job = launch(fault, "mpirun")
    assert job.seconds < SOON, job
    for rank in job.seen:
        check_told(fault, rank, job.seen)
    if job.seen:
        told = row(fault, "mpirun, MPI", job.seen, died="dead")
    else:
        assert job.code != 0, "the launcher has ended it"
        told = line(fault, "mpirun, MPI", "dead", "the launcher ends them", job)
    note(request.config.getoption("--reliability"), told)


@pytest.mark.parametrize("transport", ["torchrun", pytest.param("mpirun", marks=needs_mpi)])
def test_an_exception_that_nobody_catches_ends_the_job_with_its_own_text(
    transport: str, launch: Launch, request: pytest.FixtureRequest
) -> None:
    fault = named("raises in a backward")
    job = launch(fault, transport)
    assert job.code != 0 and job.seconds < SOON, job
    assert "Boom: out of luck" in job.output, job.output
    assert "every rank catches its error and calls coordinator.recover()" in " ".join(job.output.split())
    assert "CollectiveTimeout" not in job.output
    where = "mpirun, MPI" if transport == "mpirun" else "torchrun, gloo"
    peers = "`PeerAborted`, or the launcher ends them first"
    told = line(fault, where, "`Boom`: out of luck", peers, job)
    note(request.config.getoption("--reliability"), told)


def test_torchrun_ends_the_job_and_names_the_dead_rank(
    launch: Launch, request: pytest.FixtureRequest
) -> None:
    fault = named("killed while it waits")
    job = launch(fault, "torchrun")
    assert job.code != 0 and job.seconds < SOON, job
    assert "Signal 9 (SIGKILL)" in job.output and "local_rank: 2" in job.output, job.output
    for rank in job.seen:
        check_told(fault, rank, job.seen)
    peers = "the agent ends them, and says that rank 2 died of signal 9"
    note(request.config.getoption("--reliability"), line(fault, "torchrun, gloo", "dead", peers, job))


@pytest.mark.parametrize("transport", ["torchrun", pytest.param("mpirun", marks=needs_mpi)])
def test_a_program_that_ends_without_close_ends_quietly(
    transport: str, launch: Launch, request: pytest.FixtureRequest
) -> None:
    job = launch(ENDS, transport)
    assert job.code == 0 and job.seconds < SOON, job.output
    assert all(f"rank {rank} is done" in job.output for rank in range(4)), job.output
    for noise in ("Traceback", "terminate called", "SIGABRT", "Exception"):
        assert noise not in job.output, job.output
    where = "mpirun, MPI" if transport == "mpirun" else "torchrun, gloo"
    told = line(
        ENDS, where, "– (exit code 0, nothing is printed)", "– (exit code 0, nothing is printed)", job
    )
    note(request.config.getoption("--reliability"), told)
