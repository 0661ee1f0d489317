"""Launchers build the commands they promise and refuse what does not fit; manifests agree with their flags."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]


def call(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    venv = str(Path(sys.executable).parents[1])
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        env={**os.environ, "VIRTUAL_ENV": venv, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def printed(script: str, *arguments: str) -> list[str]:
    done = call(script, "--print", *arguments)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_valid_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False, timeout=30).returncode == 0


def test_on_one_host_torchrun_is_standalone_and_flags_pass_unchanged() -> None:
    command = printed(
        "torchrun.sh", "--ranks", "4", "--max-restarts", "1", "--", "--pp", "2", "--data", "a b.txt"
    )
    assert command[1:8] == [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--max-restarts",
        "1",
        "--standalone",
    ]
    assert command[-4:] == ["--pp", "2", "--data", "a b.txt"]
    assert Path(command[8]).name == "train_gpt.py"


@pytest.mark.parametrize(
    ("node_rank", "conf"), [(None, None), ("0", "is_host=true"), ("3", "is_host=false")], ids=str
)
def test_several_hosts_meet_at_one_address(node_rank: str | None, conf: str | None) -> None:
    rank = [] if node_rank is None else ["--node-rank", node_rank]
    command = printed(
        "torchrun.sh", "--ranks", "8", "--nnodes", "4", "--master", "h0", "--id", "j7", *rank, "--"
    )
    options = dict(zip(command[3:-1:2], command[4:-1:2], strict=True))
    expected = {"--nnodes": "4", "--rdzv-backend": "c10d", "--rdzv-endpoint": "h0:29500", "--rdzv-id": "j7"}
    assert expected.items() <= options.items()
    assert options.get("--rdzv-conf") == conf


def test_mpirun_is_the_one_beside_python() -> None:
    if not Path(sys.executable).with_name("mpirun").exists():
        pytest.skip("needs an mpirun beside Python")
    command = printed("mpirun.sh", "--ranks", "3", "--oversubscribe", "--", "--pp", "3")
    assert Path(command[0]).parent == Path(command[-4]).parent
    assert command[1:5] == ["-n", "3", "--map-by", ":oversubscribe"]
    assert command[-2:] == ["--pp", "3"]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("torchrun.sh", ["--ranks", "0", "--"]),
        ("torchrun.sh", ["--ranks"]),
        ("torchrun.sh", ["--nnodes", "2", "--"]),
        ("torchrun.sh", ["--nnodes", "2", "--master", "h", "--node-rank", "2", "--"]),
        ("torchrun.sh", ["--pp", "2"]),
        ("mpirun.sh", ["--", "--pp", "2"]),
        ("mpirun.sh", ["--ranks", "two", "--"]),
        ("mpirun.sh", ["--ranks", "2", "--hostfile", "/no/such/file", "--"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_does_not_fit_is_refused_with_one_line_and_code_two(script: str, arguments: list[str]) -> None:
    done = call(script, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def test_the_slurm_script_starts_one_torchrun_per_host_at_the_first_host(tmp_path: Path) -> None:
    for name, body in (("scontrol", 'printf "n3\\nn4\\n"'), ("srun", 'printf "%s\\n" "$@"')):
        stand_in = tmp_path / name
        stand_in.write_text(f"#!/bin/sh\n{body}\n")
        stand_in.chmod(0o755)
    done = call(
        "slurm.sbatch", "--pp", "4", "--config", "my run.toml",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(LAUNCH.parent),
        SLURM_JOB_NODELIST="n[3-4]", SLURM_NNODES="2", SLURM_JOB_ID="123456", SLURM_GPUS_ON_NODE="8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    arguments = done.stdout.splitlines()
    given = arguments[arguments.index("bash") + 2 : arguments.index("--")]
    assert dict(zip(given[::2], given[1::2], strict=True)) == {
        "--nnodes": "2", "--master": "n3:23456", "--id": "123456", "--ranks": "8",
    }  # fmt: skip
    assert arguments[-4:] == ["--pp", "4", "--config", "my run.toml"]
    assert call("slurm.sbatch", SLURM_SUBMIT_DIR=str(tmp_path)).returncode == 2


# -- manifests ---------------------------------------------------------------------------------------------------


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "k8s" / name).read_text(encoding="utf-8"))


def container(replica: dict[str, Any]) -> dict[str, Any]:
    (found,) = replica["template"]["spec"]["containers"]
    return found


def flags(replica: dict[str, Any], launcher: str) -> tuple[dict[str, str], list[str]]:
    """The launcher's options, and the program's flags."""
    words = shlex.split(container(replica)["args"][0])
    assert words[:3] == ["exec", "bash", f"launch/{launcher}"]
    split = words.index("--")
    return dict(zip(words[3:split:2], words[4:split:2], strict=True)), words[split + 1 :]


def check_mounts(replica: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container(replica)["volumeMounts"]} == volumes


def check_program(arguments: list[str], world: int) -> None:
    """The flags fit each other and the number of processes, as the program itself says."""
    done = subprocess.run(
        [sys.executable, str(LAUNCH / "train_gpt.py"), *arguments, "--dry-run", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(LAUNCH.parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{world} ranks" in done.stdout


def test_the_pytorchjob_starts_as_many_processes_as_its_flags_need() -> None:
    job = manifest("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    hosts = sum(replica["replicas"] for replica in replicas.values())
    seen = []
    for replica in replicas.values():
        assert container(replica)["name"] == "pytorch"
        check_mounts(replica)
        options, program = flags(replica, "torchrun.sh")
        assert int(options["--nnodes"]) == hosts
        assert int(options["--ranks"]) == container(replica)["resources"]["limits"]["nvidia.com/gpu"]
        assert (options["--node-rank"], options["--master"]) == ("$RANK", "$MASTER_ADDR:29500")
        seen.append(program)
    assert seen[0] == seen[1]
    check_program(seen[0], hosts * int(options["--ranks"]))


def test_the_mpijob_starts_as_many_processes_as_its_flags_need() -> None:
    job = manifest("mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    slots = job["spec"]["slotsPerWorker"]
    assert container(worker)["resources"]["limits"]["nvidia.com/gpu"] == slots
    check_mounts(worker)
    options, program = flags(launcher, "mpirun.sh")
    assert options["--hostfile"] == "/etc/mpi/hostfile"
    assert int(options["--ranks"]) == worker["replicas"] * slots
    check_program(program, worker["replicas"] * slots)
