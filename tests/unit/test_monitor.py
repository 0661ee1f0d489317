"""What a monitor says of the slots is what NumPy computes from the same tensors, and it changes nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from _fakes import E4M3, E5M2, FP8_MAX, randn, round_to_fp8
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import fp8dist as f8
from fp8dist import monitor as fm
from fp8dist._committed import Readings
from fp8dist._header import Part
from fp8dist.monitor._sampling import Sightings, Transfer, flatten

Record = dict[str, Any]
FP32 = torch.finfo(torch.float32)


class Keep:
    """A sink that keeps records, and sees to it that they are what JSON can hold."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = 0

    def write(self, record: Record) -> None:
        assert json.loads(json.dumps(record, allow_nan=False)) == record
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def column(self, field: str, slot: str) -> list[Any]:
        """One field of one slot over all samples."""
        slots = self.of("start")[-1]["slots"]
        return [sample[field][slots.index(slot)] for sample in self.of("sample")]


def make(recipe: f8.Recipe | None = None, **options: Any) -> f8.ReductionGroupCoordinator:
    return f8.ReductionGroupCoordinator(recipe or f8.DelayedScaling(amax_history_len=3), **options)


def record(slot: f8.Slot, value: float) -> None:
    slot.record(torch.tensor([value]))
    slot.request()


# -- values ---------------------------------------------------------------------------------------------------


