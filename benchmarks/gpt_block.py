"""Forward and backward of eight GPT blocks on one GPU: FP8, bf16 eager and bf16 compiled; milliseconds and peak memory.

    python benchmarks/gpt_block.py [--json FILE] [--blocks 8] [--batch 2] [--methods bf16 fp8dist ...]

Hidden 4096, 32 heads, GELU MLP 16384, sequence 4096, causal attention, bf16 parameters. Methods have the card in turn,
each for itself; parameters and gradients count.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import fp8dist as f8
from fp8dist.graphs import GraphedStep

HIDDEN, HEADS, FFN, SEQUENCE = 4096, 32, 16384, 4096
METHODS = ("bf16", "bf16 compiled", "fp8dist", "fp8dist, graph")


class Block(nn.Module):
    """Attention and MLP, both behind a LayerNorm."""

    def __init__(self, qkv: nn.Module, proj: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj, self.mlp = qkv, proj, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] to the same."""
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, h))
        y: torch.Tensor = x + self.mlp(x)
        return y


def plain(blocks: int) -> nn.Module:
    """The model of torch modules."""
    kw: Any = {"device": "cuda", "dtype": torch.bfloat16}

    def block() -> Block:
        return Block(
            nn.Sequential(nn.LayerNorm(HIDDEN, **kw), nn.Linear(HIDDEN, 3 * HIDDEN, **kw)),
            nn.Linear(HIDDEN, HIDDEN, **kw),
            nn.Sequential(
                nn.LayerNorm(HIDDEN, **kw),
                nn.Linear(HIDDEN, FFN, **kw),
                nn.GELU("tanh"),
                nn.Linear(FFN, HIDDEN, **kw),
            ),
        )

    return nn.Sequential(*(block() for _ in range(blocks)))


def ours(blocks: int, coordinator: f8.ReductionGroupCoordinator) -> nn.Module:
    """The model of fused FP8 modules."""

    def block(i: int) -> Block:
        kw: Any = {"coordinator": coordinator, "device": "cuda", "dtype": torch.bfloat16}
        return Block(
            f8.LayerNormLinear(HIDDEN, 3 * HIDDEN, name=f"{i}.qkv", **kw),
            f8.Linear(HIDDEN, HIDDEN, name=f"{i}.proj", **kw),
            f8.LayerNormMLP(HIDDEN, FFN, name=f"{i}.mlp", **kw),
        )

    return nn.Sequential(*(block(i) for i in range(blocks)))


def measure(method: str, blocks: int, batch: int, iterations: int) -> dict[str, Any]:
    """Time and memory of one method."""
    torch.manual_seed(0)
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=16), name=method)
    model = ours(blocks, coordinator) if method.startswith("fp8dist") else plain(blocks)
    run = torch.compile(model) if method == "bf16 compiled" else model
    x = torch.randn(batch, SEQUENCE, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x) * 0.1

    def once() -> None:
        x.grad = None
        for p in model.parameters():
            p.grad = None
        run(x).backward(dy)

    def step() -> None:
        if method.startswith("fp8dist"):
            with coordinator.step():
                once()
        else:
            once()

    for _ in range(4):
        step()
    body: Callable[[], None] = step
    if method == "fp8dist, graph":
        graphed = body = GraphedStep(coordinator, once, [x, *model.parameters()])
        while not graphed.captured:
            graphed()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    # A graph's memory is set aside at its capture, and counts as free while it is not replayed.
    peak = None if method == "fp8dist, graph" else torch.cuda.max_memory_allocated() / 2**30
    coordinator.close()
    return {"method": method, "ms": statistics.median(times), "peak_gib": peak}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("prediction: FP8 <= 100 ms and <= 9.5 GiB; bf16 eager about 160 ms and 11.7 GiB on one H200")
    table = Table(
        title=f"{args.blocks} GPT blocks, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    for heading in ("method", "ms", "peak GiB"):
        table.add_column(heading, justify="right")
    results = []
    for method in args.methods:
        results.append(measure(method, args.blocks, args.batch, args.iterations))
        gc.collect()
        torch.cuda.empty_cache()
        r = results[-1]
        table.add_row(r["method"], f"{r['ms']:.1f}", "" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
