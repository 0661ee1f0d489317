"""From what the user names (nothing, a group, a mesh, a communicator) to the transport that reaches those ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup, Store

from ..bootstrap import expected_world_size, launched_by
from . import _mpi_home
from ._base import Transport, Work
from ._control import Control
from .local import LocalTransport
from .mpi import MpiTransport
from .torch_dist import TorchTransport

__all__ = [
    "Control",
    "LocalTransport",
    "MpiTransport",
    "TorchTransport",
    "Transport",
    "Work",
    "ranks_of",
    "resolve",
]


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group's members, by group rank. Local: nothing is made, no peer is asked.

    Args:
        group: as for `resolve`.

    Returns:
        Ranks of torch's default group; of `MPI.COMM_WORLD` for a communicator.

    Raises:
        ValueError: as `resolve` does.
    """
    if _mpi_home.is_from_mpi4py(group):
        return _mpi_home.ranks_of(group)
    if group is not None and not isinstance(group, ProcessGroup | DeviceMesh):
        raise ValueError(
            "group expects None, a ProcessGroup, a one-dimensional DeviceMesh or an mpi4py communicator but got "
            f"{type(group).__name__} {group!r}; for a list of ranks create torch.distributed.new_group(ranks) on "
            "every rank"
            + (
                " (this is new_group's answer on a rank that is no member: create the coordinator on members only)"
                if group == dist.GroupMember.NON_GROUP_MEMBER
                else ""
            )
        )
    if not _initialised():
        if group is None and expected_world_size() in (None, 1):
            return (0,)
        raise ValueError(_uninitialised())
    group = _process_group(group)
    ranks = dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size())
    me = dist.get_rank()
    if me not in ranks:
        raise ValueError(
            f"group expects this rank {me} among its members but has {list(ranks)}; create the coordinator on members "
            "only"
        )
    return tuple(ranks)


def resolve(group: Any, store: Store | None, timeout: float | None = 300.0) -> Transport:
    """The transport for `group`. A collective over its ranks if it is the first on an mpi4py communicator.

    Args:
        group: None (all ranks), a `ProcessGroup`, a one-dimensional `DeviceMesh`, or an mpi4py
            intracommunicator.
        store: where ranks meet; default: the store of the default group, or one that MPI carries the address of.
        timeout: seconds for all ranks of a communicator to come, None waits for ever.

    Raises:
        ValueError: unfit group, this rank is no member, or `torch.distributed` is not initialised although
            a launcher started several processes.
        CollectiveTimeout: a rank of the communicator did not come.
        TransportError: a rank of the communicator could not reach the store.
    """
    if _mpi_home.is_from_mpi4py(group):
        return MpiTransport(group, store, timeout)
    ranks = ranks_of(group)
    if not _initialised():
        return LocalTransport()
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    nccl = dist.is_nccl_available() and "nccl" in str(dist.get_backend(_process_group(group)))
    return TorchTransport(ranks, ranks.index(dist.get_rank()), store, nccl=nccl)


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _process_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"group expects a one-dimensional DeviceMesh but got {group.ndim} dimensions "
            f"{group.mesh_dim_names}; pass one of them, mesh['name'], or flatten several"
        )
    return group.get_group()


def _uninitialised() -> str:
    launched = expected_world_size()
    under_mpirun = "or pass an mpi4py communicator: group=MPI.COMM_WORLD"
    return (
        f"expects torch.distributed to be initialised ({launched or 'several'} processes were launched) but it is "
        "not; call torch.distributed.init_process_group() (under mpirun: "
        "fp8dist.bootstrap.init_process_group_from_mpi()) before creating the coordinator"
        + (f", {under_mpirun}" if launched_by() == "mpi" else "")
    )
