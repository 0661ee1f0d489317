"""Text from the trained model: its stages are gathered on rank 0, which goes on byte by byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .experts import pieces
from .model import GPTConfig, Stage, build_stage
from .parallel import Grid
from .replicas import counts, whole


def gather_model(grid: Grid, shape: GPTConfig, parameters: Mapping[str, nn.Parameter]) -> Stage | None:
    """The whole model on the CPU of rank 0, in high precision; None on other ranks. A collective."""
    own: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        value = whole(parameter.detach()).cpu()  # a collective, so on all ranks
        if counts(grid, name, parameter) or isinstance(parameter, DTensor):
            own |= pieces(name, parameter, value, grid.own_experts.start)
    parts: Sequence[dict[str, torch.Tensor]] = [own]
    if grid.config.world > 1:
        gathered: list[dict[str, torch.Tensor]] = [{} for _ in range(grid.config.world)]
        dist.gather_object(own, gathered if dist.get_rank() == 0 else None)
        if dist.get_rank():
            return None
        parts = gathered
    values = {name: value for part in parts for name, value in part.items()}
    model = build_stage(dataclasses.replace(shape, own_experts=range(shape.experts)), 0, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part, value in pieces(name, parameter, parameter, 0).items():
                value.copy_(values[part])
    return model.eval()


@torch.no_grad()
def sample_text(
    model: Stage, prompt: bytes, *, count: int, window: int, temperature: float, seed: int
) -> bytes:
    """Go on with a text.

    Args:
        model: the whole model.
        prompt: at least one byte.
        count: bytes to add.
        window: bytes that the model sees at once.
        temperature: 0 takes the likeliest byte; 1 the model's own distribution.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text[-window:]]))[0, -1].float()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            probabilities = (logits / temperature).softmax(-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text[len(prompt) :])