def tensors(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output gradient of a step; they grow, so that delayed scales saturate, and have small values."""
    x = randn(64, 32, seed=step) * 1.5**step
    x[:, ::4] *= 1e-7
    return x, randn(64, 16, seed=100 + step) * 2.0**step


def expected_scale(history: list[float], format_max: float, margin: int) -> np.float32:
    return np.float32(format_max * 2.0**-margin) / np.float32(max(history[-3:]))


@pytest.mark.parametrize("margin", [0, 2])
def test_a_sample_holds_what_numpy_computes_of_the_same_step(margin: int) -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=3, margin=margin))
    linear = f8.Linear(32, 16, coordinator=coordinator, name="a")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=3)
    amaxes: dict[str, list[float]] = {"a.input": [], "a.grad_output": []}
    for step in range(1, 8):
        x, dy = tensors(step)
        with coordinator.step():
            linear(x).backward(dy)
        for name, tensor in (("a.input", x), ("a.grad_output", dy)):
            amaxes[name].append(float(np.abs(tensor.numpy()).max()))
        monitor.step(step=step, loss=step / 3, lr=0.5)
    samples = keep.of("sample")
    assert [sample["step"] for sample in samples] == [3, 6]
    for sample in samples:
        step = sample["step"]
        for name, tensor, dtype in zip(amaxes, tensors(step), (E4M3, E5M2), strict=True):
            i = keep.of("start")[0]["slots"].index(name)
            format_max = FP8_MAX[dtype]
            scale = expected_scale(amaxes[name][: step - 1], format_max, margin)
            assert np.float32(sample["scale"][i]) == scale
            assert np.float32(sample["amax"][i]) == np.float32(amaxes[name][step - 1])
            largest = float(scale) * amaxes[name][step - 1]
            assert sample["headroom"][i] == pytest.approx(math.log2(format_max / largest), abs=1e-4)
            scaled = tensor.numpy() * scale
            assert sample["saturated"][i] == np.mean(np.abs(scaled) > format_max)
            zero = (round_to_fp8(tensor, float(scale), dtype) == 0) & (tensor.numpy() != 0)
            assert sample["flushed"][i] == np.mean(zero)
            if margin == 0:
                assert sample["headroom"][i] < 0 < sample["saturated"][i], "the step was to saturate"
        assert sample["flushed"][keep.of("start")[0]["slots"].index("a.input")] > 0.2
        assert (sample["loss"], sample["numbers"]) == (step / 3, {"lr": 0.5})
        assert sample["stale"] == sample["nonfinite"] == [0, 0, 0]
        assert sample["commits"] == sample["generation"] == step
        assert sample["collectives"] == step + 1  # one seeds the weight
    weight = linear.weight.detach().abs().max().item()
    assert [np.float32(w) for w in keep.column("amax", "a.weight")] == [np.float32(weight)] * 2
    assert keep.column("headroom", "a.weight") == pytest.approx([margin] * 2, abs=1e-4)


def test_waits_are_averaged_over_the_steps_since_the_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([1.0, 2.0, 6.0, 4.0, 5.0, 7.0])
    monkeypatch.setattr(f8.ReductionGroupCoordinator, "last_wait_s", property(lambda self: next(waits)))
    coordinator = make()
    coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=3)
    for step in range(1, 7):
        with coordinator.step():
            pass
        monitor.step(step=step)
    assert [sample["wait_s"] for sample in keep.of("sample")] == [3.0, 16 / 3]


def test_a_start_record_says_whose_run_it_is() -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=3, margin=1), name="critic")
    coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    for step in range(2):
        with coordinator.step():
            pass
        monitor.step(step=step)
    (start,) = keep.of("start")
    assert (start["version"], start["rank"], start["world"], start["name"]) == (1, 0, 1, "critic")
    assert start["slots"] == ["a.input"]
    assert (start["recipe"]["class"], start["recipe"]["margin"]) == ("DelayedScaling", 1)
    assert start["recipe"]["fp8_format"] == "hybrid"


def test_a_slot_without_a_scale_of_its_own_has_none() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    coordinator.freeze()
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    for step in range(2):
        with coordinator.step():
            record(slot, 2.0)
        monitor.step(step=step)
    assert keep.column("scale", "a.input") == [None, 224.0]
    assert keep.column("headroom", "a.input") == [None, 0.0]
    assert keep.column("amax", "a.input") == [2.0, 2.0]


@pytest.mark.parametrize(
    "recipe",
    [
        f8.DelayedScaling(amax_history_len=3),
        f8.DelayedScaling(amax_history_len=1),
        f8.DelayedScaling(amax_history_len=3, idle="hold"),
        f8.DelayedScaling(amax_history_len=3, rule_set="te_fused"),
        f8.DelayedScaling(amax_history_len=3, rule_set="te_unfused"),
    ],
    ids=["age", "short", "hold", "te_fused", "te_unfused"],
)
def test_staleness_counts_steps_beyond_the_history_and_between_samples(recipe: f8.Recipe) -> None:
    coordinator = make(recipe)
    used = {"a.input": {1, 2, 3, 6, 12, 18}, "b.grad_output": {5}, "never.input": set()}
    slots = {name: coordinator.slot(name) for name in used}
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=6)
    for step in range(1, 19):
        with coordinator.step():
            for name, steps in used.items():
                if step in steps:
                    record(slots[name], float(step))
        monitor.step(step=step)
    assert keep.column("stale", "a.input") == [0, 0, 0]
    assert keep.column("stale", "b.grad_output") == [1, 7, 13]
    assert keep.column("stale", "never.input") == [6, 12, 18]
    assert keep.column("amax", "a.input") == [6.0, 12.0, 18.0]
    assert keep.column("amax", "b.grad_output") == [5.0, 5.0, 5.0]
    assert keep.column("amax", "never.input") == [None] * 3
    assert keep.column("headroom", "b.grad_output") == [None] * 3, "its casts are of another step"


def test_forward_and_gradient_slots_are_followed_apart_where_they_commit_apart() -> None:
    coordinator = make(trigger="backward_end", update_every="microbatch")
    linear = f8.Linear(32, 16, coordinator=coordinator, name="a")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=2)
    coordinator.as_default()
    for step in range(1, 5):
        with f8.autocast(recipe=coordinator.recipe):
            y = linear(randn(16, 32, seed=step) * step)
        if step != 3:
            y.backward(randn(16, 16, seed=step) * step)
        monitor.step(step=step)
    assert keep.column("stale", "a.input") == [0, 0]
    assert keep.column("stale", "a.grad_output") == [0, 0]
    for name, width in (("a.input", 32), ("a.grad_output", 16)):
        found = [np.float32(value) for value in keep.column("amax", name)]
        assert found == [np.abs((randn(16, width, seed=s) * s).numpy()).max() for s in (2, 4)]
    coordinator.close()


def test_slots_that_come_later_get_a_new_start_and_the_others_keep_their_staleness() -> None:
    coordinator = make()
    first = coordinator.slot("b.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=2)
    for step in range(1, 7):
        if step == 4:
            later = coordinator.slot("a.input")
        with coordinator.step():
            if step == 1:
                record(first, 1.0)
            if step >= 4:
                record(later, 2.0)
        monitor.step(step=step)
    assert [start["slots"] for start in keep.of("start")] == [["b.input"], ["a.input", "b.input"]]
    assert [sample["step"] for sample in keep.of("sample")] == [2, 5, 6], (
        "one step later where the slots changed"
    )
    assert [sample["stale"] for sample in keep.of("sample")] == [[1], [0, 4], [0, 5]]


def test_a_sampled_step_that_was_given_up_has_no_headroom() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=2)
    for step in range(1, 5):
        with coordinator.step() as scope:
            record(slot, 3.0)
            if step == 2:
                scope.abort()
        monitor.step(step=step)
    assert [sample["aborts"] for sample in keep.of("sample")] == [1, 1]
    assert keep.column("headroom", "a.input") == [None, 0.0]


def test_a_reduction_that_still_overlaps_is_settled_before_it_is_read() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=2)
    for step in range(1, 5):
        with coordinator.step(overlap=True):
            record(slot, float(step))
        monitor.step(step=step)
    assert keep.column("amax", "a.input") == [2.0, 4.0]
    assert keep.column("headroom", "a.input") == pytest.approx([-1.0, math.log2(3 / 4)], abs=1e-4)


@pytest.mark.parametrize("recipe", [f8.CurrentScaling(), f8.DelayedScaling()])
def test_a_run_without_slots_is_sampled_too(recipe: f8.Recipe) -> None:
    coordinator = make(recipe)
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    for step in range(3):
        with coordinator.step():
            pass
        monitor.step(step=step, loss=1.0)
    assert [sample["scale"] for sample in keep.of("sample")] == [[]] * len(keep.of("sample"))
    assert keep.of("sample")[-1]["step"] == 2


def test_what_is_not_finite_is_null() -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=3, non_finite="freeze"))
    slot = coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    for step, value in enumerate((1.0, math.nan, math.inf)):
        with coordinator.step():
            record(slot, value)
        monitor.step(step=step, loss=torch.tensor([math.nan]), lr=math.inf, tokens=torch.tensor(7))
    last = keep.of("sample")[-1]
    assert (last["loss"], last["numbers"]) == (None, {"lr": None, "tokens": 7.0})
    assert (last["amax"], last["headroom"], last["nonfinite"]) == ([None], [None], [2])


# -- it changes nothing, and does little --------------------------------------------------------------------------


def train(every: int | None, *, overlap: bool = False) -> tuple[int, list[bytes]]:
    torch.manual_seed(0)
    coordinator = make()
    model = f8.convert(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)), coordinator
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None if every is None else fm.Monitor(coordinator, [Keep()], every=every)
    for step in range(9):
        with coordinator.step(step, overlap=overlap):
            loss = model(randn(16, 16, seed=step) * 1.3**step).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(step=step, loss=loss)
    digest, weights = coordinator.digest(), [p.detach().numpy().tobytes() for p in model.parameters()]
    coordinator.close()
    return digest, weights


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_monitoring_changes_no_bit_of_a_run(every: int, overlap: bool) -> None:
    assert train(every, overlap=overlap) == train(None)


def test_casts_are_counted_in_sampled_steps_only() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    coordinator.freeze()
    monitor = fm.Monitor(coordinator, [Keep()], every=3)
    counted = []
    for step in range(1, 8):
        with coordinator.step():
            counted.append(slot.casts is not None)
        monitor.step(step=step)
    assert counted == [False, False, True, False, False, True, False]
    with coordinator.step():
        assert slot.casts is None
    monitor.step(step=8)
    assert slot.casts is not None
    monitor.close()
    assert slot.casts is None


def test_without_counting_the_rest_is_sampled() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    coordinator.freeze()
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=2, count_casts=False)
    coordinator.count_casts()
    for step in range(1, 5):
        with coordinator.step():
            record(slot, 1.0)
        monitor.step(step=step)
    assert slot.casts is not None, "who counts goes on counting"
    assert keep.column("headroom", "a.input") == [0.0, 0.0]


def test_counts_of_a_layout_that_is_gone_are_not_read() -> None:
    coordinator = make()
    coordinator.slot("b.input")
    coordinator.freeze()
    coordinator.count_casts()
    assert coordinator.readings().casts.tolist() == [[0, 0, 0]]
    coordinator.slot("a.input")
    with coordinator.step():
        pass
    assert coordinator.readings().names == ["a.input", "b.input"]
    assert coordinator.readings().casts is None


def test_a_slot_whose_values_nobody_cast_has_no_fractions() -> None:
    coordinator = make()
    coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=2)
    for step in range(1, 3):
        with coordinator.step():
            pass
        monitor.step(step=step)
    assert keep.of("sample")[0]["saturated"] == keep.of("sample")[0]["flushed"] == [None]


def test_a_step_that_is_not_sampled_reads_no_tensor() -> None:
    coordinator = make()
    coordinator.slot("a.input")
    monitor = fm.Monitor(coordinator, [Keep()], every=3)
    unreadable = torch.empty((), device="meta")
    for step in (1, 2):
        with coordinator.step():
            pass
        monitor.step(step=step, loss=unreadable)
    with pytest.raises((RuntimeError, NotImplementedError)):
        monitor.step(step=3, loss=unreadable)


class NotYet:
    """Stands for the event of a copy that a GPU has not come to."""

    def __init__(self) -> None:
        self.over = False
        self.waited = 0

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.waited += 1
        self.over = True


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[NotYet]:
    """The events of all samples' copies, none of which is over by itself."""
    events: list[NotYet] = []
    start = Transfer.start.__func__

    def late(cls: type[Transfer], *args: Any) -> Transfer:
        events.append(NotYet())
        return dataclasses.replace(start(cls, *args), done=events[-1])

    monkeypatch.setattr(Transfer, "start", classmethod(late))
    return events


def test_a_sample_that_has_not_arrived_is_written_in_a_later_step_and_nothing_waits(
    copies: list[NotYet],
) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=4)

    def train_until(end: int) -> list[int]:
        for step in range(coordinator.stats.commits + 1, end + 1):
            with coordinator.step():
                record(slot, float(step))
            monitor.step(step=step, loss=float(step))
        return [sample["step"] for sample in keep.of("sample")]

    assert train_until(6) == [] and len(copies) == 1
    copies[0].over = True
    assert train_until(7) == [4]
    assert keep.column("amax", "a.input") == [4.0] and keep.of("sample")[0]["loss"] == 4.0
    assert copies[0].waited == 0
    assert train_until(8) == [4]
    assert train_until(12) == [4, 8], "one at a time: the next sample waits for the one before"
    assert [event.waited for event in copies] == [0, 1, 0]
    monitor.close()
    assert train_until(0) == [4, 8, 12], "closing waits for what is under way"
    assert keep.column("amax", "a.input") == [4.0, 8.0, 12.0]


