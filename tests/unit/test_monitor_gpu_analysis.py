"""What the benchmark says of a profile is what hand-made traces hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import monitor_gpu as bench  # noqa: E402


def event(name: str, ts: float, dur: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, grid: int = 1) -> dict[str, Any]:
    return event(name, ts, dur, grid=[grid, 1, 1])


NOISE = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    event("cudaLaunchKernel", 0.0, 500.0, "cuda_runtime"),
    event("aten::add", 0.0, 500.0, "cpu_op"),
]


def test_gpu_work_is_kernels_and_copies_on_all_streams() -> None:
    events = [
        *NOISE, kernel("b", 20, 3), event("Memset", 40, 1, "gpu_memset", bytes=4), kernel("a", 10, 5),
        event("Memcpy DtoH", 30, 2, "gpu_memcpy", bytes=64),
    ]  # fmt: skip
    assert [e["name"] for e in bench.work(events)] == ["a", "b", "Memcpy DtoH", "Memset"]
    assert bench.busy_us(events) == 5 + 3 + 2 + 1
    assert bench.work(NOISE) == [] and bench.busy_us([]) == 0


def test_small_kernels_are_told_from_large_ones_of_the_same_name() -> None:
    plain = [kernel("fill", 0, 100, grid=4096), kernel("gemm", 200, 50)]
    monitored = [*plain, kernel("fill", 300, 2), kernel("fill", 310, 4), kernel("where", 320, 5)]
    assert bench.added(monitored, plain) == [
        bench.Added("fill", "[1, 1, 1]", 2, 6.0), bench.Added("where", "[1, 1, 1]", 1, 5.0),
    ]  # fmt: skip
    assert bench.added(plain, monitored) == []


def test_copies_are_told_apart_by_their_size() -> None:
    plain = [event("Memcpy DtoH", 0, 1, "gpu_memcpy", bytes=64)]
    monitored = [*plain, event("Memcpy DtoH", 9, 3, "gpu_memcpy", bytes=4096)]
    assert bench.added(monitored, plain) == [bench.Added("Memcpy DtoH", "4096", 1, 3.0)]


def test_what_both_have_counts_once_however_long_it_took() -> None:
    plain = [kernel("gemm", 0, 50), kernel("gemm", 60, 50)]
    monitored = [kernel("gemm", 0, 80), kernel("gemm", 90, 40), kernel("gemm", 200, 90)]
    assert bench.added(monitored, plain) == [bench.Added("gemm", "[1, 1, 1]", 1, 70.0)], (
        "one more, at the mean"
    )


def test_the_longest_addition_comes_first() -> None:
    found = bench.added([kernel("short", 0, 1), kernel("long", 2, 9), kernel("short", 20, 1)], [])
    assert [(a.name, a.launches, a.us) for a in found] == [("long", 1, 9.0), ("short", 2, 2.0)]


def test_waits_are_counted_by_the_names_of_the_calls_that_wait() -> None:
    events = [
        *NOISE,
        event("cudaStreamSynchronize", 0, 9, "cuda_runtime"),
        event("cudaStreamSynchronize", 9, 9, "cuda_runtime"),
        event("cudaMemcpy_v3020", 20, 9, "cuda_runtime"),
        event("cuCtxSynchronize", 30, 9, "cuda_driver"),
        event("cudaMemcpyAsync", 40, 9, "cuda_runtime"),
        event("cudaEventQuery", 50, 9, "cuda_runtime"),
        event("cudaEventSynchronize", 50, 9, "cpu_op"),
        event("cudaHostAlloc", 60, 9, "cuda_runtime"),
    ]
    assert bench.calls(events, bench.WAITS) == {
        "cudaStreamSynchronize": 2, "cudaMemcpy": 1, "cuCtxSynchronize": 1,
    }  # fmt: skip
    assert bench.calls(events, bench.ALLOCATIONS) == {"cudaHostAlloc": 1}


def test_the_longest_gap_is_where_no_stream_has_work() -> None:
    events = [
        *NOISE,
        kernel("long", 100, 90), kernel("inside", 110, 10),  # over long before the one around it
        kernel("soon", 195, 5), kernel("late", 230, 5), kernel("last", 240, 5),
    ]  # fmt: skip
    assert bench.longest_gap(events) == bench.Gap(30, "soon", "late")
    assert bench.longest_gap(events[:-2]) == bench.Gap(5, "long", "soon")


@pytest.mark.parametrize(
    "events", [[], NOISE, [kernel("one", 50, 5)], [kernel("a", 0, 5), kernel("b", 5, 5)]]
)
def test_without_two_works_apart_there_is_no_gap(events: list[dict[str, Any]]) -> None:
    assert bench.longest_gap(events).us == 0


def test_a_comparison_takes_off_what_only_the_plain_run_does() -> None:
    plain = [
        kernel("fused", 0, 60),
        kernel("gemm", 60, 40),
        event("cudaStreamSynchronize", 0, 1, "cuda_runtime"),
    ]
    monitored = [
        kernel("gemm", 0, 40), kernel("norm", 50, 50), kernel("cast", 100, 35),
        event("cudaStreamSynchronize", 0, 1, "cuda_runtime"), event("cudaHostAlloc", 0, 1, "cuda_runtime"),
    ]  # fmt: skip
    found = bench.compare(monitored, plain, steps=2)
    assert found["gpu_us_per_step"] == {"monitored": 62.5, "plain": 50.0}
    assert found["added"] == {"count": 2, "us": 85.0} and found["missing"] == {"count": 1, "us": 60.0}
    assert found["share"] == pytest.approx(0.25)
    assert found["waits"]["monitored"] == found["waits"]["plain"] == {"cudaStreamSynchronize": 1}
    assert found["allocations"] == {"monitored": {"cudaHostAlloc": 1}, "plain": {}}
    assert found["longest_gap"]["monitored"] == {"us": 10, "before": "gemm", "after": "norm"}
    assert [a["name"] for a in found["largest_added"]] == ["norm", "cast"]


def test_the_ratio_at_the_default_weighs_each_kind_of_step_by_how_often_it_comes() -> None:
    every = bench.DEFAULT
    ratio = bench.at_default({"idle": 1.0, "arming": 1.0 + every / 1000, "sampled": 1.0 + every / 100})
    assert ratio == pytest.approx(1.011)


@pytest.mark.skipif(bench.torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "monitor_gpu.py")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "expects a CUDA GPU" in done.stderr and done.stdout == ""
