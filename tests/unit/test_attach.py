"""The adapters open scopes for training only, gate the hidden passes, and check the counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist as f8


class FakeStage:
    """A stage whose chunk methods record, as a real one's layers would."""

    def __init__(self, coordinator: f8.ReductionGroupCoordinator, index: int = 0) -> None:
        self.stage_index = index
        self.slot = coordinator.slot(f"layers.{index}.input")
        self.submod = nn.Module()
        self.submod.slots = (self.slot,)  # type: ignore[assignment]

    def work(self, value: float) -> None:
        self.slot.record(torch.tensor([value]))
        self.slot.request()

    def forward_one_chunk(self, value: float) -> str:
        self.work(value)
        return "forward"

    def backward_one_chunk(self, value: float) -> None:
        self.work(value)

    def backward_weight_one_chunk(self, value: float) -> None:
        self.work(value)


class FakeSchedule:
    """Runs as many forwards and backwards as it is told, and a hidden pass like torch 2.12's before them."""

    def __init__(self, stage: FakeStage, forwards: int = 4, backwards: int = 4) -> None:
        self.stage, self.forwards, self.backwards = stage, forwards, backwards
        self._loss_fn: Any = print
        self.evals = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.stage.work(float("nan"))  # the hidden pass runs the layers, not the chunk methods
        assert all(self.stage.forward_one_chunk(1.0) == "forward" for _ in range(self.forwards))
        for _ in range(self.backwards):
            self.stage.backward_one_chunk(2.0)
        return args, kwargs

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        self.evals += 1
        return self.step(*args, **kwargs)


@pytest.fixture
def coordinator() -> Iterator[f8.ReductionGroupCoordinator]:
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=2)) as made:
        yield made


def attached(coordinator: f8.ReductionGroupCoordinator, **options: Any) -> tuple[Any, FakeStage]:
    stage = FakeStage(coordinator)
    return f8.schedules.attach(FakeSchedule(stage, **options), coordinator, stages=[stage]), stage


def last_amax(coordinator: f8.ReductionGroupCoordinator) -> float:
    return coordinator.state_dict()["slots"]["layers.0.input"]["history"][-1].item()


def test_a_step_is_one_scope_and_only_chunks_record(coordinator: f8.ReductionGroupCoordinator) -> None:
    schedule, _ = attached(coordinator)
    assert schedule.step(1, target=2) == ((1,), {"target": 2})
    assert coordinator.stats.commits == coordinator.stats.collectives == 1
    assert last_amax(coordinator) == 2.0
    assert coordinator.stats.nonfinite_amaxes == 0


def test_an_eval_opens_no_scope_and_records_nothing(coordinator: f8.ReductionGroupCoordinator) -> None:
    schedule, _ = attached(coordinator)
    schedule.step()
    before = coordinator.digest()
    schedule.eval()
    assert schedule.evals == 1
    assert coordinator.digest() == before
    assert coordinator.stats.collectives == 1


@pytest.mark.parametrize(("forwards", "backwards"), [(4, 3), (3, 4), (4, 0)])
def test_other_counts_of_forwards_and_backwards_raise_with_the_difference(
    coordinator: f8.ReductionGroupCoordinator, forwards: int, backwards: int
) -> None:
    schedule, _ = attached(coordinator, forwards=forwards, backwards=backwards)
    told = rf"stage 0 .*{forwards} forwards and {backwards} backwards \({abs(forwards - backwards)} of"
    with pytest.raises(f8.ScheduleMismatch, match=told):
        schedule.step()
    assert coordinator.stats.commits == 0
    coordinator.recover()


def test_counts_start_anew_after_a_failed_step(coordinator: f8.ReductionGroupCoordinator) -> None:
    schedule, stage = attached(coordinator)
    good, stage_work = schedule.backwards, stage.work
    schedule._schedule.backwards = 1
    with pytest.raises(f8.ScheduleMismatch):
        schedule.step()
    coordinator.recover()
    schedule._schedule.backwards = good
    schedule.step()
    assert stage_work == stage.work
    assert coordinator.stats.commits == 1