def test_following_and_reading_the_slots_waits_for_no_gpu() -> None:
    """Fake tensors have no values, so whatever asks for one, and would wait for a GPU, raises."""
    names = ["a.input", "b.grad_output"]
    with FakeTensorMode():
        amaxes = torch.empty(2)
        with pytest.raises(DataDependentOutputException):
            float(amaxes[0])
        seen = Sightings()
        for part in (Part.BOTH, Part.FORWARD, Part.BACKWARD):
            seen.see(names, amaxes, part, 0.0)
        readings = Readings(
            names=names, scale=amaxes, warm=torch.empty(2, dtype=torch.bool),
            nonfinite=torch.empty(2, dtype=torch.int64),
            casts=torch.empty((2, 3), dtype=torch.int64),
            generation=1, commits=1, aborts=0, collectives=1,
        )  # fmt: skip
        flat = flatten(readings, readings, seen, [torch.empty((), dtype=torch.bfloat16)])
        assert (flat.dtype, flat.shape) == (torch.float64, (2 * 7 + 1,))


@pytest.mark.parametrize(("slots", "loss"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", None)])
@pytest.mark.parametrize("n", [0, 2])
def test_no_tensor_of_a_gpu_is_copied_to_the_host_before_the_one_copy(
    slots: str, loss: str | None, n: int
) -> None:
    """A rank without slots keeps its empty columns on the CPU."""
    names = ["a.input", "b.grad_output"][:n]
    with FakeTensorMode():
        readings = Readings(
            names=names, scale=torch.empty(n, device=slots), warm=torch.empty(n, dtype=torch.bool),
            nonfinite=torch.empty(n, dtype=torch.int64, device=slots), casts=None,
            generation=1, commits=1, aborts=0, collectives=1,
        )  # fmt: skip
        scalars = [] if loss is None else [torch.empty((), device=loss)]
        flat = flatten(readings, readings, Sightings(), scalars)
        assert (flat.device.type, flat.shape) == ("cuda", (4 * n + len(scalars),))


def test_a_commit_that_cannot_be_followed_is_a_commit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(*args: Any) -> None:
        raise RuntimeError("out of memory")

    coordinator = make()
    slot = coordinator.slot("a.input")
    monitor = fm.Monitor(coordinator, [Keep()], every=1)
    monkeypatch.setattr(Sightings, "see", out_of_memory)
    with caplog.at_level(logging.WARNING, logger="fp8dist"), coordinator.step() as step:
        record(slot, 2.0)
    assert step.committed and coordinator.scales() == {"a.input": 224.0}
    assert "a commit was not seen: out of memory" in caplog.text
    monitor.close()


def test_no_collective_is_the_monitors() -> None:
    coordinator = make()
    coordinator.slot("a.input")
    coordinator.freeze()
    monitor = fm.Monitor(coordinator, [Keep()], every=1)
    for step in range(4):
        with coordinator.step():
            pass
        monitor.step(step=step)
    monitor.close()
    assert coordinator.stats.collectives == 4


# -- warnings -----------------------------------------------------------------------------------------------------


def told(keep: Keep, what: str) -> list[tuple[int, str | None]]:
    return [(w["step"], w["slot"]) for w in keep.of("warning") if w["what"] == what]


def test_a_slot_that_never_contributes_is_told_once_after_two_histories() -> None:
    coordinator = make()  # a history of 3
    silent, used = coordinator.slot("silent.input"), coordinator.slot("used.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    for step in range(1, 31):
        with coordinator.step():
            if step < 3:
                record(used, 1.0)  # and then it is idle for long, but it has contributed
            if step == 20:
                record(silent, 1.0)
        monitor.step(step=step)
    assert told(keep, "never_contributed") == [(6, "silent.input")]
    assert "convert(..., skip=...)" in keep.of("warning")[0]["message"]


def test_a_scale_at_its_limit_is_told_once_for_each_episode() -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=1))
    slot = coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    for step, value in enumerate([1.0, 1.0, 1e-40, 1e-40, 1e-40, 1.0, 1.0, 1e-40, 1e-40]):
        with coordinator.step():
            record(slot, value)
        monitor.step(step=step)
    # The scale that an amax of step s makes is the one that step s + 1 casts with.
    assert told(keep, "scale_at_limit") == [(3, "a.input"), (8, "a.input")]
    assert max(filter(None, keep.column("scale", "a.input"))) == pytest.approx(FP32.max)


@pytest.mark.parametrize("what", ["saturating", "flushing"])
def test_casts_that_lose_values_in_two_samples_in_a_row_are_told(what: str) -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=1))
    linear = f8.Linear(32, 16, coordinator=coordinator, name="a")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    bad = {3, 5, 6, 7, 10, 11}
    largest = 1.0
    for step in range(12):
        if what == "saturating":
            largest *= 4 if step in bad else 1  # four times what the scale was made for
            x = torch.full((16, 32), largest)
        else:
            x = torch.full((16, 32), 1.0 if step in bad else 1e6)
            x[0, 0] = 1e6
        with coordinator.step():
            linear(x).backward(torch.ones(16, 16))
        monitor.step(step=step)
    assert told(keep, what) == [(6, "a.input"), (11, "a.input")]
    message = next(w["message"] for w in keep.of("warning") if w["what"] == what)
    advice = {"saturating": "raise margin from 0 to 2", "flushing": "lower margin (now 0)"}
    assert advice[what] in message, "two powers of two are what it lacks"


