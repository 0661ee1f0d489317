"""Schedules that split the backward: the bits of one process, one collective, and each product once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from conftest import World
from pipelines import (
    LAYERS,
    MICROBATCHES,
    SPLIT,
    Run,
    assert_equal_bits,
    build,
    run_alone,
    run_pipeline,
    stages_of,
)
from torch import nn

import fp8dist as f8

STEPS = 5
V_ON_GLOO = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="before torch 2.12 a gloo rank cannot send to itself"
)
NAMES = [pytest.param(name, marks=[V_ON_GLOO] if is_v else []) for name, (_, _, is_v) in SPLIT.items()]


@pytest.fixture(scope="module")
def own_group(world: World) -> dist.ProcessGroup:
    """A group of this rank alone, for references."""
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    return groups[world.rank]


@pytest.fixture(scope="module")
def reference(own_group: dist.ProcessGroup) -> Run:
    return run_alone(own_group, STEPS)


def holds_last(name: str, world: World) -> bool:
    indices = stages_of(name, world.rank, world.size)
    return world.size * len(indices) - 1 in indices


def each_once(name: str, world: World) -> Counter[str]:
    """Products of one step: two linears per layer; nobody wants the gradient of the pipeline's input."""
    linears = 2 * LAYERS // world.size
    first = 0 in stages_of(name, world.rank, world.size)
    kinds = {"forward": linears, "dgrad": linears - first, "wgrad": linears}
    return Counter({kind: count * MICROBATCHES for kind, count in kinds.items()})


@pytest.mark.parametrize("defer", [False, True], ids=["forked", "deferred"])
@pytest.mark.parametrize("name", NAMES)
def test_a_split_backward_equals_one_process_and_multiplies_once(
    world: World, reference: Run, name: str, defer: bool
) -> None:
    run = run_pipeline(name, world.rank, world.size, STEPS, defer=defer)
    assert run.collectives == [1] * STEPS
    assert_equal_bits(run, reference, holds_last(name, world))
    # The first step also has torch's hidden pass, which is none of the schedule's work.
    assert run.products[1:] == [each_once(name, world)] * (STEPS - 1)


@pytest.mark.parametrize("defer", [False, True], ids=["forked", "deferred"])
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_leaves_no_trace(world: World, name: str, defer: bool) -> None:
    """An eval before every step also makes torch repeat its hidden pass on uninitialised memory."""
    plain = run_pipeline(name, world.rank, world.size, 3, defer=defer)
    evaluated = run_pipeline(name, world.rank, world.size, 3, evaluate=True, defer=defer)
    assert evaluated.slots == plain.slots
    assert evaluated.losses == plain.losses
    assert evaluated.collectives == [1] * 3
    assert all(torch.equal(evaluated.weights[n], weight) for n, weight in plain.weights.items())


@pytest.mark.parametrize(
    ("name", "mode"), [("1f1b", "fused"), ("interleaved1f1b", "fused"), ("interleavedzb", "forked")]
)
def test_only_a_schedule_that_splits_forks_the_layers(world: World, name: str, mode: str) -> None:
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(), timeout=10.0) as coordinator:
        _, parts = build(name, coordinator, world.rank, world.size)
        layers: list[nn.Module] = [m for part in parts for m in part.modules() if isinstance(m, f8.Linear)]
        assert len(layers) == 2 * LAYERS // world.size
        assert {layer.wgrad for layer in layers} == {mode}
