"""A small GPT over bytes, cut into pipeline stages whose layers keep their global names."""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 256  # bytes


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model.

    Attributes:
        layers: transformer blocks of the whole model.
        hidden: width of the residual stream.
        heads: attention heads; divides `hidden`.
        seq_len: longest sequence, in bytes.
        seed: seed of the initial weights.
        bf16: run the stages under BF16 autocast (weights and residual stream stay in FP32).
    """

    layers: int
    hidden: int
    heads: int
    seq_len: int
    seed: int = 0
    bf16: bool = False


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, hidden] -> the same."""
        batch, length, hidden = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


class MLP(nn.Module):
    """Two linears around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, hidden] -> the same."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, hidden] -> the same."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    """A run of consecutive blocks; the first stage embeds the bytes, the last one predicts the next.

    Blocks are keyed by their index in the whole model ("layers.5.attn.qkv"): FP8 scales are matched between
    ranks by name, and local indices would give two layers of two stages one scale.
    """

    def __init__(self, config: GPTConfig, layers: range) -> None:
        super().__init__()
        self.bf16 = config.bf16
        self.embed: nn.Embedding | None = None
        self.positions: nn.Embedding | None = None
        self.norm: nn.LayerNorm | None = None
        self.lm_head: nn.Linear | None = None
        if layers.start == 0:
            self.embed = nn.Embedding(VOCAB, config.hidden)
            self.positions = nn.Embedding(config.seq_len, config.hidden)
        self.layers = nn.ModuleDict({str(index): Block(config) for index in layers})
        if layers.stop == config.layers:
            self.norm = nn.LayerNorm(config.hidden)
            self.lm_head = nn.Linear(config.hidden, VOCAB, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stage's blocks.

        Args:
            x: first stage: int64 [batch, seq_len] bytes; others: float32 [batch, seq_len, hidden].

        Returns:
            Last stage: logits [batch, seq_len, 256]; others: float32 [batch, seq_len, hidden].
        """
        with self._precision(x.device.type):
            if self.embed is not None and self.positions is not None:
                x = self.embed(x) + self.positions.weight[: x.shape[1]]
            for block in self.layers.values():
                x = block(x)
            if self.norm is not None and self.lm_head is not None:
                x = self.lm_head(self.norm(x))
        return x

    def _precision(self, device_type: str) -> AbstractContextManager[object]:
        return torch.autocast(device_type, torch.bfloat16) if self.bf16 else nullcontext()


def stage_layers(layers: int, stage_index: int, n_stages: int) -> range:
    """Indices of the blocks of a stage; the first stages take one more where they do not divide evenly."""
    each, rest = divmod(layers, n_stages)
    start = stage_index * each + min(stage_index, rest)
    return range(start, start + each + (stage_index < rest))


def build_stage(config: GPTConfig, stage_index: int, n_stages: int) -> Stage:
    """Make one pipeline stage on the CPU, with weights that do not depend on how the model is cut.

    Args:
        config: shape of the whole model.
        stage_index: 0 <= stage_index < n_stages.
        n_stages: pipeline stages, at most `config.layers`.

    Raises:
        ValueError: there are more stages than layers, or no such stage.
    """
    if not 0 <= stage_index < n_stages <= config.layers:
        raise ValueError(
            f"expected 0 <= stage_index < n_stages <= {config.layers} layers "
            f"but got stage_index={stage_index}, n_stages={n_stages}; use fewer stages or more layers"
        )
    stage = Stage(config, stage_layers(config.layers, stage_index, n_stages))
    for name, parameter in stage.named_parameters():
        _initialize(name, parameter, config)
    return stage


@torch.no_grad()
def _initialize(name: str, parameter: nn.Parameter, config: GPTConfig) -> None:
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name:
        parameter.fill_(1)
    else:
        # Seeded by name, so that neither the partition nor the order of construction matters.
        digest = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        # Embeddings of unit size and linears that keep it. From much smaller weights a run sits on a plateau
        # at first, which noise helps it to leave: FP8 then ends 1.2% below FP32, and proves nothing.
        std = 1 if name.startswith(("embed", "positions")) else math.sqrt(1 / (3 * parameter.shape[1]))
        parameter.normal_(0, std, generator=generator)


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per byte, taken in float32.

    Args:
        logits: [batch, seq_len, 256].
        targets: int64 [batch, seq_len].
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
