"""Tensor and sequence parallelism on DTensor: shards of one tensor share one scale, the whole tensor's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import World
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp8dist as f8

Make = Callable[..., f8.ReductionGroupCoordinator]
WIDTH, HIDDEN, TOKENS = 32, 64, 16


@pytest.fixture
def mesh(world: World) -> DeviceMesh:
    return init_device_mesh("cpu", (world.size,))


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    made: list[f8.ReductionGroupCoordinator] = []

    def build(name: str, **recipe: Any) -> f8.ReductionGroupCoordinator:
        recipe = {"amax_history_len": 4, **recipe}
        made.append(f8.ReductionGroupCoordinator(f8.DelayedScaling(**recipe), name=name, timeout=10.0))
        return made[-1]

    yield build
    for coordinator in made:
        coordinator.close()


class Block(nn.Module):
    """Norm, colwise, activation, rowwise."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(self.norm(x))))


def block(seed: int = 0, activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu) -> Block:
    torch.manual_seed(seed)
    return Block(activation)


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    if not sequence:
        return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


def split(x: torch.Tensor, mesh: DeviceMesh, *, sequence: bool) -> torch.Tensor:
    return distribute_tensor(x, mesh, [Shard(1)]) if sequence else x


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, seed: int, top: int) -> torch.Tensor:
    return torch.randint(-top, top + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def train(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Whole output and gradients of one forward and backward."""
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(dy)
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"y": whole(y.detach()), "x": whole(x.grad), **grads}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("convert_first", [True, False])
def test_shards_of_one_tensor_share_the_scale_of_the_whole(
    make: Make, mesh: DeviceMesh, sequence: bool, convert_first: bool
) -> None:
    """The reference gathers every operand and takes its largest magnitude."""
    coordinator = make("tp")
    model = block()
    if convert_first:
        f8.convert(model, coordinator)
    parallelize(model, mesh, sequence=sequence)
    if not convert_first:
        f8.convert(model, coordinator)
    amaxes: dict[str, float] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, DTensor)
        amaxes[name] = tensor.full_tensor().abs().max().item()

    for name in ("up", "down"):
        layer = model.get_submodule(name)

        def see_input(layer: nn.Module, args: tuple[torch.Tensor], name: str = name) -> None:
            note(f"{name}.input", args[0].detach())
            note(f"{name}.weight", layer.weight.detach())

        def see_output(layer: nn.Module, args: object, y: torch.Tensor, name: str = name) -> None:
            y.register_hook(lambda dy: note(f"{name}.grad_output", dy))

        layer.register_forward_pre_hook(see_input)
        layer.register_forward_hook(see_output, prepend=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, dy = (randn(2, TOKENS, WIDTH, seed=10 * step + i) for i in range(2))
        before = coordinator.stats.collectives
        with coordinator.step(step):
            train(model, split(x, mesh, sequence=sequence), split(dy, mesh, sequence=sequence))
        assert coordinator.stats.collectives == before + 1 + (step == 0)  # freeze() seeds the weights
        optimizer.step()
        optimizer.zero_grad()
        slots = coordinator.state_dict()["slots"]
        assert {name: slot["history"][-1].item() for name, slot in slots.items()} == amaxes
        assert len(amaxes) == 6


@pytest.mark.parametrize("sequence", [False, True])
def test_it_equals_the_single_process_bit_for_bit_where_sums_are_exact(
    make: Make, mesh: DeviceMesh, sequence: bool
) -> None:
    """Small integers under a scale of 1: no order of summation changes a bit."""
    runs = []
    for name in ("tp", "single"):
        coordinator = make(name, first_step="unit")
        model = block(activation=F.relu)
        model.norm = nn.Identity() if not sequence else _Whole(model.norm)
        with torch.no_grad():
            for seed, p in enumerate(model.parameters()):
                p.copy_(integers(*p.shape, seed=seed, top=2))
        f8.convert(model, coordinator)
        x, dy = (integers(2, TOKENS, WIDTH, seed=s, top=2) for s in (20, 21))
        if name == "tp":
            if sequence:
                distribute_module(model.norm, mesh)
            parallelize_without_norm(model, mesh, sequence=sequence)
            x, dy = (split(t, mesh, sequence=sequence) for t in (x, dy))
        with coordinator.step():
            results = train(model, x, dy)
        runs.append((results, coordinator.scales()))
    for key, value in runs[1][0].items():
        assert torch.equal(runs[0][0][key], value), key
    assert runs[0][1] == runs[1][1]
    assert len(runs[0][1]) == 6


class _Whole(nn.Module):
    """Stands in for the norm where values have to stay integers: adds its bias."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.bias = norm.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def parallelize_without_norm(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    if not sequence:
        return parallelize(model, mesh, sequence=False)
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


@pytest.mark.parametrize(("first", "values", "scales"), [("unit", 1e-6, 0.0), ("current", 0.1, 0.01)])
@pytest.mark.parametrize("sequence", [False, True])
def test_training_stays_close_to_the_single_process(
    make: Make, mesh: DeviceMesh, sequence: bool, first: str, values: float, scales: float
) -> None:
    """Only the order of sums differs, unless cold shards choose scales of their own in the first step."""
    runs = []
    for name in ("tp", "single"):
        coordinator = make(name, first_step=first)
        model = f8.convert(block(), coordinator)
        if name == "tp":
            parallelize(model, mesh, sequence=sequence)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
        steps = []
        for step in range(4):
            x, dy = (randn(2, TOKENS, WIDTH, seed=10 * step + i) for i in range(2))
            if name == "tp":
                x, dy = (split(t, mesh, sequence=sequence) for t in (x, dy))
            with coordinator.step(step):
                steps.append(train(model, x, dy))
            optimizer.step()
            optimizer.zero_grad()
        runs.append((steps, coordinator.scales()))
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        for key, value in theirs.items():
            assert (ours[key] - value).norm() <= values * value.norm(), key
    for name, scale in runs[1][1].items():
        assert abs(runs[0][1][name] - scale) <= scales * scale, name


def layer(make: Make, seed: int = 0, **options: Any) -> tuple[f8.ReductionGroupCoordinator, f8.Linear]:
    coordinator = make(f"layer{seed}", first_step="unit")
    torch.manual_seed(seed)
    module = f8.Linear(WIDTH, HIDDEN, coordinator=coordinator, name="a", **options)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(integers(*p.shape, seed=i, top=2))
    return coordinator, module


@pytest.mark.ranks(4)
@pytest.mark.parametrize("weight_at", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("x_at", [Shard(0), Shard(1), Replicate()])
def test_every_placement_gives_the_single_process_bits(make: Make, weight_at: Any, x_at: Any) -> None:
    """On two mesh dimensions: the batch over the first (in unequal parts), tensor parallel over the second."""
    mesh = init_device_mesh("cpu", (2, 2))
    x, dy = integers(35, WIDTH, seed=5, top=2), integers(35, HIDDEN, seed=6, top=2)
    coordinator, module = layer(make)
    single, reference = layer(make, seed=1)
    bias_at = weight_at if weight_at == Shard(0) else Replicate()
    for name, at in (("weight", weight_at), ("bias", bias_at)):
        whole_parameter = distribute_tensor(getattr(module, name).detach(), mesh, [Replicate(), at])
        module.register_parameter(name, nn.Parameter(whole_parameter))
    with coordinator.step():
        ours = train(
            module,
            distribute_tensor(x, mesh, [Shard(0), x_at]),
            distribute_tensor(dy, mesh, [Shard(0), Replicate()]),
        )
    with single.step():
        theirs = train(reference, x, dy)
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert len(theirs) == 4
    assert coordinator.scales() == single.scales()


def test_the_output_of_a_rowwise_layer_waits_for_its_reduction(make: Make, mesh: DeviceMesh) -> None:
    coordinator, module = layer(make)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(1)]))
    module.bias = nn.Parameter(distribute_tensor(module.bias.detach(), mesh, [Replicate()]))
    with coordinator.step():
        y = module(distribute_tensor(randn(TOKENS, WIDTH, seed=0), mesh, [Shard(1)]))
    assert y.placements == (Partial(),)


