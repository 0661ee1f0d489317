"""Forward and backward of one linear layer on a GPU: FP8 eager and in a graph, bf16, and what peers are installed.

    python benchmarks/linear.py [--json FILE] [--iterations 60] [--sweep]

Milliseconds are medians over CUDA events, all methods interleaved in one run; MiB are the most that one forward and
backward allocates above what was there. Each shape is first checked on fresh random data against float64. `--sweep`
takes a grid of shapes instead of the four with a goal. What the host takes for a layer is in `benchmarks/host.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fp8dist as f8
from fp8dist.graphs import GraphedStep

SHAPES = [(2048, 2048, 2048), (8192, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 16384)]
SWEEP = [
    (tokens, h, f)
    for tokens in (1024, 4096, 16384)
    for h, f in ((1024, 4096), (4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672))
]
GOALS = {
    (2048, 2048, 2048): 0.30, (8192, 4096, 4096): 0.75, (8192, 8192, 8192): 2.85, (16384, 4096, 16384): 5.70,
}  # fmt: skip
GRAPH_GOALS = {(2048, 2048, 2048): 0.155}

Run = Callable[[], None]


class Case:
    """One shape's tensors, shared by all methods."""

    def __init__(self, tokens: int, n_in: int, n_out: int) -> None:
        torch.manual_seed(tokens + n_in)
        self.plain = nn.Linear(n_in, n_out, device="cuda", dtype=torch.bfloat16)
        self.x = torch.randn(tokens, n_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.randn(tokens, n_out, device="cuda", dtype=torch.bfloat16)
        self.coordinator = f8.ReductionGroupCoordinator(
            f8.DelayedScaling(amax_history_len=16), name=f"{tokens}x{n_in}x{n_out}"
        )
        self.ours = f8.Linear.from_linear(self.plain, self.coordinator, "layer")
        for _ in range(2):
            with self.coordinator.step():
                self.once(self.ours)

    def once(self, layer: nn.Module) -> torch.Tensor:
        """One forward and backward with fresh gradients."""
        self.x.grad = None
        for p in layer.parameters():
            p.grad = None
        y: torch.Tensor = layer(self.x)
        y.backward(self.dy)
        return y

    def errors(self) -> list[float]:
        """Relative errors of y, dx, dw, db against float64, on a part of the tokens."""
        with self.coordinator.step():
            y = self.once(self.ours)
        assert (
            self.x.grad is not None and self.ours.weight.grad is not None and self.ours.bias.grad is not None
        )
        some = slice(0, 256)
        x, w, dy = (t.detach().double() for t in (self.x, self.plain.weight, self.dy))
        wanted = [
            x[some] @ w.t() + self.plain.bias.double(), dy[some] @ w, dy.t()[some] @ x, dy.sum(0),
        ]  # fmt: skip
        got = [y[some], self.x.grad[some], self.ours.weight.grad[some], self.ours.bias.grad]
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True)]

    def graphed(self) -> Run:
        """Forward and backward captured once; to be called inside a scope, whose exit is not measured."""

        def body() -> None:
            self.once(self.ours)

        step = GraphedStep(self.coordinator, body, [self.x, *self.ours.parameters()])
        while not step.captured:
            step()
        return step

    def three_gemms(self) -> Run:
        """The FP8 products alone, on operands that are there."""
        (tokens, n_in), n_out = self.x.shape, self.dy.shape[1]
        one = torch.ones(1, device="cuda")

        def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        x, w, g = fp8(tokens, n_in), fp8(n_out, n_in), fp8(tokens, n_out, dtype=torch.float8_e5m2)
        w_t, g_t, x_t = w.t().contiguous(), g.t().contiguous(), x.t().contiguous()

        def run() -> None:
            for a, b, fast in ((x, w.t(), True), (g, w_t.t(), False), (g_t, x_t.t(), False)):
                torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        return run


def torchao_linear(plain: nn.Linear) -> nn.Module | None:
    """Torchao's tensorwise FP8 layer, compiled; None where it is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return None
    import copy

    from torchao.float8 import convert_to_float8_training

    module = convert_to_float8_training(nn.Sequential(copy.deepcopy(plain)))
    module.compile()
    return module


def te_linear(plain: nn.Linear) -> nn.Module | None:
    """Transformer Engine's delayed-scaling layer; None where it is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    inner = te.Linear(plain.in_features, plain.out_features, params_dtype=torch.bfloat16)

    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(amax_history_len=16)):
                y: torch.Tensor = self.inner(x)
            return y

    return Scoped()


def milliseconds(methods: dict[str, Run], iterations: int, head_start: int = 0) -> dict[str, float]:
    """Median time of each method, all of them in turn.

    Args:
        methods: what to time.
        iterations: of each.
        head_start: cycles that the GPU sleeps first, so that the host runs ahead, as in a model of several layers.
    """
    times: dict[str, list[float]] = {name: [] for name in methods}
    for run in methods.values():
        for _ in range(5):
            run()
    torch.cuda.synchronize()
    for _ in range(iterations):
        for name, run in methods.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if head_start:
                torch.cuda._sleep(head_start)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_mib(run: Run) -> float:
    """The most memory that a run has allocated at once, above what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(shape: tuple[int, int, int], iterations: int) -> dict[str, Any]:
    """All methods at one shape."""
    case = Case(*shape)
    errors = case.errors()
    assert max(errors) < 0.06, errors

    def running(layer: nn.Module) -> Run:
        def run() -> None:
            case.once(layer)

        return run

    methods: dict[str, Run] = {"three FP8 GEMMs": case.three_gemms(), "bf16": running(case.plain)}
    for name, make in (("torchao", torchao_linear), ("Transformer Engine", te_linear)):
        peer = make(case.plain)
        if peer is not None:
            methods[name] = running(peer)
    scope = case.coordinator.step()
    scope.__enter__()
    layers = {"bf16": case.plain, "fp8dist": case.ours}
    memory = {}
    for name, layer in layers.items():
        case.x.grad = None
        for p in layer.parameters():
            p.grad = None
        memory[name] = peak_mib(running(layer))
    result = milliseconds({**methods, "fp8dist": running(case.ours)}, iterations)
    scope.__exit__(None, None, None)
    graphed = case.graphed()
    with case.coordinator.step():
        result |= milliseconds({"fp8dist, graph": graphed}, iterations)
    case.coordinator.close()
    return {"shape": shape, "errors": errors, "mib": memory, **result}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--sweep", action="store_true", help="a grid of shapes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("prediction: fp8dist in a graph = three FP8 GEMMs + 0.15 ms at 8192x4096x4096; goals in the table")
    results = [measure(shape, args.iterations) for shape in (SWEEP if args.sweep else SHAPES)]
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}: forward + backward, ms")
    names = [name for name in results[0] if name not in ("shape", "errors", "mib")]
    for heading in ("T x H x F", *names, "goal", "largest error", "MiB, bf16", "MiB, FP8"):
        table.add_column(heading, justify="right")
    for r in results:
        goals = [GOALS.get(r["shape"]), GRAPH_GOALS.get(r["shape"])]
        table.add_row(
            "x".join(map(str, r["shape"])),
            *(f"{r[name]:.3f}" for name in names),
            " / ".join(f"{goal:g}" for goal in goals if goal is not None),
            f"{max(r['errors']):.3f}",
            *(f"{mib:.0f}" for mib in r["mib"].values()),
        )
    Console(width=180).print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
