"""Activation checkpointing and unusual backwards: one commit a step, and the bits of the plain run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8dist as f8

WIDTH, TOKENS, STEPS = 32, 16, 5
ROLES = ("input", "weight", "grad_output")

Run = Callable[["Net", torch.Tensor], torch.Tensor]


@pytest.fixture
def coordinator():
    with make() as coordinator:
        yield coordinator


def make(name: str = "main") -> f8.ReductionGroupCoordinator:
    return f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=3), name=name)


class Net(nn.Module):
    """Six layers, run by `how`."""

    def __init__(self, how: Run) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.how = how

    def part(self, first: int, last: int, x: torch.Tensor) -> torch.Tensor:
        """Layers `first` to `last`, the latter not included."""
        for layer in self.layers[first:last]:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def build(
    coordinator: f8.ReductionGroupCoordinator, how: Run, *, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(0)
    return f8.convert(Net(how).to(dtype), coordinator)


def plain(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.part(0, 6, x)


def everything(net: Net, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    return checkpoint(net.part, 0, 6, x, use_reentrant=reentrant)


def every_layer(net: Net, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    for i in range(6):
        x = checkpoint(net.part, i, i + 1, x, use_reentrant=reentrant)
    return x


def a_subset(net: Net, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    x = net.part(0, 1, x)
    x = checkpoint(net.part, 1, 3, x, use_reentrant=reentrant)
    return net.part(3, 6, x)


def siblings(net: Net, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    """Two regions that meet in a sum; what they share gets two gradients, whose order changes no bit."""
    x = net.part(0, 2, x)
    first, second = (checkpoint(net.part, i, i + 2, x, use_reentrant=reentrant) for i in (2, 4))
    return first + second


def siblings_plain(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.part(0, 2, x)
    return net.part(2, 4, x) + net.part(4, 6, x)


def unused_branch(net: Net, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    """A region whose output no loss reads: its forward counts, and it has no backward."""
    x = net.part(0, 3, x)
    checkpoint(net.part, 3, 6, x, use_reentrant=reentrant)
    return x


def unused_branch_plain(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.part(0, 3, x)
    net.part(3, 6, x)
    return x


def nested(net: Net, x: torch.Tensor, *, outer: bool, inner: bool) -> torch.Tensor:
    def region(x: torch.Tensor) -> torch.Tensor:
        x = net.part(0, 2, x)
        x = checkpoint(net.part, 2, 4, x, use_reentrant=inner)
        return net.part(4, 6, x)

    return checkpoint(region, x, use_reentrant=outer)


def train(
    model: nn.Module, coordinator: f8.ReductionGroupCoordinator, *, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Everything that can be seen of five steps of two microbatches."""
    coordinator.freeze()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: list[Any] = []
    for step in range(STEPS):
        commits, collectives = coordinator.stats.commits, coordinator.stats.collectives
        with coordinator.step(step):
            for microbatch in range(2):
                generator = torch.Generator().manual_seed(10 * step + microbatch)
                x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
                y = model(x)
                y.float().square().mean().backward()
                seen += [y.detach(), x.grad]
        assert coordinator.stats.commits == commits + 1
        assert coordinator.stats.collectives == collectives + 1
        seen += [p.grad for p in model.parameters() if p.grad is not None]
        seen += [t for slot in coordinator.state_dict()["slots"].values() for t in slot.values()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


REGIONS = [
    (everything, plain),
    (every_layer, plain),
    (a_subset, plain),
    (siblings, siblings_plain),
    (unused_branch, unused_branch_plain),
]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("how", "reference"), REGIONS, ids=lambda f: f.__name__)
def test_recomputing_changes_no_bit_and_commits_once(coordinator, how, reference, reentrant):
    with make("reference") as other:
        expected = train(build(other, reference), other)
    assert_same_bits(train(build(coordinator, partial(how, reentrant=reentrant)), coordinator), expected)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nested_recomputing_changes_no_bit_and_commits_once(coordinator, outer, inner, dtype):
    with make("reference") as other:
        expected = train(build(other, plain, dtype=dtype), other, dtype=dtype)
    model = build(coordinator, partial(nested, outer=outer, inner=inner), dtype=dtype)
    assert_same_bits(train(model, coordinator, dtype=dtype), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_autocast_around_the_region_only_is_enough(coordinator, reentrant):
    runs = []
    for name, how in (("reference", plain), ("main", partial(every_layer, reentrant=reentrant))):
        with make(name + "-autocast") as each:
            model, x = (
                build(each, how),
                torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)),
            )
            x.requires_grad_()
            with each.step():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = model(x)
                y.float().square().mean().backward()
            runs.append([y.detach(), x.grad, *(p.grad for p in model.parameters()), *scales(each)])
    assert_same_bits(*runs)


