"""DistributedDataParallel: one collective of ours a step, equal scales, and names that wrapping does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import World
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist as f8

Make = Callable[..., f8.ReductionGroupCoordinator]
WIDTH, TOKENS = 32, 16


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    made: list[f8.ReductionGroupCoordinator] = []

    def build(name: str) -> f8.ReductionGroupCoordinator:
        recipe = f8.DelayedScaling(amax_history_len=4)
        made.append(f8.ReductionGroupCoordinator(recipe, name=name, timeout=10.0))
        return made[-1]

    yield build
    for coordinator in made:
        coordinator.close()


class Net(nn.Module):
    """Three layers, of which the second may be recomputed."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.recompute = recompute
        self.first, self.second = nn.Linear(WIDTH, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if self.recompute is None:
            return self.head(self.second(x))
        return self.head(checkpoint(self.second, x, use_reentrant=self.recompute))


def build(recompute: bool | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Net(recompute)


def mean(gradient: torch.Tensor) -> torch.Tensor:
    """The mean over ranks, summed in the order of ranks."""
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient.contiguous())
    return sum(parts[1:], parts[0]) / len(parts)


def wrap(model: nn.Module, world: World, **options: Any) -> DistributedDataParallel:
    """DDP; with more than two ranks its all-reduce sums in an order of its own, so that is replaced."""

    def hook(_, bucket):  # DDP reads annotations, and these would be strings
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(mean(bucket.buffer()))
        return future

    ddp = DistributedDataParallel(model, **options)
    if world.size > 2:
        ddp.register_comm_hook(None, hook)
    return ddp


def train(
    model: nn.Module, coordinator: f8.ReductionGroupCoordinator, world: World, *, average: bool
) -> list[dict[str, Any]]:
    """Losses, gradients and scales after each of four steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        before = coordinator.stats.collectives
        with coordinator.step(step):
            loss = model(torch.randn(TOKENS, WIDTH, generator=generator)).square().mean()
            loss.backward()
        if step:  # the first one agrees on the layout and seeds the weights
            assert coordinator.stats.collectives == before + 1
        if average:
            for p in model.parameters():
                p.grad = mean(p.grad)
        grads = [p.grad.clone() for p in model.parameters()]
        seen.append({"loss": loss.item(), "grads": grads, "scales": coordinator.scales()})
        optimizer.step()
        optimizer.zero_grad()
    assert coordinator.stats.commits == 4
    return seen


@pytest.mark.parametrize(
    ("options", "recompute"),
    [
        ({}, None),
        ({"gradient_as_bucket_view": True}, None),
        ({"static_graph": True}, None),
        ({"static_graph": True, "gradient_as_bucket_view": True}, True),
        ({"static_graph": True}, False),
        ({"bucket_cap_mb": 0.001}, False),
        ({"find_unused_parameters": True}, None),
    ],
)
@pytest.mark.parametrize("convert_first", [True, False])
def test_it_equals_averaging_by_hand_bit_for_bit(
    world: World, make: Make, options: dict[str, Any], recompute: bool | None, convert_first: bool
) -> None:
    wrapped, plain = make("wrapped"), make("plain")
    model = build(recompute)
    if convert_first:
        f8.convert(model, wrapped)
    model = wrap(model, world, **options)
    if not convert_first:
        f8.convert(model.module, wrapped)
    ours = train(model, wrapped, world, average=False)
    theirs = train(f8.convert(build(), plain), plain, world, average=True)
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == b["loss"]
        assert a["scales"] == b["scales"]
        assert all(torch.equal(g, h) for g, h in zip(a["grads"], b["grads"], strict=True))
    scales: list[Any] = [None] * world.size
    dist.all_gather_object(scales, ours[-1]["scales"])
    assert all(s == scales[0] for s in scales)


def test_names_do_not_depend_on_wrapping(make: Make) -> None:
    expected = {
        f"{layer}.{role}"
        for layer in ("first", "second", "head")
        for role in ("input", "weight", "grad_output")
    }
    for name in ("before", "inside", "around"):
        coordinator = make(name)
        model = build()
        if name == "before":
            f8.convert(model, coordinator)
        wrapped = DistributedDataParallel(model)
        if name == "inside":
            f8.convert(wrapped.module, coordinator)
        if name == "around":
            f8.convert(wrapped, coordinator)
        coordinator.freeze()
        assert set(coordinator.scales()) == expected


def test_gradient_accumulation_without_synchronisation_is_one_step(world: World, make: Make) -> None:
    """The same microbatches, accumulated before one all-reduce."""
    runs = []
    for name in ("wrapped", "plain"):
        coordinator = make(name)
        model = f8.convert(build(), coordinator)
        ddp = wrap(model, world) if name == "wrapped" else None
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            with coordinator.step(step):
                for microbatch in range(3):
                    x = torch.randn(TOKENS, WIDTH, generator=generator)
                    if ddp is None:
                        model(x).square().mean().backward()
                    elif microbatch < 2:
                        with ddp.no_sync():
                            ddp(x).square().mean().backward()
                    else:
                        ddp(x).square().mean().backward()
            for p in model.parameters():
                if ddp is None:
                    p.grad = mean(p.grad)
                p.data -= 0.1 * p.grad
                p.grad = None
        runs.append((coordinator.scales(), [p.detach().clone() for p in model.parameters()]))
        assert coordinator.stats.commits == 3
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
