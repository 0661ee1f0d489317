"""A monitor on a GPU: it waits for nothing, its samples are those of the CPU, and it leaves the training alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist as f8
from fp8dist import monitor as fm
from fp8dist.monitor._sampling import Landing

RECIPE = f8.DelayedScaling(amax_history_len=4)
EVERY, STEPS = 3, 9  # steps of every kind


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Whatever in here waits for the GPU, as far as torch knows, raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def guarded(call: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **kw: Any) -> None:
        with waiting_raises():
            call(*args, **kw)

    return run


class Keep:
    """A sink that keeps records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def parts(kind: str, coordinator: f8.ReductionGroupCoordinator, bias: bool = True) -> nn.Module:
    """Two layers of one kind."""
    kw: Any = {"coordinator": coordinator, "device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(*(f8.Linear(128, 128, bias, name=str(i), **kw) for i in range(2)))
    return nn.Sequential(*(f8.LayerNormMLP(128, 256, bias, name=str(i), **kw) for i in range(2)))


@pytest.mark.parametrize("kind", ["linear", "fused"])
@pytest.mark.parametrize("count_casts", [True, False])
@pytest.mark.parametrize("every", [1, EVERY])
def test_neither_sampled_nor_other_steps_wait_for_the_gpu(
    kind: str, count_casts: bool, every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), waiting_raises():
        torch.ones(1, device="cuda").item()  # or this test would show nothing
    coordinator = f8.ReductionGroupCoordinator(RECIPE, name="watched")
    model = parts(kind, coordinator)
    monitor = fm.Monitor(coordinator, [fm.JsonLines(tmp_path)], every=every, count_casts=count_casts)
    watcher = monitor._see
    coordinator.watch_commits(None)
    coordinator.watch_commits(guarded(watcher))
    watched_step = guarded(monitor.step)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    for step in range(1, STEPS + 1):
        if step == 5:  # slots that come later
            late = coordinator.slot("late.input")
        with coordinator.step(step):
            loss = model(x).float().square().mean()
            loss.backward()
            if step >= 5:
                late.record(torch.full((4,), 8.0, device=late.amax.device))
        watched_step(step=step, loss=loss, lr=0.1, tokens=torch.tensor(64))
    with caplog.at_level(logging.WARNING):
        monitor.close()
    coordinator.close()
    assert not [r for r in caplog.records if "was not seen" in r.getMessage()], (
        "the watcher catches what is raised"
    )
    lines = [json.loads(line) for line in (tmp_path / "monitor-rank0.jsonl").read_text().splitlines()]
    samples = [line for line in lines if line["kind"] == "sample"]
    assert len(samples) >= STEPS // EVERY - 1 and samples[-1]["step"] == STEPS
    assert all(sample["loss"] > 0 and sample["numbers"] == {"lr": 0.1, "tokens": 64} for sample in samples)
    newest = next(line for line in reversed(lines) if line["kind"] == "start")["slots"]
    assert samples[-1]["stale"] == [0] * len(newest) and "late.input" in newest


def test_samples_land_in_memory_that_is_pinned_once() -> None:
    landing = Landing()
    places = []
    for n in (5, 3, 5):
        sent = torch.arange(n, dtype=torch.float64, device="cuda") + n
        host, done = landing.receive(sent)
        assert done is not None and host.is_pinned()
        done.synchronize()
        assert host.tolist() == sent.tolist()
        places.append(host.data_ptr())
    assert len(set(places)) == 1
    assert len(landing.receive(torch.zeros(6, dtype=torch.float64, device="cuda"))[0]) == 6


def sampled(device: str, count_casts: bool) -> list[dict[str, Any]]:
    """Records of a run whose tensors have the same values on each device."""
    coordinator = f8.ReductionGroupCoordinator(RECIPE, name=f"on {device}")
    model = f8.Linear(64, 32, False, coordinator=coordinator, name="a", device=device)
    values = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.weight.copy_(torch.randn(32, 64, generator=values))
    keep = Keep()
    with fm.Monitor(coordinator, [keep], every=2, count_casts=count_casts) as monitor:
        for step in range(1, STEPS):
            x, dy = (torch.randn(16, n, generator=values) * 3.0**step for n in (64, 32))
            x[:, ::4] *= 1e-7
            if step == 6:
                dy[0, 0] = torch.inf
            with coordinator.step(step):
                if step != 4:
                    model(x.to(device).requires_grad_()).backward(dy.to(device))
            monitor.step(step=step, loss=torch.tensor(0.1, device=device))
    coordinator.close()
    return keep.records


@pytest.mark.parametrize("count_casts", [True, False])
def test_a_sample_of_the_gpu_has_the_numbers_of_the_cpu(count_casts: bool) -> None:
    of_time = {"time", "wait_s"}
    cpu, cuda = (
        [{key: value for key, value in record.items() if key not in of_time | {"name"}} for record in records]
        for records in (sampled("cpu", count_casts), sampled("cuda", count_casts))
    )
    assert sum(record["kind"] == "sample" for record in cpu) == STEPS // 2
    assert any(record["kind"] == "sample" and any(record["nonfinite"]) for record in cpu)
    assert any(record["kind"] == "warning" for record in cpu) or not count_casts
    assert cpu == cuda


@pytest.mark.parametrize(
    ("kind", "bias", "count_casts"),
    [
        ("linear", False, True), ("linear", False, False), ("linear", True, True), ("linear", True, False),
        ("fused", True, True), ("fused", True, False),
    ],
)  # fmt: skip
def test_a_monitored_run_has_the_bits_of_one_without_a_monitor(
    kind: str, bias: bool, count_casts: bool
) -> None:
    def train(monitored: bool) -> tuple[list[float], list[torch.Tensor], int]:
        coordinator = f8.ReductionGroupCoordinator(RECIPE, name=f"monitored {monitored}")
        model = parts(kind, coordinator, bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
        monitor = fm.Monitor(coordinator, [Keep()], EVERY, count_casts=count_casts) if monitored else None
        losses = []
        for step in range(1, STEPS + 1):
            with coordinator.step(step):
                loss = (model(x) - x).float().square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step(step=step, loss=loss)
            losses.append(loss.item())
        if monitor is not None:
            monitor.close()
        digest = coordinator.digest()
        coordinator.close()
        return losses, [p.detach().clone() for p in model.parameters()], digest

    plain, watched = train(False), train(True)
    assert plain[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
    assert plain[2] == watched[2]
    assert plain[0][0] > plain[0][-1], "it trains"
