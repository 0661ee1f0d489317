"""What a monitor adds to a GPU's profile: kernels, copies, waits of the host, idle gaps, whole steps.

    python benchmarks/monitor_gpu.py [--json FILE] [--trace FILE] [--rounds 20]

The same small GPT (bfloat16, hidden 2048, 8 blocks of fused FP8 modules, AdamW) trains three times in one process:
without a monitor, with one at its defaults that writes JSON lines, and with one that counts no casts. A window of two
whole periods is profiled of each, then a sampled step alone, and one with the steps around it. Kernels are told apart
by name and launch grid, so the monitor's small ones are not mistaken for the model's large ones of the same name. Whole
steps are timed with CUDA events, in turns. Aim: less than 0.1 % of the GPU's time at the default, no further waits.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt_block import Block
from monitor import DEFAULT, KINDS, PERIOD
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fp8dist as f8
from fp8dist import monitor as fm

HIDDEN, BLOCKS, BATCH, SEQUENCE = 2048, 8, 2, 2048
AIM = 0.001  # of the GPU's time
SIDES: dict[str, dict[str, Any] | None] = {"plain": None, "default": {}, "no counts": {"count_casts": False}}
WATCHED = ("default", "no counts")
WINDOWS = {"window": 2 * DEFAULT, "sampled": 1, "around": PERIOD}  # steps that are profiled together
Event = dict[str, Any]  # of a Chrome trace: name, cat, ts and dur in microseconds, args

# -- what is read from a trace -------------------------------------------------------------------------------

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
# The names of CUDA's calls, of which the plain copy waits, too.
WAITS = {
    *(f"cuda{what}Synchronize" for what in ("Device", "Stream", "Event")),
    *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cudaMemcpy"),
}
# These may wait until the GPU has nothing to do.
ALLOCATIONS = {
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "cudaHostRegister",
}


class Added(NamedTuple):
    """GPU work of one name and launch that one run has more often than the other."""

    name: str
    launch: str
    launches: int
    us: float
    """Of them together, by the mean of their like in that run."""


class Gap(NamedTuple):
    """A time in which the GPU does nothing."""

    us: float
    before: str
    after: str


def work(events: Iterable[Event]) -> list[Event]:
    """What the GPU did, in the order in which it began."""
    return sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda e: e["ts"])


def busy_us(events: Iterable[Event]) -> float:
    """Durations of all that the GPU did, added up."""
    return float(sum(e["dur"] for e in work(events)))


def signature(event: Event) -> tuple[str, str]:
    """Name of GPU work, and how large it is."""
    args = event.get("args", {})
    size = args.get("bytes", args.get("grid"))
    return event["name"], "" if size is None else str(size)


def added(more: Iterable[Event], less: Iterable[Event]) -> list[Added]:
    """What `more` has and `less` has not, the longest first; swap them for the opposite."""
    of: dict[tuple[str, str], list[float]] = {}
    for event in work(more):
        of.setdefault(signature(event), []).append(event["dur"])
    known = Counter(signature(event) for event in work(less))
    found = [
        Added(*key, extra, extra * statistics.mean(durations))
        for key, durations in of.items()
        if (extra := len(durations) - known[key]) > 0
    ]
    return sorted(found, key=lambda a: -a.us)


def calls(events: Iterable[Event], names: set[str]) -> Counter[str]:
    """How often the host made these CUDA calls."""
    return Counter(
        name for e in events if e.get("cat") in ON_HOST and (name := e["name"].partition("_v")[0]) in names
    )


def longest_gap(events: Iterable[Event]) -> Gap:
    """The longest time between two works in which no stream of the GPU had any."""
    longest, last, end = Gap(0.0, "", ""), "", float("inf")
    for event in work(events):
        if event["ts"] - end > longest.us:
            longest = Gap(event["ts"] - end, last, event["name"])
        finish = event["ts"] + event["dur"]
        if end == float("inf") or finish > end:
            last, end = event["name"], finish
    return longest


def compare(monitored: Sequence[Event], plain: Sequence[Event], steps: int) -> dict[str, Any]:
    """What a monitored window has more than a plain one of as many steps; counts and times are per window."""
    more, fewer = added(monitored, plain), added(plain, monitored)
    plain_us = busy_us(plain)
    us, us_less = sum(a.us for a in more), sum(a.us for a in fewer)
    return {
        "steps": steps,
        "gpu_us_per_step": {"monitored": busy_us(monitored) / steps, "plain": plain_us / steps},
        "added": {"count": sum(a.launches for a in more), "us": us},
        "missing": {"count": sum(a.launches for a in fewer), "us": us_less},
        "share": (us - us_less) / plain_us,
        "waits": {"monitored": calls(monitored, WAITS), "plain": calls(plain, WAITS)},
        "allocations": {"monitored": calls(monitored, ALLOCATIONS), "plain": calls(plain, ALLOCATIONS)},
        "longest_gap": {"monitored": longest_gap(monitored)._asdict(), "plain": longest_gap(plain)._asdict()},
        "largest_added": [a._asdict() for a in more[:8]],
    }


def at_default(ratios: dict[str, float]) -> float:
    """The ratio of whole steps at the default, of the ratios of its kinds of steps."""
    return (ratios["idle"] * (DEFAULT - 2) + ratios["arming"] + ratios["sampled"]) / DEFAULT


# -- what runs -----------------------------------------------------------------------------------------------


class Training:
    """One model with its coordinator, and maybe a monitor."""

    def __init__(self, side: str, run_dir: str) -> None:
        torch.manual_seed(0)
        self.options, self.run_dir = SIDES[side], Path(run_dir) / side.replace(" ", "-")
        self.coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=16), name=side)
        kw: Any = {"coordinator": self.coordinator, "device": "cuda", "dtype": torch.bfloat16}
        self.model = nn.Sequential(
            *(
                Block(
                    f8.LayerNormLinear(HIDDEN, 3 * HIDDEN, name=f"{i}.qkv", **kw),
                    f8.Linear(HIDDEN, HIDDEN, name=f"{i}.proj", **kw),
                    f8.LayerNormMLP(HIDDEN, 4 * HIDDEN, name=f"{i}.mlp", **kw),
                )
                for i in range(BLOCKS)
            )
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.x = torch.randn(BATCH, SEQUENCE, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.monitor: fm.Monitor | None = None
        self.number = 0
        self.loss = torch.zeros(())

    def watch(self, every: int | None) -> None:
        """Let a new monitor begin, if this side has one; None: end the old one only."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
        if self.options is not None and every is not None:
            sinks = [fm.JsonLines(self.run_dir)]
            self.monitor = fm.Monitor(self.coordinator, sinks, every, **self.options)

    def step(self) -> None:
        """Train one step."""
        self.number += 1
        with self.coordinator.step(self.number):
            self.loss = (self.model(self.x) - self.x.roll(1, 1)).float().square().mean()
            self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step(step=self.number, loss=self.loss)

    def timed_step(self) -> float:
        """Train one step; milliseconds from an idle GPU to an idle GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def trace(body: Callable[[], None], path: Path) -> list[Event]:
    """Run a body on an idle GPU until that is idle again; what of its trace counts. The whole is kept as a file."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        body()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events: list[Event] = json.loads(path.read_text(), strict=False)["traceEvents"]
    return [event for event in events if event.get("cat") in (*ON_GPU, *ON_HOST)]


