"""The Triton kernels on one GPU: time, bandwidth against a plain copy, and host time per call.

    python benchmarks/kernels.py [--shapes 2048x2048 8192x4096] [--json FILE]

GPU times are medians of CUDA events around replays of a graph that holds several calls, on inputs that do not fit the
L2 cache together. Host times are those of calls on a tiny matrix, where the GPU is idle. GB/s count each input read
once and each output written once; "of copy" compares with a kernel that negates bfloat16 matrices of the same shape.
Aims: 80 % of the copy for what casts; forward and backward of a linear layer, 8192 x 4096 x 4096, in 0.75 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ("2048x2048", "8192x4096", "8192x8192", "16384x16384")
COPY_GBPS = 3900.0  # expected of an H200
EXPECTED = {  # of the copy's bandwidth
    "cast": 0.95, "cast + T": 0.87, "cast + T, float32": 0.98, "gradient + T + db": 0.70, "fp8 transpose": 0.90,
    "gelu + T": 0.85, "swiglu + T": 0.95, "dgelu + T": 0.80, "dgelu + T + db": 0.70, "dswiglu + T": 0.80,
    "LayerNorm": 0.70, "LayerNorm + T": 0.60, "RMSNorm": 0.78, "RMSNorm + T": 0.65,
    "LayerNorm backward": 0.88, "RMSNorm backward": 0.88,
}  # fmt: skip
L2_BYTES = 2**28  # inputs together are larger than any L2


class Job(NamedTuple):
    """A kernel to time on one of several sets of inputs, and the bytes per value that it moves."""

    call: Callable[[dict[str, torch.Tensor]], Any]
    bytes_per_value: int


def jobs() -> dict[str, Job]:
    """What is measured; `i` holds the inputs."""
    from fp8dist.kernels import triton as k

    fp8, grad = (E4M3, 448.0), (E5M2, 57344.0)

    def norm(i: dict[str, torch.Tensor], kind: str, transpose: bool) -> Any:
        bias = i["weight"] if kind == "LayerNorm" else None
        return k.norm_cast(i["x"], i["weight"], bias, 1e-5, kind, i["scale"], i["amax"], *fp8, transpose)

    def norm_backward(i: dict[str, torch.Tensor], kind: str) -> Any:
        mean = i["mean"] if kind == "LayerNorm" else None
        return k.norm_backward(i["dy"], i["x"], i["weight"], mean, i["rstd"], kind)

    def derivative(i: dict[str, torch.Tensor], kind: str, h: str, want_db: bool) -> Any:
        return k.activation_backward_cast(
            i["dy"], i[h], kind, i["scale"], i["amax"], *grad, True, want_db=want_db
        )

    return {
        "cast": Job(lambda i: k.cast(i["x"], i["scale"], i["amax"], *fp8, False), 3),
        "cast + T": Job(lambda i: k.cast(i["x"], i["scale"], i["amax"], *fp8, True), 4),
        "cast + T, float32": Job(lambda i: k.cast(i["x32"], i["scale"], i["amax"], *fp8, True), 6),
        "gradient + T + db": Job(
            lambda i: k.cast_gradient(i["dy"], i["scale"], i["amax"], *grad, True, want_db=True), 4
        ),
        "fp8 transpose": Job(lambda i: k.fp8_transpose(i["q"]), 2),
        "gelu + T": Job(lambda i: k.activation_cast(i["x"], "gelu", i["scale"], i["amax"], *fp8, True), 4),
        "swiglu + T": Job(
            lambda i: k.activation_cast(i["h2"], "swiglu", i["scale"], i["amax"], *fp8, True), 6
        ),
        "dgelu + T": Job(lambda i: derivative(i, "gelu", "x", False), 6),
        "dgelu + T + db": Job(lambda i: derivative(i, "gelu", "x", True), 6),
        "dswiglu + T": Job(lambda i: derivative(i, "swiglu", "h2", False), 10),
        "LayerNorm": Job(lambda i: norm(i, "LayerNorm", False), 3),
        "LayerNorm + T": Job(lambda i: norm(i, "LayerNorm", True), 4),
        "RMSNorm": Job(lambda i: norm(i, "RMSNorm", False), 3),
        "RMSNorm + T": Job(lambda i: norm(i, "RMSNorm", True), 4),
        "LayerNorm backward": Job(lambda i: norm_backward(i, "LayerNorm"), 6),
        "RMSNorm backward": Job(lambda i: norm_backward(i, "RMSNorm"), 6),
    }


def inputs(m: int, k: int) -> dict[str, torch.Tensor]:
    """Fresh random operands of all kernels."""
    device = torch.device("cuda")
    x, dy = (torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "x": x,
        "dy": dy,
        "x32": x.float(),
        "h2": torch.randn(m, 2 * k, device=device, dtype=torch.bfloat16),
        "q": x.to(E4M3),
        "weight": torch.randn(k, device=device, dtype=torch.bfloat16),
        "mean": torch.zeros(m, device=device),
        "rstd": torch.ones(m, device=device),
        "scale": torch.full((1,), 20.0, device=device),
        "amax": torch.full((1,), -1.0, device=device),
    }


def gpu_ms(calls: list[Callable[[], Any]], replays: int = 15) -> float:
    """Median milliseconds of one of `calls`, which are captured together."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # alive together, so that they are written to different places
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    del results
    return statistics.median(times)


