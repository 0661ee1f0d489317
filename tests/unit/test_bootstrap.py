"""The launcher is told by its environment, and ranks of an MPI world meet or are refused together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from datetime import timedelta
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkpool import Outcomes, run_ranks, values

from fp8dist import bootstrap
from fp8dist.errors import TransportError

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "launcher", "size"),
    [
        ({}, None, None),
        ({"HOME": "/root"}, None, None),
        (TORCHRUN, "torchrun", 8),
        (OPEN_MPI, "mpi", 4),
        (MPICH, "mpi", 2),
        (TORCHRUN | OPEN_MPI, "torchrun", 8),
        ({"WORLD_SIZE": "8"}, None, None),
        ({"PMI_SIZE": "many"}, None, None),
        ({"PMI_SIZE": "0"}, None, None),
        ({"PMI_SIZE": ""}, None, None),
    ],
)
def test_the_environment_tells_the_launcher(
    environ: Mapping[str, str], launcher: str | None, size: int | None
) -> None:
    assert bootstrap.launched_by(environ) == launcher
    assert bootstrap.expected_world_size(environ) == size


def test_mpi_s_size_is_told_also_under_torchrun_s_variables() -> None:
    assert bootstrap.mpi_world_size(TORCHRUN | OPEN_MPI) == 4
    assert bootstrap.mpi_world_size(TORCHRUN) is None


def test_missing_mpi4py_is_told_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"expected mpi4py .* do `pip install"):
        bootstrap.init_process_group_from_mpi("gloo")


def test_a_singleton_under_a_launcher_of_more_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(size=1, rank=0)
    monkeypatch.setattr(bootstrap, "_import_mpi", lambda: SimpleNamespace(COMM_WORLD=world))
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(ValueError, match=r"expected an MPI world of 4 ranks.*got a world of 1"):
        bootstrap.init_process_group_from_mpi("gloo")


class StoreComm:
    """The two collectives of an mpi4py communicator that the bootstrap uses, over a store."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.calls = 0

    def allgather(self, value: Any) -> list[Any]:
        self.calls += 1
        self.store.set(f"comm/{self.calls}/{self.rank}", pickle.dumps(value).hex())
        return [_load(self.store.get(f"comm/{self.calls}/{rank}")) for rank in range(self.size)]

    def bcast(self, value: Any, root: int) -> Any:
        self.calls += 1
        if self.rank == root:
            self.store.set(f"comm/{self.calls}", pickle.dumps(value).hex())
        return _load(self.store.get(f"comm/{self.calls}"))


def _load(text: bytes) -> Any:
    return pickle.loads(bytes.fromhex(text.decode()))


def init_on_ranks(
    world: int, hosts: list[str], backends: list[Any], prepare: Any = lambda rank: None
) -> Outcomes:
    """Run the bootstrap on forked ranks that believe to be on `hosts`, then one all-reduce."""

    def fn(rank: int, size: int) -> tuple[int, int, str]:
        comm = StoreComm(dist.FileStore(f"{folder}/store", size), rank, size)
        mpi = SimpleNamespace(COMM_WORLD=comm, Get_processor_name=lambda: hosts[rank])
        bootstrap._import_mpi = lambda: mpi
        prepare(rank)
        # The true environment may hold a launcher's variables, and they are not what is tested here.
        bootstrap.mpi_world_size = lambda environ: None  # type: ignore[assignment, misc]
        bootstrap.init_process_group_from_mpi(backends[rank], timeout=timedelta(seconds=10))
        ranks = torch.tensor([rank + 1])
        dist.all_reduce(ranks)
        return int(ranks), dist.get_rank(), dist.get_backend()

    with TemporaryDirectory() as folder:
        return run_ranks(fn, world=world, timeout=15, init=None)


@pytest.mark.parametrize("backend", ["gloo", None])
@pytest.mark.parametrize("world", [1, 3])
def test_ranks_keep_their_mpi_numbers_and_reach_each_other(world: int, backend: str | None) -> None:
    outcomes = init_on_ranks(world, ["one"] * world, [backend] * world, prepare=_without_gpus)
    assert values(outcomes) == [(world * (world + 1) // 2, rank, "gloo") for rank in range(world)]


def test_only_ranks_of_several_hosts_need_an_address_of_rank_0() -> None:
    def without_address(rank: int) -> None:
        def no_address() -> str:
            raise OSError("no address")

        bootstrap._own_address = no_address

    def loopback(rank: int) -> None:
        bootstrap._own_address = lambda: "localhost"

    values(init_on_ranks(2, ["one", "one"], ["gloo"] * 2, prepare=without_address))
    values(init_on_ranks(2, ["one", "two"], ["gloo"] * 2, prepare=loopback))
    for outcome in init_on_ranks(2, ["one", "two"], ["gloo"] * 2, prepare=without_address):
        assert isinstance(outcome.error, TransportError)
        assert "no address" in str(outcome.error)


def test_a_mistake_on_one_rank_is_refused_on_every_rank() -> None:
    def initialise(rank: int) -> None:
        if rank == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    cases = [
        (init_on_ranks(3, ["one"] * 3, ["gloo"] * 3, prepare=initialise), "initialised on rank 1"),
        (init_on_ranks(3, ["one"] * 3, ["gloo", "gloo", "nccl"]), "'nccl' on rank 2"),
        (init_on_ranks(3, ["one"] * 3, ["mpi"] * 3), "got 'mpi'"),
    ]
    for outcomes, text in cases:
        for outcome in outcomes:
            assert isinstance(outcome.error, ValueError), outcome
            assert text in str(outcome.error)


def test_a_store_that_rank_0_cannot_serve_is_told_on_every_rank() -> None:
    def no_server(rank: int) -> None:
        def refuse(*arguments: Any, **options: Any) -> None:
            raise RuntimeError("no port left")

        dist.TCPStore = refuse  # type: ignore[assignment, misc]

    for outcome in init_on_ranks(2, ["one"] * 2, ["gloo"] * 2, prepare=no_server):
        assert isinstance(outcome.error, TransportError)
        assert "no port left (on rank 0)" in str(outcome.error)


@pytest.mark.parametrize(
    ("asked", "hosts", "gpus", "expected"),
    [
        (None, "aabb", [2, 2, 2, 2], "nccl"),
        (None, "aaab", [2, 2, 2, 2], "gloo"),
        (None, "ab", [1, 0], "gloo"),
        ("gloo", "ab", [1, 1], "gloo"),
        ("nccl", "ab", [1, 1], "nccl"),
    ],
)
def test_nccl_is_taken_where_every_rank_has_a_gpu(
    asked: Any, hosts: str, gpus: list[int], expected: str
) -> None:
    assert bootstrap._agreed_backend([asked] * len(hosts), list(hosts), gpus) == expected


def test_nccl_with_too_few_gpus_names_rank_and_host() -> None:
    with pytest.raises(ValueError, match=r"got 1 GPUs for 2 ranks on b \(on rank 2\)"):
        bootstrap._agreed_backend(["nccl"] * 3, ["b", "a", "b"], [1, 1, 1])


def test_ranks_are_numbered_on_each_host() -> None:
    assert bootstrap._local_ranks(["a", "b", "a", "a", "b"]) == [0, 0, 1, 2, 1]


def _without_gpus(rank: int) -> None:
    torch.cuda.device_count = lambda: 0