def steps_of(side: Training, count: int) -> Callable[[], None]:
    """Several steps as one body."""

    def run() -> None:
        for _ in range(count):
            side.step()

    return run


def time_steps(sides: dict[str, Training], rounds: int) -> dict[str, Any]:
    """Whole steps by kind, in turns: medians in milliseconds, and of the ratios to the plain step beside it."""
    for side in sides.values():
        side.watch(PERIOD)
    took: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in sides}
    for number in range(PERIOD * (rounds + 2)):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            ms = sides[name].timed_step()
            if number >= 2 * PERIOD:
                took[name][KINDS[number % PERIOD]].append(ms)
    results: dict[str, Any] = {}
    for name, kinds in took.items():
        ratios = {
            kind: statistics.median(a / b for a, b in zip(ms, took["plain"][kind], strict=True))
            for kind, ms in kinds.items()
        }
        medians = {kind: statistics.median(ms) for kind, ms in kinds.items()}
        results[name] = {"ms": medians, "ratio": ratios, "ratio_at_default": at_default(ratios)}
    return results


def profile_side(side: Training, directory: Path) -> dict[str, list[Event]]:
    """Traces of two periods at the default, of a sampled step alone, and of one with its neighbours."""
    file = directory / "window.json"
    side.watch(DEFAULT)
    traces = {"window": trace(steps_of(side, 2 * DEFAULT), file)}
    side.watch(PERIOD)
    steps_of(side, PERIOD - 1)()
    traces["sampled"] = trace(side.step, directory / "sampled.json")
    side.step()
    traces["around"] = trace(steps_of(side, PERIOD), file)
    side.watch(None)
    return traces


