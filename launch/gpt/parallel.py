"""From a configuration to a rank's part: its device, its groups and its stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import V_SCHEDULES, Ranks, TrainConfig
from .corpus import Batch


def choose_device(config: TrainConfig, ranks: Ranks) -> torch.device:
    """A GPU of this rank's own where every rank of the host can have one, else the CPU.

    Raises:
        ValueError: `--device cuda` was asked for and there are too few GPUs.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if gpus >= ranks.local_world:
        return torch.device("cuda", ranks.local_rank)
    if config.device == "cuda":
        raise ValueError(
            f"expected a GPU for each of {ranks.local_world} ranks of this host but got {gpus}; "
            "start fewer ranks or leave --device out"
        )
    return torch.device("cpu")


class Grid:
    """The ranks as [dp, pp, tp]: neighbours share layers, next come the stages of a pipeline, then its replicas.

    Attributes:
        dp_index: which pipeline this rank belongs to.
        pp_index: its position there.
        tp_index: which part of the layers it computes.
        pp_group: the ranks of this pipeline; None where a process is alone.
        dp_group: the ranks with the same parts of the same stages; None where a process is alone.
        dp_mesh: the same as a mesh.
        tp_mesh: the ranks that share layers; None where a process is alone.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, device: torch.device) -> None:
        self.config = config
        self.device = device
        replica, self.tp_index = divmod(ranks.rank, config.tp)
        self.dp_index, self.pp_index = divmod(replica, config.pp)
        self.pp_group: dist.ProcessGroup | None = None
        self.dp_group: dist.ProcessGroup | None = None
        self.dp_mesh: DeviceMesh | None = None
        self.tp_mesh: DeviceMesh | None = None
        if config.world > 1:
            names = ("dp", "pp", "tp")
            mesh = init_device_mesh(device.type, (config.dp, config.pp, config.tp), mesh_dim_names=names)
            self.pp_group, self.dp_group = mesh.get_group("pp"), mesh.get_group("dp")
            self.dp_mesh, self.tp_mesh = mesh["dp"], mesh["tp"]

    @property
    def first(self) -> bool:
        """This rank holds the embedding and takes the inputs."""
        return 0 in self.stage_indices()

    @property
    def last(self) -> bool:
        """This rank holds the head and computes the loss."""
        return self.config.stages - 1 in self.stage_indices()

    def stage_indices(self) -> list[int]:
        """Stages of this rank: dealt out round-robin, or to the last rank and back again for V schedules."""
        if self.config.pp > 1 and self.config.schedule in V_SCHEDULES:
            return [self.pp_index, 2 * self.config.pp - 1 - self.pp_index]
        return [self.pp_index + chunk * self.config.pp for chunk in range(self.config.chunks)]

    @property
    def own_experts(self) -> range:
        """Experts of this rank: all, or the share of its replica."""
        share = self.config.experts // self.config.ep
        first = share * (self.dp_index if self.config.ep > 1 else 0)
        return range(first, first + share)

    def agree(self, value: int) -> bool:
        """Whether all ranks have the same value."""
        ends = torch.tensor([value, -value], device=self.device)
        if self.config.world > 1:
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        return int(ends[0]) == -int(ends[1])

    def replica_share(self, batch: Batch) -> Batch:
        """This replica's sequences of the global batch, on the rank's device."""
        parts = (part.chunk(self.config.dp)[self.dp_index].to(self.device) for part in batch)
        return Batch(*parts)

    def mean_loss(self, losses: list[torch.Tensor]) -> float:
        """Mean over microbatches and replicas, on every rank.

        Args:
            losses: float32 scalars of the microbatches; empty on ranks without the last stage.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if losses and self.tp_index == 0:
            total += torch.stack(losses).double().mean() / self.config.dp
        if self.config.world > 1:
            dist.all_reduce(total)
        return total.item()
