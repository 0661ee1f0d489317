"""The contract between ranks: everybody joins, names meet, disagreement is told, one collective a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import World
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fp8dist as f8

RECIPE = f8.DelayedScaling(amax_history_len=4)
Make = Callable[..., f8.ReductionGroupCoordinator]


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    """Coordinators that are dropped after the test, also where they are broken."""
    made: list[f8.ReductionGroupCoordinator] = []

    def build(recipe: f8.Recipe = RECIPE, group: Any = None, **options: Any) -> f8.ReductionGroupCoordinator:
        made.append(f8.ReductionGroupCoordinator(recipe, group, **{"timeout": 10.0, **options}))
        return made[-1]

    yield build
    for coordinator in made:
        coordinator.close()


def record(slot: f8.Slot, value: float) -> None:
    slot.record(torch.tensor([value]))
    slot.request()


def history(coordinator: f8.ReductionGroupCoordinator, name: str) -> list[float]:
    return coordinator.state_dict()["slots"][name]["history"].tolist()


def agree(value: Any, world: World) -> bool:
    """Whether all ranks have the same value."""
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return all(v == values[0] for v in values)


def test_the_largest_amax_of_any_rank_enters_every_history(world: World, make: Make) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    for step in range(5):
        with coordinator.step(step):
            record(slot, 1.0 + (world.rank + step) % world.size)
    assert history(coordinator, "a.input") == [float(world.size)] * 4
    assert agree(coordinator.digest(), world)


def test_a_rank_without_fp8_modules_joins_every_step(world: World, make: Make) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input") if world.rank else None
    for step in range(4):
        before = coordinator.stats.collectives
        with coordinator.step(step) as scope:
            if slot is not None:
                record(slot, step + 1.0)
        assert scope.committed
        assert coordinator.stats.collectives == before + 1
    assert coordinator.stats.generation == 4
    assert coordinator.scales() == ({} if slot is None else {"a.input": 448.0 / 4})


@pytest.mark.parametrize("idle", ["age", "hold"])
def test_a_rank_that_skips_its_layers_changes_only_the_value_of_the_max(
    world: World, make: Make, idle: str
) -> None:
    coordinator = make(f8.DelayedScaling(amax_history_len=4, idle=idle))
    slot = coordinator.slot("a.input")
    seen = []
    for step in range(6):
        active = [r for r in range(world.size) if (step + r) % 3]
        if active:
            seen.append(max(active) + 1.0)
        elif idle == "age":
            seen.append(-1.0)
        with coordinator.step(step):
            if world.rank in active:
                record(slot, world.rank + 1.0)
    assert history(coordinator, "a.input") == ([-1.0] * 4 + seen)[-4:]
    assert agree(coordinator.digest(), world)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000 - 2**32, 0x7F800000])
def test_a_non_finite_amax_on_any_one_rank_is_seen_by_all(world: World, make: Make, bits: int) -> None:
    value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step():
        record(slot, 2.0)
    scale = slot.scale.item()
    for odd_one in range(world.size):
        with coordinator.step():
            slot.record(value if world.rank == odd_one else torch.tensor([1e6]))
        assert coordinator.stats.nonfinite_amaxes == odd_one + 1
        assert slot.scale.item() == scale, "a non-finite amax keeps the scale"
    assert history(coordinator, "a.input")[-1] == -1.0


def test_ranks_share_the_slots_they_both_name_and_no_others(world: World, make: Make) -> None:
    coordinator = make()
    shared, own = coordinator.slot("shared.input"), coordinator.slot(f"own{world.rank}.input")
    with coordinator.step():
        record(shared, world.rank + 1.0)
        record(own, world.rank + 10.0)
    assert history(coordinator, "shared.input")[-1] == world.size
    assert history(coordinator, f"own{world.rank}.input")[-1] == world.rank + 10.0
    assert len(coordinator.class_digests()) == 2


def test_the_order_of_declaration_plays_no_part(world: World, make: Make) -> None:
    coordinator = make()
    names = [f"l{i}.{role}" for i in range(5) for role in ("input", "weight", "grad_output")]
    mine = names[world.rank :] + names[: world.rank]
    slots = {name: coordinator.slot(name) for name in mine}
    with coordinator.step():
        for name in mine:
            record(slots[name], names.index(name) + 1.0)
    for name in names:
        assert history(coordinator, name)[-1] == names.index(name) + 1.0
    assert agree(coordinator.digest(), world)


@pytest.mark.parametrize("first", [True, False])
def test_new_slots_on_one_rank_cost_one_more_collective_in_that_step_only(
    world: World, make: Make, first: bool
) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input") if first else None
    coordinator.freeze()
    counts = []
    for step in range(4):
        before = coordinator.stats.collectives
        with coordinator.step(step):
            if slot is not None:
                record(slot, 1.0)
            if step >= 1 and world.rank == world.size - 1:
                record(coordinator.slot("late.grad_output"), 8.0)
        counts.append(coordinator.stats.collectives - before)
    assert counts == [1, 2, 1, 1]
    if world.rank == world.size - 1:
        assert history(coordinator, "late.grad_output") == [-1.0, 8.0, 8.0, 8.0]
    if slot is not None:
        assert history(coordinator, "a.input") == [1.0] * 4


def test_a_rank_that_newly_holds_a_name_takes_over_its_state(world: World, make: Make) -> None:
    coordinator = make()
    early = coordinator.slot("a.input") if world.rank == 0 else None
    for step in range(2):
        with coordinator.step(step):
            if early is not None:
                record(early, 3.0 + step)
    with coordinator.step(2):
        record(coordinator.slot("a.input"), 10.0 * (world.rank + 1))
    with coordinator.step(3):
        record(coordinator.slot("a.input"), 1.0)
    assert history(coordinator, "a.input") == [3.0, 4.0, 10.0 * world.size, 1.0]
    assert coordinator.slot("a.input").warm.item()
    assert agree(coordinator.digest(), world)


@pytest.mark.parametrize(("field", "values"), [
    ("tag", (5, 6)), ("tag", (5, None)), ("tag", ("a", "b")), ("tag", (2**40, 2**40 + 1)),
])  # fmt: skip
def test_another_tag_is_told_on_every_rank_with_the_values(
    world: World, make: Make, field: str, values: tuple[Any, Any]
) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step("first"):
        record(slot, 1.0)
    before = coordinator.digest()
    odd_one = world.size - 1
    told = rf"same tag but have {values[0]!r} on rank.*; {values[1]!r} on rank {odd_one}"
    with (
        pytest.raises(f8.RanksDisagree, match=told) as raised,
        coordinator.step(values[world.rank == odd_one]),
    ):  # fmt: skip
        record(slot, 9.0)
    assert raised.value.field == field
    assert coordinator.digest() == before
    coordinator.recover()
    with coordinator.step(7):
        record(slot, 2.0)
    assert history(coordinator, "a.input")[-2:] == [1.0, 2.0]


def one_ulp_off(value: torch.Tensor) -> torch.Tensor:
    return (value.clone().view(torch.int32) + 1).view(torch.float32)


def corrupt(coordinator: f8.ReductionGroupCoordinator, name: str, field: str) -> None:
    """Change one value by one ulp, as a flipped bit in memory would."""
    bad = coordinator.state_dict()
    value = bad["slots"][name][field].reshape(-1)
    value[-1:] = one_ulp_off(value[-1:])
    bad["slots"][name][field] = value.reshape(bad["slots"][name][field].shape)
    coordinator.load_state_dict(bad)


@pytest.mark.parametrize("field", ["scale", "history"])
def test_a_value_that_drifted_by_one_ulp_is_found_and_named_and_healed(
    world: World, make: Make, field: str
) -> None:
    coordinator = make()
    slots = [coordinator.slot(f"layers.{i}.input") for i in range(20)]
    with coordinator.step():
        for slot in slots:
            record(slot, 3.0)
    before = coordinator.state_dict()
    bad = world.size - 1
    if world.rank == bad:
        corrupt(coordinator, "layers.13.input", field)
    with pytest.raises(f8.RanksDisagree) as raised, coordinator.step():
        record(slots[0], 1.0)
    assert raised.value.field == "scales"
    text = str(raised.value)
    assert f"'layers.13.input': rank {bad} has scale " in text
    assert "and another history" in text or field == "scale"
    assert "layers.12" not in text
    coordinator.recover(heal_from=0)
    assert str(coordinator.state_dict()) == str(before)
    with coordinator.step():
        record(slots[0], 1.0)
    assert coordinator.stats.generation == 2


def test_a_drift_is_told_also_where_the_store_cannot_help_to_find_it(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(member: Any) -> str:
        raise f8.TransportError("the store is gone")

    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step():
        record(slot, 3.0)
    if world.rank == 1:
        corrupt(coordinator, "a.input", "scale")
    monkeypatch.setattr("fp8dist._protocol.Member.search", gone)
    with pytest.raises(f8.RanksDisagree, match="could not be found out"), coordinator.step():
        record(slot, 1.0)
    coordinator.recover(heal_from=0)


def test_ranks_that_want_to_be_healed_from_different_ranks_are_told(world: World, make: Make) -> None:
    coordinator = make()
    coordinator.slot("a.input")
    coordinator.freeze()
    with pytest.raises(f8.RanksDisagree, match="heal_from") as raised:
        coordinator.recover(heal_from=world.rank)
    assert raised.value.field == "heal_from"
    with pytest.raises(ValueError, match=r"heal_from expects a rank in \[0, "):
        coordinator.recover(heal_from=world.size)
    coordinator.recover()


def test_unequal_recipes_are_told_by_field_on_every_rank(world: World, make: Make) -> None:
    coordinator = make(f8.DelayedScaling(margin=int(world.rank == 1), amax_history_len=4))
    coordinator.slot("a.input")
    with pytest.raises(f8.RanksDisagree, match=r"margin: 0 on rank.*; 1 on rank 1"):
        coordinator.freeze()


def test_abort_on_one_rank_commits_on_none_and_needs_no_recovery(world: World, make: Make) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step(0):
        record(slot, 1.0)
    before = coordinator.digest()
    with coordinator.step(1) as step:
        record(slot, 50.0)
        if world.rank == 1:
            step.abort()
    assert step.committed is False
    assert coordinator.digest() == before
    with coordinator.step(2) as step:
        record(slot, 2.0)
    assert step.committed
    assert history(coordinator, "a.input")[-2:] == [1.0, 2.0]


def test_coordinators_created_in_another_order_do_not_swap_results(world: World, make: Make) -> None:
    names = ["actor", "critic"] if world.rank % 2 else ["critic", "actor"]
    coordinators = {name: make(name=name) for name in names}
    slots = {name: coordinators[name].slot("a.input") for name in names}
    for step in range(3):
        with coordinators["actor"].step(step), coordinators["critic"].step(step):
            record(slots["actor"], 1.0)
            record(slots["critic"], 5.0)
    assert coordinators["actor"].scales()["a.input"] == 448.0
    assert coordinators["critic"].scales()["a.input"] == (torch.tensor(448.0) / 5).item()


@pytest.mark.ranks(4)
def test_groups_of_one_name_do_not_meet(world: World, make: Make) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    coordinator = make(group=groups[world.rank // 2])
    slot = coordinator.slot("a.input")
    with coordinator.step():
        record(slot, world.rank + 1.0)
    assert history(coordinator, "a.input")[-1] == (2.0 if world.rank < 2 else 4.0)


@pytest.mark.ranks(4)
def test_a_mesh_dimension_is_a_group(world: World, make: Make) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="one-dimensional DeviceMesh but got 2"):
        make(group=mesh)
    coordinator = make(group=mesh["dp"])
    slot = coordinator.slot("a.input")
    with coordinator.step():
        record(slot, world.rank + 1.0)
    assert history(coordinator, "a.input")[-1] == (3.0 if world.rank % 2 == 0 else 4.0)


@pytest.mark.ranks(4)
def test_a_group_this_rank_is_not_in_is_refused(world: World, make: Make) -> None:
    group = dist.new_group([0, 1])
    if world.rank >= 2:
        with pytest.raises(ValueError, match="members only"):
            make(group=group)


def test_another_group_on_another_rank_is_told_and_does_not_hang(world: World, make: Make) -> None:
    alone = dist.new_group([0])
    coordinator = make(group=alone if world.rank == 0 else None, timeout=5.0)
    coordinator.slot("a.input")
    if world.rank == 0:  # its group of one needs nobody
        coordinator.freeze()
        dist.barrier()
    else:
        with pytest.raises(f8.RanksDisagree, match=r"was given the group ranks 0-.* but rank 0 on rank 0"):
            coordinator.freeze()
        dist.barrier()


def test_a_taken_name_is_refused_and_free_again_after_close(world: World, make: Make) -> None:
    first = make()
    with pytest.raises(ValueError, match=r"'main' exists on rank.*name="):
        make()
    first.close()
    dist.barrier()
    second = make()
    with second.step():
        pass


def test_one_scope_more_on_one_rank_is_told_there_at_once(world: World, make: Make) -> None:
    coordinator = make(timeout=30.0)
    for step in range(2):
        with coordinator.step(step):
            pass
    if world.rank == world.size - 1:
        with (
            pytest.raises(f8.RanksDisagree, match=r"closed it after 2 and rank \d is in number 3"),
            coordinator.step(2),
        ):
            pass
    coordinator.close()


def test_close_compares_the_scope_counts(world: World) -> None:
    coordinator = f8.ReductionGroupCoordinator(RECIPE, timeout=10.0)
    coordinator.freeze()
    coordinator._serial += world.rank == 1  # as a rank that lost count would leave it
    with pytest.raises(f8.RanksDisagree, match="equally many scopes") as raised:
        coordinator.close()
    assert raised.value.field == "scopes"


def test_replicas_train_bit_identically_to_their_joint_batch(world: World, make: Make) -> None:
    """Data parallelism by hand: averaged gradients, shared scales; every rank ends with equal bits."""
    coordinator = make()
    torch.manual_seed(0)
    model = f8.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), coordinator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(world.rank)
    for step, _ in itertools.product(range(3), range(2)):
        with coordinator.step(step):
            for _ in range(world.rank + 1):  # replicas may run other numbers of microbatches
                model(torch.randn(16, 16, generator=data)).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    assert agree([p.detach().tolist() for p in model.parameters()], world)
    assert agree(coordinator.digest(), world)


def test_scopes_on_default_group_traffic_do_not_interfere(world: World, make: Make) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    work, total = None, torch.ones(1000)
    for step in range(5):
        with coordinator.step(step):
            record(slot, 1.0)
            work = dist.all_reduce(total, async_op=True)
        work.wait()
    assert total[0].item() == float(world.size) ** 5
