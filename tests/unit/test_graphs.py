"""A step that replays a recorded tape instead of a CUDA graph: bits of the eager step, and all that Python must add."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _graph_runs import WIDTH, FakeCuda, Run
from forkpool import run_ranks, values
from torch import nn

import fp8dist as f8
from fp8dist import graphs
from fp8dist.graphs import GraphedStep

STEPS = 8
CUDA = graphs._Cuda


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Cuda", FakeCuda)


@pytest.fixture
def make() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def build(name: str = "main", *args: Any, **kwargs: Any) -> Run:
        made.append(Run(name, *args, **kwargs))
        return made[-1]

    yield build
    for run in made:
        with run.coordinator:
            pass


def same(ours: Run, theirs: Run) -> None:
    ours_, theirs_ = ours.state(), theirs.state()
    assert ours_.keys() == theirs_.keys()
    assert [name for name in ours_ if ours_[name] != theirs_[name]] == []


# -- the bits of the eager step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", ["mlp", "linears"])
def test_graphed_steps_equal_eager_steps_bit_for_bit(
    make: Callable[..., Run], kind: str, microbatches: int, overlap: bool
) -> None:
    ours, theirs = make("ours", kind, microbatches), make("theirs", kind, microbatches)
    graphed = ours.graphed()
    losses = ours.train(lambda step: graphed(step, overlap=overlap), range(STEPS))
    assert losses == theirs.train(theirs.eagerly, range(STEPS))
    assert len({str(loss) for loss in losses}) == STEPS
    same(ours, theirs)
    assert (graphed.captures, graphed._cuda.runs, graphed._cuda.replays) == (1, 3, STEPS - 3)
    ours_, theirs_ = ours.coordinator.stats, theirs.coordinator.stats
    assert (ours_.commits, ours_.collectives) == (theirs_.commits, theirs_.collectives)
    assert ours_.commits == STEPS


def test_an_eager_step_between_replays_is_what_it_always_was(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours", microbatches=3), make("theirs", microbatches=3)
    graphed = ours.graphed()
    step_fns = [graphed] * 5 + [ours.eagerly] + [graphed] * 2
    losses = ours.train(lambda step: step_fns[step](step), range(STEPS))
    assert losses == theirs.train(theirs.eagerly, range(STEPS))
    same(ours, theirs)
    assert graphed.captures == 1


def test_what_is_not_finite_is_recorded_by_a_replay(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours"), make("theirs")
    graphed = ours.graphed()
    for run, step_fn in ((ours, graphed), (theirs, theirs.eagerly)):
        run.train(step_fn, range(4))
        run.load(4)
        run.x[0, 0, 0], run.x[0, 1, 0] = float("nan"), float("inf")
        step_fn(4)
        assert run.coordinator.stats.nonfinite_amaxes > 0
    assert ours.coordinator.stats.nonfinite_amaxes == theirs.coordinator.stats.nonfinite_amaxes
    assert ours.coordinator.state_dict()["slots"].keys() == theirs.coordinator.state_dict()["slots"].keys()
    assert ours.coordinator.scales() == theirs.coordinator.scales()


# -- what Python adds to a replay -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_a_replay_requests_and_records_exactly_if_the_capture_did(
    make: Callable[..., Run], training: bool
) -> None:
    run = make()
    run.train(run.eagerly, range(2))
    run.model.train(training)
    graphed = run.graphed(warmup=2)
    scope = run.coordinator.request_handle
    for step in range(5):
        with run.coordinator.step():
            run.load(step)
            graphed()
            assert (scope.requested, scope.recorded) == (training, training), step
    assert graphed._cuda.replays == 3


def test_what_ran_before_in_the_same_scope_is_no_request_of_the_graph(make: Callable[..., Run]) -> None:
    run = make()
    run.train(run.eagerly, range(2))
    graphed = run.graphed(warmup=2)
    run.model.eval()
    graphed(), graphed()
    slot = run.coordinator.slot("a.fc1.input")
    with run.coordinator.step():
        slot.record(torch.ones(1))
        slot.request()
        graphed()
        assert run.coordinator.request_handle.requested
    with run.coordinator.step():
        graphed()
        assert not run.coordinator.request_handle.requested
        assert not run.coordinator.request_handle.recorded


def test_gradients_are_those_of_the_step_whatever_was_there_before(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours", "linears", 2), make("theirs", "linears", 2)
    unused = nn.Parameter(torch.zeros(3))
    parameters = [*ours.model.parameters(), unused]
    graphed = GraphedStep(ours.coordinator, ours.body, parameters)
    for step in range(6):
        for p in parameters:
            p.grad = torch.full_like(p, 7.0) if step % 2 else None
        theirs.optimizer.zero_grad()
        for run, step_fn in ((ours, graphed), (theirs, theirs.eagerly)):
            run.load(step)
            step_fn(step)
        same(ours, theirs)
        assert unused.grad is None
    assert graphed.captures == 1


def test_a_scope_around_takes_the_step_and_can_abort_it(make: Callable[..., Run]) -> None:
    run = make()
    graphed = run.graphed()
    run.train(graphed, range(5))
    before, commits = run.coordinator.digest(), run.coordinator.stats.commits
    with run.coordinator.step(5) as step:
        graphed()
        step.abort()
    assert step.committed is False
    assert (run.coordinator.digest(), run.coordinator.stats.commits) == (before, commits)
    run.train(graphed, range(6, 8))
    assert (run.coordinator.stats.commits, graphed.captures) == (commits + 2, 1)


def test_an_overlapped_step_commits_later(make: Callable[..., Run]) -> None:
    run = make()
    graphed = run.graphed()
    for overlap in (False, True):
        for step in range(5):
            run.load(step)
            graphed(step, overlap=overlap)
            assert (run.coordinator.request_handle.settle is not None) is overlap
    run.coordinator.settle()
    assert run.coordinator.stats.commits == 10


# -- weights that were quantized elsewhere ----------------------------------------------------------------------------


def test_no_weight_of_the_graph_is_used_outside_it_and_none_from_outside_in_it(
    make: Callable[..., Run],
) -> None:
    ours, theirs = make("ours", "linears", 2), make("theirs", "linears", 2)
    graphed = ours.graphed()
    ours.train(graphed, range(3))
    theirs.train(theirs.eagerly, range(3))
    cache = ours.coordinator.request_handle.weight_cache

    def around(run: Run, inner: Callable[[], Any]) -> Callable[[int], torch.Tensor]:
        def step_fn(step: int) -> torch.Tensor:
            with run.coordinator.step(step):
                first = run.model(run.x[0]).square().mean()  # fills the cache of the scope
                kept = dict(cache)
                inner()
                assert run is theirs or dict(cache) == kept
                return first.detach()[None]

        return step_fn

    losses = ours.train(around(ours, graphed), range(3, 6))
    assert graphed.captures == 1
    assert losses == theirs.train(around(theirs, theirs.body), range(3, 6))
    same(ours, theirs)


def test_a_scope_knows_after_replays_which_weights_several_microbatches_use(make: Callable[..., Run]) -> None:
    run = make(microbatches=3)
    graphed = run.graphed()
    scope = run.coordinator.request_handle
    for step in range(6):
        if step == 3:
            scope.reused = frozenset({"a.fc1.weight"})  # a GPU's layers count their uses, a CPU's do not
        run.train(graphed, range(step, step + 1))
    assert scope.reused == {"a.fc1.weight"}


# -- what a graph does not survive -----------------------------------------------------------------------------------


def grow(run: Run) -> None:
    run.coordinator.slot("late.input")
    run.train(run.eagerly, range(5, 6))


def fail_and_recover(run: Run) -> None:
    with pytest.raises(MemoryError), run.coordinator.step():
        raise MemoryError
    run.coordinator.recover()
    run.train(run.eagerly, range(5, 6))


def load_weights(run: Run) -> None:
    run.model.load_state_dict({k: v * 64 for k, v in run.model.state_dict().items()})
    run.train(run.eagerly, range(5, 6))
    run.model.load_state_dict({k: v / 64 for k, v in run.model.state_dict().items()})


def load_both(run: Run) -> None:
    state = {k: v.clone() for k, v in run.model.state_dict().items()}, run.coordinator.state_dict()
    run.train(run.eagerly, range(5, 6))
    run.model.load_state_dict(state[0])
    run.coordinator.load_state_dict(state[1])


def move_parameters(run: Run) -> None:
    for p in run.model.parameters():
        p.data = p.data.clone()
    gc.collect()
    run.train(run.eagerly, range(5, 6))


def test_weights_loaded_before_the_capture_start_the_warmup_again(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours", "linears"), make("theirs", "linears")
    graphed = ours.graphed(warmup=2)
    for run, step_fn in ((ours, graphed), (theirs, theirs.eagerly)):
        run.train(step_fn, range(2))
        run.model.load_state_dict({k: v / 2 for k, v in run.model.state_dict().items()})
        run.train(step_fn, range(2, 6))
    same(ours, theirs)
    assert (graphed._cuda.runs, graphed.captures) == (4, 1)


@pytest.mark.parametrize(
    ("event", "captures"),
    [
        (grow, 2),
        (fail_and_recover, 2),
        (load_weights, 2),
        (move_parameters, 2),
        (load_both, 1),
    ],
)
def test_it_captures_again_where_a_replay_would_be_wrong(
    make: Callable[..., Run], event: Callable[[Run], None], captures: int
) -> None:
    ours, theirs = make("ours", "linears"), make("theirs", "linears")
    graphed = ours.graphed(warmup=2)
    losses = []
    for run, step_fn in ((ours, graphed), (theirs, theirs.eagerly)):
        run.train(step_fn, range(5))
        event(run)
        losses.append(run.train(step_fn, range(6, 10)))
    assert losses[0] == losses[1]
    same(ours, theirs)
    assert (graphed.captures, graphed.captured) == (captures, True)


def test_recording_that_is_switched_off_is_off_in_a_graph_too(make: Callable[..., Run]) -> None:
    run = make()
    graphed = run.graphed(warmup=2)
    run.train(graphed, range(4))
    slot = run.coordinator.slot("a.fc1.input")
    with run.coordinator.step(), run.coordinator.paused():
        for _ in range(4):  # two eager, one captures, one replays
            graphed()
        assert slot.amax.item() == -1
        assert not run.coordinator.request_handle.requested
    assert graphed.captures == 2


def test_a_graph_of_fp8_is_not_replayed_where_fp8_is_off(make: Callable[..., Run]) -> None:
    run = make()
    run.coordinator.as_default()
    graphed = run.graphed(warmup=2)
    run.train(graphed, range(4))
    run.load(9)
    with f8.autocast(enabled=False):
        losses = [graphed().item() for _ in range(4)]
    with torch.no_grad(), f8.autocast(enabled=False):
        plain = run.model(run.x[0]).square().mean().item()
    with torch.no_grad():
        rounded = run.model(run.x[0]).square().mean().item()
    assert losses == [plain] * 4
    assert plain != rounded


def test_recapture_forgets_what_cannot_be_seen(make: Callable[..., Run]) -> None:
    run = make()
    factor = [1.0]
    graphed = GraphedStep(run.coordinator, lambda: factor[0] * run.body(), run.model.parameters(), warmup=2)
    run.load(0)
    for _ in range(3):
        before = graphed().clone()
    factor[0] = 2.0
    assert torch.equal(graphed(), before)
    graphed.recapture()
    assert not graphed.captured
    after = [graphed().clone() for _ in range(4)]
    assert all(torch.equal(loss, 2 * before) for loss in after)
    assert graphed.captures == 2


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_cold_slot_is_refused_by_name_and_a_longer_warmup_helps(make: Callable[..., Run]) -> None:
    run = make(kind="linears")
    with torch.no_grad():
        run.model[2].weight.zero_()  # so the first layer gets no gradient in the first step
    state = {k: v.clone() for k, v in run.model.state_dict().items()}
    graphed = run.graphed(warmup=2)
    run.train(graphed, range(2))
    before = run.coordinator.digest()
    with pytest.raises(ValueError, match=r"'0\.grad_output' had none yet in the last of 2 .* larger warmup="):
        graphed(2)
    assert graphed.captures == 0
    assert not run.coordinator.in_scope
    run.coordinator.recover()
    assert run.coordinator.digest() == before
    run.train(graphed, range(2, 5))  # it has begun anew, and finds them warm
    assert graphed.captures == 1
    other = make("other", "linears")
    other.model.load_state_dict(state)
    graphed = other.graphed(warmup=3)
    other.train(graphed, range(4))
    assert graphed.captures == 1


def test_a_slot_that_the_step_does_not_run_may_be_cold(make: Callable[..., Run]) -> None:
    run = make()
    idle = f8.Linear(WIDTH, WIDTH, coordinator=run.coordinator, name="idle")
    graphed = run.graphed()
    run.train(graphed, range(5))
    assert idle.slots is not None
    assert not idle.slots.input.warm
    assert graphed.captures == 1


def test_an_error_in_the_capture_is_the_steps_own_and_leaves_nothing_open(make: Callable[..., Run]) -> None:
    run = make(kind="linears", microbatches=2)
    bad = [False]

    def body() -> torch.Tensor:
        losses = run.body()
        if bad[0]:
            raise ZeroDivisionError("in the body")
        return losses

    graphed = GraphedStep(run.coordinator, body, run.model.parameters())
    run.train(graphed, range(3))
    before = run.coordinator.digest()
    bad[0] = True
    with pytest.raises(ZeroDivisionError, match="in the body"):
        graphed(3)
    scope = run.coordinator.request_handle
    assert (run.coordinator.in_scope, scope.requested, scope.recorded) == (False, False, False)
    assert scope.weight_cache == {}
    assert all(p.grad is None for p in run.model.parameters())  # nothing has written them
    assert (graphed.captures, graphed.captured) == (0, False)
    with pytest.raises(f8.NeedsRecovery):
        graphed(3)
    run.coordinator.recover()
    assert run.coordinator.digest() == before
    bad[0] = False
    run.train(graphed, range(3, 6))
    assert graphed.captures == 1


def test_casts_are_not_counted_in_a_graph_and_counters_stay_where_they_were(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours"), make("theirs")
    graphed = ours.graphed()
    ours.train(graphed, range(2))
    theirs.train(theirs.eagerly, range(2))
    ours.coordinator.count_casts()
    ours.train(graphed, range(2, 5))
    counts = ours.coordinator.cast_counts()
    assert len(counts) == 6
    assert set(counts.values()) == {(0, 0, 0)}
    ours.coordinator.count_casts(False)
    ours.train(graphed, range(5, 7))
    theirs.train(theirs.eagerly, range(2, 7))
    same(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coordinator": None}, "expects a ReductionGroupCoordinator but got NoneType"),
        ({"body": 3}, "body expects a function"),
        ({"warmup": 1}, "warmup expects an int of at least 2 but got 1"),
        ({"warmup": True}, "at least 2 but got True"),
        ({"warmup": 2.0}, "at least 2 but got 2.0"),
        ({"parameters": []}, "pass model.parameters"),
        ({"parameters": [("weight", torch.zeros(1))]}, "pass model.parameters"),
        ({"parameters": [torch.zeros(1, device="meta")]}, "expects parameters on a GPU but got one on meta"),
        ({"pool": (0, 1)}, "pool expects another GraphedStep or None but got tuple"),
    ],
)
def test_unfit_arguments_are_refused(make: Callable[..., Run], change: dict[str, Any], message: str) -> None:
    run = make()
    arguments: dict[str, Any] = {
        "coordinator": run.coordinator, "body": run.body, "parameters": run.model.parameters(), **change,
    }  # fmt: skip
    first = [arguments.pop(name) for name in ("coordinator", "body", "parameters")]
    with pytest.raises(ValueError, match=message):
        GraphedStep(*first, **arguments)


@pytest.mark.parametrize(
    "kwargs", [{"trigger": "backward_end"}, {"trigger": "next_autocast"}, {"update_every": "microbatch"}]
)
def test_a_coordinator_that_commits_elsewhere_is_refused(
    make: Callable[..., Run], kwargs: dict[str, Any]
) -> None:
    run = make()
    with (
        f8.ReductionGroupCoordinator(f8.DelayedScaling(), name="other", **kwargs) as other,
        pytest.raises(
            ValueError,
            match=f"trigger='step' and update_every='step' but got .*{next(iter(kwargs.values()))}",
        ),
    ):
        GraphedStep(other, run.body, run.model.parameters())


def test_a_cpu_has_no_graphs_and_is_told_what_to_do(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_Cuda", CUDA)
    with pytest.raises(
        ValueError, match=r"on a GPU but got one on cpu; without a GPU call body\(\) in `with"
    ):
        make().graphed()


def test_slots_that_are_not_where_graphs_are_end_the_first_step(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = make().graphed()
    monkeypatch.setattr(FakeCuda, "device_type", "cuda")
    with pytest.raises(ValueError, match="the slots of coordinator 'main' on a GPU but got cpu"):
        graphed()


# -- several graphs and several ranks ---------------------------------------------------------------------------------


def test_two_steps_of_one_model_share_memory_and_take_turns(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours", microbatches=2), make("theirs", microbatches=2)

    def half(run: Run) -> torch.Tensor:
        loss = run.model(run.x[0, :16]).square().mean()
        loss.backward()
        return loss.detach()[None]

    whole = ours.graphed()
    short = GraphedStep(ours.coordinator, lambda: half(ours), ours.model.parameters(), pool=whole)

    def eager_half(step: int) -> torch.Tensor:
        with theirs.coordinator.step(step):
            return half(theirs)

    losses = ours.train(lambda step: (whole if step % 2 else short)(step), range(12))
    assert losses == theirs.train(
        lambda step: theirs.eagerly(step) if step % 2 else eager_half(step), range(12)
    )
    same(ours, theirs)
    assert (whole.captures, short.captures) == (1, 1)
    # The short one captures first, when there is no memory to share yet; then it is captured again.
    assert whole._cuda is short._cuda
    short.recapture()
    for _ in range(4):
        short()
    assert whole._cuda.pools == [None, None, "pool 2"]


def ranks(rank: int, world: int, fail: bool) -> Any:
    graphs._Cuda = FakeCuda  # type: ignore[misc]
    run = Run("main", microbatches=2)
    graphed = run.graphed()

    def body() -> torch.Tensor:
        if graphed._cuda.pools:
            raise ZeroDivisionError("while capturing")
        return run.body()

    if fail and rank == 0:
        graphed._body = body
        inner = graphed._cuda.capture
        graphed._cuda.capture = lambda body, pool: (graphed._cuda.pools.append(pool), inner(body, pool))[1]
    step_fn = graphed if rank == 0 else run.eagerly
    try:
        run.train(step_fn, range(6))
    except (ZeroDivisionError, f8.PeerAborted) as error:
        run.coordinator.recover()
        return type(error).__name__, run.coordinator.stats.generation, run.coordinator.digest()
    run.coordinator.close()
    return graphed.captures, run.coordinator.digest()


def test_a_rank_with_a_graph_and_one_without_commit_together() -> None:
    (ours, digest), (theirs, other) = values(run_ranks(lambda r, w: ranks(r, w, False), world=2, timeout=60))
    assert (ours, theirs) == (1, 0)
    assert digest == other


def test_a_rank_that_fails_to_capture_frees_its_peers() -> None:
    ours, theirs = values(run_ranks(lambda r, w: ranks(r, w, True), world=2, timeout=60))
    assert (ours[0], theirs[0]) == ("ZeroDivisionError", "PeerAborted")
    assert ours[1:] == theirs[1:]
    assert ours[1] == 3
