"""Ranks that monitor themselves write what they know, run no collective for it, and are put together afterwards.

Ranks are forks of this process (see forkpool).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forkpool import run_ranks, values

import fp8dist as f8
from fp8dist import monitor as fm

WORLD = 4
STEPS = 24
EVERY = 3
SLOW = 2
LENGTH = 3


def amax_of(step: int, rank: int, own: bool) -> float:
    """What a rank records of a shared slot, or of its own one."""
    return float(np.random.default_rng([step, rank, own]).uniform(1, 4))


def run_rank(run_dir: Path | None, *, slow: int | None) -> Any:
    def body(rank: int, world: int) -> dict[str, Any]:
        coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=LENGTH))
        shared, own = coordinator.slot("shared.input"), coordinator.slot(f"only{rank}.grad_output")
        coordinator.freeze()
        monitor = None if run_dir is None else fm.Monitor(coordinator, [fm.JsonLines(run_dir)], every=EVERY)
        for step in range(1, STEPS + 1):
            with coordinator.step(step):
                shared.record(torch.tensor([amax_of(step, rank, False)]))
                own.record(torch.tensor([amax_of(step, rank, True)]))
                if rank == slow:
                    time.sleep(0.05)
            if monitor is not None:
                monitor.step(step=step, loss=step + rank / 10)
        if monitor is not None:
            monitor.close()
        result = {
            "digest": coordinator.digest(),
            "state": {name: {k: v.tolist() for k, v in fields.items()}
                      for name, fields in coordinator.state_dict()["slots"].items()},
            "collectives": coordinator.stats.collectives,
        }  # fmt: skip
        coordinator.close()
        return result

    return values(run_ranks(body, world=WORLD, timeout=60))


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], fm.Run]:
    """What four monitored ranks end with, and what they have written; one of them is slow."""
    run_dir = tmp_path_factory.mktemp("run")
    ends = run_rank(run_dir, slow=SLOW)
    return ends, fm.read_run(run_dir)


def test_each_rank_writes_its_own_slots_and_the_reduced_amaxes(monitored: Any) -> None:
    run = monitored[1]
    assert list(run.ranks) == list(range(WORLD)) and run.skipped_lines == 0
    for rank, written in run.ranks.items():
        (start,) = written.starts
        assert (start["rank"], start["world"]) == (rank, WORLD)
        assert start["slots"] == ["shared.input", f"only{rank}.grad_output"]
        assert list(written.samples) == list(range(EVERY, STEPS + 1, EVERY))
        for step, sample in written.samples.items():
            by_step = {
                s: (max(amax_of(s, r, False) for r in range(WORLD)), amax_of(s, rank, True))
                for s in range(max(1, step - LENGTH), step + 1)
            }
            amaxes = np.float32(by_step.pop(step))
            scales = np.float32([448.0, 57344.0]) / np.float32(list(by_step.values())).max(0)
            assert np.array_equal(np.float32(sample["amax"]), amaxes)
            assert np.array_equal(np.float32(sample["scale"]), scales)
            headroom = (
                np.log2([448.0, 57344.0]) - np.log2(amaxes.astype(float)) - np.log2(scales.astype(float))
            )
            assert sample["headroom"] == pytest.approx(headroom.tolist(), abs=1e-4)
            assert sample["loss"] == step + rank / 10
            assert sample["generation"] == step


def test_the_rank_that_sleeps_is_the_one_the_others_wait_for(monitored: Any) -> None:
    run = monitored[1]
    assert run.awaited_rank == SLOW
    assert min(run.waits, key=run.waits.__getitem__) == SLOW
    for rank, wait in run.waits.items():
        assert rank == SLOW or wait > run.waits[SLOW] + 0.025  # half of what it sleeps in each step
    (message,) = [w["message"] for w in run.warnings if w["what"] == "always_last"]
    assert message.startswith(f"rank {SLOW} on ")


def test_monitoring_changes_no_bit_and_adds_no_collective_on_any_rank(monitored: Any) -> None:
    assert monitored[0] == run_rank(None, slow=None)


def test_a_monitored_rank_whose_disk_is_full_does_not_hold_up_the_others(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a disk without space")
    (tmp_path / "monitor-rank1.jsonl").symlink_to("/dev/full")
    run_rank(tmp_path, slow=None)
    (tmp_path / "monitor-rank1.jsonl").unlink()
    assert list(fm.read_run(tmp_path).ranks) == [0, 2, 3]
