"""A small GPT over bytes, cut into pipeline stages whose layers keep their global names."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .experts import Experts, pieces

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
        recomputed: part of each block whose activations are computed again in the backward: `none`, `full`,
            `attention` or `mlp`.
        experts: MLPs that take the place of one in some blocks; 0: nowhere.
        moe_every: every how manyth block has experts.
        top_k: experts that each byte goes to.
        own_experts: those that this process holds.
    """

    layers: int
    hidden: int
    heads: int
    seq_len: int
    seed: int = 0
    bf16: bool = False
    recomputed: str = "none"
    experts: int = 0
    moe_every: int = 2
    top_k: int = 1
    own_experts: range = range(0)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.hidden // config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, hidden] -> the same."""
        batch, length, _ = x.shape
        # A head's query, key and value lie together: a rank that has a part of the features has whole heads.
        parts = self.qkv(x).view(batch, length, -1, 3, self.head_width)
        query, key, value = parts.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


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

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp: nn.Module = MLP(config)
        if config.experts and index % config.moe_every == config.moe_every - 1:
            self.mlp = Experts(config.hidden, config.experts, config.top_k, config.own_experts)
        self.recomputed = config.recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, hidden] -> the same."""
        return self._run("full", self._both, x)

    def _both(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._run("attention", self.attn, self.norm1(x))
        return x + self._run("mlp", self.mlp, self.norm2(x))

    def _run(
        self, part: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        if self.recomputed != part or not torch.is_grad_enabled():
            return function(x)
        y: torch.Tensor = checkpoint(function, x, use_reentrant=False)
        return y


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
        self.layers = nn.ModuleDict({str(index): Block(config, index) for index in layers})
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
        for part_name, part in pieces(name, parameter, parameter, config.own_experts.start).items():
            _initialize(part_name, part, config)
    return stage


@torch.no_grad()
def _initialize(name: str, parameter: torch.Tensor, config: GPTConfig) -> None:
    if "bias" in name:
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


def parameter_names(config: GPTConfig) -> list[str]:
    """Names of the whole model's parameters, of each expert's its own, without making them."""
    whole = dataclasses.replace(config, own_experts=range(config.experts))
    with torch.device("meta"):
        parameters = list(Stage(whole, range(config.layers)).named_parameters())
    return [part for name, parameter in parameters for part in pieces(name, parameter, parameter, 0)]


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per byte, taken in float32.

    Args:
        logits: [batch, seq_len, 256].
        targets: int64 [batch, seq_len].
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