def test_infinite_and_nan_amaxes_are_told_once_for_each_episode(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    with caplog.at_level(logging.WARNING, logger="fp8dist"):
        for step, value in enumerate([1.0, 1.0, math.nan, math.inf, 1.0, math.nan]):
            with coordinator.step():
                record(slot, value)
            monitor.step(step=step)
    assert told(keep, "nonfinite") == [(2, "a.input"), (5, "a.input")]
    assert [r.getMessage() for r in caplog.records] == [
        f"rank 0, step {w['step']}: {w['message']}" for w in keep.of("warning")
    ]


def test_many_findings_of_one_sample_are_logged_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = make()
    for i in range(10):
        coordinator.slot(f"l{i}.input")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    with caplog.at_level(logging.WARNING, logger="fp8dist"):
        for step in range(1, 9):
            with coordinator.step():
                pass
            monitor.step(step=step)
    assert len(keep.of("warning")) == 10
    assert len(caplog.records) == 4 and caplog.records[-1].getMessage().endswith("and 7 more")


@pytest.mark.parametrize("margin", [0, 1])
def test_a_healthy_run_is_told_nothing(margin: int) -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=3, margin=margin))
    linear = f8.Linear(32, 16, coordinator=coordinator, name="a")
    keep = Keep()
    monitor = fm.Monitor(coordinator, [keep], every=1)
    for step in range(12):
        with coordinator.step():
            # Few values, so that a single one that rounding brings above the largest is above the threshold.
            linear(randn(16, 32, seed=step).clamp(-1.7, 1.7)).backward(
                randn(16, 16, seed=step).clamp(-1.3, 1.3)
            )
        monitor.step(step=step)
    assert len(keep.of("sample")) == 11
    assert keep.of("warning") == []


