"""Files of a coordinator's state: resumed bit for bit on any number of ranks, whole or not there, never trusted.

Ranks are forks of this process (see forkpool), so they may be killed while they write.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
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
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import frozen, make, record
from forkpool import run_ranks, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import fp8dist as f8
from fp8dist import _state_file, checkpoints
from fp8dist._slot_table import Columns

MICROBATCHES = 4
EXPERTS = 4
STEPS = 5
SAVED_AT = 2

State = dict[str, Any]


def bits(state: State) -> dict[str, Any]:
    """A state that compares with == and pickles."""
    return {
        "generation": int(state["generation"]),
        **{
            f"{name}.{field}": value.reshape(-1).view(torch.uint8).tolist()
            for name, fields in state["slots"].items()
            for field, value in fields.items()
        },
    }


# -- resuming -------------------------------------------------------------------------------------------------


class Run:
    """Data-parallel layers on all ranks, and experts that only one rank each holds.

    Everything a step computes is the same for any number of ranks: four microbatches, whose gradients are added
    in one order.
    """

    def __init__(self, rank: int, world: int, name: str = "main") -> None:
        torch.manual_seed(0)
        self.rank, self.world = rank, world
        self.coordinator = make(name=name)
        layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.model = f8.convert(layers, self.coordinator)
        mine = range(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        self.experts = {i: self.coordinator.slot(f"experts.expert.{i}.input") for i in mine}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.losses: list[list[float]] = []

    def forward_backward(self, step: int) -> tuple[list[torch.Tensor], list[float]]:
        """One flat gradient and one loss per microbatch of this rank."""
        gradients, losses = [], []
        share = MICROBATCHES // self.world
        for m in range(self.rank * share, (self.rank + 1) * share):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(100 * step + m)) * (1 + step)
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in self.model.parameters()]))
            losses.append(loss.item())
        for i, slot in self.experts.items():
            record(slot, 10.0 * step + i)
        return gradients, losses

    def optimize(self, gradients: list[torch.Tensor], losses: list[float]) -> None:
        """Add the gradients of all microbatches in order, and step."""
        mine = torch.stack(
            [torch.cat([g, torch.tensor([x])]) for g, x in zip(gradients, losses, strict=True)]
        )
        rows = [mine]
        if self.world > 1:
            rows = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(rows, mine)
        rows = [row for part in rows for row in part]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        self.losses.append([row[-1].item() for row in rows])
        start = 0
        for p in self.model.parameters():
            p.grad = total[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        self.optimizer.step()

    def train(self, steps: range) -> None:
        for step in steps:
            with self.coordinator.step(step):
                gradients, losses = self.forward_backward(step)
            self.optimize(gradients, losses)

    def result(self) -> dict[str, Any]:
        """Everything that must be equal, as plain values."""
        weights = {name: value.tolist() for name, value in self.model.state_dict().items()}
        return {"losses": self.losses, "weights": weights, "state": bits(self.coordinator.state_dict())}


def save(run: Run, path: Path, how: str) -> None:
    if how == "dcp":
        dcp.save({"model": run.model, "fp8": run.coordinator}, checkpoint_id=path)
        return
    checkpoints.save(run.coordinator, path)
    if run.rank == 0:
        save_file(run.model.state_dict(), path / "model.safetensors")


def load(run: Run, path: Path, how: str) -> None:
    if how == "dcp":
        dcp.load({"model": run.model, "fp8": run.coordinator}, checkpoint_id=path)
        return
    with safe_open(path / "model.safetensors", framework="pt") as file:
        run.model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert checkpoints.load(run.coordinator, path) == SAVED_AT


def union(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks; what they share must be equal."""
    state: dict[str, Any] = {}
    for result in results:
        for key, value in result["state"].items():
            assert state.setdefault(key, value) == value, key
        assert result["losses"] == results[0]["losses"]
        assert result["weights"] == results[0]["weights"]
    return {**results[0], "state": state}


