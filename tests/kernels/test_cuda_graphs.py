"""On a GPU a step as a CUDA graph has the bits of the eager step, and nothing of it is stale."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist as f8
from fp8dist.graphs import GraphedStep

TOKENS, WIDTH, STEPS = 64, 128, 8


@pytest.fixture(autouse=True)
def _no_debug_mode_survives() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


class Run:
    """A model, its optimizer and data, and one step of them."""

    def __init__(self, name: str, kind: str = "mlp", microbatches: int = 1) -> None:
        torch.manual_seed(0)
        self.coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=3), name=name)
        kw: dict[str, Any] = {"coordinator": self.coordinator, "device": "cuda", "dtype": torch.bfloat16}
        make: dict[str, Callable[[int], nn.Module]] = {
            "mlp": lambda i: f8.LayerNormMLP(WIDTH, 2 * WIDTH, name=f"{i}.mlp", **kw),
            "checkpointed mlp": lambda i: f8.LayerNormMLP(
                WIDTH, 2 * WIDTH, name=f"{i}.mlp", checkpoint=True, **kw
            ),
            "linear": lambda i: f8.Linear(WIDTH, WIDTH, name=f"{i}.linear", **kw),
            "norm linear": lambda i: f8.LayerNormLinear(WIDTH, WIDTH, name=f"{i}.norm", **kw),
        }
        self.model = nn.Sequential(*(make[kind](i) for i in range(2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.x = [
            torch.zeros(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(microbatches)
        ]
        self.bodies = 0  # how often Python ran it

    def load(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for x in self.x:
            x.data.copy_(torch.randn(x.shape, generator=generator) * (1 + step))

    def body(self) -> torch.Tensor:
        self.bodies += 1
        losses = []
        for x in self.x:
            loss = self.model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def leaves(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.x]

    def graphed(self, **kwargs: Any) -> GraphedStep[torch.Tensor]:
        return GraphedStep(self.coordinator, self.body, self.leaves(), **kwargs)

    def eagerly(self, tag: int | None = None, overlap: bool = False) -> torch.Tensor:
        with self.coordinator.step(tag, overlap=overlap):
            return self.body()

    def train(self, step_fn: Callable[[int], torch.Tensor], steps: range) -> list[list[float]]:
        losses = []
        for step in steps:
            self.load(step)
            for leaf in self.leaves():
                leaf.grad = None
            losses.append(step_fn(step).clone())
            self.optimizer.step()
        return [loss.tolist() for loss in losses]

    def state(self) -> dict[str, Any]:
        slots = self.coordinator.state_dict()["slots"]
        found = {f"{n}.{k}": v.tolist() for n, slot in slots.items() for k, v in slot.items()}
        for i, leaf in enumerate(self.leaves()):
            assert leaf.grad is not None
            found |= {f"leaf {i}": leaf.tolist(), f"gradient {i}": leaf.grad.tolist()}
        return found


@pytest.fixture
def make() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def build(*args: Any, **kwargs: Any) -> Run:
        made.append(Run(*args, **kwargs))
        return made[-1]

    yield build
    for run in made:
        with run.coordinator:
            pass


def same(ours: Run, theirs: Run) -> None:
    ours_, theirs_ = ours.state(), theirs.state()
    assert ours_.keys() == theirs_.keys()
    assert [name for name in ours_ if ours_[name] != theirs_[name]] == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", ["mlp", "checkpointed mlp", "linear", "norm linear"])
def test_graphed_steps_equal_eager_steps_bit_for_bit(
    make: Callable[..., Run], kind: str, microbatches: int, overlap: bool
) -> None:
    ours, theirs = make("ours", kind, microbatches), make("theirs", kind, microbatches)
    graphed = ours.graphed()
    losses = ours.train(lambda step: graphed(step, overlap=overlap), range(STEPS))
    assert losses == theirs.train(theirs.eagerly, range(STEPS))
    assert len({str(loss) for loss in losses}) == STEPS
    same(ours, theirs)
    assert (graphed.captures, ours.bodies, theirs.bodies) == (1, 4, STEPS)
    assert ours.coordinator.stats.commits == theirs.coordinator.stats.commits == STEPS


def test_a_replay_waits_for_nothing_of_the_device(make: Callable[..., Run]) -> None:
    run = make("waits", microbatches=2)
    graphed = run.graphed()
    run.train(graphed, range(5))
    torch.cuda.set_sync_debug_mode("error")
    for step in range(5, 8):
        graphed(step)
        run.optimizer.step()
        run.optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    assert (graphed.captures, run.coordinator.stats.commits) == (1, 8)


def test_eager_and_graphed_steps_mix(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours", microbatches=3), make("theirs", microbatches=3)
    graphed = ours.graphed()
    step_fns = [graphed] * 5 + [ours.eagerly] * 2 + [graphed] * 3
    losses = ours.train(lambda step: step_fns[step](step), range(10))
    assert losses == theirs.train(theirs.eagerly, range(10))
    same(ours, theirs)
    assert graphed.captures == 1


def test_no_quantized_weight_crosses_the_border_of_the_graph(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours", microbatches=2), make("theirs", microbatches=2)
    graphed = ours.graphed()
    ours.train(graphed, range(3))
    theirs.train(theirs.eagerly, range(3))

    def once(run: Run, x: torch.Tensor) -> torch.Tensor:
        loss = run.model(x).float().square().mean()
        loss.backward()
        return loss.detach()

    def around(run: Run, inner: Callable[[], Any]) -> Callable[[int], torch.Tensor]:
        def step_fn(step: int) -> torch.Tensor:
            with run.coordinator.step(step):
                before = [once(run, run.x[0]) for _ in range(2)]  # the scope keeps the weights
                for leaf in run.leaves():
                    leaf.grad = None
                inner()
                return torch.stack([*before, once(run, run.x[1])])

        return step_fn

    losses = ours.train(around(ours, graphed), range(3, 8))
    assert losses == theirs.train(around(theirs, theirs.body), range(3, 8))
    same(ours, theirs)
    assert graphed.captures == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_replay_records_what_is_not_finite(make: Callable[..., Run], value: float) -> None:
    ours, theirs = make("ours", "linear"), make("theirs", "linear")
    graphed = ours.graphed()
    for run, step_fn in ((ours, graphed), (theirs, theirs.eagerly)):
        run.train(step_fn, range(5))
        run.load(5)
        run.x[0].data[3, 5] = value
        step_fn(5)
        assert run.coordinator.stats.nonfinite_amaxes > 0
        run.optimizer.zero_grad()  # the weights stay as they are
        run.train(step_fn, range(6, 9))
    assert ours.coordinator.stats.nonfinite_amaxes == theirs.coordinator.stats.nonfinite_amaxes
    same(ours, theirs)
    assert graphed.captures == 1


def fail_and_recover(run: Run) -> None:
    with pytest.raises(MemoryError), run.coordinator.step():
        raise MemoryError
    run.coordinator.recover()


def grow(run: Run) -> None:
    run.coordinator.slot("late.input")
    run.train(run.eagerly, range(20, 21))


def load_weights(run: Run) -> None:
    run.model.load_state_dict({k: v * 64 for k, v in run.model.state_dict().items()})


def load_both(run: Run) -> None:
    weights = {k: v.clone() for k, v in run.model.state_dict().items()}
    slots = run.coordinator.state_dict()
    run.train(run.eagerly, range(20, 21))
    run.model.load_state_dict(weights)
    run.coordinator.load_state_dict(slots)


def move(run: Run) -> None:
    for p in run.model.parameters():
        p.data = p.data.clone()


@pytest.mark.parametrize(
    ("event", "captures"), [(fail_and_recover, 2), (grow, 2), (load_weights, 2), (move, 2), (load_both, 1)]
)
def test_it_captures_again_where_a_replay_would_be_wrong(
    make: Callable[..., Run], event: Callable[[Run], None], captures: int
) -> None:
    ours, theirs = make("ours"), make("theirs")
    graphed = ours.graphed()
    losses = []
    for run, step_fn in ((ours, graphed), (theirs, theirs.eagerly)):
        run.train(step_fn, range(5))
        event(run)
        losses.append(run.train(step_fn, range(6, 12)))
    assert losses[0] == losses[1]
    same(ours, theirs)
    assert (graphed.captures, graphed.captured) == (captures, True)


def test_two_shapes_share_memory_and_take_turns(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours"), make("theirs")

    def short(run: Run) -> torch.Tensor:
        loss = run.model(run.x[0][: TOKENS // 2]).float().square().mean()
        loss.backward()
        return loss.detach()[None]

    def eager_short(step: int) -> torch.Tensor:
        with theirs.coordinator.step(step):
            return short(theirs)

    whole = ours.graphed()
    part = GraphedStep(ours.coordinator, lambda: short(ours), ours.leaves(), pool=whole)
    losses = ours.train(lambda step: (part if step % 2 else whole)(step), range(14))
    assert losses == theirs.train(
        lambda step: eager_short(step) if step % 2 else theirs.eagerly(step), range(14)
    )
    same(ours, theirs)
    assert (whole.captures, part.captures) == (1, 1)
    part.recapture()
    losses = ours.train(part, range(14, 19))
    assert losses == theirs.train(eager_short, range(14, 19))
    same(ours, theirs)


def test_an_error_in_the_capture_comes_out_and_the_run_goes_on(make: Callable[..., Run]) -> None:
    ours, theirs = make("ours"), make("theirs")
    capturing = torch.cuda.is_current_stream_capturing

    def body() -> torch.Tensor:
        losses = ours.body()
        if capturing():
            raise ZeroDivisionError("in the body")
        return losses

    graphed = GraphedStep(ours.coordinator, body, ours.leaves())
    ours.train(graphed, range(3))
    stream = torch.cuda.current_stream()
    with pytest.raises(ZeroDivisionError, match="in the body"):
        graphed(3)
    assert torch.cuda.current_stream() == stream
    assert not capturing()
    assert not ours.coordinator.in_scope
    assert not graphed.captured
    ours.coordinator.recover()
    theirs.train(theirs.eagerly, range(3))
    assert ours.train(ours.eagerly, range(3, 5)) == theirs.train(theirs.eagerly, range(3, 5))
    same(ours, theirs)


BREAKING = """
import torch
import fp8dist as f8
from fp8dist.graphs import GraphedStep

coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling())
layer = f8.Linear(64, 64, coordinator=coordinator, name="l", device="cuda", dtype=torch.bfloat16)
x = torch.ones(32, 64, device="cuda", dtype=torch.bfloat16)

def body():
    loss = layer(x).float().square().mean()
    loss.backward()
    if torch.cuda.is_current_stream_capturing():
        loss.item()  # a host that asks for a value breaks the capture
    return loss.detach()

graphed = GraphedStep(coordinator, body, layer.parameters())
stream = torch.cuda.current_stream()
try:
    for step in range(4):
        graphed(step)
except RuntimeError as error:
    print("told:", "captur" in str(error))
print("stream kept:", torch.cuda.current_stream() == stream, not torch.cuda.is_current_stream_capturing())
print("open:", coordinator.in_scope, graphed.captured)
coordinator.recover()
for step in range(3, 6):
    with coordinator.step(step):
        layer(x + torch.randn_like(x)).float().square().mean().backward()
torch.cuda.synchronize()
print("commits:", coordinator.stats.commits)
"""


def test_a_capture_that_the_device_breaks_is_told_and_the_run_goes_on() -> None:
    # In a process of its own: a broken capture can leave torch's allocator and generators in any state.
    done = subprocess.run(
        [sys.executable, "-c", BREAKING], capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()
    assert lines == [
        "told: True",
        "stream kept: True True",
        "open: False False",
        "commits: 6",
    ], done.stdout + done.stderr


def test_a_capture_that_failed_in_python_can_be_repeated(make: Callable[..., Run]) -> None:
    run = make("again")
    bad = [True]

    def body() -> torch.Tensor:
        losses = run.body()
        if bad[0] and torch.cuda.is_current_stream_capturing():
            raise ZeroDivisionError
        return losses

    graphed = GraphedStep(run.coordinator, body, run.leaves())
    run.train(graphed, range(3))
    with pytest.raises(ZeroDivisionError):
        graphed(3)
    run.coordinator.recover()
    bad[0] = False
    run.train(graphed, range(3, 9))
    assert (graphed.captures, graphed.captured) == (1, True)


def test_other_threads_may_use_cuda_during_a_capture(make: Callable[..., Run]) -> None:
    run = make("threads", microbatches=3)
    graphed = run.graphed()
    run.train(graphed, range(3))
    over, errors, rounds = threading.Event(), [], []

    def loader() -> None:
        try:
            event = torch.cuda.Event()
            event.record()
            for i in range(20000):
                rounds.append(torch.empty(4096 + i).pin_memory().numel())
                event.query()
                if over.is_set():
                    return
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=loader)
    thread.start()
    try:
        run.train(graphed, range(3, 6))
    finally:
        over.set()
        thread.join(30)
    assert errors == []
    assert rounds
    assert graphed.captures == 1


def test_a_graph_whose_slots_lie_elsewhere_is_refused() -> None:
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(), name="elsewhere")
    layer = f8.Linear(WIDTH, WIDTH, coordinator=coordinator, name="a")
    on_gpu = nn.Parameter(torch.zeros(1, device="cuda"))
    x = torch.randn(TOKENS, WIDTH)
    graphed = GraphedStep(coordinator, lambda: layer(x).sum().backward(), [on_gpu])
    with pytest.raises(ValueError, match="on a GPU but got cpu"):
        graphed()
    coordinator.recover()
    coordinator.close()


def test_a_capture_by_hand_bakes_in_no_weight_that_was_quantized_before() -> None:
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4), name="by hand")
    torch.manual_seed(0)
    layer = f8.Linear(64, 64, coordinator=coordinator, name="l", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # twice in a scope, so that the weight is one that is kept for it
        with coordinator.step():
            for _ in range(2):
                layer(x).sum().backward()
    with coordinator.step():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    with coordinator.step(), torch.no_grad():
        graph.replay()
        assert torch.equal(y, layer(x))
    coordinator.close()


def test_a_capture_by_hand_with_a_cold_slot_is_refused() -> None:
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(), name="cold by hand")
    layer = f8.Linear(64, 64, coordinator=coordinator, name="l", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    coordinator.freeze()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with coordinator.step(), torch.no_grad():
        with (
            pytest.raises(ValueError, match="slots that have a scale"),
            torch.cuda.graph(graph, stream=stream),
        ):
            layer(x)
        layer(x)
    coordinator.close()
