"""Forward and backward of many experts' linear layers on a GPU: bf16, FP8 layer by layer, FP8 as one node.

    python benchmarks/experts.py [--experts 8] [--tokens 16384] [--odd] [--json FILE] [--iterations 20]

Milliseconds are medians over CUDA events, all methods interleaved in one run; host us is the time it takes to start one
forward and backward of the same number of tiny experts. Each shape is first checked on fresh random data against
float64. The counts of tokens are uneven, and multiples of 16 unless `--odd` is given.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from linear import Run, milliseconds
from rich.console import Console
from rich.table import Table
from torch import nn

import fp8dist as f8
from fp8dist.kernels import gemm

HEAD_START = 1_000_000  # cycles
SHAPES = [(4096, 14336), (14336, 4096), (2048, 1408), (1408, 2048)]
PREDICTION = (
    "prediction at 8 x 4096 x 14336 and 16384 tokens: bf16 8.5 ms; FP8 layer by layer 7 ms; one node 5.7 ms (products "
    "4.8 ms, casts 0.9 ms); products in one launch are slower than one by one there, and faster at 2048 x 1408"
)


def uneven(experts: int, tokens: int, odd: bool) -> list[int]:
    """Counts that add up to `tokens`, the largest about three times the smallest."""
    weights = torch.linspace(0.5, 1.5, experts, dtype=torch.float64)
    unit = 1 if odd else 16
    counts = (weights / weights.sum() * (tokens // unit)).long() * unit
    counts[-1] += tokens - counts.sum()
    if odd:
        counts[0] += 1 - counts[0] % 2
        counts[-1] += tokens - counts.sum()
    return counts[torch.randperm(experts, generator=torch.Generator().manual_seed(0))].tolist()


class Case:
    """One shape's tensors, shared by all methods."""

    def __init__(self, n_in: int, n_out: int, counts: Sequence[int], format: f8.Format) -> None:
        torch.manual_seed(n_in)
        self.counts = list(counts)
        self.x = torch.randn(sum(counts), n_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.randn(sum(counts), n_out, device="cuda", dtype=torch.bfloat16)
        self.coordinator = f8.ReductionGroupCoordinator(
            f8.DelayedScaling(fp8_format=format, amax_history_len=16), name=f"{n_in}x{n_out}x{format.value}"
        )
        self.module = f8.GroupedLinear(
            len(counts), n_in, n_out, coordinator=self.coordinator, name="experts", device="cuda", dtype=torch.bfloat16
        )  # fmt: skip
        self.ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
        for _ in range(2):
            with self.coordinator.step():
                self.once(self.ours)

    def ours(self) -> torch.Tensor:
        """FP8, by the module's path."""
        y: torch.Tensor = self.module(self.x, self.counts)
        return y

    def loop(self) -> torch.Tensor:
        """Bf16, expert by expert."""
        assert isinstance(self.module.bias, nn.Parameter)
        parts = zip(self.x.split(self.counts), self.module.weight, self.module.bias, strict=True)
        return torch.cat([F.linear(x, w, b) for x, w, b in parts])

    def one_launch(self) -> torch.Tensor:
        """Bf16, all experts' products in one launch, as torch has it; without the bias."""
        y: torch.Tensor = torch._grouped_mm(self.x, self.module.weight.transpose(1, 2), offs=self.ends)
        return y

    def once(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One forward and backward with fresh gradients."""
        self.x.grad = None
        self.module.zero_grad()
        y = forward()
        y.backward(self.dy)
        return y

    def errors(self) -> dict[str, float]:
        """Relative errors against float64, of one expert: the one with the fewest tokens."""
        with self.coordinator.step():
            y = self.once(self.ours)
        weight, bias = self.module.weight, self.module.bias
        assert (
            self.x.grad is not None and weight.grad is not None and bias is not None and bias.grad is not None
        )
        e = self.counts.index(min(self.counts))
        rows = slice(sum(self.counts[:e]), sum(self.counts[: e + 1]))
        x, w, b, dy = (t.detach().double() for t in (self.x[rows], weight[e], bias[e], self.dy[rows]))
        pairs = {
            "y": (y[rows], x @ w.t() + b), "dx": (self.x.grad[rows], dy @ w),
            "dw": (weight.grad[e], dy.t() @ x), "db": (bias.grad[e], dy.sum(0)),
        }  # fmt: skip
        return {name: ((a.double() - c).norm() / c.norm()).item() for name, (a, c) in pairs.items()}


@contextmanager
def variant(case: Case, name: str) -> Iterator[None]:
    """The module's path for one call: one of `VARIANTS`."""
    case.module.path = "looped" if name == "layers" else "grouped"
    before, gemm.GROUPED_WORK = gemm.GROUPED_WORK, float("inf") if name == "one launch" else 0.0
    try:
        # With autocast, which changes nothing here but that, the node does without its kernels.
        with torch.autocast("cuda", torch.bfloat16, enabled=name == "node without kernels"):
            yield
    finally:
        gemm.GROUPED_WORK = before


VARIANTS = ("layers", "node without kernels", "one by one", "one launch")


def methods_of(case: Case, odd: bool) -> dict[str, Run]:
    """All methods by name."""

    def fp8(name: str) -> Run:
        def run() -> None:
            with variant(case, name):
                case.once(case.ours)

        return run

    methods: dict[str, Run] = {"bf16 loop": lambda: void(case.once(case.loop))}
    if not odd:  # what torch demands of the weight gradient's groups differs between its releases
        methods["bf16 one launch"] = lambda: void(case.once(case.one_launch))
    return methods | {f"FP8 {name}": fp8(name) for name in VARIANTS}


def void(result: object) -> None:
    """For a lambda that returns nothing."""


def casts(case: Case) -> float:
    """Milliseconds of the three casts of the node alone."""
    from fp8dist.kernels.triton.grouped import cast_groups

    slots, dev = case.module._expert_slots, case.x.device
    assert slots is not None
    n, n_out, n_in = case.module.weight.shape
    groups, of_weights = gemm.RowGroups.of(case.counts, dev), gemm.RowGroups.of([n_out] * n, dev)
    weight = case.module.weight.detach().view(-1, n_in)
    amax = torch.zeros(n, device=dev)

    def run() -> None:
        for x, rows, cells, sums in (
            (case.x.detach(), groups, slots.input, None), (weight, of_weights, slots.weight, None),
            (case.dy, groups, slots.grad_output, torch.bfloat16),
        ):  # fmt: skip
            cast_groups(
                x, rows, cells.addresses()[0], None, amax, cells.dtype, transpose=True, keep=True, sums_dtype=sums
            )  # fmt: skip

    return milliseconds({"casts": run}, 20, HEAD_START)["casts"]


def measure(
    shape: tuple[int, int], counts: Sequence[int], format: f8.Format, odd: bool, n: int
) -> dict[str, Any]:
    """All methods at one shape, inside of one scope; weights are cast in every call all the same."""
    case = Case(*shape, counts, format)
    errors = {}
    for name in VARIANTS:
        with variant(case, name):
            errors[name] = case.errors()
        assert max(errors[name].values()) < 0.08, (name, errors[name])
    scope = case.coordinator.step()
    scope.__enter__()
    forget = case.coordinator._scope.weight_cache.clear

    def anew(run: Run) -> Run:
        def forgetful() -> None:
            forget()
            run()

        return forgetful

    result = milliseconds({name: anew(run) for name, run in methods_of(case, odd).items()}, n, HEAD_START)
    result["casts alone"] = casts(case)
    scope.__exit__(None, None, None)
    case.coordinator.close()
    return {"shape": shape, "format": format.value, "counts": list(counts), "errors": errors, "ms": result}


def host_us(experts: int) -> dict[str, float]:
    """Host time of one forward and backward: tiny experts, whose kernels never hold the host up."""
    case = Case(64, 64, [16] * experts, f8.Format.HYBRID)
    result = {}
    with case.coordinator.step():
        for name, run in methods_of(case, odd=False).items():
            for _ in range(20):
                run()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                run()
            result[name] = (time.perf_counter() - start) / 100 * 1e6
            torch.cuda.synchronize()
    case.coordinator.close()
    return result


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--odd", action="store_true", help="counts that are no multiples of 16")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(PREDICTION)
    counts = uneven(args.experts, args.tokens, args.odd)
    print(f"counts {counts}")
    results = [
        measure(shape, counts, format, args.odd, args.iterations)
        for shape in SHAPES
        for format in (f8.Format.HYBRID, f8.Format.E4M3)
    ]
    host = host_us(args.experts)
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}: forward + backward, ms")
    for heading in ("K x N", "format", *results[0]["ms"], "largest error"):
        table.add_column(heading, justify="right")
    for r in results:
        worst = max(max(errors.values()) for errors in r["errors"].values())
        times = (f"{ms:.3f}" for ms in r["ms"].values())
        table.add_row("x".join(map(str, r["shape"])), r["format"], *times, f"{worst:.3f}")
    console = Console(width=180)
    console.print(table)
    console.print(f"host us per forward + backward: {', '.join(f'{k} {v:.0f}' for k, v in host.items())}")
    if args.json:
        args.json.write_text(json.dumps({"shapes": results, "host_us": host}, indent=1))


if __name__ == "__main__":
    main()
