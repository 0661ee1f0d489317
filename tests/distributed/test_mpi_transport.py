"""The MPI transport keeps the contract that the gloo transport keeps, and gives the same bits."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import World

import fp8dist as f8
from fp8dist.transport import MpiTransport, ranks_of, resolve

MPI = pytest.importorskip("mpi4py.MPI")
RECIPE = f8.DelayedScaling(amax_history_len=4)
ROLES = ("input", "weight", "grad_output")
SOON = 1.0  # seconds in which a failure must have freed every peer
CPU = torch.device("cpu")
Make = Callable[..., f8.ReductionGroupCoordinator]
names = itertools.count()


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    """Coordinators on MPI that are dropped after the test, also where they are broken."""
    made: list[f8.ReductionGroupCoordinator] = []

    def build(group: Any = None, **options: Any) -> f8.ReductionGroupCoordinator:
        group = MPI.COMM_WORLD if group is None else group
        made.append(f8.ReductionGroupCoordinator(RECIPE, group, **{"timeout": 10.0, **options}))
        return made[-1]

    yield build
    for coordinator in made:
        coordinator.close()


@pytest.fixture
def own(world: World) -> Iterator[Any]:
    """A communicator over all ranks that no test has used."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


def fresh_name() -> str:
    """Equal on all ranks, since all run the same tests; no test sees what another left in the store."""
    return f"test-{next(names)}"


def record(slot: f8.Slot, value: float) -> None:
    slot.record(torch.tensor([value]))
    slot.request()


def last(coordinator: f8.ReductionGroupCoordinator, name: str = "a.input") -> float:
    return float(coordinator.state_dict()["slots"][name]["history"][-1])


def agree(value: Any, world: World) -> bool:
    """Whether all ranks have the same value."""
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return all(v == values[0] for v in values)


def random_amaxes(step: int, size: int) -> torch.Tensor:
    """[ranks, slots] float32: powers over the whole range, -1 where a rank does not run a layer, NaN, inf."""
    generator = torch.Generator().manual_seed(step)
    amaxes = torch.exp2(torch.rand(size, 9, generator=generator) * 200 - 100)
    amaxes[torch.rand(size, 9, generator=generator) < 0.3] = -1.0
    if step % 3 == 0:
        amaxes[step % size, step % 9] = float("nan")
        amaxes[(step + 1) % size, (step + 4) % 9] = float("inf")
    return amaxes


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_random_amaxes_give_the_bits_that_gloo_gives(world: World, algorithm: Any) -> None:
    recipe = f8.DelayedScaling(amax_history_len=5, amax_compute_algo=algorithm)
    keys = [f"layer{i}.{role}" for i in range(3) for role in ROLES]
    both = [
        f8.ReductionGroupCoordinator(recipe, group, name=f"{algorithm} {kind}", timeout=10.0)
        for kind, group in (("gloo", None), ("mpi", MPI.COMM_WORLD))
    ]
    for coordinator in both:
        slots = [coordinator.slot(key) for key in keys]
        for step in range(20):
            with coordinator.step(step):
                for slot, amax in zip(slots, random_amaxes(step, world.size)[world.rank], strict=True):
                    if not amax < 0:
                        slot.record(amax.reshape(1))
    gloo, mpi = (coordinator.state_dict() for coordinator in both)
    for key in keys:
        for field in ("history", "scale", "warm"):
            bits = [state["slots"][key][field].reshape(-1).view(torch.uint8) for state in (gloo, mpi)]
            assert torch.equal(*bits), (key, field)
    assert both[0].digest() == both[1].digest()
    assert both[0].stats.nonfinite_amaxes == both[1].stats.nonfinite_amaxes > 0
    assert agree(both[1].digest(), world)
    # And against no library at all: the row that the last step must have left.
    expected = random_amaxes(19, world.size).amax(dim=0)
    assert [mpi["slots"][key]["history"][-1] for key in keys] == expected.tolist()
    for coordinator in both:
        coordinator.close()


