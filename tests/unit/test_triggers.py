"""Commits without a step scope: exactly one per outermost backward or autocast, whatever the autograd shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8dist as f8
from fp8dist import compat

Net = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


def make(trigger: str, **options: Any) -> f8.ReductionGroupCoordinator:
    return f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4), trigger=trigger, **options)


def layers(coordinator: f8.ReductionGroupCoordinator, n: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return f8.convert(nn.ModuleList([nn.Linear(16, 16) for _ in range(n)]), coordinator)


def batch(step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(step)
    return (torch.randn(16, 16, generator=g) * 2.0**step).requires_grad_()


def plain(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return m[2](torch.tanh(m[1](torch.tanh(m[0](x)))))


def whole(reentrant: bool) -> Net:
    return lambda m, x: checkpoint(lambda y: plain(m, y), x, use_reentrant=reentrant)


def each(reentrant: bool) -> Net:
    def net(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1):
            x = checkpoint(lambda y, i=i: torch.tanh(m[i](y)), x, use_reentrant=reentrant)
        return checkpoint(m[2], x, use_reentrant=reentrant)

    return net


def nested(outer: bool, inner: bool) -> Net:
    def net(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        def inside(y: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(m[0](y))
            return m[2](torch.tanh(checkpoint(m[1], y, use_reentrant=inner)))

        return checkpoint(inside, x, use_reentrant=outer)

    return net


def middle(reentrant: bool) -> Net:
    return lambda m, x: m[2](torch.tanh(checkpoint(m[1], torch.tanh(m[0](x)), use_reentrant=reentrant)))


def unused_branch(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    checkpoint(m[1], x, use_reentrant=True)
    checkpoint(m[1], x, use_reentrant=False)
    return plain(m, x)


SHAPES: dict[str, Net] = {
    "plain": plain,
    "one region, reentrant": whole(True),
    "one region": whole(False),
    "per layer, reentrant": each(True),
    "per layer": each(False),
    "nested RR": nested(True, True),
    "nested RN": nested(True, False),
    "nested NR": nested(False, True),
    "nested NN": nested(False, False),
    "in the middle, reentrant": middle(True),
    "in the middle": middle(False),
}


def run(coordinator: f8.ReductionGroupCoordinator, net: Net, steps: int = 5) -> list[Any]:
    """Train without any scope; what each step left behind."""
    m = layers(coordinator)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
    seen: list[Any] = []
    for step in range(steps):
        x = batch(step)
        loss = net(m, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        coordinator.flush()
        seen.append((loss.item(), x.grad.tolist(), coordinator.digest(), coordinator.stats.commits))
    return seen


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_end_commits_once_per_backward_with_the_bits_of_the_plain_run(shape: str) -> None:
    expected = run(make("backward_end", name="plain"), plain)
    seen = run(make("backward_end"), SHAPES[shape])
    assert [commits for *_, commits in seen] == [1, 2, 3, 4, 5]
    assert seen == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_the_step_scope_commits_the_same_bits_for_every_shape(shape: str) -> None:
    def run_scoped(net: Net, name: str) -> list[Any]:
        coordinator = make("step", name=name)
        m = layers(coordinator)
        seen: list[Any] = []
        for step in range(5):
            x = batch(step)
            with coordinator.step(step):
                loss = net(m, x).square().mean()
                loss.backward()
            seen.append((loss.item(), x.grad.tolist(), coordinator.digest(), coordinator.stats.commits))
        return seen

    assert run_scoped(SHAPES[shape], "shape") == run_scoped(plain, "plain")


def test_an_unused_checkpointed_branch_costs_no_commit() -> None:
    seen = run(make("backward_end"), unused_branch)
    assert [commits for *_, commits in seen] == [1, 2, 3, 4, 5]


def test_several_backwards_are_several_commits_and_one_inside_a_scope() -> None:
    coordinator = make("backward_end")
    m = layers(coordinator)
    for _ in range(3):
        plain(m, batch(0)).sum().backward()
    assert coordinator.stats.commits == 3
    with coordinator.step():
        for _ in range(3):
            plain(m, batch(0)).sum().backward()
    assert coordinator.stats.commits == 4


class Bomb(torch.autograd.Function):
    """Raises in its backward while armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        if Bomb.armed:
            raise RuntimeError("bomb")
        return g


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    Bomb.armed = False
    yield
    Bomb.armed = False