# -- use ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every expects an int >= 1 but got 0"),
        ({"every": 2.5}, "every expects"),
        ({"every": True}, "every expects"),
        ({"sinks": ["run"]}, "sinks expects"),
        ({"coordinator": None}, "coordinator expects"),
    ],
)
def test_unfit_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fm.Monitor(**{"coordinator": make(), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": "7"}, "step expects an int"),
        ({"step": 1, "loss": "low"}, "loss expects a number"),
        ({"step": 1, "loss": torch.zeros(2)}, r"shape \(2,\)"),
        ({"step": 1, "lr": [0.1]}, "lr expects a number"),
    ],
)
def test_a_wrong_number_is_refused_in_every_step(arguments: dict[str, Any], message: str) -> None:
    monitor = fm.Monitor(make(), every=100)
    with pytest.raises(ValueError, match=message):
        monitor.step(**arguments)


def test_a_call_inside_the_scope_is_refused() -> None:
    coordinator = make()
    monitor = fm.Monitor(coordinator)
    with coordinator.step(), pytest.raises(f8.ScopeError, match="no open scope"):
        monitor.step(step=1)


def test_a_coordinator_has_one_monitor_at_a_time() -> None:
    coordinator = make()
    first = fm.Monitor(coordinator)
    with pytest.raises(ValueError, match="one monitor"):
        fm.Monitor(coordinator)
    first.close()
    first.close()
    with fm.Monitor(coordinator):
        pass
    with pytest.raises(ValueError, match="closed"):
        first.step(step=1)


def test_importing_fp8dist_imports_none_of_the_sinks_libraries() -> None:
    import subprocess
    import sys

    wanted = "('rich', 'tensorboard', 'prometheus_client')"
    code = f"import sys, fp8dist.monitor; print([m for m in {wanted} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# -- sinks that fail ----------------------------------------------------------------------------------------------


class Broken(Keep):
    def write(self, record: Record) -> None:
        if len(self.records) == 2:
            raise RuntimeError("no more")
        super().write(record)


def test_a_sink_that_raises_is_switched_off_with_one_warning_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    broken, keep = Broken(), Keep()
    monitor = fm.Monitor(coordinator, [broken, keep], every=1)
    with caplog.at_level(logging.WARNING, logger="fp8dist"):
        for step in range(6):
            with coordinator.step():
                record(slot, 1.0)
            monitor.step(step=step)
        monitor.close()
    assert len(broken.records) == 2 and broken.closed == 1
    assert len(keep.of("sample")) == 5 and keep.closed == 1
    (warning,) = caplog.records
    assert (
        "Broken failed and is switched off, training goes on: RuntimeError: no more" in warning.getMessage()
    )
