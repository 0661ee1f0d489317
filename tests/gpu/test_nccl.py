"""The contract over nccl: equal to gloo bit for bit, and failures end as they do on the CPU."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Ended, attempt, frozen, make, record
from forkpool import RankDied, run_ranks, values
from torch import nn

import fp8dist as f8
from fp8dist.graphs import GraphedStep

pytestmark = [pytest.mark.gpus(2), pytest.mark.timeout(120)]
WORLD = 2


def on_gpu(rank: int, **options: Any) -> tuple[nn.Module, f8.ReductionGroupCoordinator, list[f8.Slot]]:
    """A converted model on this rank's GPU, its coordinator over nccl, and two slots of our own."""
    torch.cuda.set_device(rank)
    group = dist.new_group(list(range(WORLD)), backend="nccl")
    coordinator = make(group=group, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()
    f8.convert(model, coordinator)
    return model, coordinator, [coordinator.slot("x.input"), coordinator.slot("x.grad_output")]


def work(model: nn.Module, scale: float) -> None:
    model(torch.full((32, 64), scale, device="cuda")).square().sum().backward()


AMAXES = [[1.0, 2.0], [float("nan"), 3.0], [4.0, float("inf")], [5e-41, 1.0], [0.0, 0.0], [7.0, float("nan")]]


@pytest.mark.parametrize("non_finite", ["absent", "freeze"])
def test_nccl_commits_what_gloo_commits(non_finite: str) -> None:
    def run(rank: int, world: int) -> Any:
        recipe = f8.DelayedScaling(amax_history_len=3, non_finite=non_finite)
        model, gpu, on_cuda = on_gpu(rank, recipe=recipe)
        cpu = make(recipe, name="cpu")
        on_cpu = [cpu.slot("x.input"), cpu.slot("x.grad_output")]
        gpu.freeze()
        for row in AMAXES:
            with gpu.step(), cpu.step():
                for slots in (on_cuda, on_cpu):
                    for slot in slots:
                        slot.record(torch.tensor([row[rank]], device=slot.amax.device))
        states = [c.state_dict()["slots"] for c in (gpu, cpu)]
        # NaN has other bits on a GPU (0x7fffffff), and one rank's NaN wins as it is.
        bits = [
            [s[name][field].cpu().nan_to_num(nan=-7.0).tolist() for field in ("history", "scale")]
            for s in states
            for name in ("x.input", "x.grad_output")
        ]
        assert gpu.stats.collectives == len(AMAXES) + 1
        assert model[0].slots.input.amax.is_cuda
        gpu.close()
        cpu.close()
        return bits[:2] == bits[2:], bits

    results = values(run_ranks(run, world=WORLD, timeout=90))
    assert results[0] == results[1]
    assert results[0][0], results[0][1]


def test_a_model_trains_with_equal_scales_on_all_gpus() -> None:
    def run(rank: int, world: int) -> Any:
        model, coordinator, _ = on_gpu(rank)
        for step in range(6):
            with coordinator.step(step):
                for _ in range(rank + 1):
                    work(model, 1.0 + step + rank)
        stats, digest = coordinator.stats, coordinator.digest()
        coordinator.close()
        return digest, stats.collectives, stats.commits, model[0].slots.input.scale.item()

    results = values(run_ranks(run, world=WORLD, timeout=90))
    assert results[0] == results[1]
    assert results[0][1:3] == (7, 6)
    assert results[0][3] == torch.div(torch.tensor(448.0), torch.tensor(7.0)).item()


def test_a_raising_rank_frees_its_peer_and_both_go_on() -> None:
    def run(rank: int, world: int) -> Ended:
        model, coordinator, _ = on_gpu(rank)
        for step in range(2):
            with coordinator.step(step):
                work(model, 1.0)

        def failing() -> None:
            with coordinator.step(2):
                work(model, 50.0)
                if rank == 1:
                    raise ValueError("boom")

        end = attempt(coordinator, failing)
        coordinator.recover()
        with coordinator.step(2):
            work(model, 2.0)
        end.digest = coordinator.digest()
        coordinator.close()
        return end

    ended = values(run_ranks(run, world=WORLD, timeout=90))
    assert [end.error for end in ended] == ["PeerAborted", "ValueError"]
    assert ended[0].named == 1
    assert all(end.before == end.after and end.seconds < 1.0 for end in ended), ended
    assert ended[0].digest == ended[1].digest


def test_a_rank_that_never_enters_is_named_and_recovery_aborts_the_stuck_reduction() -> None:
    def run(rank: int, world: int) -> Any:
        model, coordinator, _ = on_gpu(rank, timeout=1.5, stall_warning=None)
        with coordinator.step(0):
            work(model, 1.0)
        if rank == 1:
            time.sleep(4.0)
            end = None
        else:

            def waiting() -> None:
                with coordinator.step(1):
                    work(model, 9.0)

            end = attempt(coordinator, waiting)
        coordinator._timeout = 20.0
        coordinator.recover()
        with coordinator.step(1):
            work(model, 3.0)
        digest = coordinator.digest()
        coordinator.close()
        return end, digest

    (end, digest), (_, other) = values(run_ranks(run, world=WORLD, timeout=100))
    assert end.error == "CollectiveTimeout"
    assert end.missing == (1,)
    assert 1.4 < end.seconds < 3.0
    assert end.before == end.after
    assert digest == other


def test_a_killed_rank_is_named_by_our_deadline_and_torchs_watchdog_does_not_come_first() -> None:
    def run(rank: int, world: int) -> Any:
        model, coordinator, _ = on_gpu(rank, timeout=2.0, stall_warning=None)
        with coordinator.step(0):
            work(model, 1.0)
        torch.cuda.synchronize()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

        def waiting() -> None:
            with coordinator.step(1):
                work(model, 9.0)

        return attempt(coordinator, waiting)

    outcomes = run_ranks(run, world=WORLD, timeout=60)
    assert isinstance(outcomes[1].error, RankDied)
    end = outcomes[0].value
    assert end is not None, outcomes[0]
    assert end.error in ("CollectiveTimeout", "TransportError")
    assert "ank 1" in end.text
    assert end.seconds < 4.0
    assert end.before == end.after


def test_a_slot_declared_late_costs_one_more_reduction_once() -> None:
    def run(rank: int, world: int) -> Any:
        model, coordinator, _ = on_gpu(rank)
        counts = []
        for step in range(3):
            before = coordinator.stats.collectives
            with coordinator.step(step):
                work(model, 1.0)
                if step >= 1 and rank == 0:
                    late = coordinator.slot("late.input")
                    late.record(torch.full((4,), 8.0, device=late.amax.device))
            counts.append(coordinator.stats.collectives - before)
        scales = coordinator.scales().get("late.input")
        state = frozen(coordinator)
        coordinator.close()
        return counts[1:], scales, state

    results = values(run_ranks(run, world=WORLD, timeout=90))
    assert [r[0] for r in results] == [[2, 1]] * 2
    assert [r[1] for r in results] == [56.0, None]


def test_an_amax_of_another_device_is_refused() -> None:
    def run(rank: int, world: int) -> str:
        model, coordinator, (slot, _) = on_gpu(rank)
        assert model[0].weight.is_cuda
        try:
            with coordinator.step():
                record(slot, 1.0)
        except ValueError as error:
            coordinator.recover()
            coordinator.close()
            return str(error)
        return ""

    for text in values(run_ranks(run, world=WORLD, timeout=90)):
        assert "lives on cuda" in text
        assert "cpu" in text


def test_steps_that_overlap_the_optimizer_commit_the_bits_of_steps_that_wait() -> None:
    def run(rank: int, world: int) -> Any:
        runs = []
        for overlap in (False, True):
            model, coordinator, _ = on_gpu(rank, name=f"overlap {overlap}")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            coordinator.freeze()
            before = coordinator.stats.collectives
            for step in range(8):
                optimizer.zero_grad()
                with coordinator.step(step, overlap=overlap) as scope:
                    work(model, 1.0 + step * (1 + rank))
                    if step == 5 and rank == 1:
                        scope.abort()
                optimizer.step()
            coordinator.settle()
            counts = coordinator.stats.collectives - before, coordinator.stats.commits
            runs.append(
                (frozen(coordinator), counts, [p.flatten()[:64].tolist() for p in model.parameters()])
            )
            coordinator.close()
        return runs

    for waiting, overlapping in values(run_ranks(run, world=WORLD, timeout=90)):
        assert waiting == overlapping
        assert waiting[1] == (8, 7)


def test_with_overlap_a_raising_rank_is_told_at_the_next_entry_and_both_go_on() -> None:
    def run(rank: int, world: int) -> Any:
        model, coordinator, _ = on_gpu(rank)
        with coordinator.step(0, overlap=True):
            work(model, 1.0)
        coordinator.settle()
        before = frozen(coordinator)
        told = ""
        try:
            with coordinator.step(1, overlap=True):
                work(model, 9.0)
                if rank == 1:
                    raise ArithmeticError("bad batch")
            model[0].weight.detach().mul_(1.0)  # the optimizer
            with coordinator.step(2, overlap=True):
                work(model, 9.0)
        except (ArithmeticError, f8.PeerAborted) as error:
            told = str(error)
        coordinator.recover()
        after = frozen(coordinator)
        for step in (1, 2):
            with coordinator.step(step, overlap=True):
                work(model, 2.0)
        digest = coordinator.digest()
        coordinator.close()
        return told, before == after, digest

    ended = values(run_ranks(run, world=WORLD, timeout=90))
    assert "rank 1 left step 1" in ended[0][0]
    assert "bad batch" in ended[0][0]
    assert all(same for _, same, _ in ended)
    assert ended[0][2] == ended[1][2]


def test_with_overlap_a_rank_that_never_enters_is_named_at_the_next_entry() -> None:
    def run(rank: int, world: int) -> Any:
        model, coordinator, _ = on_gpu(rank, timeout=1.5, stall_warning=None)
        with coordinator.step(0):
            work(model, 1.0)
        end = None
        if rank == 1:
            time.sleep(4.0)
        else:
            with coordinator.step(1, overlap=True):
                work(model, 9.0)
            try:
                coordinator.step(2).__enter__()
            except f8.CollectiveTimeout as error:
                end = error.missing, str(error)
        coordinator._timeout = 20.0
        coordinator.recover()
        with coordinator.step(1, overlap=True):
            work(model, 3.0)
        digest = coordinator.digest()
        coordinator.close()
        return end, digest

    (end, digest), (_, other) = values(run_ranks(run, world=WORLD, timeout=100))
    assert end is not None
    assert end[0] == (1,)
    assert "step 1 " in end[1]
    assert digest == other


@pytest.mark.parametrize("overlap", [False, True])
def test_graphed_steps_with_the_collective_outside_commit_what_eager_ones_do(overlap: bool) -> None:
    def run(rank: int, world: int) -> Any:
        runs = []
        for graphed in (False, True):
            model, coordinator, _ = on_gpu(rank, name=f"graphed {graphed}")
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.empty(32, 64, device="cuda")

            def body(model: nn.Module = model, x: torch.Tensor = x) -> torch.Tensor:
                loss = model(x).square().mean()
                loss.backward()
                return loss.detach()

            step = GraphedStep(coordinator, body, model.parameters(), warmup=3 if graphed else 1000)
            coordinator.freeze()
            before, losses = coordinator.stats.collectives, []
            for i in range(10):
                x.fill_(1.0 + i * (1 + rank))
                losses.append(step(i, overlap=overlap).clone())
                optimizer.step()
            coordinator.settle()
            weights = [p.detach().cpu().view(torch.int32).tolist() for p in model.parameters()]
            counts = coordinator.stats.collectives - before, coordinator.stats.commits
            runs.append((frozen(coordinator), counts, torch.stack(losses).tolist(), weights))
            assert step.captures == int(graphed)
            coordinator.close()
        return runs

    for eager, graphed in values(run_ranks(run, world=WORLD, timeout=90)):
        assert eager[:3] == graphed[:3]
        assert eager[3] == graphed[3]
        assert graphed[1] == (10, 10)
