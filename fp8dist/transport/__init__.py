"""From what the user names (nothing, a group, a mesh) to the transport that reaches those ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup, Store

from ..bootstrap import expected_world_size
from ._base import Transport, Work
from ._control import Control
from .local import LocalTransport
from .torch_dist import TorchTransport

__all__ = ["Control", "LocalTransport", "TorchTransport", "Transport", "Work", "resolve"]


def resolve(group: Any, store: Store | None) -> Transport:
    """The transport for `group`.

    Args:
        group: None (all ranks), a `ProcessGroup`, or a one-dimensional `DeviceMesh`.
        store: where ranks meet; default: the store of the default group.

    Raises:
        ValueError: unfit group, this rank is no member, or `torch.distributed` is not initialised although
            a launcher started several processes.
    """
    if group is not None and not isinstance(group, ProcessGroup | DeviceMesh):
        raise ValueError(
            f"group expects None, a ProcessGroup or a one-dimensional DeviceMesh but got {type(group).__name__} "
            f"{group!r}; for a list of ranks create torch.distributed.new_group(ranks) on every rank"
            + (
                " (this is new_group's answer on a rank that is no member: create the coordinator on members only)"
                if group == dist.GroupMember.NON_GROUP_MEMBER
                else ""
            )
        )
    if not (dist.is_available() and dist.is_initialized()):
        launched = expected_world_size()
        if group is None and (launched is None or launched == 1):
            return LocalTransport()
        raise ValueError(
            f"expects torch.distributed to be initialised ({launched or 'several'} processes were launched) but it is "
            "not; call torch.distributed.init_process_group() (under mpirun: "
            "fp8dist.bootstrap.init_process_group_from_mpi()) before creating the coordinator"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group expects a one-dimensional DeviceMesh but got {group.ndim} dimensions "
                f"{group.mesh_dim_names}; pass one of them, mesh['name'], or flatten several"
            )
        group = group.get_group()
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    me = dist.get_rank()
    if me not in ranks:
        raise ValueError(
            f"group expects this rank {me} among its members but has {ranks}; create the coordinator on members only"
        )
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    nccl = dist.is_nccl_available() and "nccl" in str(dist.get_backend(group))
    return TorchTransport(ranks, ranks.index(me), store, nccl=nccl)
