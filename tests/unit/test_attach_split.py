"""Adapters for schedules that split the backward: what they detect, set, count and refuse. No processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import fp8dist as f8


class Kind(Enum):
    """torch's letters for actions."""

    FORWARD = "F"
    FULL = "B"
    INPUT = "I"
    WEIGHT = "W"
    OVERLAP = "OVERLAP_F_B"


def action(kind: Kind, *parts: Kind) -> SimpleNamespace:
    return SimpleNamespace(computation_type=kind, sub_actions=tuple(map(action, parts)) or None)


class FakeStage:
    """Chunk methods with torch's signatures; each records its microbatch into the layer's input slot."""

    has_backward = True

    def __init__(self, coordinator: f8.ReductionGroupCoordinator, index: int = 1, **attributes: Any) -> None:
        self.stage_index = index
        self.dw_builder = None
        self.submod = f8.convert(nn.Sequential(nn.Linear(16, 16)), coordinator, prefix=f"stage{index}")
        vars(self).update(attributes)

    def work(self, chunk: int) -> None:
        self.submod[0].slots.input.record(torch.tensor([float(chunk + 1)]))

    def forward_one_chunk(self, fwd_chunk_id: int) -> None:
        self.work(fwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.work(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self.work(bwd_chunk_id)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        assert self.has_backward, "torch asserts here"
        return (mb_index,)

    def set_local_bwd_input(self, outputs: Any, mb_index: int) -> None:
        assert isinstance(outputs, tuple) and self.has_backward, "torch asserts here"


class FakeSchedule:
    """Runs a program of letters: F, B, I or W, each on the next microbatch of its kind."""

    def __init__(self, stage: FakeStage, program: str, order: Any = None) -> None:
        self.stage, self.program = stage, program
        if order is not None:
            self.pipeline_order = order

    def step(self) -> None:
        seen = dict.fromkeys("FBIW", 0)
        for letter in self.program:
            chunk = seen[letter]
            seen[letter] += 1
            if letter == "F":
                self.stage.forward_one_chunk(chunk)
            elif letter == "W":
                self.stage.backward_weight_one_chunk(chunk, last_backward=False)
            else:
                self.stage.backward_one_chunk(chunk, loss=None, full_backward=letter == "B")

    def eval(self) -> None:
        self.stage.has_backward = False
        self.stage.set_local_bwd_input(self.stage.get_local_bwd_output(0), 0)


@pytest.fixture
def coordinator() -> Iterator[f8.ReductionGroupCoordinator]:
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=2)) as made:
        yield made


K = Kind
ORDERS = {
    "plain": ({0: [action(K.FORWARD), None, action(K.FULL)]}, "fused"),
    "split": ({0: [action(K.FORWARD), action(K.INPUT), action(K.WEIGHT)]}, "forked"),
    "split on another rank": ({0: [action(K.FULL)], 1: [None, action(K.WEIGHT)]}, "forked"),
    "overlapped whole": ({0: [action(K.OVERLAP, K.FORWARD, K.FULL)]}, "fused"),
    "overlapped half": ({0: [action(K.OVERLAP, K.FORWARD, K.INPUT)]}, "forked"),
    "none, in code": (None, "fused"),
}


@pytest.mark.parametrize(("order", "mode"), ORDERS.values(), ids=ORDERS)
def test_layers_are_forked_if_any_action_is_half_a_backward(
    coordinator: f8.ReductionGroupCoordinator, order: Any, mode: str
) -> None:
    stage = FakeStage(coordinator)
    f8.schedules.attach(FakeSchedule(stage, "", order), coordinator, stages=[stage])
    assert stage.submod[0].wgrad == mode


@pytest.mark.parametrize(("split", "mode"), [(True, "forked"), (False, "fused")])
@pytest.mark.parametrize("order", [ORDERS["plain"][0], ORDERS["split"][0], {}])
def test_an_argument_decides_over_the_actions(
    coordinator: f8.ReductionGroupCoordinator, order: Any, split: bool, mode: str
) -> None:
    stage = FakeStage(coordinator)
    schedule = FakeSchedule(stage, "FIW", order)
    attached = f8.schedules.attach(schedule, coordinator, stages=[stage], split_backward=split)
    assert stage.submod[0].wgrad == mode
    attached.step()


def test_actions_are_loaded_before_attaching(coordinator: f8.ReductionGroupCoordinator) -> None:
    stage = FakeStage(coordinator)
    with pytest.raises(ValueError, match="FakeSchedule to have its actions but got none; load them before"):
        f8.schedules.attach(FakeSchedule(stage, "", {}), coordinator, stages=[stage])
    schedule = FakeSchedule(stage, "FIW", ORDERS["plain"][0])  # and others are loaded later
    attached = f8.schedules.attach(schedule, coordinator, stages=[stage])
    with pytest.raises(f8.ScheduleMismatch, match=r"stage 1 expects full backwards.*inputs only"):
        attached.step()