def test_a_forward_only_schedule_is_not_counted(coordinator: f8.ReductionGroupCoordinator) -> None:
    schedule, _ = attached(coordinator, backwards=0)
    schedule._schedule._loss_fn = None
    schedule.step()


def test_an_exception_in_a_chunk_shuts_the_gate(coordinator: f8.ReductionGroupCoordinator) -> None:
    schedule, stage = attached(coordinator)
    with pytest.raises(AssertionError):
        schedule._schedule.stage = type("S", (), {"work": stage.work, "forward_one_chunk": lambda v: ""})
        schedule.step()
    coordinator.recover()
    with pytest.raises(f8.MissingScope):  # the gate does not count this chunk as part of a step
        stage.forward_one_chunk(50.0)
    schedule._schedule.stage = stage
    schedule.step()
    assert last_amax(coordinator) == 2.0


def test_everything_else_is_the_schedules_own(coordinator: f8.ReductionGroupCoordinator) -> None:
    schedule, stage = attached(coordinator)
    assert schedule.stage is stage
    with pytest.raises(AttributeError):
        _ = schedule.no_such_thing


def test_the_tag_function_tags_the_step(coordinator: f8.ReductionGroupCoordinator) -> None:
    stage = FakeStage(coordinator)
    tags = iter([5, "bad", 2**70])
    schedule = f8.schedules.attach(
        FakeSchedule(stage), coordinator, stages=[stage], tag_fn=lambda: next(tags)
    )
    schedule.step()
    schedule.step()
    with pytest.raises(ValueError, match="tag"):
        schedule.step()
    assert coordinator.stats.commits == 2


BAD: list[tuple[Callable[[Any, Any, Any], Any], str]] = [
    (lambda s, c, t: f8.schedules.attach(s, c, stages=[]), "got none"),
    (lambda s, c, t: f8.schedules.attach(s, c, stages=[nn.Linear(1, 1)]), "PipelineStages but got Linear"),
    (lambda s, c, t: f8.schedules.attach(print, c, stages=[t]), "wrap_step"),
    (
        lambda s, c, t: f8.schedules.attach(f8.schedules.attach(s, c, stages=[t]), c, stages=[t]),
        "attached to a coordinator already",
    ),
    (
        lambda s, c, t: (f8.schedules.attach(s, c, stages=[t]), f8.schedules.attach(s, c, stages=[t])),
        "stage 0 is attached already",
    ),
    (lambda s, c, t: f8.schedules.wrap_step(3, c), "step function but got int"),
]


@pytest.mark.parametrize(("call", "told"), BAD)
def test_unfit_arguments_are_refused(
    coordinator: f8.ReductionGroupCoordinator, call: Callable[[Any, Any, Any], Any], told: str
) -> None:
    stage = FakeStage(coordinator)
    with pytest.raises(ValueError, match=told):
        call(FakeSchedule(stage), coordinator, stage)


def test_one_slot_in_two_stages_of_a_process_is_refused(coordinator: f8.ReductionGroupCoordinator) -> None:
    first = FakeStage(coordinator, 0)
    second = FakeStage(coordinator, 1)
    second.submod = first.submod
    with pytest.raises(ValueError, match=r"layers\.0\.input.*stage 0 already but stage 1"):
        f8.schedules.attach(FakeSchedule(first), coordinator, stages=[first, second])


def test_wrapped_steps_tell_training_from_evaluation(coordinator: f8.ReductionGroupCoordinator) -> None:
    slot = coordinator.slot("a.input")

    def forward_backward(value: float, *, forward_only: bool) -> float:
        slot.record(torch.tensor([value]))
        slot.request()
        return value

    step = f8.schedules.wrap_step(
        forward_backward,
        coordinator,
        training=lambda args, kwargs: not kwargs["forward_only"],
        tag_fn=lambda: 1,
    )
    assert step.__name__ == "forward_backward"
    assert step(3.0, forward_only=False) == 3.0
    assert step(9.0, forward_only=True) == 9.0
    assert coordinator.stats.commits == coordinator.stats.collectives == 1
    with coordinator.step():
        pass
    assert coordinator.state_dict()["slots"]["a.input"]["history"].tolist() == [3.0, -1.0]
