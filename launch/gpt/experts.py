"""Mixture of experts: a router sends every byte to a few MLPs of many, which may be on other replicas' ranks.

flat x ──▶ router ──▶ chosen experts, gates
  │ sorted by expert          │
  ▼                           │
all_to_all ▶ own experts ▶ all_to_all ▶ back in order, weighted by the gates ──▶ y
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class ExpertLinear(nn.Module):
    """One linear layer for each of this rank's experts, over tokens that are sorted by expert.

    Attributes:
        weight: [experts of this rank, out, in].
        bias: [experts of this rank, out].
    """

    def __init__(self, experts: range, inputs: int, outputs: int) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(len(experts), outputs, inputs))
        self.bias = nn.Parameter(torch.empty(len(experts), outputs))

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[T, in] and how many tokens each expert has -> [T, out]."""
        parts = zip(tokens.split(counts), self.weight.unbind(), self.bias.unbind(), strict=True)
        return torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])


class Experts(nn.Module):
    """Takes the place of an MLP. Experts go by their index in the whole model.

    Attributes:
        experts: those of this rank.
        group: the ranks that share the experts in equal parts, in order; None if this one has all.
    """

    def __init__(self, hidden: int, experts: int, top_k: int, own: range) -> None:
        super().__init__()
        self.top_k, self.experts = top_k, own
        self.group: dist.ProcessGroup | None = None
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = ExpertLinear(own, hidden, 4 * hidden)
        self.down = ExpertLinear(own, 4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, hidden] -> the same."""
        flat = x.flatten(0, 1)
        gates, chosen = self.route(flat)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        sent = flat.repeat_interleave(self.top_k, 0)[order]
        y = self._compute(sent, counts)[order.argsort()].view(-1, self.top_k, x.shape[-1])
        return (y * gates.unsqueeze(-1)).sum(1).view_as(x)

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> weights and indices of each token's experts, both [T, top_k]."""
        gates, chosen = self.router(flat).float().softmax(-1).topk(self.top_k)
        return gates, chosen

    def _compute(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run the experts on tokens that are sorted by expert; `counts`: int64 [experts of the model]."""
        if self.group is None:
            return self._mlp(tokens, counts.tolist())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        by_rank = theirs.view(-1, len(self.experts))
        splits = (counts.view_as(by_rank).sum(1).tolist(), by_rank.sum(1).tolist())
        received: torch.Tensor = _Exchange.apply(tokens, *splits, self.group)
        # They come sorted by rank, then by expert.
        expert = torch.arange(len(self.experts), device=tokens.device).repeat(len(by_rank))
        order = expert.repeat_interleave(theirs).argsort(stable=True)
        y = self._mlp(received[order], by_rank.sum(0).tolist())[order.argsort()]
        back: torch.Tensor = _Exchange.apply(y, *splits[::-1], self.group)
        return back

    def _mlp(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(tokens, counts)), counts)
        return y


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group and receives theirs; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way_back = received, sent, group
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back: torch.Tensor = _Exchange.apply(gradient, *ctx.way_back)
        return back, None, None, None


def is_expert(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter has one part for each expert: it has one dimension more than others of its kind."""
    return parameter.dim() == (2 if name.endswith("bias") else 3)


def pieces(name: str, parameter: torch.Tensor, value: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    """Something of a parameter by names that do not depend on which rank holds which expert.

    Args:
        name: the parameter's.
        parameter: it itself.
        value: of its shape: itself, its gradient, a moment.
        first: index in the whole model of this rank's first expert.
    """
    if not is_expert(name, parameter):
        return {name: value}
    return {f"{name}.expert.{first + i}": part for i, part in enumerate(value.unbind())}