def host_us(call: Callable[[], Any], calls: int = 1000) -> float:
    """Microseconds that a call keeps the host busy."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 5):
            call()
        times.append((time.perf_counter() - start) / (calls // 5))
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def measure_shape(m: int, k: int, host: dict[str, float]) -> list[dict[str, Any]]:
    """All kernels on [m, k]."""
    count = max(2, min(16, L2_BYTES // (m * k)))
    sets = [inputs(m, k) for _ in range(count)]
    copies = [(torch.empty_like(i["x"]), i["x"]) for i in sets]
    # Not `copy_`, which a graph replays by other means than a kernel, slowly for large matrices.
    copy_ms = gpu_ms([lambda t=t: torch.neg(t[1], out=t[0]) for t in copies])  # type: ignore[misc]
    copy_gbps = 4 * m * k / copy_ms / 1e6
    results = []
    for name, job in jobs().items():
        ms = gpu_ms([lambda i=i, job=job: job.call(i) for i in sets])  # type: ignore[misc]
        gbps = job.bytes_per_value * m * k / ms / 1e6
        results.append({"kernel": name, "shape": f"{m}x{k}", "ms": ms, "gbps": gbps, "copy_gbps": copy_gbps,
                        "of_copy": gbps / copy_gbps, "host_us": host[name]})  # fmt: skip
    return results


def linear_step(tokens: int, features: int, out_features: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of one linear layer: three casts and three products, and the products alone."""
    from fp8dist.kernels import triton as k

    i = inputs(tokens, features)
    weight = torch.randn(out_features, features, device="cuda", dtype=torch.bfloat16) / features**0.5
    dy = torch.randn(tokens, out_features, device="cuda", dtype=torch.bfloat16)
    scale, amax = i["scale"], i["amax"]

    def product(
        a: torch.Tensor, b: torch.Tensor, a_inv: torch.Tensor, b_inv: torch.Tensor, fast: bool
    ) -> Any:
        return torch._scaled_mm(a, b.t(), a_inv, b_inv, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def products(x: Any, w: Any, g: Any) -> Any:
        y = product(x.data, w.data, x.scale_inv, w.scale_inv, True)
        dx = product(g.data, w.data_t, g.scale_inv, w.scale_inv, False)
        dw = product(g.data_t, x.data_t, g.scale_inv, x.scale_inv, False)
        return y, dx, dw

    def casts() -> Any:
        x = k.cast(i["x"], scale, amax, E4M3, 448.0, True)
        w = k.cast(weight, scale, amax, E4M3, 448.0, True)
        return x, w, k.cast(dy, scale, amax, E5M2, 57344.0, True)

    ready = casts()
    return lambda: products(*casts()), lambda: products(*ready)


def measure_update() -> list[dict[str, Any]]:
    """The update of all slots in one launch."""
    from fp8dist.kernels.triton import update

    results = []
    for n, length in ((2400, 16), (2400, 1024), (100_000, 16), (100_000, 1024)):
        row, scale, scale_inv = (torch.ones(n, device="cuda") for _ in range(3))
        ring = torch.rand(length, n, device="cuda")
        warm = torch.zeros(n, dtype=torch.bool, device="cuda")
        lost = torch.zeros(n, dtype=torch.int64, device="cuda")

        def call(row=row, ring=ring, scale=scale, scale_inv=scale_inv, warm=warm, lost=lost) -> None:  # type: ignore
            update(row, ring, 0, scale, scale_inv, warm, lost, 448.0)

        ms = gpu_ms([call] * 10)
        results.append({"kernel": "update", "shape": f"L={length} n={n}", "ms": ms, "gbps": 4 * n * length / ms / 1e6,
                        "host_us": host_us(call)})  # fmt: skip
    return results


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table("kernel", "shape", "ms", "GB/s", "of copy", "host us", title=title)
    for row in rows:
        fraction = f"{row['of_copy']:.2f}" if "of_copy" in row else ""
        host = f"{row['host_us']:.1f}" if "host_us" in row else ""
        gbps = f"{row['gbps']:.0f}" if "gbps" in row else ""
        table.add_row(row["kernel"], row["shape"], f"{row['ms']:.4f}", gbps, fraction, host)
    console.print(table)


def predict(console: Console, shapes: list[tuple[int, int]]) -> None:
    """Say what should come out, before it is known."""
    table = Table(
        "kernel", *(f"{m}x{k}" for m, k in shapes), title="Predicted ms: bytes / (copy x fraction) + 3 us"
    )
    for name, job in jobs().items():
        rate = COPY_GBPS * 1e6 * EXPECTED[name]
        table.add_row(name, *(f"{job.bytes_per_value * m * k / rate + 0.003:.4f}" for m, k in shapes))
    console.print(table)
    console.print(
        "Predicted: linear 8192x4096x4096 in 0.59 + 0.10 = 0.69 ms; host 20-30 us a cast; update 3 us."
    )


def main() -> None:
    """Predict, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device but found none; run this on a machine with a Hopper GPU")
    console = Console(width=120)
    torch.manual_seed(0)
    shapes = [(int(m), int(k)) for m, k in (shape.split("x") for shape in options.shapes)]
    predict(console, shapes)
    tiny = inputs(16, 16)
    host = {name: host_us(lambda job=job: job.call(tiny)) for name, job in jobs().items()}  # type: ignore[misc]
    rows: list[dict[str, Any]] = []
    for m, k in shapes:
        measured = measure_shape(m, k, host)
        show(console, f"{m} x {k}; copy {measured[0]['copy_gbps']:.0f} GB/s", measured)
        rows += measured
        torch.cuda.empty_cache()
    updates = measure_update()
    for tokens, features, out_features in ((2048, 2048, 2048), (8192, 4096, 4096), (8192, 8192, 8192)):
        step, products = linear_step(tokens, features, out_features)
        name = f"{tokens}x{features}x{out_features}"
        updates.append({"kernel": "linear, forward + backward", "shape": name, "ms": gpu_ms([step] * 5),
                        "host_us": host_us(step, 200)})  # fmt: skip
        updates.append({"kernel": "its three products alone", "shape": name, "ms": gpu_ms([products] * 5)})
    show(
        console,
        "Update of all slots; linear layers (host: includes waiting for the queue of large ones)",
        updates,
    )
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows + updates}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    else:
        console.print_json(json.dumps(report))


if __name__ == "__main__":
    main()
