"""FSDP2: the scales of a sharded model are those of the whole one, with and without an FP8 all-gather."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import World
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fp8dist as f8
from fp8dist.modules._fsdp import GatheredWeight, ShardedWeight, enable_fp8_all_gather

Make = Callable[..., f8.ReductionGroupCoordinator]
WIDTH, TOKENS = 48, 16


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    made: list[f8.ReductionGroupCoordinator] = []

    def build(name: str, recipe: f8.Recipe | None = None) -> f8.ReductionGroupCoordinator:
        recipe = recipe or f8.DelayedScaling(amax_history_len=4)
        made.append(f8.ReductionGroupCoordinator(recipe, name=name, timeout=10.0))
        return made[-1]

    yield build
    for coordinator in made:
        coordinator.close()


class Net(nn.Module):
    """Two blocks of two layers; the last layer belongs to the root."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 80), nn.GELU(), nn.Linear(80, WIDTH, bias=False)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(x)


def build(coordinator: f8.ReductionGroupCoordinator, **options: bool) -> nn.Module:
    torch.manual_seed(0)
    return f8.convert(Net(**options), coordinator)


def shard(model: nn.Module, *, fp8: bool, **options: Any) -> nn.Module:
    if fp8:
        enable_fp8_all_gather(model)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(
    model: nn.Module,
    coordinator: f8.ReductionGroupCoordinator,
    world: World,
    *,
    steps: int = 3,
    average: bool,
    collectives: int = 1,
    dtype: torch.dtype = torch.float32,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[dict[str, Any]]:
    """Losses, whole gradients and scales after each step; two microbatches a step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        losses = []
        before = coordinator.stats.collectives
        summed = [torch.zeros_like(p) for p in model.parameters()] if average else []
        with coordinator.step(step):
            for microbatch in range(2):
                x = randn(TOKENS, WIDTH, seed=100 * step + 10 * microbatch + world.rank)
                loss = model(x.to(dtype)).float().square().mean()
                loss.backward()
                losses.append(loss.item())
                for total, p in zip(summed, model.parameters(), strict=False):
                    dist.all_reduce(p.grad)
                    total += p.grad / world.size
                    p.grad = None
        if step:
            assert coordinator.stats.collectives == before + collectives
        for total, p in zip(summed, model.parameters(), strict=False):
            p.grad = total
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        seen.append({"losses": losses, "grads": [g.clone() for g in grads], "scales": coordinator.scales()})
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("fp8", "recompute", "options"),
    [
        (False, False, {}),
        (False, True, {}),
        (True, False, {}),
        (True, True, {}),
        (True, False, {"reshard_after_forward": False}),
    ],
)
def test_a_sharded_model_trains_like_whole_replicas_bit_for_bit(
    world: World, make: Make, fp8: bool, recompute: bool, options: dict[str, Any]
) -> None:
    sharded, whole = make("sharded"), make("whole")
    model = shard(build(sharded, recompute=recompute), fp8=fp8, **options)
    ours = train(model, sharded, world, average=False)
    theirs = train(build(whole), whole, world, average=True)
    for a, b in zip(ours, theirs, strict=True):
        assert a["losses"] == b["losses"]
        assert a["scales"] == b["scales"]
        for g, h in zip(a["grads"], b["grads"], strict=True):
            assert torch.equal(g, h)
    assert len(theirs[0]["scales"]) == 15


def test_without_state_the_shards_of_a_weight_still_share_its_scale(world: World, make: Make) -> None:
    sharded, whole = make("sharded", f8.CurrentScaling()), make("whole", f8.CurrentScaling())
    ours = train(shard(build(sharded), fp8=True), sharded, world, steps=2, average=False, collectives=0)
    theirs = train(build(whole), whole, world, steps=2, average=True, collectives=0)
    for a, b in zip(ours, theirs, strict=True):
        assert a["losses"] == b["losses"]
        assert all(torch.equal(g, h) for g, h in zip(a["grads"], b["grads"], strict=True))


def test_a_cold_weight_is_gathered_under_the_scale_of_its_whole(world: World, make: Make) -> None:
    """An evaluation before the first step, which leaves the root's weight gathered; then training."""
    sharded, whole = make("sharded"), make("whole")
    models = shard(build(sharded), fp8=True), build(whole)
    optimizer = torch.optim.AdamW(models[0].parameters(), lr=0.01)
    with torch.no_grad():
        x = randn(TOKENS, WIDTH, seed=world.rank)
        ours, theirs = (model.eval()(x) for model in models)
    assert torch.equal(ours, theirs)
    assert isinstance(models[0].head.weight, GatheredWeight)
    ours = train(models[0].train(), sharded, world, steps=2, average=False, optimizer=optimizer)
    theirs = train(models[1].train(), whole, world, steps=2, average=True)
    assert [step["losses"] for step in ours] == [step["losses"] for step in theirs]
    assert ours[-1]["scales"] == theirs[-1]["scales"]


def test_the_gather_moves_one_byte_per_element_that_a_cast_of_the_whole_weight_would_give(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make("sharded")
    model = build(coordinator)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    sent: list[torch.Tensor] = []
    real = ShardedWeight.fsdp_pre_all_gather

    @functools.wraps(real)
    def spy(self: ShardedWeight, *args: Any) -> Any:
        inputs, metadata = real(self, *args)
        sent.extend(inputs)
        return inputs, metadata

    monkeypatch.setattr(ShardedWeight, "fsdp_pre_all_gather", spy)
    shard(model, fp8=True)
    used = []

    def check(module: nn.Module, args: object, name: str) -> None:
        weight, scale = module.weight, module.slots.weight.scale
        assert isinstance(weight, GatheredWeight)
        expected = (whole[f"{name}.weight"] * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(weight.fp8.view(torch.uint8), expected.view(torch.uint8))
        used.append(weight.numel())

    for name, module in model.named_modules():
        if isinstance(module, f8.Linear):
            module.register_forward_pre_hook(functools.partial(check, name=name))
    with coordinator.step():
        model(randn(TOKENS, WIDTH, seed=0)).sum()
    assert len(used) == 5
    assert {t.dtype for t in sent} == {torch.uint8}
    assert sum(t.numel() for t in sent) * dist.get_world_size() == sum(used)


def test_a_gathered_weight_is_recorded_where_it_is_used(world: World, make: Make) -> None:
    """A gather alone, by a prefetch or by hand, records nothing; neither does a use under a shut gate."""
    coordinator = make("sharded")
    model = shard(build(coordinator), fp8=True)
    x = randn(TOKENS, WIDTH, seed=0)

    def last(name: str) -> float:
        return coordinator.state_dict()["slots"][f"{name}.weight"]["history"][-1].item()

    whole = model.head.weight.full_tensor().abs().max().item()
    with coordinator.step():
        model.unshard()
        for block in model.blocks:
            block.unshard()
        with coordinator.paused():
            model(x)
    assert [last(name) for name in ("head", "blocks.0.0", "blocks.1.2")] == [-1.0] * 3
    with coordinator.step(), torch.no_grad():
        model(x)
    assert last("head") == whole


@pytest.mark.parametrize("rows", [3, 1, 0])
def test_a_short_shard_is_padded_to_the_size_of_the_others(make: Make, rows: int) -> None:
    coordinator = make("main")
    slot = coordinator.slot("a.weight")
    weight = randn(rows, 16, seed=0)
    with coordinator.step():
        slot.record(torch.ones(1))
    mesh = SimpleNamespace(size=lambda: 3)  # 7 rows on three ranks: 3, 3, 1
    (sent,), (scale_inv, amax) = ShardedWeight(weight, slot).fsdp_pre_all_gather(
        mesh, torch.Size((7, 16)), (16, 1), nn.Identity(), None
    )
    assert sent.shape == (3, 16)
    expected = (weight * 448.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(sent[:rows].view(torch.float8_e4m3fn).float(), expected.float())
    assert not sent[rows:].any()
    assert scale_inv.item() == slot.scale_inv.item()
    assert amax is None if rows == 0 else amax.item() == weight.abs().max().item()


def test_mixed_precision_quantizes_the_master_weights(world: World, make: Make) -> None:
    coordinator = make("sharded")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(build(coordinator), fp8=True, mp_policy=policy)
    dtypes = []
    model.head.register_forward_hook(lambda module, args, y: dtypes.append((module.weight.dtype, y.dtype)))
    before = model.head.weight.full_tensor().abs().max().item()
    train(model, coordinator, world, steps=1, average=False, dtype=torch.bfloat16)
    assert dtypes == [(torch.bfloat16, torch.bfloat16)] * 2
    assert coordinator.state_dict()["slots"]["head.weight"]["history"][-1].item() == before
    assert model.head.weight.dtype == torch.float32


def test_what_is_saved_are_plain_tensors_that_load_again(make: Make) -> None:
    coordinator = make("sharded")
    model = build(coordinator)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard(model, fp8=True)
    state = model.state_dict()
    assert all(torch.equal(state[name].full_tensor(), value) for name, value in whole.items())
    file = io.BytesIO()
    torch.save({name: tensor.to_local() for name, tensor in state.items()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    mesh = model.head.weight.device_mesh
    model.load_state_dict({name: DTensor.from_local(t, mesh, [Shard(0)]) for name, t in loaded.items()})
    assert isinstance(model.head.weight.to_local(), ShardedWeight)
    assert all(torch.equal(p.full_tensor(), whole[name]) for name, p in model.named_parameters())


def test_a_model_made_on_meta_is_initialised_after_sharding(world: World, make: Make) -> None:
    coordinator = make("sharded")
    with torch.device("meta"):
        model = f8.convert(Net(), coordinator)
    shard(model, fp8=True).to_empty(device="cpu")
    reference = build(make("whole"))
    for p, value in zip(model.parameters(), reference.parameters(), strict=True):
        p.detach().copy_(distribute_tensor(value.detach(), p.device_mesh, [Shard(0)]))
    with torch.no_grad():
        x = randn(TOKENS, WIDTH, seed=world.rank)
        assert torch.equal(model.eval()(x), reference.eval()(x))


def test_a_weight_gathered_in_fp8_cannot_be_used_in_high_precision(make: Make) -> None:
    model = shard(build(make("sharded")), fp8=True)
    model.unshard()
    with pytest.raises(NotImplementedError, match="only its FP8 layer can use"):
        model.head.weight + 1


def test_weights_that_cannot_be_gathered_in_fp8_are_refused(make: Make) -> None:
    model = build(make("tied"))
    model.table = nn.Embedding(16, WIDTH)
    model.table.weight = model.head.weight
    before = list(model.parameters())
    with pytest.raises(ValueError, match="parameter 'weight' of a Embedding is also the weight"):
        enable_fp8_all_gather(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    sharded = shard(build(make("sharded")), fp8=False)
    with pytest.raises(ValueError, match="but got a DTensor; call enable_fp8_all_gather before fully_shard"):
        enable_fp8_all_gather(sharded)
    columns = shard(build(make("columns")), fp8=True, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    with pytest.raises(ValueError, match="sharded by its rows"):
        columns(randn(TOKENS, WIDTH, seed=0))


def test_tied_fp8_layers_keep_one_weight_and_enabling_twice_changes_nothing(make: Make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    model[0].weight.note = "mine"
    f8.convert(model, make("main"))
    weight = enable_fp8_all_gather(model)[0].weight
    assert model[1].weight is weight
    assert (weight.note, weight.requires_grad) == ("mine", True)
    assert enable_fp8_all_gather(model)[0].weight is weight
    assert isinstance(copy.deepcopy(model)[0].weight.detach(), ShardedWeight)