def measure(rounds: int, trace_file: Path | None) -> dict[str, Any]:
    """All of it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sides = {side: Training(side, name) for side in SIDES}
        for side in sides.values():
            steps_of(side, 4)()
        results: dict[str, Any] = {"steps": time_steps(sides, rounds)}
        for side in sides.values():
            trace(side.step, directory / "first.json")  # the first profile takes long to set up
        traces = {}
        for side_name, side in sides.items():
            traces[side_name] = profile_side(side, directory)
            if side_name == "default" and trace_file is not None:
                trace_file.write_bytes((directory / "sampled.json").read_bytes())
    for side_name in WATCHED:
        results[side_name] = {
            window: compare(events, traces["plain"][window], WINDOWS[window])
            for window, events in traces[side_name].items()
        }
    results["losses"] = {side_name: float(side.loss.detach()) for side_name, side in sides.items()}
    return results


# -- what is printed -----------------------------------------------------------------------------------------


def profile_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What, with the monitor and without, for one window."""

    def both(field: str, show: Callable[[Any], str]) -> tuple[str, str]:
        return show(found[field]["monitored"]), show(found[field]["plain"])

    def own(field: str) -> str:
        return f"{found[field]['count']}, {found[field]['us']:.0f} us"

    def listed(counts: Counter[str]) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"

    def gap(g: dict[str, Any]) -> str:
        return f"{g['us']:.0f} us before {g['after'][:32]}"

    return [
        ("GPU work a step", *both("gpu_us_per_step", lambda us: f"{us:.0f} us")),
        ("kernels and copies only here", own("added"), own("missing")),
        ("their share of the plain GPU work", f"{found['share']:+.3%}", ""),
        ("waits of the host", *both("waits", listed)),
        ("allocations", *both("allocations", listed)),
        ("longest idle gap", *both("longest_gap", gap)),
    ]


def show(results: dict[str, Any], console: Console) -> None:
    """Print tables and the verdict."""
    titles = {
        "window": f"{2 * DEFAULT} steps at every={DEFAULT}",
        "sampled": "a sampled step alone",
        "around": "arming, sampled and next step",
    }
    for side in WATCHED:
        for window, found in results[side].items():
            table = Table(title=f"Monitor ({side}): {titles[window]}")
            for heading in ("what", "with it", "without"):
                table.add_column(heading, overflow="fold")
            for row in profile_rows(found):
                table.add_row(*row)
            console.print(table)
        for a in results[side]["window"]["largest_added"]:
            print(
                f"  only with it: {a['launches']} x {a['name'][:90]} {a['launch']}, {a['us']:.0f} us together"
            )
    table = Table(
        title="Whole steps from idle to idle GPU, in turns: median ms, and of ratios to the plain one"
    )
    for heading in ("side", *KINDS, f"at every={DEFAULT}"):
        table.add_column(heading, justify="right")
    for side, r in results["steps"].items():
        cells = (f"{r['ms'][kind]:.2f} ({r['ratio'][kind]:.4f})" for kind in KINDS)
        table.add_row(side, *cells, f"{r['ratio_at_default']:.4f}")
    console.print(table)
    print("losses after the last step: " + ", ".join(f"{k} {v!r}" for k, v in results["losses"].items()))
    for side in WATCHED:
        share = results[side]["window"]["share"]
        print(f"{side}: {share:+.3%} of GPU work, aim < {AIM:.1%}: {'met' if share < AIM else 'missed'}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="timed sampled steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="where to put the Chrome trace of a sampled step")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds expects an int >= 1 but got {args.rounds}")
    if not torch.cuda.is_available():
        print("monitor_gpu.py expects a CUDA GPU but found none; run it where there is one", file=sys.stderr)
        raise SystemExit(2)
    logging.getLogger("fp8dist").setLevel(logging.ERROR)
    print(
        f"prediction: without counting casts < {AIM:.1%} of the GPU's time; with it, which adds passes over each cast "
        "tensor, a sampled step twice as long, so 2 % of the GPU's time at the default; no wait of the host in either"
    )
    results = measure(args.rounds, args.trace)
    show(results, Console(width=120))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
