"""torch.compile: one graph for equal layers, the bits of eager, and no recompilation while scales move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fp8dist as f8

WIDTH, TOKENS, LAYERS = 32, 16, 12


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(name: str) -> f8.ReductionGroupCoordinator:
    return f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=3), name=name)


class Block(nn.Module):
    """One residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class BlockThatRecomputes(Block):
    """The same, with the recomputation inside of what is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Recomputed(nn.Sequential):
    """Runs each block twice, the second time in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def layers(
    coordinator: f8.ReductionGroupCoordinator,
    n: int = LAYERS,
    *,
    kind: type[nn.Sequential] = nn.Sequential,
    block: type[Block] = Block,
) -> nn.Sequential:
    torch.manual_seed(0)
    return f8.convert(kind(*(block() for _ in range(n))), coordinator)


def train(model: nn.Module, coordinator: f8.ReductionGroupCoordinator, steps: int = 4) -> list[torch.Tensor]:
    """Outputs, gradients, histories and scales of some steps; the first one has cold slots."""
    seen: list[torch.Tensor] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
        with coordinator.step(step):
            y = model(x)
            y.square().sum().backward()
        seen += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        seen += [t for slot in coordinator.state_dict()["slots"].values() for t in slot.values()]
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-3 * p.grad
                p.grad = None
    return seen


def compare(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "block"),
    [(nn.Sequential, Block), (Recomputed, Block), (nn.Sequential, BlockThatRecomputes)],
)
def test_equal_layers_share_one_graph_with_the_bits_of_eager(
    kind: type[nn.Sequential], block: type[Block]
) -> None:
    with make("eager") as each:
        expected = train(layers(each), each)
    counter = CompileCounterWithBackend("aot_eager")
    with make("compiled") as coordinator:
        model = layers(coordinator, kind=kind, block=block)
        for each_block in model:
            each_block.compile(backend=counter, fullgraph=True)
        compare(train(model, coordinator), expected)
        assert coordinator.stats.commits == 4
    assert counter.frame_count == 1


def test_a_whole_model_is_one_graph_from_its_cold_step_on() -> None:
    with make("eager") as each:
        expected = train(layers(each), each)
    counter = CompileCounterWithBackend("aot_eager")
    with make("compiled") as coordinator:
        model = layers(coordinator)
        compare(train(torch.compile(model, backend=counter, fullgraph=True), coordinator), expected)
    assert counter.frame_count == 1


def test_inductor_gives_the_bits_of_eager() -> None:
    """Amax and cast are one opaque op, so the compiler fuses nothing into them."""
    with make("eager") as each:
        expected = train(layers(each, 1), each, steps=3)
    with make("compiled") as coordinator:
        model = layers(coordinator, 1)
        compare(train(torch.compile(model, fullgraph=True), coordinator, steps=3), expected)


def test_a_layout_that_grows_recompiles_at_most_once() -> None:
    runs: list[Any] = []
    counter = CompileCounterWithBackend("aot_eager")
    for name in ("eager", "compiled"):
        with make(name) as coordinator:
            model = layers(coordinator)
            if name == "compiled":
                for block in model:
                    block.compile(backend=counter, fullgraph=True)
            seen = train(model, coordinator, steps=2)
            coordinator.slot("late.input")
            seen += train(model, coordinator, steps=3)
            runs.append(seen)
    compare(*runs)
    assert counter.frame_count <= 2


def test_evaluation_and_training_are_two_graphs_and_keep_their_meaning() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    with make("compiled") as coordinator:
        model = layers(coordinator)
        for block in model:
            block.compile(backend=counter, fullgraph=True)
        train(model, coordinator, steps=2)
        before = coordinator.digest()
        x = torch.randn(TOKENS, WIDTH)
        with torch.no_grad():
            y = model.eval()(x)
        for block in model:
            block._compiled_call_impl = None
        with torch.no_grad():
            assert torch.equal(model(x), y)
        assert coordinator.digest() == before
    assert counter.frame_count == 2