def scales(coordinator: f8.ReductionGroupCoordinator) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in coordinator.scales().values()]


@pytest.mark.parametrize(
    "how", [plain, partial(every_layer, reentrant=False), partial(every_layer, reentrant=True)]
)
def test_an_optimizer_that_steps_in_backward_sees_the_same_gradients(coordinator, how):
    """Each weight moves as soon as its gradient is there, inside the scope, and is not quantized again."""
    with make("reference") as other:
        expected = optimize(build(other, plain), other, in_backward=False)
    assert_same_bits(optimize(build(coordinator, how), coordinator, in_backward=True), expected)


def optimize(
    model: nn.Module, coordinator: f8.ReductionGroupCoordinator, *, in_backward: bool
) -> list[torch.Tensor]:
    optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    if in_backward:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
    seen = []
    for step in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step), requires_grad=True)
        with coordinator.step(step):
            model(x).square().mean().backward()
        if not in_backward:
            for p in model.parameters():
                update(p)
        seen += [p.detach().clone() for p in model.parameters()]
        seen += [t.clone() for slot in coordinator.state_dict()["slots"].values() for t in slot.values()]
    assert coordinator.stats.commits == STEPS
    return seen


@pytest.mark.parametrize(
    "how", [plain, partial(every_layer, reentrant=False), partial(siblings, reentrant=False)]
)
def test_two_backwards_of_one_graph_double_the_gradients_and_commit_once(coordinator, how):
    model = build(coordinator, how)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with coordinator.step():
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        once = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        amaxes = [slot.amax.clone() for slot in slots(model)]
        loss.backward()
        twice = [x.grad, *(p.grad for p in model.parameters())]
        assert_same_bits([slot.amax for slot in slots(model)], amaxes)
    assert coordinator.stats.commits == 1
    assert_same_bits(twice, [2 * g for g in once])


def slots(model: nn.Module) -> list[f8.Slot]:
    return [slot for layer in model.layers for slot in layer.slots]


def test_a_second_derivative_is_refused_by_name_of_the_reason(coordinator):
    model = build(coordinator, plain)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with coordinator.step():
        (dx,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        with pytest.raises(
            RuntimeError, match="differentiate twice a function that was marked with @once_diff"
        ):
            dx.square().sum().backward()


@pytest.mark.parametrize("where", ["forward", "recompute", "backward", "hook"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_an_exception_anywhere_leaves_the_next_step_right(coordinator, where, reentrant):
    with make("reference") as other:
        expected = train(build(other, plain), other)
    model = build(coordinator, partial(every_layer, reentrant=reentrant))
    layer = model.layers[3]
    forwards = []

    def fail(*_: Any) -> None:
        forwards.append(None)
        if where != "recompute" or len(forwards) == 2:
            raise ArithmeticError(where)

    if where in ("forward", "recompute"):
        handle = layer.register_forward_pre_hook(fail)
    elif where == "backward":
        handle = layer.register_full_backward_hook(fail)
    else:
        handle = layer.weight.register_post_accumulate_grad_hook(fail)
    coordinator.freeze()
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    before = coordinator.digest()
    with pytest.raises(ArithmeticError, match=where), coordinator.step():
        model(x * 100).square().mean().backward()
    handle.remove()
    model.zero_grad()
    assert coordinator.digest() == before
    coordinator.recover()
    assert_same_bits(train(model, coordinator), expected)


def test_an_in_place_activation_behind_a_layer_has_the_bits_of_the_other_kind(coordinator):
    runs = []
    for activation in (torch.relu, torch.relu_):
        torch.manual_seed(0)
        with make(activation.__name__) as each:
            layer = f8.Linear(WIDTH, WIDTH, coordinator=each, name="a")
            x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
            with each.step():
                y = activation(layer(x))
                y.square().sum().backward()
            runs.append([y.detach(), x.grad, layer.weight.grad, *scales(each)])
    assert_same_bits(*runs)