def test_a_weight_that_changes_inside_a_scope_is_quantized_again(make: Make, mesh: DeviceMesh) -> None:
    """An in-place op on a DTensor leaves the version counter of its local part alone."""
    coordinator, module = layer(make, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    x = distribute_tensor(randn(TOKENS, WIDTH, seed=0), mesh, [Replicate()])
    with coordinator.step(), torch.no_grad():
        assert module(x).full_tensor().any()
        module.weight.zero_()
        assert not module(x).full_tensor().any()


def test_shards_that_do_not_fit_fp8_compute_in_high_precision_on_every_rank(
    world: World, make: Make, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = make("main")
    module = f8.Linear(WIDTH, 16, coordinator=coordinator, name="a")
    plain = nn.Linear(WIDTH, 16)
    plain.load_state_dict(module.state_dict())
    ours, theirs = (
        parallelize_module(m, mesh, ColwiseParallel(output_layouts=Replicate())) for m in (module, plain)
    )
    x, dy = randn(TOKENS, WIDTH, seed=0), randn(TOKENS, 16, seed=1)
    with caplog.at_level(logging.WARNING, "fp8dist"), coordinator.step():
        for a, b in zip(train(ours, x, dy).values(), train(theirs, x, dy).values(), strict=True):
            assert torch.equal(a, b)
    said = [record.getMessage() for record in caplog.records]
    assert ["the features of its shards" in text for text in said] == [True]
    assert coordinator.state_dict()["slots"]["a.input"]["history"][-1] == -1.0


@pytest.mark.parametrize(
    ("x_is_dtensor", "weight_at", "message"),
    [
        (False, Shard(0), "expected a DTensor for its input"),
        (True, None, "expected a DTensor for its weight"),
        (True, Partial(), r"placement Shard\(0\), Shard\(1\) or Replicate\(\) but got P"),
    ],
)
def test_tensors_that_cannot_meet_are_refused(
    make: Make, mesh: DeviceMesh, x_is_dtensor: bool, weight_at: Any, message: str
) -> None:
    coordinator, module = layer(make, bias=False)
    if weight_at is not None:
        module.weight = nn.Parameter(DTensor.from_local(module.weight.detach(), mesh, [weight_at]))
    x = randn(TOKENS, WIDTH, seed=0)
    with coordinator.step(), pytest.raises(ValueError, match=message):
        module(distribute_tensor(x, mesh, [Replicate()]) if x_is_dtensor else x)
