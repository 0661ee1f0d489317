"""Where the host time of an FP8 layer goes on a GPU: pieces, and whole layers in a chain.

    python benchmarks/host.py [--layers 16] [--rounds 200] [--profile] [--json FILE]

The tensors are tiny, so no kernel holds the host up; each figure is the lowest decile of its rounds. A chain of layers
has one hand-over to autograd's thread per backward, as a model has; "one thread" runs the backward in the caller's
thread, which shows what the hand-over costs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fp8dist as f8
from fp8dist.kernels.quantize import Layout, quantize

SIZE = 64
REPEATS = 20


def quiet(seconds: list[float]) -> float:
    """The lowest decile, in microseconds: what it takes where the core runs undisturbed."""
    return sorted(seconds)[len(seconds) // 10] * 1e6


def host_us(body: Callable[[], object], calls: int) -> float:
    """Host time of one call, the GPU idle before each round."""
    body()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            body()
        times.append((time.perf_counter() - start) / calls)
    return quiet(times)


class Identity(torch.autograd.Function):
    """A node that does as little as a Python node can."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        """The same values."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        """The same gradient."""
        return dy


def pieces(slot: f8.Slot, gradient: f8.Slot) -> dict[str, Callable[[], object]]:
    """What one layer is made of."""
    x = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    q = x.to(torch.float8_e4m3fn)
    one, bias = torch.ones(1, device="cuda"), torch.zeros(SIZE, device="cuda", dtype=torch.bfloat16)
    asking = x.clone().requires_grad_()
    weight = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    return {
        "torch.empty": lambda: torch.empty(SIZE, SIZE, dtype=torch.float8_e4m3fn, device="cuda"),
        "bf16 F.linear": lambda: nn.functional.linear(x, weight, bias),
        "_scaled_mm": lambda: torch._scaled_mm(q, q.t(), one, one, out_dtype=torch.bfloat16),
        "_scaled_mm with bias": lambda: torch._scaled_mm(q, q.t(), one, one, bias=bias, out_dtype=torch.bfloat16),
        "quantize, rows": lambda: quantize(x, slot, True),
        "quantize, both": lambda: quantize(x, slot, True, layout=Layout.BOTH),
        "quantize, gradient": lambda: quantize(x, gradient, True, layout=Layout.BOTH),
        "empty autograd node": lambda: Identity.apply(asking),
    }  # fmt: skip


def chain(layers: int, fp8: bool) -> tuple[nn.Module, f8.ReductionGroupCoordinator]:
    """Linear layers one after the other."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(layers))).to("cuda", torch.bfloat16)
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=16), name=f"chain {fp8}")
    return (f8.convert(plain, coordinator) if fp8 else plain), coordinator


def whole(layers: int, rounds: int, profile: bool) -> dict[str, float]:
    """Host time of a layer's forward and backward, by method."""
    x = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    models = {"bf16": chain(layers, False), "fp8dist": chain(layers, True)}

    def once(model: nn.Module) -> tuple[float, float]:
        for p in model.parameters():
            p.grad = None
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = model(x)
        middle = time.perf_counter()
        y.backward(dy)
        return middle - start, time.perf_counter() - middle

    def step(name: str) -> tuple[float, float]:
        model, coordinator = models[name]
        with coordinator.step():
            return once(model)

    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for i in range(rounds + 3):
        for threads in ("own thread", "one thread"):
            with torch.autograd.set_multithreading_enabled(threads == "own thread"):
                for name in models:
                    pair = step(name)
                    if i >= 3:
                        seconds.setdefault((name, threads), []).append(pair)
    if profile:
        profiler = cProfile.Profile()
        with torch.autograd.set_multithreading_enabled(False):
            profiler.enable()
            for _ in range(rounds):
                step("fp8dist")
            profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return {
        f"{name} {what}, {threads}": quiet([pair[k] for pair in pairs]) / layers
        for (name, threads), pairs in seconds.items()
        for k, what in enumerate(("forward", "backward"))
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="print a profile of the FP8 chain")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("prediction: in a chain forward + backward of an FP8 layer <= 150 us, twice bf16's")
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(), name="pieces")
    slots = [coordinator.slot("x.input"), coordinator.slot("x.grad_output")]
    for slot in slots:  # a slot goes to the device of the weights, and here is none
        slot.scale, slot.amax = slot.scale.cuda(), slot.amax.cuda()
        slot.warm.fill_(True)
    us = {}
    coordinator.request_handle.implicit = True  # record, and never commit
    for name, body in pieces(*slots).items():
        us[name] = host_us(body, args.rounds)
    layers = whole(args.layers, args.rounds, args.profile)
    table = Table(title=f"Host us, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    table.add_column("what")
    table.add_column("us", justify="right")
    for name, value in {**us, **layers}.items():
        table.add_row(name, f"{value:.1f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"pieces": us, "layers": layers}, indent=1))


if __name__ == "__main__":
    main()
