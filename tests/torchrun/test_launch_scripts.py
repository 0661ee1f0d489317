"""The launch scripts really start the training program: on two hosts' worth of agents, under mpirun, under Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environ_for_a_launcher

LAUNCH = Path(__file__).parents[2] / "launch"
SECONDS = 100.0
TINY = [
    "--steps",
    "3",
    "--batch",
    "8",
    "--microbatches",
    "2",
    "--layers",
    "2",
    "--hidden",
    "32",
    "--heads",
    "2",
]
TINY += ["--seq-len", "16", "--device", "cpu", "--no-plot"]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    venv = str(Path(sys.executable).parents[1])
    return subprocess.Popen(
        command,
        env=environ_for_a_launcher() | {"VIRTUAL_ENV": venv} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str]) -> None:
    """All end with 0; otherwise none is left behind, with what it started."""
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]


def check(run: Path, world: int) -> list[float]:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world"], summary["commits"], summary["ranks_agree"]) == (world, 3, True)
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(SECONDS + 20)
def test_two_agents_meet_at_one_address_and_run_one_job(tmp_path: Path) -> None:
    port = 20000 + os.getpid() % 10000
    script, program = LAUNCH / "torchrun.sh", [*TINY, "--pp", "2", "--run-dir", str(tmp_path / "run")]
    meeting = ["--nnodes", "2", "--ranks", "1", "--master", f"127.0.0.1:{port}", "--max-restarts", "0"]
    agents = [
        start(["bash", str(script), *meeting, "--node-rank", str(node), "--", *program]) for node in (0, 1)
    ]
    finish(*agents)
    check(tmp_path / "run", 2)


@pytest.mark.timeout(2 * SECONDS + 20)
def test_mpirun_gives_the_losses_that_one_process_has(tmp_path: Path) -> None:
    if not Path(sys.executable).with_name("mpirun").exists():
        pytest.skip("needs an mpirun beside Python")
    mpi = ["bash", str(LAUNCH / "mpirun.sh"), "--ranks", "2", "--oversubscribe", "--"]
    options = {"OMPI_MCA_btl": "self,sm", "OMPI_MCA_osc": "^ucx"}
    finish(start([*mpi, *TINY, "--pp", "2", "--run-dir", str(tmp_path / "mpi")], **options))
    alone = [sys.executable, str(LAUNCH / "train_gpt.py"), *TINY, "--run-dir", str(tmp_path / "alone")]
    finish(start(alone, PYTHONPATH=str(LAUNCH.parent)))
    assert check(tmp_path / "mpi", 2) == check(tmp_path / "alone", 1)


@pytest.mark.timeout(SECONDS + 20)
def test_the_slurm_script_runs_where_srun_starts_one_task(tmp_path: Path) -> None:
    for name, body in (("scontrol", "echo 127.0.0.1"), ("srun", 'shift; exec "$@"')):
        stand_in = tmp_path / name
        stand_in.write_text(f"#!/bin/sh\n{body}\n")
        stand_in.chmod(0o755)
    run = tmp_path / "run"
    finish(
        start(
            ["bash", str(LAUNCH / "slurm.sbatch"), *TINY, "--pp", "2", "--run-dir", str(run)],
            PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(LAUNCH.parent),
            SLURM_JOB_NODELIST="n1", SLURM_NNODES="1", SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="2",
        )
    )  # fmt: skip
    check(run, 2)
    assert list((run / "checkpoints").iterdir())
