"""The step scope on one rank: what it commits, what it leaves alone, what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist as f8


def make(recipe: f8.Recipe | None = None, **options: Any) -> f8.ReductionGroupCoordinator:
    return f8.ReductionGroupCoordinator(recipe or f8.DelayedScaling(amax_history_len=3), **options)


def record(slot: f8.Slot, value: float) -> None:
    slot.record(torch.tensor([value]))
    slot.request()


def history(coordinator: f8.ReductionGroupCoordinator, name: str) -> list[float]:
    return coordinator.state_dict()["slots"][name]["history"].tolist()


def model_and_coordinator(**options: Any) -> tuple[nn.Module, f8.ReductionGroupCoordinator]:
    torch.manual_seed(0)
    coordinator = make(**options)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return f8.convert(model, coordinator), coordinator


def backward(model: nn.Module, scale: float = 1.0) -> None:
    model(torch.full((16, 16), scale)).square().sum().backward()


def test_an_exit_commits_the_largest_amax_of_the_step() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    for values in ([1.0, 3.0, 2.0], [0.5]):
        with coordinator.step() as step:
            for value in values:
                record(slot, value)
        assert step.committed
    assert history(coordinator, "a.input") == [-1.0, 3.0, 0.5]
    assert coordinator.scales()["a.input"] == (torch.tensor(448.0) / torch.tensor(3.0)).item()


def test_an_empty_step_commits_too() -> None:
    coordinator = make()
    coordinator.slot("a.input")
    with coordinator.step() as step:
        pass
    assert step.committed
    assert coordinator.stats.generation == coordinator.stats.commits == 1


@pytest.mark.parametrize("slots", [0, 1])
def test_every_scope_is_exactly_one_collective(slots: int) -> None:
    coordinator = make()
    for i in range(slots):
        coordinator.slot(f"l{i}.input")
    coordinator.freeze()
    for expected in range(1, 6):
        with coordinator.step():
            pass
        assert coordinator.stats.collectives == expected


def test_nested_scopes_are_one_step() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step(4) as outer:
        with coordinator.step() as inner, coordinator.step(4):
            record(slot, 2.0)
        assert inner is outer
        assert coordinator.stats.commits == 0
    assert coordinator.stats.commits == coordinator.stats.collectives == 1


def test_a_nested_scope_with_another_tag_names_the_forgotten_one() -> None:
    coordinator = make()
    forgotten = coordinator.step(1)
    forgotten.__enter__()
    with pytest.raises(ValueError, match=rf"outer scope's tag 1 but got 2.*{__file__}:\d+ was never closed"):
        coordinator.step(2).__enter__()
    with pytest.raises(f8.ScopeError, match=r"never left"):
        coordinator.close()
    forgotten.__exit__(None, None, None)
    coordinator.close()


def test_an_outer_scope_that_closes_first_commits_nothing() -> None:
    coordinator = make()
    outer, inner = coordinator.step(), coordinator.step()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(f8.ScopeError, match="still open"):
        outer.__exit__(None, None, None)
    assert coordinator.stats.commits == 0
    coordinator.recover()
    with coordinator.step():
        pass


def test_a_caught_exception_in_a_nested_scope_is_the_outer_scopes_business_no_more() -> None:
    coordinator = make()
    with coordinator.step() as step, pytest.raises(KeyError), coordinator.step():
        raise KeyError
    assert step.committed


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), GeneratorExit()])
def test_leaving_by_an_exception_changes_nothing_and_asks_for_recovery(error: BaseException) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step():
        record(slot, 1.0)
    before = coordinator.digest()
    with pytest.raises(type(error)) as raised, coordinator.step(7):
        record(slot, 9.0)
        raise error
    assert raised.value is error
    assert any("step 7" in note for note in error.__notes__)
    assert coordinator.digest() == before
    with pytest.raises(f8.NeedsRecovery, match=type(error).__name__), coordinator.step():
        pass
    coordinator.recover()
    with coordinator.step():
        pass
    assert history(coordinator, "a.input") == [-1.0, 1.0, -1.0], "the amax of the failed step is gone"


def test_abort_gives_the_step_up_without_an_error() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step() as step:
        record(slot, 1.0)
        step.abort()
    assert step.committed is False
    assert (coordinator.stats.commits, coordinator.stats.aborts, coordinator.stats.collectives) == (0, 1, 1)
    with pytest.raises(f8.ScopeError):
        step.abort()
    with coordinator.step() as step:
        pass
    assert step.committed
    assert history(coordinator, "a.input") == [-1.0, -1.0, -1.0]


def test_evaluation_records_nothing_inside_and_outside_a_scope() -> None:
    model, coordinator = model_and_coordinator()
    with coordinator.step():
        backward(model)
    before = coordinator.digest()
    model.eval()
    backward(model, 100.0)
    assert coordinator.digest() == before
    assert coordinator.stats.collectives == 2  # the freeze and the step
    with coordinator.step():
        backward(model, 100.0)
    assert history(coordinator, "0.input")[-1] == -1.0


def test_pausing_shuts_recording_and_requests() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.paused():
        record(slot, 3.0)
    with coordinator.step():
        with coordinator.paused():
            record(slot, 9.0)
            with coordinator.resumed():
                record(slot, 1.0)
            record(slot, 9.0)
        record(slot, 2.0)
    assert history(coordinator, "a.input") == [-1.0, -1.0, 2.0]


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000])
@pytest.mark.parametrize("after", [False, True])
def test_nan_wins_over_any_amax_whatever_its_sign(bits: int, after: bool) -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=3, non_finite="freeze"))
    slot = coordinator.slot("a.input")
    nan = torch.tensor([bits - 2**32 if bits >= 2**31 else bits], dtype=torch.int32).view(torch.float32)
    values = [nan, torch.tensor([5.0])]
    with coordinator.step():
        for value in reversed(values) if after else values:
            slot.record(value)
    assert history(coordinator, "a.input")[-1] != history(coordinator, "a.input")[-1]
    assert coordinator.stats.nonfinite_amaxes == 1


def test_a_slot_declared_inside_a_step_loses_no_amax() -> None:
    coordinator = make()
    first = coordinator.slot("a.input")
    for step in range(3):
        with coordinator.step():
            record(first, 1.0 + step)
            if step == 1:
                late = coordinator.slot("z.grad_output")
                record(late, 8.0)
    assert history(coordinator, "a.input") == [1.0, 2.0, 3.0]
    assert history(coordinator, "z.grad_output") == [-1.0, 8.0, -1.0]
    assert late.scale.item() == 57344 / 8
    assert coordinator.stats.collectives == 4  # one a step, and one more where the layout grew


def test_weights_get_their_first_scale_at_freeze() -> None:
    model, coordinator = model_and_coordinator()
    coordinator.freeze()
    for index in (0, 2):
        amax = model[index].weight.detach().abs().max()
        assert coordinator.scales()[f"{index}.weight"] == torch.div(torch.tensor(448.0), amax).item()


def test_first_step_unit_seeds_nothing() -> None:
    model, coordinator = model_and_coordinator(recipe=f8.DelayedScaling(first_step="unit"))
    coordinator.freeze()
    assert set(coordinator.scales().values()) == {1.0}
    assert coordinator.stats.collectives == 0
    assert isinstance(model[0], f8.Linear)


def test_weights_on_the_meta_device_are_refused_at_freeze() -> None:
    coordinator = make()
    model = f8.convert(nn.Sequential(nn.Linear(16, 16, device="meta")), coordinator)
    assert model[0].weight.is_meta
    with pytest.raises(ValueError, match=r"0\.weight.*meta device.*to_empty"):
        coordinator.freeze()


def test_a_model_materialised_from_meta_is_seeded_from_its_real_weights() -> None:
    coordinator = make()
    model = f8.convert(nn.Sequential(nn.Linear(16, 16, device="meta")), coordinator)
    model.to_empty(device="cpu")
    torch.nn.init.constant_(model[0].weight, 0.5)
    coordinator.freeze()
    assert coordinator.scales()["0.weight"] == 896.0


def test_a_conversion_that_fails_declares_nothing() -> None:
    coordinator = make()
    f8.convert(nn.Linear(16, 16), coordinator, prefix="b")
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    with pytest.raises(ValueError, match=r"b\.weight"):
        f8.convert(model, coordinator)
    assert type(model["a"]) is nn.Linear
    f8.convert(nn.Linear(16, 16), coordinator, prefix="a")


def test_loading_weights_without_state_makes_their_slots_cold() -> None:
    model, coordinator = model_and_coordinator()
    with coordinator.step():
        backward(model)
    weights = {name: value * 50 for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    with coordinator.step():
        assert not model[0].slots.weight.warm.item()
        backward(model)
    assert history(coordinator, "0.weight")[:2] == [-1.0, -1.0]
    assert (
        coordinator.scales()["0.weight"]
        == torch.div(torch.tensor(448.0), weights["0.weight"].abs().max()).item()
    )


@pytest.mark.parametrize("weights_first", [True, False])
def test_a_resumed_run_equals_one_that_never_stopped(weights_first: bool) -> None:
    def run(model: nn.Module, coordinator: f8.ReductionGroupCoordinator, steps: range) -> None:
        for i in steps:
            with coordinator.step():
                backward(model, 1.0 + i)

    model, coordinator = model_and_coordinator()
    run(model, coordinator, range(3))
    saved = copy.deepcopy((model.state_dict(), coordinator.state_dict()))
    run(model, coordinator, range(3, 6))

    resumed_model, resumed = model_and_coordinator(name="resumed")
    loads = [lambda: resumed_model.load_state_dict(saved[0]), lambda: resumed.load_state_dict(saved[1])]
    for load in loads if weights_first else reversed(loads):
        load()
    run(resumed_model, resumed, range(3, 6))
    assert resumed.digest() == coordinator.digest()
    assert resumed.stats.generation == coordinator.stats.generation == 6


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    model, coordinator = model_and_coordinator()
    with coordinator.step():
        backward(model)
    good, before = coordinator.state_dict(), coordinator.digest()
    missing = {**good, "slots": {k: v for k, v in good["slots"].items() if k != "2.input"}}
    short = copy.deepcopy(good)
    short["slots"]["2.input"]["history"] = torch.zeros(7)
    no_scale = copy.deepcopy(good)
    del no_scale["slots"]["0.input"]["scale"]
    for state, told in (
        (missing, r"2\.input"),
        (short, r"2\.input.*\(7,\)"),
        (no_scale, "scale"),
        ({}, "generation"),
    ):
        with pytest.raises(ValueError, match=told):
            coordinator.load_state_dict(state)
        assert coordinator.digest() == before
    coordinator.load_state_dict(missing, strict=False)


def test_state_inside_a_scope_is_that_of_the_last_commit() -> None:
    model, coordinator = model_and_coordinator()
    with coordinator.step():
        backward(model)
    before = coordinator.state_dict()
    with coordinator.step():
        backward(model, 30.0)
        inside = coordinator.state_dict()
        with pytest.raises(f8.ScopeError):
            coordinator.load_state_dict(inside)
    for name, fields in before["slots"].items():
        for field, value in fields.items():
            assert torch.equal(value, inside["slots"][name][field])


def test_two_coordinators_do_not_touch_each_other() -> None:
    actor, a = model_and_coordinator(name="actor")
    critic, b = model_and_coordinator(name="critic")
    with a.step():
        backward(actor)
    before = b.digest()
    with a.step(), b.step():
        backward(actor)
        backward(critic, 3.0)
    with a.step():
        backward(actor)
    assert (a.stats.commits, b.stats.commits) == (3, 1)
    assert b.digest() != before
    assert history(b, "0.input") == [-1.0, -1.0, 3.0]


def test_current_scaling_needs_no_collective_and_no_scope() -> None:
    model, coordinator = model_and_coordinator(recipe=f8.CurrentScaling())
    backward(model)
    with coordinator.step() as step:
        backward(model)
    assert step.committed is False
    assert coordinator.stats.collectives == coordinator.stats.commits == 0


def test_local_amaxes_are_not_reduced_but_the_step_is_checked() -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=3, reduce_amax=False))
    slot = coordinator.slot("a.input")
    with coordinator.step():
        record(slot, 4.0)
    assert coordinator.stats.collectives == 1
    assert history(coordinator, "a.input")[-1] == 4.0


def test_a_subclassed_state_owns_its_rule() -> None:
    class Average(f8.RecipeState):
        def update(self, amax: torch.Tensor) -> None:
            self.history.copy_(self.history.roll(-1, 0))
            self.history[-1] = amax
            seen = self.history.clamp(min=0).mean(0)
            self.scale.copy_(seen + 1)
            self.warm.fill_(True)

    class Recipe(f8.DelayedScaling):
        def make_state(self, n: int, *, backward: bool, device: Any = "cpu") -> f8.RecipeState:
            return Average(self, n, backward=backward, device=device)

    coordinator = make(Recipe(amax_history_len=2))
    slot = coordinator.slot("a.input")
    for value in (2.0, 4.0):
        with coordinator.step():
            record(slot, value)
    assert coordinator.scales()["a.input"] == 4.0


@pytest.mark.parametrize(("options", "told"), [
    ({"recipe": "delayed"}, "DelayedScaling or CurrentScaling but got str"),
    ({"timeout": 0.0}, "timeout"), ({"stall_warning": -1.0}, "stall_warning"),
    ({"name": ""}, "name"), ({"name": "a/b"}, "name"), ({"group": [0, 1]}, "group expects"),
    ({"group": "dp"}, "group expects"),
])  # fmt: skip
def test_an_unfit_argument_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        f8.ReductionGroupCoordinator(**{"recipe": f8.DelayedScaling(), **options})


def test_a_launched_rank_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"4 processes were launched.*init_process_group"):
        make()


def test_two_modules_cannot_share_a_name() -> None:
    coordinator = make()
    f8.convert(nn.Sequential(nn.Linear(16, 16)), coordinator)
    with pytest.raises(ValueError, match=r"0\.weight.*prefix="):
        f8.convert(nn.Sequential(nn.Linear(16, 16)), coordinator)


@pytest.mark.parametrize("name", ["a", "a.bias", "input.x"])
def test_a_slot_name_ends_in_its_role(name: str) -> None:
    with pytest.raises(ValueError, match="role"):
        make().slot(name)


def test_a_slot_records_floating_point_only() -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step():
        with pytest.raises(ValueError, match="int64"):
            slot.record(torch.tensor([1, 2]))
        slot.record(torch.empty(0))
    assert history(coordinator, "a.input")[-1] == -1.0


def test_a_closed_coordinator_is_refused() -> None:
    coordinator = make()
    coordinator.close()
    coordinator.close()
    with pytest.raises(f8.ScopeError, match="closed"), coordinator.step():
        pass


def test_a_copied_model_reads_the_same_slots_and_cannot_be_pickled_whole() -> None:
    model, coordinator = model_and_coordinator()
    with coordinator.step():
        backward(model)
    ema = copy.deepcopy(model)
    assert ema[0].slots.input is model[0].slots.input
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(model[0].slots.input)


def test_five_hundred_steps_leave_nothing_behind() -> None:
    model, coordinator = model_and_coordinator()

    def live() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    for _ in range(5):
        with coordinator.step():
            backward(model)
    before = live()
    for _ in range(500):
        with coordinator.step():
            backward(model)
    assert live() <= before


def test_weights_loaded_before_the_first_step_are_seeded_from_what_was_loaded() -> None:
    model, coordinator = model_and_coordinator()
    weights = {name: value * 50 for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    with coordinator.step():
        assert model[0].slots.weight.warm.item()
        expected = torch.div(torch.tensor(448.0), weights["0.weight"].abs().max())
        assert model[0].slots.weight.scale.item() == expected.item()


def test_a_rank_says_that_it_enters_before_the_start_of_the_reduction_which_may_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = make()
    coordinator.slot("a.input")
    said: list[str] = []
    publish, start = coordinator._stall.progress.publish, coordinator._transport.start_max

    def published(phase: str, *rest: Any) -> None:
        said.append(phase)
        publish(phase, *rest)

    def started(words: torch.Tensor) -> Any:
        said.append("start")
        newest = coordinator.flight.last()
        assert newest is not None and newest.kind == "enter"
        return start(words)

    coordinator.freeze()
    monkeypatch.setattr(coordinator._stall.progress, "publish", published)
    monkeypatch.setattr(coordinator._transport, "start_max", started)
    with coordinator.step():
        pass
    assert said == ["open", "exit", "start"]
