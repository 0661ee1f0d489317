"""From gradients to new weights: the rate of each step, the norm of the whole gradient, and AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .config import TrainConfig
from .experts import pieces
from .parallel import Grid
from .replicas import counts, local

LONGEST_WARMUP = 20  # steps, where the configuration leaves it open


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a part of the peak."""
    warmup = config.warmup_steps
    if warmup is None:
        warmup = min(LONGEST_WARMUP, max(1, config.steps // 5))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_fraction + (1 - config.min_lr_fraction) * cosine)


def make_optimizer(config: TrainConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """AdamW that lets matrices decay, and neither biases nor the gains of norms."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decays = parameter.dim() >= 2 and not name.endswith("bias")
        # Sharded and whole parameters do not go into one call of a fused update.
        groups.setdefault((decays, isinstance(parameter, DTensor)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": config.weight_decay if decays else 0.0}
            for (decays, _), members in groups.items()
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
    )


class Clipper:
    """Scales the gradients of all ranks down where their common norm is too large."""

    def __init__(self, grid: Grid, parameters: Mapping[str, nn.Parameter], names: Sequence[str]) -> None:
        """Prepare for the parameters of this rank.

        Args:
            grid: the ranks.
            parameters: of this rank, by name.
            names: of the whole model's parameters, in an order that all ranks share.
        """
        self.grid = grid
        self.parameters = parameters
        self.position = {name: i for i, name in enumerate(names)}

    def clip(self) -> float:
        """Scale this rank's gradients if need be, and return the norm that they had. A collective.

        Every parameter has a place of its own in the sum, whoever holds it, so the norm has the same bits
        however the model is cut into stages.
        """
        squares = torch.zeros(len(self.position), dtype=torch.float64, device=self.grid.device)
        for name, parameter in self.parameters.items():
            if parameter.grad is None or not counts(self.grid, name, parameter):
                continue
            first = self.grid.own_experts.start
            for part, gradient in pieces(name, parameter, local(parameter.grad), first).items():
                squares[self.position[part]] = gradient.double().square().sum()
        if self.grid.config.world > 1:
            dist.all_reduce(squares)
        norm = math.sqrt(squares.sum().item())
        if norm > self.grid.config.clip:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.grid.config.clip / norm)
        return norm
