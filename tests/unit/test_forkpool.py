"""The fork pool reports every way in which a rank can end, and leaves nothing behind."""

from __future__ import annotations

import atexit
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forkpool import RankDied, RankFailed, RankHung, run_ranks, values

from fp8dist.errors import PeerAborted


def _sum_of_ranks(rank: int, world: int) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("store_rank", [None, 0, -1])
def test_ranks_form_a_world_and_return_their_values(world: int, store_rank: int | None) -> None:
    store_rank = world - 1 if store_rank == -1 else store_rank
    outcomes = run_ranks(_sum_of_ranks, world=world, store_rank=store_rank)
    assert values(outcomes) == [world * (world - 1) / 2] * world
    assert [outcome.rank for outcome in outcomes] == list(range(world))


def test_without_init_there_is_no_process_group() -> None:
    assert values(run_ranks(lambda rank, world: (rank, dist.is_initialized()), world=2, init=None)) == [
        (0, False),
        (1, False),
    ]


def test_ranks_run_backward_after_the_parent_did() -> None:
    def gradient(rank: int, world: int) -> float:
        x = torch.full((2,), float(rank), requires_grad=True)
        (x * x).sum().backward()
        assert x.grad is not None
        assert torch.get_num_threads() == 1
        return x.grad.sum().item()

    torch.set_num_threads(1)
    assert gradient(1, 1) == 4.0
    assert values(run_ranks(gradient, world=2, init=None)) == [0.0, 4.0]


def test_large_values_do_not_block_the_pipe() -> None:
    results = values(run_ranks(lambda rank, world: torch.full((300_000,), rank), world=2, init=None))
    assert [int(result.sum()) for result in results] == [0, 300_000]


def test_an_exception_keeps_type_attributes_and_traceback() -> None:
    def fail(rank: int, world: int) -> None:
        if rank == 1:
            raise PeerAborted("stage gone", rank=3, step=7)

    outcomes = run_ranks(fail, world=2, init=None)
    error = outcomes[1].error
    assert isinstance(error, PeerAborted)
    assert (str(error), error.rank, error.step) == ("stage gone", 3, 7)
    assert "raise PeerAborted" in outcomes[1].traceback
    assert outcomes[0].error is None
    with pytest.raises(PeerAborted) as caught:
        outcomes.raise_first()
    assert any("on rank 1 of 2" in note for note in caught.value.__notes__)


def test_the_earliest_error_is_raised_first() -> None:
    def fail(rank: int, world: int) -> None:
        time.sleep(0.0 if rank == 2 else 0.2)
        raise ValueError(f"rank {rank}")

    with pytest.raises(ValueError, match="rank 2"):
        run_ranks(fail, world=3, init=None).raise_first()


def test_an_exception_that_cannot_travel_arrives_as_text() -> None:
    class Local(RuntimeError):
        pass

    def fail(rank: int, world: int) -> None:
        raise Local("only here")

    (outcome,) = run_ranks(fail, world=1, init=None)
    assert isinstance(outcome.error, RankFailed)
    assert "Local: only here" in str(outcome.error)


def test_a_value_that_does_not_pickle_is_an_error() -> None:
    (outcome,) = run_ranks(lambda rank, world: lambda: 0, world=1, init=None)
    assert isinstance(outcome.error, RankFailed)


def test_a_rank_ended_by_a_signal_is_reported_and_the_others_see_it() -> None:
    def die(rank: int, world: int) -> None:
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(64))

    outcomes = run_ranks(die, world=3)
    assert outcomes[1].signal == signal.SIGKILL
    assert isinstance(outcomes[1].error, RankDied)
    assert "SIGKILL" in str(outcomes[1].error)
    assert all(isinstance(outcomes[rank].error, RuntimeError) for rank in (0, 2))
    assert all(outcomes[rank].signal is None for rank in (0, 2))


def test_a_rank_that_leaves_without_a_report_is_an_error() -> None:
    (outcome,) = run_ranks(lambda rank, world: os._exit(3), world=1, init=None)
    assert isinstance(outcome.error, RankDied)
    assert (outcome.exit_code, outcome.signal) == (3, None)


def test_ranks_that_hang_are_named_with_their_stacks_and_killed() -> None:
    """Without a process group: to join one may take seconds by itself, where the resolver loses an answer."""

    def hang(rank: int, world: int) -> int:
        if rank != 1:
            _wait_in_python_code() if rank == 0 else _wait_in_c_code()
        return os.getpid()

    def _wait_in_python_code() -> None:
        while True:
            pass

    def _wait_in_c_code() -> None:
        os.read(os.pipe()[0], 1)

    start = time.monotonic()
    outcomes = run_ranks(hang, world=3, timeout=2.0, init=None)
    assert time.monotonic() - start < 25.0
    assert [isinstance(outcome.error, RankHung) for outcome in outcomes] == [True, False, True]
    assert "rank 0 of 3 was still running after 2 s" in str(outcomes[0].error)
    assert "_wait_in_python_code" in str(outcomes[0].error)
    assert "_wait_in_c_code" in str(outcomes[2].error)
    with pytest.raises(ProcessLookupError):
        os.kill(outcomes[1].value, 0)


def test_a_stopped_rank_is_killed_too() -> None:
    def stop(rank: int, world: int) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    (outcome,) = run_ranks(stop, world=1, timeout=0.3, init=None)
    assert isinstance(outcome.error, RankHung)


@pytest.mark.parametrize("ending", ["None", "exec('raise SystemExit(0)')"])
def test_ranks_return_into_nothing_of_the_parent(tmp_path: Path, ending: str) -> None:
    parent = os.getpid()

    def leave_a_mark() -> None:
        if os.getpid() != parent:
            (tmp_path / "a rank was here").touch()

    atexit.register(leave_a_mark)
    try:
        run_ranks(lambda rank, world: eval(ending), world=1, init=None)
    finally:
        leave_a_mark()
    atexit.unregister(leave_a_mark)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stay", [True, False])
def test_a_finished_rank_stays_only_if_asked(stay: bool) -> None:
    def fn(rank: int, world: int) -> bool:
        pids = torch.zeros(world, dtype=torch.int64)
        pids[rank] = os.getpid()
        dist.all_reduce(pids)
        dist.barrier()
        if rank == 1:
            return True
        deadline = time.monotonic() + (0.5 if stay else 10.0)
        while time.monotonic() < deadline:
            if _is_gone(int(pids[1])):
                return False
            time.sleep(0.01)
        return True

    assert values(run_ranks(fn, world=2, stay=stay)) == [stay, True]


def _is_gone(pid: int) -> bool:
    """True for a process that has ended, also if its parent has not reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