@pytest.mark.parametrize("shape", ["plain", "one region, reentrant", "one region", "nested RR"])
@pytest.mark.parametrize("where", ["in a node", "in a hook", "in a recompute"])
def test_after_an_exception_the_next_step_is_right_and_nothing_leaks(shape: str, where: str) -> None:
    if where == "in a recompute" and shape == "plain":
        return  # nothing is recomputed
    coordinator = make("backward_end")
    m = layers(coordinator)
    calls = [0]

    def net(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return SHAPES[shape](m, Bomb.apply(x))

    def fail_in_recompute(*_: Any) -> None:
        calls[0] += 1
        if Bomb.armed and calls[0] == 2:
            raise RuntimeError("bomb")

    def step(i: int, fails: bool = False) -> tuple[float, int]:
        x = batch(i)
        loss = net(m, x).square().mean()
        Bomb.armed = fails
        loss.backward()
        return loss.item(), coordinator.digest()

    step(0)
    if where == "in a hook":
        handle = m[0].weight.register_hook(lambda g: (_ for _ in ()).throw(RuntimeError("bomb")))
    elif where == "in a recompute":
        # Not before its first layer: a backward that has not reached any FP8 layer cannot be told from none.
        handle = m[1].register_forward_pre_hook(fail_in_recompute)
    before = coordinator.digest()
    with pytest.raises(RuntimeError, match="bomb"):
        step(3, fails=where != "in a hook")
    Bomb.armed = False
    if where != "in a node":
        handle.remove()
    assert coordinator.digest() == before
    m.zero_grad()
    after = step(1)

    clean = make("backward_end", name="clean")
    reference = layers(clean)
    for i in (0, 1):
        x = batch(i)
        loss = plain(reference, x).square().mean()
        loss.backward()
    assert after == (loss.item(), clean.digest())
    assert coordinator.stats.commits == 2


def test_a_missing_scope_falls_back_to_the_end_of_the_backward_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = make("step")
    m = layers(coordinator)
    with caplog.at_level(logging.WARNING, logger="fp8dist"):
        for step in range(3):
            plain(m, batch(step)).sum().backward()
    assert coordinator.stats.commits == 3
    assert sum("outside a step scope" in r.message for r in caplog.records) == 1


def test_a_request_outside_scope_and_backward_is_refused() -> None:
    for trigger in ("step", "backward_end"):
        coordinator = make(trigger, name=trigger)
        with pytest.raises(f8.MissingScope, match=r"coordinator\.step\(\)"):
            coordinator.slot("a.grad_output").request()


# -- next_autocast ------------------------------------------------------------------------------------------


@pytest.fixture
def next_autocast() -> Iterator[f8.ReductionGroupCoordinator]:
    with make("next_autocast").as_default() as coordinator:
        yield coordinator


def test_next_autocast_commits_at_the_next_entry_and_flush_at_the_end(
    next_autocast: f8.ReductionGroupCoordinator,
) -> None:
    m = layers(next_autocast)
    commits = []
    for step in range(3):
        with f8.autocast():
            y = plain(m, batch(step))
        y.sum().backward()
        commits.append(next_autocast.stats.commits)
    assert commits == [0, 1, 2]
    with pytest.raises(f8.ScopeError, match=r"flush\(\)"):
        next_autocast.state_dict()
    next_autocast.flush()
    next_autocast.flush()
    assert next_autocast.stats.commits == 3


def test_next_autocast_equals_backward_end_bit_for_bit(next_autocast: f8.ReductionGroupCoordinator) -> None:
    def net(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with f8.autocast():
            return plain(m, x)

    seen = run(next_autocast, net)  # it flushes after each step
    assert seen == run(make("backward_end", name="other"), plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_next_autocast_does_not_flush_in_evaluation_recompute_or_backward(
    next_autocast: f8.ReductionGroupCoordinator, reentrant: bool
) -> None:
    m = layers(next_autocast)

    def inner(x: torch.Tensor) -> torch.Tensor:
        with f8.autocast():
            return plain(m, x)

    for expected in (0, 1):
        checkpoint(inner, batch(0), use_reentrant=reentrant).sum().backward()
        assert next_autocast.stats.commits == expected * (not reentrant)
    m.eval()
    with torch.no_grad(), f8.autocast():
        plain(m, batch(0))
    m.train()
    before = next_autocast.stats.commits
    x = batch(0)
    x.register_hook(lambda g: inner(g.detach()).detach())
    plain(m, x).sum().backward()
    assert next_autocast.stats.commits == before


# -- Transformer Engine's names ------------------------------------------------------------------------------


@pytest.fixture
def te() -> Iterator[f8.ReductionGroupCoordinator]:
    """The process default with Transformer Engine's timing."""
    with make("backward_end", update_every="microbatch").as_default() as coordinator:
        yield coordinator


def autocast_around(net: Net) -> Net:
    def around(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with f8.autocast():
            return net(m, x)

    return around


@pytest.mark.parametrize("shape", SHAPES)
def test_one_forward_and_one_backward_update_per_step_for_every_foreign_checkpoint(
    te: f8.ReductionGroupCoordinator, shape: str
) -> None:
    m = layers(te)
    for step in range(3):
        before = te.stats.commits
        y = autocast_around(SHAPES[shape])(m, batch(step))
        assert te.stats.commits == before + 1, "the forward update"
        y.sum().backward()
        assert te.stats.commits == before + 2, "the backward update"


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_autocast_inside_the_checkpointed_region_updates_exactly_once(
    te: f8.ReductionGroupCoordinator, reentrant: bool
) -> None:
    m = layers(te)
    for step in range(3):
        before = te.stats.commits
        y = checkpoint(lambda x: autocast_around(plain)(m, x), batch(step), use_reentrant=reentrant)
        y.sum().backward()
        assert te.stats.commits == before + 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_our_checkpoint_has_the_bits_of_no_checkpoint(reentrant: bool) -> None:
    def train(wrap: bool, name: str) -> list[Any]:
        with make("backward_end", update_every="microbatch", name=name).as_default() as coordinator:
            m = layers(coordinator)
            seen = []
            for step in range(5):
                x = batch(step)
                with f8.autocast():
                    if wrap:
                        y = f8.checkpoint(lambda z: torch.tanh(m[0](z)), x, use_reentrant=reentrant)
                        y = f8.checkpoint(lambda z: m[2](torch.tanh(m[1](z))), y, use_reentrant=reentrant)
                    else:
                        y = plain(m, x)
                y.sum().backward()
                grads = [p.grad.tolist() for p in m.parameters()]
                seen.append(
                    (y.tolist(), x.grad.tolist(), grads, coordinator.digest(), coordinator.stats.commits)
                )
            return seen

    assert train(True, "wrapped") == train(False, "plain")


def test_evaluation_updates_nothing(te: f8.ReductionGroupCoordinator) -> None:
    m = layers(te)
    autocast_around(plain)(m, batch(0)).sum().backward()
    before = (te.stats.commits, te.digest())
    m.eval()
    with torch.no_grad():
        autocast_around(plain)(m, batch(3))
    assert (te.stats.commits, te.digest()) == before


def test_nested_autocasts_update_once_and_disabled_ones_compute_in_high_precision(
    te: f8.ReductionGroupCoordinator,
) -> None:
    m = layers(te)
    x = batch(0)
    with f8.autocast():
        with f8.autocast():
            m[0](x)
        with f8.autocast(enabled=False):
            assert torch.equal(m[1](x), nn.functional.linear(x, m[1].weight, m[1].bias))
        assert te.stats.commits == 0
    assert te.stats.commits == 1
    assert te.slot("1.input").amax.item() == -1.0


def test_calibration_records_in_high_precision(te: f8.ReductionGroupCoordinator) -> None:
    m = layers(te)
    x = batch(0)
    with torch.no_grad(), f8.autocast(enabled=False, calibrating=True):
        y = m[0](x)
    assert torch.equal(y, nn.functional.linear(x, m[0].weight, m[0].bias))
    assert te.scales()["0.input"] == torch.div(torch.tensor(448.0), x.abs().max()).item()


def test_a_backward_scope_commits_gradients_once_also_if_nothing_ran(
    te: f8.ReductionGroupCoordinator,
) -> None:
    m = layers(te)
    outputs = [autocast_around(plain)(m, batch(i)) for i in range(3)]
    before = te.stats.commits
    with f8.quantization_backward_scope():
        for y in outputs:
            with f8.quantization_backward_scope():
                y.sum().backward()
        assert te.stats.commits == before
    assert te.stats.commits == before + 1
    with f8.quantization_backward_scope():
        pass
    assert te.stats.commits == before + 2


def test_a_backward_scope_inside_a_running_backward_defers_to_its_end(
    te: f8.ReductionGroupCoordinator,
) -> None:
    m = layers(te)
    x = batch(0)
    y = autocast_around(plain)(m, x)
    seen = []

    def hook(g: torch.Tensor) -> torch.Tensor:
        with f8.quantization_backward_scope():
            pass
        seen.append(te.stats.commits)
        return g

    x.register_hook(hook)
    before = te.stats.commits
    y.sum().backward()
    assert seen == [before]
    assert te.stats.commits == before + 1


def test_names_without_effect_where_there_is_no_delayed_state() -> None:
    with f8.ReductionGroupCoordinator(f8.CurrentScaling(), name="c").as_default() as coordinator:
        m = layers(coordinator)
        with f8.quantization_backward_scope():
            autocast_around(plain)(m, batch(0)).sum().backward()
        assert not f8.backward_quantization_update_needed()
        assert coordinator.stats.collectives == 0


def test_modules_of_other_people_ask_in_forward_and_request_in_backward(
    te: f8.ReductionGroupCoordinator,
) -> None:
    slot = te.slot("theirs.grad_output")

    class Theirs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.update = f8.backward_quantization_update_needed()
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            if ctx.update:
                slot.record(g)
                f8.request_backward_quantization_update()
            return g * 2

    x = torch.ones(4, requires_grad=True)
    with f8.autocast():
        y = Theirs.apply(x)
    (y * 3).sum().backward()
    assert te.state_dict()["slots"]["theirs.grad_output"]["history"][-1].item() == 3.0
    assert not f8.backward_quantization_update_needed()


@pytest.mark.parametrize("call", [f8.reduce_and_update_quantization_state, f8.reduce_and_update_fp8_tensors])
def test_an_update_by_hand_takes_one_direction(te: f8.ReductionGroupCoordinator, call: Any) -> None:
    forward, backward = te.slot("a.input"), te.slot("a.grad_output")
    for slot in (forward, backward):
        slot.record(torch.tensor([2.0]))
    call(forward=True)
    histories = {n: s["history"][-1].item() for n, s in te.state_dict()["slots"].items()}
    assert histories == {"a.input": 2.0, "a.grad_output": -1.0}
    call(forward=False)
    histories = {n: s["history"][-1].item() for n, s in te.state_dict()["slots"].items()}
    assert histories == {"a.input": 2.0, "a.grad_output": 2.0}


def test_another_recipe_or_a_second_default_is_refused(te: f8.ReductionGroupCoordinator) -> None:
    with (
        pytest.raises(ValueError, match="recipe of the process default"),
        f8.autocast(recipe=f8.DelayedScaling(margin=1)),
    ):
        pass
    with pytest.raises(ValueError, match="process default already"):
        make("step", name="second").as_default()
    with f8.autocast(recipe=f8.DelayedScaling(amax_history_len=4)):
        pass


def test_the_older_name_takes_the_older_arguments(te: f8.ReductionGroupCoordinator) -> None:
    m = layers(te)
    x = batch(0)
    with torch.no_grad(), f8.fp8_autocast(False, True, te.recipe, None):
        y = m[0](x)
    assert torch.equal(y, nn.functional.linear(x, m[0].weight, m[0].bias))
    assert te.stats.commits == 1
    with f8.fp8_autocast(enabled=True, fp8_recipe=te.recipe):
        m[0](x)
    assert te.stats.commits == 2


def test_arguments_in_transformer_engines_order_are_refused_with_the_mend(
    te: f8.ReductionGroupCoordinator,
) -> None:
    with pytest.raises(ValueError, match="pass its arguments by name"), f8.autocast(True, False):
        pass


def test_the_first_autocast_makes_the_default() -> None:
    previous = compat.default_coordinator()
    assert previous is None or previous.closed
    with f8.autocast(recipe=f8.DelayedScaling(amax_history_len=7)):
        made = compat.default_coordinator()
        assert made is not None
        assert made.recipe.amax_history_len == 7
        assert (made.trigger, made.update_every) == ("backward_end", "microbatch")
    made.close()


def test_an_exception_in_an_autocast_leaves_nothing_pending(te: f8.ReductionGroupCoordinator) -> None:
    m = layers(te)
    with pytest.raises(KeyError), f8.autocast():
        m[0](batch(3))
        raise KeyError
    autocast_around(plain)(m, batch(0)).sum().backward()
    assert te.stats.commits == 2
    assert te.state_dict()["slots"]["0.input"]["history"].tolist()[:3] == [-1.0] * 3


def test_inside_a_step_scope_the_names_only_record(te: f8.ReductionGroupCoordinator) -> None:
    m = layers(te)
    with te.step():
        with f8.quantization_backward_scope():
            autocast_around(plain)(m, batch(0)).sum().backward()
        assert te.stats.commits == 0
    assert te.stats.commits == 1
