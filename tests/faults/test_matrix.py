"""Every fault of the matrix under gloo: what each rank sees, how soon, with what state, and that all go on.

Ranks are forks of this process (see forkpool).
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import make, record
from forkpool import RankDied, RankHung, run_ranks, values
from matrix import DEADLY, FAULTS, NAMES
from report import record as note
from trial import Fault, Place, Seen, check, check_survivors, last_trial, row, trial

import fp8dist
from fp8dist._progress import records

ON_GLOO = [fault for fault in FAULTS if "gloo" in fault.transports]


@pytest.mark.parametrize("fault", ON_GLOO, ids=lambda fault: fault.name)
def test_every_rank_is_told_no_state_moves_and_training_goes_on(
    fault: Fault, request: pytest.FixtureRequest
) -> None:
    def run(rank: int, world: int) -> Seen:
        return trial(fault, Place(rank))

    seen = values(run_ranks(run, world=4, timeout=30))
    check(fault, seen)
    note(request.config.getoption("--reliability"), row(fault, "gloo", dict(enumerate(seen))))


@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.name)
def test_survivors_are_told_who_is_gone_and_nobody_hangs(
    fault: Fault, request: pytest.FixtureRequest
) -> None:
    def run(rank: int, world: int) -> Seen:
        return last_trial(fault, Place(rank))

    served_by = 0 if fault.name.startswith("the store's host") else None
    outcomes = run_ranks(run, world=4, timeout=30, store_rank=served_by, expendable=fault.odd)
    (gone,) = [outcomes.pop(rank) for rank in fault.odd]
    assert isinstance(gone.error, RankDied | RankHung), gone
    seen = dict(zip((outcome.rank for outcome in outcomes), values(outcomes), strict=True))
    check_survivors(fault, seen)
    died = "stopped" if isinstance(gone.error, RankHung) else "dead"
    note(request.config.getoption("--reliability"), row(fault, "gloo", seen, died=died))


def test_the_users_collectives_under_debug_detail_are_left_alone() -> None:
    """Torch then wraps the default group, and compares what the ranks run on it."""
    (fault,) = [fault for fault in FAULTS if fault.name == "the user's collectives"]

    def run(rank: int, world: int) -> Seen:
        assert (
            "Wrapper"
            in type(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))).__name__
        )
        return trial(fault, Place(rank))

    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        outcomes = run_ranks(run, world=4, timeout=30)
    finally:
        dist.set_debug_level(before)
    check(fault, values(outcomes))


STEPS, EARLY = 1000, 300


def busy(rank: int, step: int) -> random.Random:
    """Chance of one rank in one step, the same for whoever asks."""
    return random.Random(1000 * step + rank)


def amax(rank: int, step: int) -> float | None:
    """What a rank records in a step, or that it skips its backward."""
    chance = busy(rank, step)
    return None if chance.random() < 0.3 else 1.0 + chance.random()


def await_progress(coordinator: fp8dist.ReductionGroupCoordinator) -> None:
    """Wait until each rank has published its progress, behind all that a coordinator enters at its start.

    A lost answer of the resolver holds up the thread that does it for 5 s.
    """
    limit = time.monotonic() + 25.0
    while None in records(coordinator._stall.control, 4):
        assert time.monotonic() < limit, "a rank has not published its progress"
        time.sleep(0.05)


def test_a_thousand_steps_with_delays_and_skips_give_the_right_values_and_grow_nothing() -> None:
    def counted() -> tuple[int, int, int]:
        store = dist.distributed_c10d._get_default_store()
        return threading.active_count(), len(os.listdir("/proc/self/fd")), store.num_keys()

    def run(rank: int, world: int) -> tuple[list[float], float, list[tuple[int, int, int]]]:
        coordinator = make(timeout=30.0, stall_warning=None)
        slot = coordinator.slot("a.input")
        counts = []
        for step in range(STEPS):
            time.sleep(0.002 * busy(rank, -step).random())
            with coordinator.step(step):
                mine = amax(rank, step)
                if mine is not None:
                    record(slot, mine)
            if step in (EARLY, STEPS - 1):
                await_progress(coordinator)
                dist.barrier()
                counts.append(counted())
                dist.barrier()  # who goes on may close, which leaves keys, too
        history = coordinator.state_dict()["slots"]["a.input"]["history"].tolist()
        coordinator.close()
        return history, slot.scale.item(), counts

    told = []
    for step in range(STEPS):
        amaxes = [a for rank in range(4) if (a := amax(rank, step)) is not None]
        told.append(float(np.float32(max(amaxes))) if amaxes else -1.0)
    window = told[-4:]
    for history, scale, counts in values(run_ranks(run, world=4, timeout=60)):
        assert history == window
        assert scale == np.float32(448.0) / np.float32(max(window))
        assert counts[0] == counts[1], "threads, file descriptors, keys in the store"


def test_the_page_names_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    missing = [name for name in NAMES if f"| **{name}**: " not in page]
    assert not missing, "make the page again, as it says at its end"
