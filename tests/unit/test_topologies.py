"""Random graphs, random checkpoints, random faults: the commits and bits of plain torch without any of it.

`--topologies N` searches N cases for each property instead of some dozens, `--topologies-seed` elsewhere.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import topologies
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from topologies import (
    Aside,
    Batch,
    Case,
    Chain,
    Evaluate,
    Fault,
    Layer,
    Limits,
    Region,
    Site,
    Topology,
    Train,
    Use,
    cases,
    drift,
    features,
    inputs,
)
from topology_machines import BACKWARD, FORWARD, Boom, Event, Network, Player, Reference, events
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8dist as f8

LENGTH = 3
CHUNK = 100  # cases in one test of the long search, to keep below the time limit of a test
QUICK = {
    "step_scope": 120,
    "backward_end": 120,
    "foreign": 120,
    "our_checkpoint": 120,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each chunk of cases; its seed is in its name."""
    if "chunk" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--topologies")
        first = metafunc.config.getoption("--topologies-seed")
        quick = next(n for name, n in QUICK.items() if name in metafunc.function.__name__)
        count, size = (-(-wanted // CHUNK), CHUNK) if wanted else (1, quick)
        metafunc.parametrize("chunk", [(first + i, size) for i in range(count)], ids=lambda c: f"seed={c[0]}")


def search(chunk: tuple[int, int], strategy: st.SearchStrategy[Case], check: Callable[[Case], None]) -> None:
    """Check as many cases as the chunk asks for."""
    number, size = chunk

    @seed(number)
    @settings(
        max_examples=size,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def run(case: Case) -> None:
        with warnings.catch_warnings():
            # A reentrant checkpoint warns if its input needs no gradient, which is meant here.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            check(case)

    run()


def check_equal(a: torch.Tensor | None, b: torch.Tensor | None, exact: bool = True) -> None:
    """Both None or equal; NaN equals NaN. If not `exact`, up to the order of a sum."""
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        torch.testing.assert_close(
            a,
            b,
            equal_nan=True,
            rtol=0.0,
            atol=0.0 if exact else 1e-5 * float(b.nan_to_num(0, 0, 0).abs().max()),
        )


class Pair:
    """A case run with the library, and by hand."""

    def __init__(self, case: Case, *, wrap: Callable[..., torch.Tensor] = checkpoint, **options: Any) -> None:
        recipe = f8.DelayedScaling(amax_history_len=LENGTH)
        self.coordinator = f8.ReductionGroupCoordinator(recipe, **options)
        self.net = Network(case.topology, wrap)
        f8.convert(self.net, self.coordinator)
        self.reference = Reference(case.topology, LENGTH)
        self.topology = case.topology

    def counts(self) -> tuple[int, int, int]:
        """Commits, collectives, generation."""
        stats = self.coordinator.stats
        return stats.commits, stats.collectives, stats.generation

    def count_commits(self, roles: dict[str, tuple[str, ...]]) -> Callable[[Event | None], None]:
        """Give a function that, called behind each event, checks how many commits it made; None made none."""
        seen = [self.coordinator.stats.commits]

        def check(event: Event | None) -> None:
            seen[0] += event is not None and bool(roles[event.kind])
            commits, collectives, generation = self.counts()
            # The first one gives the weights their scales, which is another collective.
            assert (commits, collectives, generation) == (seen[0], seen[0] + (seen[0] > 0), seen[0])

        return check

    def start(self, i: int, step: Train) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs of both sides, gradients cleared, weights moved."""
        for machine in (self.net, self.reference):
            machine.zero_grad()
            drift(machine.layers, i)
        self.net.fuse.fault, self.net.fuse.fired = step.fault, False
        return inputs(self.topology, step.batches, i), inputs(self.topology, step.batches, i)

    def check_state(self) -> None:
        """Windows, scales and coldness are equal."""
        state = {
            name: (slot["history"].tolist(), slot["scale"].item(), slot["warm"].item())
            for name, slot in self.coordinator.state_dict()["slots"].items()
        }
        if self.reference.seeded:
            assert state == self.reference.state()
        else:  # before the first commit there is nothing to save but that
            assert all(set(history) <= {-1.0} and not warm for history, _, warm in state.values())

    def check_gradients(self, step: Train, xs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        """Gradients of inputs and parameters are equal, bit for bit where their sums have one order."""
        for x, y in zip(xs, expected, strict=True):
            check_equal(x.grad, y.grad)
        layers = zip(self.topology.exact(step), self.net.layers, self.reference.layers, strict=True)
        for exact, ours, theirs in layers:
            assert isinstance(ours, nn.Linear) and isinstance(theirs, nn.Linear)
            check_equal(ours.weight.grad, theirs.weight.grad, exact)
            if ours.bias is not None:
                check_equal(ours.bias.grad, theirs.bias.grad, exact)

    def check_evaluation(self, i: int, step: Evaluate, around: Callable[[], Any] = nullcontext) -> None:
        """An evaluation has equal outputs and leaves nothing behind."""
        y = self.evaluate(i, step, around)
        with torch.no_grad():
            check_equal(y, self.reference.eval()(inputs(self.topology, (step.batch,), i)[0]))
        self.reference.train()

    def evaluate(self, i: int, step: Evaluate, around: Callable[[], Any] = nullcontext) -> torch.Tensor:
        """The library's output of an evaluation, which commits nothing."""
        before = self.counts()
        self.net.fuse.fault = None
        with torch.no_grad(), around():
            y = self.net.eval()(inputs(self.topology, (step.batch,), i)[0])
        self.net.train()
        assert self.counts() == before
        return y


# -- step scope ---------------------------------------------------------------------------------------------


def check_step_scope(case: Case) -> None:
    pair = Pair(case)
    with pair.coordinator as coordinator:
        coordinator.freeze()
        pair.reference.seed()
        for i, step in enumerate(case.steps):
            if isinstance(step, Evaluate):
                pair.check_evaluation(i, step)
            else:
                check_scoped_step(pair, i, step)
                if step.save:
                    pair.check_state()
            assert all(coordinator.slot(name).amax.item() == -1.0 for name in pair.reference.places)


def check_scoped_step(pair: Pair, i: int, step: Train) -> None:
    coordinator, fuse = pair.coordinator, pair.net.fuse
    xs, ys = pair.start(i, step)
    commits, collectives, _ = pair.counts()
    player = Player(pair.net, step, xs, fuse=fuse)
    try:
        with coordinator.step(i) as scope:
            player.play(events(step))
            if step.abort:
                scope.abort()
    except Boom:
        assert fuse.fired
        assert pair.counts()[:2] == (commits, collectives)
        coordinator.recover()
        return
    assert not fuse.fired
    assert scope.committed is not step.abort
    assert pair.counts()[:2] == (commits + (not step.abort), collectives + 1)
    reference = Player(pair.reference, step, ys)
    reference.play(events(step))
    if step.abort:
        pair.reference.forget()
    else:
        pair.reference.commit()
    check_equal(player.losses, reference.losses)
    pair.check_gradients(step, xs, ys)


def test_a_step_scope_commits_once_with_the_bits_of_plain_torch(chunk: tuple[int, int]) -> None:
    search(chunk, cases(Limits(abort=True)), check_step_scope)


# -- commits at the end of each backward --------------------------------------------------------------------


def check_backward_end(case: Case) -> None:
    pair = Pair(case, trigger="backward_end")
    with pair.coordinator:
        for i, step in enumerate(case.steps):
            if isinstance(step, Evaluate):
                pair.check_evaluation(i, step)
            else:
                check_unscoped_step(pair, i, step, {"forward": (), "backward": (*FORWARD, *BACKWARD)})


def check_unscoped_step(
    pair: Pair,
    i: int,
    step: Train,
    roles: dict[str, tuple[str, ...]],
    around_forward: Callable[[], Any] = nullcontext,
) -> None:
    """Run a step whose forwards and backwards commit these roles, both on their own."""
    fuse, reference = pair.net.fuse, pair.reference
    xs, ys = pair.start(i, step)
    counted = pair.count_commits(roles)
    player = Player(pair.net, step, xs, fuse=fuse, around_forward=around_forward, after=counted)
    try:
        player.play(events(step))
    except Boom:
        assert fuse.fired
        counted(None)
    failed = len(player.done) < len(events(step))
    assert failed is fuse.fired

    def commit_by_hand(event: Event) -> None:
        if roles[event.kind]:
            reference.commit(roles[event.kind])

    by_hand = Player(reference, step, ys, after=commit_by_hand)
    by_hand.play(player.done)
    if failed:
        reference.forget()
    else:
        pair.check_gradients(step, xs, ys)
    check_equal(player.losses, by_hand.losses)
    if step.save:
        pair.check_state()


def test_a_backward_end_commits_once_with_the_bits_of_plain_torch(chunk: tuple[int, int]) -> None:
    # Two backwards of one graph, or one after another's update, are refused: the scales in between have moved.
    limits = Limits(
        orders=("each", "one"), faults=("recompute", "backward", "hook"), twice=False, late_faults=True
    )
    search(chunk, cases(limits), check_backward_end)


# -- Transformer Engine's timing ----------------------------------------------------------------------------


def check_our_checkpoint(case: Case) -> None:
    options = {"trigger": "backward_end", "update_every": "microbatch"}
    pair = Pair(case, wrap=f8.checkpoint, **options)
    with pair.coordinator.as_default():
        for i, step in enumerate(case.steps):
            if isinstance(step, Evaluate):
                pair.check_evaluation(i, step, f8.autocast)
            else:
                roles = {"forward": FORWARD, "backward": BACKWARD}
                check_unscoped_step(pair, i, step, roles, f8.autocast)


def test_our_checkpoint_updates_per_microbatch_with_the_bits_of_plain_torch(chunk: tuple[int, int]) -> None:
    search(chunk, cases(Limits()), check_our_checkpoint)


def check_foreign_checkpoints(case: Case) -> None:
    pair = Pair(case, trigger="backward_end", update_every="microbatch")
    fuse = pair.net.fuse
    with pair.coordinator.as_default():
        for i, step in enumerate(case.steps):
            if isinstance(step, Evaluate):
                pair.evaluate(i, step, f8.autocast)
                continue
            xs, _ = pair.start(i, step)
            counted = pair.count_commits({"forward": FORWARD, "backward": BACKWARD})
            player = Player(pair.net, step, xs, fuse=fuse, around_forward=f8.autocast, after=counted)
            try:
                player.play(events(step))
            except Boom:
                counted(None)
            assert fuse.fired is (len(player.done) < len(events(step)))


def test_foreign_checkpoints_update_once_per_forward_and_backward(chunk: tuple[int, int]) -> None:
    search(chunk, cases(Limits()), check_foreign_checkpoints)


# -- cases that a search meets too rarely -------------------------------------------------------------------

PLAIN = Topology(16, True, (Layer(16, 16), Layer(16, 16)), Chain((Use(0), Site(0), Use(1))))
EARLY_STOP = Topology(
    16,
    True,
    (Layer(16, 16), Layer(16, 16), Layer(16, 16)),
    Chain((Region(Chain((Use(0), Aside(Use(1), "no grad"))), reentrant=False), Use(2))),
)
RARE = {
    "the first backward fails, and later amaxes are smaller": (
        check_backward_end,
        Case(PLAIN, (Train((Batch(6),), fault=Fault(0, "backward", 0)), Train((Batch(0),)))),
    ),
    "the first autocast fails, and later amaxes are smaller": (
        check_our_checkpoint,
        Case(PLAIN, (Train((Batch(6),), fault=Fault(0, "forward", 0)), Train((Batch(0),)))),
    ),
    "an evaluation follows a backward that failed": (
        check_our_checkpoint,
        Case(
            PLAIN,
            (
                Train((Batch(0),)),
                Train((Batch(3),), fault=Fault(0, "backward", 0), save=False),
                Evaluate(Batch(0)),
            ),
        ),
    ),
    "one graph is recomputed twice, and the recompute ends before the region does": (
        check_our_checkpoint,
        Case(EARLY_STOP, (Train((Batch(0),)), Train((Batch(3),), twice=True))),
    ),
}


@pytest.mark.parametrize("name", RARE)
def test_a_rare_case_has_the_commits_and_bits_of_plain_torch(name: str) -> None:
    check, case = RARE[name]
    check(case)


# -- the generator ------------------------------------------------------------------------------------------


def fired(case: Case) -> set[str]:
    """The kinds of the faults that go off when this is run."""
    net = Network(case.topology)
    kinds: set[str] = set()
    for i, step in enumerate(case.steps):
        if isinstance(step, Train) and step.fault is not None:
            net.fuse.fault = step.fault
            try:
                Player(net, step, inputs(case.topology, step.batches, i), fuse=net.fuse).play(events(step))
            except Boom:
                kinds.add(step.fault.kind)
    return kinds


def test_the_generator_reaches_every_feature_and_every_repr_is_its_case() -> None:
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()

    def note(case: Case) -> None:
        assert eval(repr(case), vars(topologies)) == case
        total.update(features(case))
        kinds.update(fired(case))

    search((0, 200), cases(Limits(abort=True)), note)
    nested = {f"{inner} in {outer}" for inner in (True, False) for outer in (True, False)}
    asides = set(get_args(topologies.AsideKind))
    wanted = {
        "sum",
        "cat",
        "shared",
        "tied",
        "frozen",
        "reentrant=True",
        "reentrant=False",
        "each",
        "after",
        "one",
    }
    wanted |= {"abort", "infinite", "evaluate"} | nested | asides | {f"{how} in a region" for how in asides}
    assert {name for name, n in total.items() if n} >= wanted
    assert set(kinds) == set(get_args(topologies.FaultKind))
