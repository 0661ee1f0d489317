"""What a monitor costs a training step, by how often it samples.

    python benchmarks/monitor.py [--rounds 40] [--json FILE]

A small GPT trains twice in one process, with a monitor that writes JSON lines and without; their steps take turns, and
CPU time is measured, since nothing here waits and the machine may be busy. In most steps the monitor follows the commit
and is called, nothing else; in the one before a sampled step it also arms. Both are timed by themselves, because two
whole steps differ by more than they take. A sampled step, in which casts are counted, is compared with the plain step
beside it. From the trimmed means follows the cost for any `every`. Aim: < 1 % at the default, at hidden 256, 8 layers,
512 tokens.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import fp8dist as f8
from fp8dist import monitor as fm

AIM = 0.01
DEFAULT = inspect.signature(fm.Monitor).parameters["every"].default
PERIOD = 3  # steps from sample to sample while it is measured: idle, arming, sampled
KINDS = ("idle", "arming", "sampled")
SHAPES = {"tiny": (64, 2, 64), "realistic": (256, 8, 512)}  # hidden, layers, tokens


class Block(nn.Module):
    """Attention over sequences of 64 tokens, and an MLP four times as wide."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to the same."""
        tokens, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(-1, 64, 3, 4, hidden // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(tokens, hidden))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Training:
    """One model with its coordinator, and a monitor if there is a directory for what it writes."""

    def __init__(self, name: str, hidden: int, layers: int, tokens: int, run_dir: str | None) -> None:
        torch.manual_seed(0)
        self.coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=16), name=name)
        self.model = f8.convert(nn.Sequential(*(Block(hidden) for _ in range(layers))), self.coordinator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(tokens, hidden)
        self.coordinator.freeze()
        self.in_monitor = 0.0
        self.monitor = None
        if run_dir is not None:
            self.monitor = fm.Monitor(self.coordinator, [fm.JsonLines(run_dir)], every=PERIOD)
            watcher = self.monitor._see
            self.coordinator.watch_commits(None)
            self.coordinator.watch_commits(lambda *commit: self.timed(lambda: watcher(*commit)))

    def timed(self, call: Callable[[], None]) -> None:
        """Run a part of the monitor and add up its CPU seconds."""
        start = time.thread_time()
        call()
        self.in_monitor += time.thread_time() - start

    def step(self, number: int) -> float:
        """Train one step; return its loss."""
        with self.coordinator.step(number):
            loss = (self.model(self.x) - self.x.roll(1, 0)).square().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        monitor = self.monitor
        if monitor is not None:
            self.timed(lambda: monitor.step(step=number, loss=loss))
        return float(loss.detach())


def trimmed(values: list[float]) -> tuple[float, float]:
    """Mean of all but the lowest and the highest tenth, and its standard error."""
    cut = len(values) // 10
    kept = sorted(values)[cut : len(values) - cut]
    # Of a trimmed mean: the spread of the values with the cut ones drawn to the edge of the others.
    drawn = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(drawn) / ((1 - 2 * cut / len(values)) * math.sqrt(len(values)))
    return statistics.mean(kept), error


def measure(shape: str, rounds: int) -> dict[str, Any]:
    """CPU seconds of a plain step, and what each kind of monitored step takes more."""
    with tempfile.TemporaryDirectory() as run_dir:
        sides = {
            "plain": Training("plain", *SHAPES[shape], None),
            "monitored": Training("monitored", *SHAPES[shape], run_dir),
        }
        plain: list[float] = []
        more: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(1, PERIOD * (rounds + 2) + 1):
            took, losses = {}, {}
            sides["monitored"].in_monitor = 0.0
            for name in sorted(sides, reverse=bool(number % 2)):
                start = time.process_time()
                losses[name] = sides[name].step(number)
                took[name] = time.process_time() - start
            assert losses["plain"] == losses["monitored"], "a monitor changes nothing"
            if number > 2 * PERIOD:
                plain.append(took["plain"])
                kind = KINDS[(number - 1) % PERIOD]
                whole = took["monitored"] - took["plain"]
                more[kind].append(whole if kind == "sampled" else sides["monitored"].in_monitor)
    means = {kind: trimmed(values) for kind, values in more.items()}
    return {"plain_s": trimmed(plain)[0], "more_s": means}


def cost(measured: dict[str, Any], every: int) -> tuple[float, float]:
    """Part of a plain step that a monitor costs on average, and the standard error."""
    weights = {"idle": every - 2, "arming": 1, "sampled": 1}
    more = measured["more_s"]
    total = sum(weight * more[kind][0] for kind, weight in weights.items())
    error = math.sqrt(sum((weight * more[kind][1]) ** 2 for kind, weight in weights.items()))
    return total / every / measured["plain_s"], error / every / measured["plain_s"]


def main() -> None:
    """Measure both shapes and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="sampled steps of the realistic shape")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fp8dist").setLevel(logging.ERROR)  # the weights of a first step do grow quickly
    print(
        "prediction: a sampled step takes 20 % more (two more passes over each cast tensor), other steps < 0.1 % more; "
        f"so every={DEFAULT} costs < {AIM:.0%} of a realistic step"
    )
    results = {shape: measure(shape, args.rounds * (1 if shape == "realistic" else 5)) for shape in SHAPES}
    table = Table(
        title="A monitor's cost in CPU time, one thread, steps side by side, trimmed mean ± standard error"
    )
    table.add_column("what")
    for shape, (hidden, layers, tokens) in SHAPES.items():
        table.add_column(f"{shape}: hidden {hidden}, {layers} layers, {tokens} tokens", justify="right")
    table.add_row("plain step", *(f"{r['plain_s'] * 1e3:.2f} ms" for r in results.values()))
    for kind in KINDS:
        cells = (tuple(1e6 * v for v in r["more_s"][kind]) for r in results.values())
        table.add_row(f"{kind} step, more", *(f"{mean:+.0f} ± {error:.0f} us" for mean, error in cells))
    for every in sorted({10, 25, 50, 100, DEFAULT}):
        cells = (cost(r, every) for r in results.values())
        mark = " (default)" if every == DEFAULT else ""
        table.add_row(f"cost at every={every}{mark}", *(f"{m:+.2%} ± {e:.2%}" for m, e in cells))
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