class CountingComm:
    """Notes every MPI call that a transport makes on its duplicate."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.comm, name)


def test_a_step_makes_one_mpi_call(world: World, make: Make) -> None:
    coordinator = make()
    slots = [coordinator.slot(f"{i}.input") for i in range(5)]
    coordinator.freeze()
    duplicate = coordinator._transport._duplicate
    counting = duplicate.comm = CountingComm(duplicate.comm)
    for step in range(3):
        with coordinator.step(step):
            for slot in slots:
                for _ in range(4):
                    record(slot, 1.0)
    assert counting.calls == ["Iallreduce"] * 3
    assert coordinator.stats.collectives == 3
    duplicate.comm = counting.comm


def test_long_rows_and_late_ranks_lose_nothing(world: World) -> None:
    transport = resolve(MPI.COMM_WORLD, None)
    transport.connect(fresh_name(), CPU, 10.0)
    for late in range(world.size):
        generator = torch.Generator().manual_seed(late)
        rows = torch.randint(-(2**31), 2**31 - 1, (world.size, 300_001), generator=generator).int()
        words = rows[world.rank].clone()
        time.sleep(0.05 * (world.rank == late))
        work = transport.start_max(words)
        assert work.wait(10.0)
        assert torch.equal(words, rows.amax(dim=0))
    transport.disconnect()


@pytest.mark.ranks(4)
def test_members_of_a_sub_communicator_reduce_while_the_others_do_nothing(world: World, make: Make) -> None:
    member = world.rank in (1, 3)
    sub = MPI.COMM_WORLD.Split(0 if member else MPI.UNDEFINED, key=-world.rank)
    if member:
        assert ranks_of(sub) == (3, 1)  # in the communicator's own order
        coordinator = make(sub)
        assert coordinator.spans(sub) and not coordinator.spans(MPI.COMM_WORLD)
        slot = coordinator.slot("a.input")
        with coordinator.step():
            record(slot, 1.0 + world.rank)
        assert last(coordinator) == 4.0
    else:
        with pytest.raises(ValueError, match=r"COMM_NULL .*create the coordinator on members only"):
            make(sub)


@pytest.mark.ranks(4)
def test_rows_and_columns_of_a_grid_do_not_meet(world: World, make: Make) -> None:
    row = MPI.COMM_WORLD.Split(world.rank // 2)
    column = MPI.COMM_WORLD.Split(world.rank % 2)
    both = [make(row, name="row"), make(column, name="column")]
    for coordinator in both:
        slot = coordinator.slot("a.input")
        with coordinator.step():
            record(slot, 1.0 + world.rank)
    assert [last(coordinator) for coordinator in both] == [2.0 + world.rank // 2 * 2, 3.0 + world.rank % 2]


def test_one_rank_alone_is_a_group(world: World, make: Make) -> None:
    coordinator = make(MPI.COMM_SELF)
    assert coordinator.spans(MPI.COMM_SELF)
    for step in range(2 + world.rank):
        with coordinator.step():
            record(coordinator.slot("a.input"), 3.0 + step)
    assert last(coordinator) == 4.0 + world.rank


def test_asking_for_the_ranks_of_a_group_needs_nobody(world: World, own: Any) -> None:
    if world.rank == 0:
        assert ranks_of(own) == ranks_of(None) == tuple(range(world.size))
    dist.barrier()
    transport = resolve(own, None, timeout=10.0)  # rank 0 has started nothing more on it than the others
    assert transport.global_ranks == ranks_of(own)


def test_coordinators_created_in_another_order_do_not_swap_results(
    world: World, own: Any, make: Make
) -> None:
    names = ["actor", "critic"] if world.rank % 2 else ["critic", "actor"]
    both = {name: make(own, name=name) for name in names}
    slots = {name: both[name].slot("a.input") for name in names}
    for step in range(3):
        with both["actor"].step(step), both["critic"].step(step):
            record(slots["actor"], 1.0)
            record(slots["critic"], 5.0)
    assert (last(both["actor"]), last(both["critic"])) == (1.0, 5.0)


@pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="MPI allows one thread at a time")
def test_communicators_that_connect_at_once_in_another_order_do_not_swap(world: World, own: Any) -> None:
    transports = {name: resolve(own, None) for name in ("x", "y")}
    suffix = fresh_name()
    results: dict[str, list[int]] = {}

    def run(name: str, value: int) -> None:
        transports[name].connect(f"{name} {suffix}", CPU, 10.0)
        words = torch.tensor([value + world.rank], dtype=torch.int32)
        if transports[name].start_max(words).wait(10.0):
            results[name] = words.tolist()

    threads = [threading.Thread(target=run, args=("x", 0)), threading.Thread(target=run, args=("y", 100))]
    for thread in threads[:: 1 if world.rank % 2 else -1]:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(20.0)
    assert results == {"x": [world.size - 1], "y": [100 + world.size - 1]}


class Boom(Exception):
    """What the failing rank raises."""


@pytest.mark.parametrize("odd_one", [0, 1])
def test_a_raising_rank_frees_its_peers_and_all_go_on_twice(world: World, make: Make, odd_one: int) -> None:
    coordinator = make(name=fresh_name())
    slot = coordinator.slot("a.input")
    for attempt in range(2):
        with coordinator.step(attempt):
            record(slot, 1.0 + attempt)
        before = coordinator.digest()
        dist.barrier()
        start = time.monotonic()
        expected = Boom if world.rank == odd_one else f8.PeerAborted
        with pytest.raises(expected) as caught, coordinator.step(10 + attempt):
            record(slot, 100.0)
            if world.rank == odd_one:
                raise Boom
        assert time.monotonic() - start < SOON
        assert world.rank == odd_one or caught.value.rank == odd_one
        assert coordinator.digest() == before
        with pytest.raises(f8.NeedsRecovery), coordinator.step():
            pass
        coordinator.recover()
    with coordinator.step(20) as step:
        record(slot, 7.0)
    assert step.committed and last(coordinator) == 7.0
    assert agree(coordinator.digest(), world)


def test_a_rank_that_never_enters_is_named_by_all_others_and_recover_goes_on(
    world: World, make: Make
) -> None:
    coordinator = make(name=fresh_name(), timeout=1.0)
    slot = coordinator.slot("a.input")
    with coordinator.step(0):
        record(slot, 1.0)
    if world.rank != 1:
        with (
            pytest.raises(f8.CollectiveTimeout, match="Rank 1 has not entered") as caught,
            coordinator.step(1),
        ):
            record(slot, 9.0)
        assert caught.value.missing == (1,)
    dist.barrier()
    coordinator.recover()
    with coordinator.step(1):
        record(slot, 2.0)
    assert coordinator.state_dict()["slots"]["a.input"]["history"].tolist() == [-1.0, -1.0, 1.0, 2.0]
    assert agree(coordinator.digest(), world)


def test_a_rank_that_creates_its_coordinator_late_is_named_and_a_new_attempt_succeeds(
    world: World, own: Any
) -> None:
    for _ in range(2):
        if world.rank != 1:
            with pytest.raises(f8.CollectiveTimeout, match="rank 1 did not come") as caught:
                resolve(own, None, timeout=0.3)
            assert caught.value.missing == (1,)
    dist.barrier()
    transport = resolve(own, None, timeout=10.0)
    transport.connect(fresh_name(), CPU, 10.0)
    words = torch.tensor([world.rank], dtype=torch.int32)
    assert transport.start_max(words).wait(10.0)
    assert words.tolist() == [world.size - 1]


def test_a_store_that_one_rank_has_not_is_an_error_on_all_and_the_next_attempt_starts_anew(
    world: World, own: Any
) -> None:
    given = dist.distributed_c10d._get_default_store()
    with pytest.raises(f8.TransportError, match="rank 1 has not reached it"):
        resolve(own, given if world.rank != 1 else None, timeout=10.0)
    transport = resolve(own, given, timeout=10.0)
    transport.connect(fresh_name(), CPU, 10.0)
    assert transport.start_max(torch.zeros(3, dtype=torch.int32)).wait(10.0)


def test_a_rank_that_misses_a_connect_is_named_and_later_ones_pair_rightly(world: World, own: Any) -> None:
    transport = resolve(own, None)
    missed, *after = [fresh_name() for _ in range(3)]
    if world.rank != 1:
        with pytest.raises(f8.CollectiveTimeout, match="rank 1 did not come") as caught:
            transport.connect(missed, CPU, 0.3)
        assert caught.value.missing == (1,) if world.rank == 0 else 1 in caught.value.missing
    dist.barrier()
    if world.rank == 0:  # as if all had come just when the time of rank 1 was up
        number = transport._home.new_number()
        assert transport._home.duplicate(number, time.monotonic()) is None
    for i, name in enumerate(after):
        transport.connect(name, CPU, 10.0)
        words = torch.tensor([10 * i + world.rank], dtype=torch.int32)
        assert transport.start_max(words).wait(10.0)
        assert words.tolist() == [10 * i + world.size - 1]


def test_reductions_that_a_rank_missed_are_made_up_for(world: World) -> None:
    transport = resolve(MPI.COMM_WORLD, None)
    transport.connect(fresh_name(), CPU, 10.0)
    rows = [torch.full((4 + i,), 5 * i + world.rank, dtype=torch.int32) for i in range(2)]
    works = [transport.start_max(row) for row in rows] if world.rank != 0 else []
    assert not any(work.wait(0.05) for work in works)
    dist.barrier()
    transport.catch_up([2, 4, 5])
    assert transport.started == [2, 4, 5]
    assert all(work.wait(5.0) for work in works)
    if works:
        assert [row.tolist() for row in rows] == [[5 * i + world.size - 1] * (4 + i) for i in range(2)]
    transport.disconnect()


def test_ctrl_c_ends_a_wait(world: World) -> None:
    transport = resolve(MPI.COMM_WORLD, None)
    transport.connect(fresh_name(), CPU, 10.0)
    words = torch.tensor([world.rank], dtype=torch.int32)
    if world.rank == 0:
        work = transport.start_max(words)
        timer = threading.Timer(0.3, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            work.wait(30.0)
        timer.join()
    dist.barrier()
    if world.rank != 0:
        work = transport.start_max(words)
    assert work.wait(10.0)  # the wait that was interrupted has harmed nothing
    assert words.tolist() == [world.size - 1]


def test_coordinators_that_come_and_go_leave_one_duplicate_behind(world: World, own: Any, make: Make) -> None:
    for _ in range(12):
        coordinator = make(own, name="the same")
        slot = coordinator.slot("a.input")
        with coordinator.step():
            record(slot, 1.0)
        coordinator.close()
    home = coordinator._transport._home
    assert len(home.retired) == 1
    assert home._made == {}


def test_a_duplicate_with_pending_work_is_never_freed(world: World, own: Any) -> None:
    transport = resolve(own, None)
    transport.connect(fresh_name(), CPU, 10.0)
    if world.rank != 1:
        words = torch.zeros(2, dtype=torch.int32)
        work = transport.start_max(words)
    abandoned = transport._duplicate.comm
    for _ in range(2):
        transport.connect(fresh_name(), CPU, 10.0)
    assert abandoned.size == world.size  # the handle of a freed one is COMM_NULL
    if world.rank == 1:
        ones = torch.ones(2, dtype=torch.int32)  # mpi4py does not hold it
        request = abandoned.Iallreduce(MPI.IN_PLACE, ones.numpy(), op=MPI.MAX)
        deadline = time.monotonic() + 10.0
        while not request.Test():
            assert time.monotonic() < deadline
    else:
        assert work.wait(10.0)
        assert words.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("unfit", "told"),
    [
        (lambda: MPI.COMM_NULL, "members only"),
        (lambda: MPI.COMM_WORLD.Get_group(), "expects an intracommunicator but got mpi4py's Group"),
        (lambda: MPI.INT, "expects an intracommunicator but got mpi4py's Datatype"),
    ],
    ids=["null", "group", "datatype"],
)
def test_what_is_no_communicator_of_this_rank_is_refused(
    world: World, unfit: Callable[[], Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        f8.ReductionGroupCoordinator(RECIPE, unfit())


def test_an_intercommunicator_is_refused_with_the_mend(world: World) -> None:
    half = MPI.COMM_WORLD.Split(world.rank % 2)
    inter = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - world.rank % 2)
    with pytest.raises(ValueError, match=r"Merge\(\)"):
        f8.ReductionGroupCoordinator(RECIPE, inter)
    merged = inter.Merge()
    assert isinstance(resolve(merged, None), MpiTransport)


def test_unequal_tags_are_told_on_every_rank(world: World, make: Make) -> None:
    coordinator = make(name=fresh_name())
    coordinator.slot("a.input")
    with pytest.raises(f8.RanksDisagree, match="tag") as caught, coordinator.step(world.rank % 2):
        pass
    assert caught.value.field == "tag"