def in_processes(world: int, body: Callable[[Run], None]) -> dict[str, Any]:
    """The union of the results of fresh processes."""

    def rank_body(rank: int, world: int) -> dict[str, Any]:
        run = Run(rank, world)
        body(run)
        result = run.result()
        run.coordinator.close()
        return result

    return union(values(run_ranks(rank_body, world=world, timeout=40)))


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return in_processes(1, lambda run: run.train(range(STEPS)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, dict[str, Any]]]:
    """Where a number of ranks has saved in all ways, and what it had computed until then."""

    @functools.cache
    def by(world: int) -> tuple[Path, dict[str, Any]]:
        path = tmp_path_factory.mktemp(f"by{world}")

        def body(run: Run) -> None:
            run.train(range(SAVED_AT))
            for how in ("files", "dcp"):
                (path / how).mkdir(exist_ok=True)
                save(run, path / how, how)

        return path, in_processes(world, body)

    return by


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("how", "saved_by", "loaded_by"),
    [
        *(("files", *worlds) for worlds in ((1, 1), (4, 4), (4, 2), (2, 4), (1, 4))),
        *(("dcp", *worlds) for worlds in ((4, 4), (4, 2), (2, 4))),
    ],
)
def test_a_run_resumed_by_fresh_processes_equals_one_that_never_stopped(
    how: str, saved_by: int, loaded_by: int, saved: Any, uninterrupted: dict[str, Any]
) -> None:
    path, before = saved(saved_by)

    def second(run: Run) -> None:
        load(run, path / how, how)
        run.train(range(SAVED_AT, STEPS))

    after = in_processes(loaded_by, second)
    assert before["losses"] + after["losses"] == uninterrupted["losses"]
    assert after["weights"] == uninterrupted["weights"]
    assert after["state"] == uninterrupted["state"]


def leave_open(run: Run, path: Path) -> None:
    with run.coordinator.step(SAVED_AT):
        run.forward_backward(SAVED_AT)  # nothing of it is committed yet
        save(run, path, "files")


def give_up(run: Run, path: Path) -> None:
    with run.coordinator.step(SAVED_AT) as step:
        run.forward_backward(SAVED_AT)
        step.abort()
    save(run, path, "files")


def fail(run: Run, path: Path) -> None:
    with pytest.raises((KeyError, f8.PeerAborted)), run.coordinator.step(SAVED_AT):
        run.forward_backward(SAVED_AT)
        if run.rank == 1:
            raise KeyError("out of luck")
    save(run, path, "files")


def recover(run: Run, path: Path) -> None:
    fail(run, path / "not this one")
    run.coordinator.recover()
    save(run, path, "files")