@pytest.mark.parametrize("program", ["FFIWIW", "FFIIWW", "FBFIW", "FFBB"])
def test_a_full_backward_counts_as_both_halves(
    coordinator: f8.ReductionGroupCoordinator, program: str
) -> None:
    stage = FakeStage(coordinator)
    schedule = FakeSchedule(stage, program, ORDERS["split"][0])
    f8.schedules.attach(schedule, coordinator, stages=[stage]).step()
    assert coordinator.stats.commits == 1
    history = coordinator.state_dict()["slots"]["stage1.0.input"]["history"]
    assert history[-1] == 2.0  # the second microbatch's


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("FFIIW", "2 forwards and 2 backwards (0 of difference) and 1 weight gradients (1 of"),
        ("FFIWW", "2 forwards and 1 backwards (1 of difference) and 2 weight gradients (0 of"),
        ("FBW", "1 forwards and 1 backwards (0 of difference) and 2 weight gradients (1 of"),
    ],
)
def test_a_missing_or_surplus_half_is_told(
    coordinator: f8.ReductionGroupCoordinator, program: str, told: str
) -> None:
    stage = FakeStage(coordinator)
    schedule = FakeSchedule(stage, program, ORDERS["split"][0])
    attached = f8.schedules.attach(schedule, coordinator, stages=[stage])
    with pytest.raises(f8.ScheduleMismatch) as error:
        attached.step()
    assert told in str(error.value)
    assert coordinator.stats.commits == 0


def test_a_stage_with_a_builder_stays_deferred(coordinator: f8.ReductionGroupCoordinator) -> None:
    stage = FakeStage(coordinator)
    stage.dw_builder = f8.schedules.dw_builder(stage.submod)
    schedule = FakeSchedule(stage, "FIW", ORDERS["split"][0])
    attached = f8.schedules.attach(schedule, coordinator, stages=[stage])
    assert stage.submod[0].wgrad == "deferred"
    with coordinator.step():
        stage.submod(torch.ones(16, 16)).sum().backward()
    attached.step()  # forgets what an earlier, failed step left
    stage.dw_builder()()
    assert stage.submod[0].weight.grad is None


def test_deferred_layers_without_a_builder_are_refused(coordinator: f8.ReductionGroupCoordinator) -> None:
    stage = FakeStage(coordinator)
    stage.submod[0].wgrad = "deferred"
    with pytest.raises(ValueError, match="stage 1 expects a dw_builder"):
        f8.schedules.attach(FakeSchedule(stage, "", ORDERS["split"][0]), coordinator, stages=[stage])


V, LOOPED, ONE_RANK = {0: 0, 1: 1, 2: 1, 3: 0}, {0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("version", "ranks", "device", "refused"),
    [
        ("2.11.0", V, "cpu", True),
        ("2.12.0", V, "cpu", False),
        ("2.11.0", V, "meta", False),
        ("2.11.0", LOOPED, "cpu", False),
        ("2.11.0", ONE_RANK, "cpu", False),
    ],
)
def test_a_v_on_gloo_needs_torch_2_12(
    coordinator: f8.ReductionGroupCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    ranks: dict[int, int],
    device: str,
    refused: bool,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    stage = FakeStage(coordinator, stage_index_to_group_rank=ranks, device=torch.device(device))
    schedule = FakeSchedule(stage, "", ORDERS["split"][0])
    if refused:
        with pytest.raises(ValueError, match=r"torch 2\.12 or newer for a V schedule.*got torch 2\.11\.0"):
            f8.schedules.attach(schedule, coordinator, stages=[stage])
    else:
        f8.schedules.attach(schedule, coordinator, stages=[stage])


def test_stages_of_one_rank_pass_no_gradient_in_evaluation(
    coordinator: f8.ReductionGroupCoordinator,
) -> None:
    stage = FakeStage(coordinator)
    attached = f8.schedules.attach(FakeSchedule(stage, "", ORDERS["split"][0]), coordinator, stages=[stage])
    assert stage.get_local_bwd_output(3) == (3,)
    attached.eval()
    stage.has_backward = True
    with pytest.raises(AssertionError):
        stage.set_local_bwd_input(None, 0)


class OverlappingStage(FakeStage):
    """A forward that comes in first and leaves first, while a backward is inside."""

    def prepare(self) -> None:
        self.forward_in, self.backward_in, self.forward_out = (threading.Event() for _ in range(3))
        self.recorded: list[bool] = []

    def recording(self) -> bool:
        return self.submod[0].slots.input.scope.recording

    def forward_one_chunk(self, fwd_chunk_id: int) -> None:
        self.forward_in.set()
        assert self.backward_in.wait(10)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.backward_in.set()
        assert self.forward_out.wait(10)
        self.recorded.append(self.recording())


class OverlappingSchedule(FakeSchedule):
    """Runs both on threads, and looks at the gate before and after."""

    stage: OverlappingStage

    def step(self) -> None:
        stage = self.stage
        stage.recorded.append(stage.recording())
        forward = threading.Thread(target=stage.forward_one_chunk, args=(0,))
        backward = threading.Thread(target=stage.backward_one_chunk, args=(0,))
        forward.start()
        assert stage.forward_in.wait(10)
        backward.start()
        forward.join(10)
        stage.forward_out.set()
        backward.join(10)
        stage.recorded.append(stage.recording())


def test_chunks_that_overlap_on_threads_share_one_gate(coordinator: f8.ReductionGroupCoordinator) -> None:
    """torch runs chunks one after the other, but a custom function of a schedule need not."""
    stage = OverlappingStage(coordinator)
    stage.prepare()
    f8.schedules.attach(OverlappingSchedule(stage, ""), coordinator, stages=[stage]).step()
    assert stage.recorded == [False, True, False]
