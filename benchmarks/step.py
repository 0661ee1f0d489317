"""A whole training step of GPT blocks on some ranks: FP8 against bf16, and what of the amax reduction is not hidden.

    python benchmarks/step.py [--ranks 2] [--blocks 4] [--hidden 4096] [--batch 2] [--rounds 30] [--json FILE]

Data-parallel ranks, each with a GPU of its own, or on the CPU (gloo, one thread each) where there are too few:
there read the ratios only. A step is forward, backward, all-reduce of the gradients, AdamW. Methods take turns, a few
steps in a row each, between which nothing waits for the GPU: so what a host's wait costs is in it, too. "alone" is FP8
whose ranks each have a reduction group of their own, so "FP8 - alone" is the exposed reduction; it should be below 1 %
of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from coordinator import free_port
from rich.console import Console
from rich.table import Table
from torch import nn

import fp8dist as f8

AIM = 0.01
METHODS = ("bf16", "FP8", "FP8, overlap", "FP8, alone")
IN_A_ROW = 4


class Block(nn.Module):
    """A pre-norm transformer block; `parts` makes its four layers."""

    def __init__(self, hidden: int, heads: int, parts: Callable[[str], nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj, self.up, self.down = (parts(name) for name in ("qkv", "proj", "up", "down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] to the same."""
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, h))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return y


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The blocks in bf16 on a GPU, in fp32 on the CPU."""
    sizes = {"qkv": (1, 3), "proj": (1, 1), "up": (1, 4), "down": (4, 1)}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)

    def linear(name: str) -> nn.Module:
        wide, out = sizes[name]
        return nn.Linear(wide * args.hidden, out * args.hidden)

    blocks = (Block(args.hidden, args.hidden // 128 or 1, linear) for _ in range(args.blocks))
    return nn.Sequential(*blocks).to(device, dtype)


class Method:
    """One way to train: a model, its optimizer, and its scope."""

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device, alone: Any) -> None:
        self.model = build(args, device)
        self.coordinator: f8.ReductionGroupCoordinator | None = None
        self.options: dict[str, Any] = {"overlap": name == "FP8, overlap"}
        if name != "bf16":
            group = alone if name == "FP8, alone" else None
            self.coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(), group, name=name)
            self.model = f8.convert(self.model, self.coordinator)
            self.coordinator.freeze()
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        dtype = next(self.model.parameters()).dtype
        self.x = torch.randn(args.batch, args.sequence, args.hidden, device=device, dtype=dtype)

    def step(self) -> None:
        """One optimizer step."""
        if self.coordinator is None:
            self.model(self.x).square().mean().backward()
        else:
            with self.coordinator.step(**self.options):
                self.model(self.x).square().mean().backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()
        self.optimizer.zero_grad()


def rank_main(rank: int, args: argparse.Namespace, port: int, out: str) -> None:
    """One rank; the first writes the medians of the slowest."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= args.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, args.ranks, rank == 0)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=args.ranks)
    groups = [dist.new_group([r]) for r in range(args.ranks)]
    methods = {name: Method(name, args, device, groups[rank]) for name in METHODS}
    for method in methods.values():
        for _ in range(3):
            method.step()
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for i in range(args.rounds):
        for name in METHODS if i % 2 else METHODS[::-1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                methods[name].step()
            if on_gpu:
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - start) / IN_A_ROW)
    everyone: list[Any] = [None] * args.ranks
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    dist.all_gather_object(everyone, medians)
    if rank == 0:
        slowest = {name: max(each[name] for each in everyone) for name in METHODS}
        Path(out).write_text(json.dumps({"device": str(device.type), "ms": slowest}))
    dist.barrier()
    os._exit(0)


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table."""
    ms, tokens = result["ms"], args.ranks * args.batch * args.sequence
    table = Table(
        title=f"{args.blocks} blocks of {args.hidden}, {args.ranks} ranks, {result['device']}, medians"
    )
    for heading in ("method", "ms", "tokens/s", "of bf16", "exposed reduction"):
        table.add_column(heading, justify="right")
    for name in METHODS:
        exposed = ms[name] - ms["FP8, alone"]
        shown = f"{exposed / ms[name]:+.2%}" if name in ("FP8", "FP8, overlap") else ""
        table.add_row(
            name, f"{ms[name]:.2f}", f"{tokens / ms[name] * 1e3:.0f}", f"{ms[name] / ms['bf16']:.2f}", shown
        )
    Console().print(table)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=4 if on_gpu else 2)
    parser.add_argument("--hidden", type=int, default=4096 if on_gpu else 256)
    parser.add_argument("--sequence", type=int, default=4096 if on_gpu else 128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"prediction: exposed reduction < {AIM:.0%} of a step on GPUs, with overlap and without")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        mp.start_processes(
            rank_main, args=(args, free_port(), str(out)), nprocs=args.ranks, start_method="spawn"
        )
        result = json.loads(out.read_text())
    show(result, args)
    if args.json:
        args.json.write_text(
            json.dumps(result | {"arguments": {k: str(v) for k, v in vars(args).items()}}, indent=1)
        )


if __name__ == "__main__":
    main()