@pytest.mark.parametrize("moment", [leave_open, give_up, fail, recover])
def test_a_state_saved_inside_or_after_a_step_that_does_not_count_is_that_of_the_last_commit(
    moment: Callable[[Run, Path], None], tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    (tmp_path / "not this one").mkdir()

    def first(run: Run) -> None:
        run.train(range(SAVED_AT))
        moment(run, tmp_path)
        if moment is fail:
            run.coordinator.recover()

    def second(run: Run) -> None:
        load(run, tmp_path, "files")
        run.train(range(SAVED_AT, STEPS))

    before = in_processes(2, first)
    after = in_processes(2, second)
    assert before["losses"] + after["losses"] == uninterrupted["losses"]
    assert after["state"] == uninterrupted["state"]


def test_saving_and_loading_run_no_collective_and_commit_nothing(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> tuple[int, int]:
        run = Run(rank, world)
        run.train(range(SAVED_AT))
        before = run.coordinator.stats
        checkpoints.save(run.coordinator, tmp_path)
        dist.barrier()
        checkpoints.load(run.coordinator, tmp_path)
        after = run.coordinator.stats
        return (after.collectives - before.collectives, after.commits - before.commits)

    assert values(run_ranks(body, world=2)) == [(0, 0), (0, 0)]


# -- killed while saving --------------------------------------------------------------------------------------


def in_a_child(action: Callable[[], object], killed_at: int) -> bool:
    """Run `action` in a forked process that dies before the given line of the code that saves; False if it died.

    A line of a loop counts twice at most.
    """
    pid = os.fork()
    if pid == 0:
        lines = 0
        hits: dict[tuple[str, int], int] = {}
        files = {checkpoints.__file__, _state_file.__file__}

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_filename not in files:
                return None
            place = (frame.f_code.co_filename, frame.f_lineno)
            hits[place] = hits.get(place, 0) + (event == "line")
            if event == "line" and hits[place] <= 2:
                lines += 1
                if lines == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_line_of_its_save_leaves_one_whole_save_or_the_other(
    victim: int, tmp_path: Path
) -> None:
    """Saves of steps 1 and 2 lie there, that of step 3 is cut short; a load finds 3 if whole, else 2."""

    def body(rank: int, world: int) -> tuple[int, dict[int, int], int]:
        run = Run(rank, world)
        states = {}
        for step in (1, 2, 3):
            run.train(range(step, step + 1))
            dist.barrier()
            if step < 3:
                checkpoints.save(run.coordinator, tmp_path / "before")
            state = bits(run.coordinator.state_dict())
            parts: list[Any] = [None] * world
            dist.all_gather_object(parts, state)
            states[step] = {key: value for part in parts for key, value in part.items()}
        found: dict[int, int] = {}
        mended = 0
        for line in range(1, 1000):
            path = tmp_path / f"{line}"
            if rank == 0:
                shutil.copytree(tmp_path / "before", path)
            dist.barrier()
            survived = in_a_child(
                lambda path=path: checkpoints.save(run.coordinator, path), line if rank == victim else 0
            )
            votes: list[Any] = [None] * world
            dist.all_gather_object(votes, survived)
            read = checkpoints.read(path)
            generation = int(read["generation"])
            assert bits(read) == states[generation], line
            found[generation] = found.get(generation, 0) + 1
            if all(votes):
                assert generation == 3
                return line, found, mended
            dist.barrier()
            checkpoints.save(run.coordinator, path)
            dist.barrier()
            if rank == victim:
                mended += bits(checkpoints.read(path)) == states[3]
        raise AssertionError("the save has no end")

    results = values(run_ranks(body, world=2, timeout=100))
    lines, found, mended = results[victim]
    assert set(found) == {2, 3}, found
    assert lines > 40
    assert mended == lines - 1


def test_a_save_removes_only_what_no_load_would_choose(tmp_path: Path) -> None:
    def folders() -> list[int]:
        return sorted(int(folder.name.split("-")[1]) for folder in tmp_path.iterdir())

    coordinator = make()
    slot = coordinator.slot("a.input")
    seen = []
    for _ in range(4):
        with coordinator.step():
            record(slot, 1.0)
        checkpoints.save(coordinator, tmp_path)
        seen.append(folders())
    assert seen == [[1], [1, 2], [2, 3], [3, 4]]


def test_a_run_that_went_back_is_found_although_its_generation_is_lower(tmp_path: Path) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    early = None
    for value in (1.0, 2.0, 3.0):
        with coordinator.step():
            record(slot, value)
        early = early or coordinator.state_dict()
    checkpoints.save(coordinator, tmp_path)
    coordinator.load_state_dict(early)
    with coordinator.step():
        record(slot, 9.0)
    checkpoints.save(coordinator, tmp_path)
    state = checkpoints.read(tmp_path)
    assert int(state["generation"]) == 2
    assert state["slots"]["a.input"]["history"].tolist() == [-1.0, -1.0, 1.0, 9.0]


def test_another_state_of_the_same_step_cannot_be_mixed_into_a_save(tmp_path: Path) -> None:
    coordinator = make()
    slot = coordinator.slot("a.input")
    with coordinator.step():
        record(slot, 1.0)
    file = checkpoints.save(coordinator, tmp_path)
    assert file is not None
    before = file.read_bytes()
    assert checkpoints.save(coordinator, tmp_path) == file
    other = coordinator.state_dict()
    other["slots"]["a.input"]["scale"] *= 2
    coordinator.load_state_dict(other)
    with pytest.raises(ValueError, match="another one"):
        checkpoints.save(coordinator, tmp_path)
    assert file.read_bytes() == before


def test_two_coordinators_cannot_share_a_path(tmp_path: Path) -> None:
    for name, told in (("actor", None), ("critic", "'actor' but 'critic'")):
        coordinator = make(name=name)
        coordinator.freeze()
        if told is None:
            checkpoints.save(coordinator, tmp_path)
        else:
            with pytest.raises(ValueError, match=told):
                checkpoints.save(coordinator, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = make()
    coordinator.freeze()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save(coordinator, tmp_path)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    checkpoints.save(coordinator, tmp_path)
    assert int(checkpoints.read(tmp_path)["generation"]) == 0


def test_ranks_that_have_not_met_cannot_save(tmp_path: Path) -> None:
    with pytest.raises(f8.ScopeError, match="freeze"):
        checkpoints.save(make(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_without_state_writes_nothing_and_reads_nothing(tmp_path: Path) -> None:
    coordinator = make(f8.CurrentScaling())
    assert checkpoints.save(coordinator, tmp_path / "none") is None
    assert checkpoints.load(coordinator, tmp_path / "none") == 0
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_reduce_get_their_own_scales_back(tmp_path: Path) -> None:
    recipe = f8.DelayedScaling(amax_history_len=4, reduce_amax=False)

    def saved(rank: int, world: int) -> str:
        coordinator = make(recipe)
        slot = coordinator.slot("a.input")
        with coordinator.step():
            record(slot, 1.0 + rank)
        checkpoints.save(coordinator, tmp_path)
        return frozen(coordinator)

    def loaded(rank: int, world: int) -> str:
        coordinator = make(recipe)
        coordinator.slot("a.input")
        checkpoints.load(coordinator, tmp_path)
        return frozen(coordinator)

    before = values(run_ranks(saved, world=2))
    assert before[0] != before[1]
    assert values(run_ranks(loaded, world=2)) == before
    coordinator = make(recipe)
    coordinator.slot("a.input")
    with pytest.raises(ValueError, match="2 ranks but got 1"):
        checkpoints.load(coordinator, tmp_path)


# -- refusals -------------------------------------------------------------------------------------------------

RECIPE = f8.DelayedScaling(amax_history_len=4)


def columns_of(names: dict[str, float]) -> Columns:
    history = torch.full((4, len(names)), -1.0)
    history[-1] = torch.tensor(list(names.values()))
    warm = torch.ones(len(names), dtype=torch.bool)
    return Columns(list(names), history, torch.full((len(names),), 2.0), warm)


def write_save(top: Path, parts: list[dict[str, float]], **changes: Any) -> list[Path]:
    """A save as ranks write it, one part each, without any rank. Label fields may be changed for the last."""
    label = _state_file.Label(3, "ab12-3", 0, len(parts), "main", 1, checkpoints._recipe_fields(RECIPE), [])
    files = []
    for rank, part in enumerate(parts):
        last = changes if rank == len(parts) - 1 else {}
        own = dataclasses.replace(label, **{"rank": rank, "names": list(part), **last})
        folder = top / "generation-00000003-ab12-3"
        folder.mkdir(parents=True, exist_ok=True)
        files.append(folder / f"rank-{rank:05d}-of-{len(parts):05d}.safetensors")
        _state_file.write(files[-1], own, columns_of(part))
    return files


def loading(recipe: f8.Recipe = RECIPE) -> f8.ReductionGroupCoordinator:
    coordinator = make(recipe)
    for name in ("a.input", "b.input"):
        coordinator.slot(name)
    return coordinator


WHOLE = [{"a.input": 1.0, "both.input": 2.0}, {"b.input": 3.0, "both.input": 2.0}]


def test_a_load_takes_the_union_of_all_files(tmp_path: Path) -> None:
    write_save(tmp_path, WHOLE)
    slots = checkpoints.read(tmp_path)["slots"]
    assert {name: fields["history"][-1].item() for name, fields in slots.items()} == {
        "a.input": 1.0, "both.input": 2.0, "b.input": 3.0,
    }  # fmt: skip
    coordinator = loading()
    assert checkpoints.load(coordinator, tmp_path) == 3
    assert sorted(coordinator.state_dict()["slots"]) == ["a.input", "b.input"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"generation": 4}, "generation 4"),
        ({"moment": "cd-3"}, "cd-3"),
        ({"rank": 0}, "rank 0 of 2"),
        ({"world": 3}, "of 3"),
        ({"coordinator": "critic"}, "mixed"),
        ({"recipe": {}}, "mixed"),
    ],
)
def test_files_of_several_saves_are_not_mixed(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    files = write_save(tmp_path, WHOLE, **changes)
    coordinator = loading()
    before = frozen(coordinator)
    with pytest.raises(ValueError, match=f"{files[-1].name}.*{told}"):
        checkpoints.load(coordinator, tmp_path)
    assert frozen(coordinator) == before


def test_ranks_that_had_drifted_apart_are_noticed(tmp_path: Path) -> None:
    write_save(tmp_path, [WHOLE[0], {"b.input": 3.0, "both.input": 2.5}])
    with pytest.raises(ValueError, match=r"both\.input.*drifted apart"):
        checkpoints.load(loading(), tmp_path)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_file_is_named(gone: int, tmp_path: Path) -> None:
    write_save(tmp_path, WHOLE)[gone].unlink()
    with pytest.raises(ValueError, match=rf"complete save.*without ranks \[{gone}\]"):
        checkpoints.load(loading(), tmp_path)


def test_an_incomplete_save_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_save(tmp_path, WHOLE)
    newer = tmp_path / "generation-00000005-ab12-5"
    newer.mkdir()
    shutil.copy(next(tmp_path.glob("*-3/rank-00001*")), newer)
    with caplog.at_level(logging.WARNING, logger="fp8dist"):
        assert checkpoints.load(loading(), tmp_path) == 3
    assert "generation-00000005-ab12-5 without ranks [0]" in caplog.text


def test_a_generation_that_is_asked_for_is_loaded_or_refused(tmp_path: Path) -> None:
    write_save(tmp_path, WHOLE)
    assert checkpoints.load(loading(), tmp_path, generation=3) == 3
    with pytest.raises(ValueError, match=r"generation 4 but has generation-00000003"):
        checkpoints.load(loading(), tmp_path, generation=4)
    with pytest.raises(ValueError, match="nowhere expects a complete save but has none"):
        checkpoints.load(loading(), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (f8.DelayedScaling(amax_history_len=8), "amax_history_len: saved 4, now 8"),
        (f8.DelayedScaling(amax_history_len=4, fp8_format=f8.Format.E4M3), "fp8_format.*HYBRID.*E4M3"),
    ],
)
def test_a_recipe_that_the_state_does_not_fit_is_refused(
    recipe: f8.Recipe, told: str, tmp_path: Path
) -> None:
    write_save(tmp_path, WHOLE)
    with pytest.raises(ValueError, match=told):
        checkpoints.load(loading(recipe), tmp_path)


@pytest.mark.parametrize(
    "changes", [{"margin": 1}, {"idle": "hold"}, {"amax_compute_algo": "most_recent"}, {}]
)
def test_another_margin_or_rule_goes_on_and_says_so(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_save(tmp_path, WHOLE)
    with caplog.at_level(logging.WARNING, logger="fp8dist"):
        checkpoints.load(loading(f8.DelayedScaling(amax_history_len=4, **changes)), tmp_path)
    assert [key in caplog.text for key in changes] == [True] * len(changes)
    assert bool(caplog.text) == bool(changes)


@pytest.mark.parametrize("strict", [True, False])
def test_a_slot_that_was_not_saved_is_refused_or_starts_afresh(strict: bool, tmp_path: Path) -> None:
    write_save(tmp_path, WHOLE[:1])
    coordinator = loading()
    if strict:
        with pytest.raises(ValueError, match=r"b\.input"):
            checkpoints.load(coordinator, tmp_path)
        return
    checkpoints.load(coordinator, tmp_path, strict=False)
    slots = coordinator.state_dict()["slots"]
    assert [slots[name]["history"][-1].item() for name in ("a.input", "b.input")] == [1.0, -1.0]


def rewrite(file: Path, **changes: str) -> None:
    """Change the metadata of a file, with a fresh checksum where that is possible."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    metadata.pop("checksum")
    metadata |= changes
    save_file(tensors, file, {**metadata, "checksum": _state_file._checksum(metadata, tensors)})


def newer(file: Path) -> None:
    rewrite(file, version="2")


def weights(file: Path) -> None:
    save_file({"weight": torch.ones(2)}, file)


def other_format(file: Path) -> None:
    rewrite(file, format="theirs")


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps({"format": "fp8dist"}))


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def nonsense_label(file: Path) -> None:
    rewrite(file, names=json.dumps(3))


def a_name_too_few(file: Path) -> None:
    rewrite(file, names=json.dumps(["b.input"]))


def a_name_twice(file: Path) -> None:
    rewrite(file, names=json.dumps(["b.input", "b.input"]))


def a_name_that_is_no_text(file: Path) -> None:
    rewrite(file, coordinator=json.dumps(["main"]))


def tensor_missing(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in ("history", "scale")}
    metadata.pop("checksum")
    save_file(tensors, file, {**metadata, "checksum": _state_file._checksum(metadata, tensors)})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (newer, "newer fp8dist.*version is 2.*up to 1"),
        (weights, "another program wrote it"),
        (other_format, "another program wrote it"),
        (truncated, "cannot be read"),
        (empty, "cannot be read"),
        (pickled, "cannot be read"),
        (a_folder, "cannot be read"),
        (nonsense_label, "cannot be read"),
        (a_name_too_few, "cannot be read.*1 slots"),
        (a_name_twice, "cannot be read.*a name comes twice"),
        (a_name_that_is_no_text, "cannot be read.*coordinator"),
        (tensor_missing, "cannot be read.*warm"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_is_not_whole_and_ours_is_refused_by_name(
    rank: int, damage: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    file = write_save(tmp_path, WHOLE)[rank]
    damage(file)
    coordinator = loading()
    before = frozen(coordinator)
    with pytest.raises(ValueError, match=f"{file.name}.*{told}"):
        checkpoints.load(coordinator, tmp_path)
    assert frozen(coordinator) == before


@pytest.mark.parametrize("case", range(2))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_truncated_or_flipped_file_changes_what_is_loaded(
    case: int, data: st.DataObject, tmp_path: Path
) -> None:
    (file,) = write_save(tmp_path, [{"a.input": 1.0, "b.input": 2.0}])
    whole = bytearray(file.read_bytes())
    state = bits(checkpoints.read(tmp_path))
    if case == 0:
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        damaged = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(damaged)
    with loading() as coordinator:
        before = frozen(coordinator)
        try:
            checkpoints.load(coordinator, tmp_path)
        except ValueError:
            assert frozen(coordinator) == before
        else:
            assert bits(coordinator.state_dict()) == state


def test_no_byte_of_a_file_can_change_unnoticed(tmp_path: Path) -> None:
    (file,) = write_save(tmp_path, [{"a.input": 1.0, "b.input": 2.0}])
    whole = file.read_bytes()
    state = bits(checkpoints.read(tmp_path))
    refused = 0
    for i in range(len(whole)):
        damaged = bytearray(whole)
        damaged[i] ^= 1 << i % 8
        file.write_bytes(damaged)
        try:
            assert bits(checkpoints.read(tmp_path)) == state, i
        except ValueError:
            refused += 1
    assert refused > 0.9 * len(whole)


def test_loading_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_save(tmp_path, WHOLE)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert checkpoints.load(loading(), tmp_path) == 3
