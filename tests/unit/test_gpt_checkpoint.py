"""Checkpoints of the training program: whole or not there, and read without running what they hold."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forkpool import RankDied, run_ranks
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from gpt import checkpoint
from gpt.checkpoint import Checkpoint, Checkpoints, RunState, SafeReader, find_start, list_complete, load
from gpt.config import Ranks, TrainConfig
from gpt.optimizer import make_optimizer

FIRST = Ranks()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        precision="fp32", checkpoint_every=1, steps=100, checkpoint_dir=tmp_path / "checkpoints"
    )


def make_state(config: TrainConfig, value: float = 1.0, ranks: Ranks = FIRST) -> RunState:
    """A model of one matrix; its optimizer has stepped once."""
    parameters = {"weight": nn.Parameter(torch.full((4, 4), value))}
    optimizer = make_optimizer(config, parameters)
    parameters["weight"].grad = torch.full((4, 4), value)
    optimizer.step()
    return RunState(parameters, optimizer, None, ranks)


def names(config: TrainConfig) -> list[str]:
    return sorted(path.name for path in config.checkpoints.iterdir())


def test_weights_moments_and_random_numbers_come_back(config: TrainConfig) -> None:
    saved, other = make_state(config, 1.0), make_state(config, 2.0)
    torch.manual_seed(5)
    Checkpoints(config, FIRST).save(7, saved)
    expected = torch.rand(3)
    start = find_start(config, FIRST)
    assert start is not None
    assert start.step == 7
    load(start, other)
    assert torch.rand(3).equal(expected)
    for part in ("model", "optimizer"):
        ours, theirs = other.tensors()[part], saved.tensors()[part]
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert set(saved.tensors()["optimizer"]) == {"weight.step", "weight.exp_avg", "weight.exp_avg_sq"}


def test_a_state_that_has_not_stepped_takes_the_moments_over(config: TrainConfig) -> None:
    saved = make_state(config)
    Checkpoints(config, FIRST).save(1, saved)
    parameters = {"weight": nn.Parameter(torch.zeros(4, 4))}
    fresh = RunState(parameters, make_optimizer(config, parameters), None, FIRST)
    load(Checkpoint(config.checkpoints / "step-00000001", 1, {}), fresh)
    for state in (saved, fresh):
        state.parameters["weight"].grad = torch.eye(4)
        state.optimizer.step()
    assert fresh.parameters["weight"].equal(saved.parameters["weight"])


def test_the_newest_two_stay(config: TrainConfig) -> None:
    for step in (8, 9, 10, 100_000_000):
        Checkpoints(config, FIRST).save(step, make_state(config))
    assert names(config) == ["step-00000010", "step-100000000"]
    start = find_start(dataclasses.replace(config, steps=10**9), FIRST)
    assert start is not None
    assert start.step == 100_000_000


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle(folder: Path) -> None:
    next(folder.iterdir()).unlink()
    die()


def die_at(suffix: str) -> Callable[[Path, Path], Path]:
    """A `Path.rename` that does not come back where a name with that suffix would be changed."""
    rename = Path.rename
    return lambda path, target: die() if path.suffix == suffix else rename(path, target)


MOMENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "plan": (dcp.FileSystemWriter, "prepare_global_plan", die),
    "tensors": (dcp.FileSystemWriter, "write_data", die),
    "sync": (os, "fsync", die),
    "metadata": (Path, "rename", die_at(".tmp")),  # DCP's own
    "run.json": (checkpoint, "write_synced", die),
    "name": (Path, "rename", die_at(".partial")),
    "removal": (shutil, "rmtree", die_in_the_middle),  # of step 1, after step 3 has its name
}


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_kill_at_any_moment_of_a_save_leaves_complete_checkpoints_and_no_obstacle(
    config: TrainConfig, moment: str
) -> None:
    for step in (1, 2):
        Checkpoints(config, FIRST).save(step, make_state(config, float(step)))

    def killed(rank: int, world: int) -> None:
        setattr(*MOMENTS[moment])
        Checkpoints(config, FIRST).save(3, make_state(config, 3.0))

    (outcome,) = run_ranks(killed, world=1, timeout=30.0, init=None)
    assert isinstance(outcome.error, RankDied)
    complete = list_complete(config.checkpoints)
    assert [path.name for path in complete] == [
        f"step-0000000{step}" for step in ((2, 3) if moment == "removal" else (1, 2))
    ]
    for path in complete:
        start, state = checkpoint.read_checkpoint(path), make_state(config, 9.0)
        load(start, state)
        assert state.parameters["weight"].equal(make_state(config, float(start.step)).parameters["weight"])
    Checkpoints(config, FIRST).save(4, state)
    assert names(config) == [complete[-1].name, "step-00000004"]


def test_what_a_killed_save_left_is_no_part_of_the_next_one(config: TrainConfig) -> None:
    left = config.checkpoints / "step-00000001.partial"
    left.mkdir(parents=True)
    (left / "__7_0.distcp").write_bytes(b"of another number of ranks")
    Checkpoints(config, FIRST).save(1, make_state(config))
    (path,) = list_complete(config.checkpoints)
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "run.json"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_holds_more_than_tensors_is_refused_before_anything_of_it_runs(
    config: TrainConfig, tmp_path: Path
) -> None:
    Checkpoints(config, FIRST).save(1, make_state(config))
    (path,) = list_complete(config.checkpoints)
    trap = tmp_path / "trap"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trap,)

    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="expected a checkpoint of tensors but its"):
        SafeReader(path).read_metadata()
    assert not trap.exists()
    dcp.save({"no tensor": Evil()}, checkpoint_id=tmp_path / "objects", no_dist=True)
    with pytest.raises(ValueError, match="BytesStorageMetadata"):
        SafeReader(tmp_path / "objects").read_metadata()


@pytest.mark.parametrize(
    ("saved", "flags", "restarts", "expected"),
    [
        ([2, 4], {}, 0, 4),
        ([], {}, 0, None),
        ([4], {"resume": "never", "checkpoint_every": 0}, 0, None),
        ([2, 4], {"resume": "step-00000002", "checkpoint_every": 0}, 0, 2),
        # Started again by the launcher: from its own newest, whatever the command line said at first.
        ([4], {"resume": "never"}, 1, 4),
        ([2, 4], {"resume": "step-00000002"}, 1, 4),
        # These are of another run, since this one writes none.
        ([4], {"resume": "never", "checkpoint_every": 0}, 1, None),
        ([2, 4], {"resume": "step-00000002", "checkpoint_every": 0}, 1, 2),
    ],
)
def test_where_a_run_starts(
    config: TrainConfig, saved: list[int], flags: dict[str, Any], restarts: int, expected: int | None
) -> None:
    for step in saved:
        Checkpoints(config, FIRST).save(step, make_state(config))
    if flags.get("resume", "").startswith("step"):
        flags = flags | {"resume": str(config.checkpoints / flags["resume"])}
    start = find_start(dataclasses.replace(config, **flags), Ranks(restarts=restarts))
    assert (start.step if start else None) == expected


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            {"resume": "nowhere"},
            "expected a complete checkpoint of this program at nowhere but got FileNotFoundError",
        ),
        (
            {"resume": "never"},
            "expected no checkpoints after step 0 in .* but got step-00000004; go on from it",
        ),
        ({"layers": 6}, "expected --layers 8, as in the checkpoint .*step-00000004, but got 6"),
        ({"steps": 3}, "expected --steps to be at least 4, .* but got 3"),
    ],
)
def test_a_start_that_cannot_be_is_refused(
    config: TrainConfig, flags: dict[str, Any], complaint: str
) -> None:
    Checkpoints(config, FIRST).save(4, make_state(config))
    with pytest.raises(ValueError, match=complaint):
        find_start(dataclasses.replace(config, **flags), FIRST)


def test_another_history_length_is_refused_for_fp8_alone(config: TrainConfig) -> None:
    config = dataclasses.replace(config, precision="fp8", amax_history_len=4)
    Checkpoints(config, FIRST).save(4, make_state(config))
    longer = dataclasses.replace(config, amax_history_len=8)
    with pytest.raises(ValueError, match="expected --amax-history-len 4"):
        find_start(longer, FIRST)
    assert find_start(dataclasses.replace(longer, precision="fp32"), FIRST) is not None
