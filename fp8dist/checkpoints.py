"""A coordinator's state in files: one per rank, no pickle, no collective, and whole or not there after a crash.

    <path>/
      generation-<commits>-<moment>/        one save; the name is equal on all ranks
        rank-00000-of-00004.safetensors     the slots that rank 0 holds
        rank-00001-of-00004.safetensors     ...

A file appears under its name only when all of it is on the disk, and a save counts only when the files of all
ranks are there, so no barrier is needed. At its next save rank 0 removes what is older than the newest complete
one. Slots meet by name, so any number of ranks, split in any way, can load what any other has saved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from . import _state, _state_file
from ._slot_table import Columns
from ._state_file import Label
from .coordinator import ReductionGroupCoordinator
from .recipe import Recipe, _canonical

logger = logging.getLogger("fp8dist")

_SAVE = re.compile(r"generation-(\d+)-([0-9a-f]+-\d+)")
_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")
# A scale made for one FP8 format saturates, or flushes to zero, in the other; a history has one length.
_MUST_AGREE = ("fp8_format", "amax_history_len")


@dataclass(frozen=True)
class _Save:
    """One save as it lies on the disk."""

    folder: Path
    generation: int
    moment: str
    ranks: dict[int, Path]
    world: int
    """0 if no file is there, or files of several."""

    @property
    def run(self) -> str:
        """Equal in all saves of one run."""
        return self.moment.partition("-")[0]

    @property
    def missing(self) -> list[int]:
        """Ranks without a file."""
        return [rank for rank in range(self.world) if rank not in self.ranks]

    @property
    def complete(self) -> bool:
        """Whether every rank has written its file."""
        return self.world > 0 and not self.missing


def save(coordinator: ReductionGroupCoordinator, path: str | os.PathLike[str]) -> Path | None:
    """Write what this rank holds. Call it on every rank at the same point of the program; nobody waits.

    Inside a step it writes the last commit. The save is complete once the call has returned on all ranks.

    Args:
        coordinator: whose state; its ranks have met (after `freeze()` or a step).
        path: a directory on a file system that all ranks see, one for each coordinator. It is made if it is
            not there, and may hold earlier saves.

    Returns:
        The file of this rank; None for a recipe without state, which writes nothing.

    Raises:
        ScopeError: the ranks have not met, or amaxes wait for a `flush()`.
        ValueError: the directory belongs to another coordinator, or has another state of this moment.
        OSError: the file could not be written. The save stays incomplete; earlier ones are untouched.
    """
    if coordinator.recipe.stateless:
        return None
    state = coordinator.state_dict()
    generation, columns = _state.from_plain(state, list(state["slots"]), coordinator.recipe, strict=True)
    rank, world = coordinator.place
    moment, top = coordinator.moment(), Path(path)
    folder = top / f"generation-{generation:08d}-{moment}"
    target = folder / f"rank-{rank:05d}-of-{world:05d}.safetensors"
    if target.exists():
        if _state_file.same_state(_state_file.read(target)[1], columns):
            return target
        raise ValueError(
            f"{target} expects the state it was saved with but got another one, loaded since within the same step; "
            "run a step first, or save to another path"
        )
    order = _tidy(top, coordinator.name, moment) if rank == 0 else 0
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _state_file.sync_folder(top)
        _state_file.sync_folder(top.parent)
    names, recipe = list(columns.names), _recipe_fields(coordinator.recipe)
    label = Label(generation, moment, rank, world, coordinator.name, order, recipe, names)
    _state_file.write(target, label, columns)
    return target


def load(
    coordinator: ReductionGroupCoordinator,
    path: str | os.PathLike[str],
    *,
    generation: int | None = None,
    strict: bool = True,
) -> int:
    """Take over the newest complete save, or the newest complete one of a generation. Call it on every rank.

    Args:
        coordinator: its slots are declared (after `convert`).
        path: what `save` was given, by any number of ranks that held any split of the slots.
        generation: the commits that the save must have, as the model's checkpoint noted them.
        strict: every slot of this rank must be there; otherwise those that are not start afresh.

    Returns:
        The generation that was loaded; 0 for a recipe without state, which reads nothing.

    Raises:
        ValueError: no complete save, a damaged or foreign file, another FP8 format or history length, or what
            `load_state_dict` refuses. Nothing is changed.
        ScopeError: a scope is open.
    """
    recipe = coordinator.recipe
    if recipe.stateless:
        return 0
    chosen = _newest(Path(path), generation)
    rank, world = coordinator.place
    only = None
    if not getattr(recipe, "reduce_amax", True):  # then equal names have other scales on every rank
        if world != chosen.world:
            raise ValueError(
                f"{chosen.folder} expects {chosen.world} ranks but got {world}: with reduce_amax=False every rank has "
                "scales of its own; load with as many ranks as saved"
            )
        only = rank
    label, columns = _read_save(chosen, only)
    _check_recipe(chosen.folder, label.recipe, _recipe_fields(recipe))
    coordinator.load_state_dict(_state.to_plain(label.generation, columns), strict=strict)
    return label.generation


def read(path: str | os.PathLike[str], *, generation: int | None = None) -> dict[str, Any]:
    """The state of all ranks in the newest complete save, in the form of `state_dict()`. Needs no coordinator.

    Args:
        path: what `save` was given.
        generation: take the newest complete save of that generation.

    Raises:
        ValueError: no complete save, or a damaged or foreign file.
    """
    label, columns = _read_save(_newest(Path(path), generation), None)
    return _state.to_plain(label.generation, columns)


# -- which saves there are ------------------------------------------------------------------------------------


def _saves(top: Path) -> list[_Save]:
    """All saves in a directory, complete or not, by folder name."""
    found = []
    for folder in sorted(top.iterdir()) if top.is_dir() else ():
        named = _SAVE.fullmatch(folder.name)
        if named is None or not folder.is_dir():
            continue
        files = [(match, file) for file in folder.iterdir() if (match := _FILE.fullmatch(file.name))]
        worlds = {int(match[2]) for match, _ in files}
        world = worlds.pop() if len(worlds) == 1 else 0
        ranks = {int(match[1]): file for match, file in files}
        found.append(_Save(folder, int(named[1]), named[2], ranks, world))
    return found


def _newest(top: Path, generation: int | None) -> _Save:
    saves = _saves(top)
    wanted = [save for save in saves if generation in (None, save.generation)]
    broken = "; ".join(
        f"{save.folder.name} without ranks {save.missing[:16]}"
        if save.world
        else f"{save.folder.name} without files"
        for save in wanted
        if not save.complete
    )
    orders = {save.folder: _state_file.read_label(save.ranks[0]).order for save in wanted if save.complete}
    if not orders:
        what = "a complete save" if generation is None else f"a complete save of generation {generation}"
        got = broken or ", ".join(save.folder.name for save in saves) or "none"
        raise ValueError(f"{top} expects {what} but has {got}; check the path, and that every rank had saved")
    newest = max((save for save in wanted if save.complete), key=lambda save: orders[save.folder])
    if broken:
        logger.warning("loading %s; incomplete saves are passed over: %s", newest.folder, broken)
    return newest


def _tidy(top: Path, coordinator: str, moment: str) -> int:
    """Remove what no load would choose any more; return the order of the next save. Rank 0 only.

    What is older than a complete save has no writer left, since each rank writes its files one after the other.
    Nor has what an earlier run left without a file of rank 0.
    """
    saves = _saves(top)
    orders: dict[Path, int] = {}
    for save in saves:
        if 0 not in save.ranks:
            continue
        try:
            label = _state_file.read_label(save.ranks[0])
        except ValueError as error:  # a load will complain; a save goes on and leaves it alone
            logger.warning("while saving: %s", error)
            continue
        if label.coordinator != coordinator:
            raise ValueError(
                f"{top} expects saves of coordinator {label.coordinator!r} but {coordinator!r} saves there; give each "
                "coordinator a path of its own"
            )
        orders[save.folder] = label.order
    newest = max(
        (orders[save.folder] for save in saves if save.complete and save.folder in orders), default=0
    )
    run = moment.partition("-")[0]
    for save in saves:
        orphan = 0 not in save.ranks and save.run != run
        if orphan or orders.get(save.folder, newest) < newest:
            _remove(save)
    return 1 + max(orders.values(), default=0)


def _remove(save: _Save) -> None:
    """Rank 0's file goes last: as long as it is there, a removal that was cut short is taken up again."""
    logger.debug("removing the save %s", save.folder)
    first = save.ranks.get(0)
    for file in save.folder.iterdir():
        if file != first:
            file.unlink(missing_ok=True)
    if first is not None:
        first.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody has put something else there
        save.folder.rmdir()


# -- all files of a save --------------------------------------------------------------------------------------


def _read_save(save: _Save, only: int | None) -> tuple[Label, Columns]:
    """The union of the files by name, or one rank's; refuses files that contradict each other."""
    first: Label | None = None
    union: Columns | None = None
    for rank in range(save.world) if only is None else (only,):
        file = save.ranks[rank]
        label, columns = _state_file.read(file)
        first = first or label
        claimed = (label.generation, label.moment, label.world, label.rank)
        fits = union is None or len(columns.history) == len(union.history)
        expected = (save.generation, save.moment, save.world, rank)
        if label.shared() != first.shared() or claimed != expected or not fits:
            raise ValueError(
                f"{file} expects to belong to its folder but says it is rank {label.rank} of {label.world} of "
                f"generation {label.generation} ({label.moment}); files of several saves were mixed, load another one"
            )
        union = columns if union is None else _merged(file, union, columns)
    assert first is not None
    assert union is not None
    return first, union


def _merged(file: Path, union: Columns, columns: Columns) -> Columns:
    """The union and what is new; what both have must have the same bits."""
    position = {name: i for i, name in enumerate(union.names)}
    here = [i for i, name in enumerate(columns.names) if name in position]
    there = [position[columns.names[i]] for i in here]
    same = (
        (union.history[:, there].view(torch.int32) == columns.history[:, here].view(torch.int32)).all(0)
        & (union.scale[there] == columns.scale[here])
        & (union.warm[there] == columns.warm[here])
    )
    if not bool(same.all()):
        name = columns.names[here[int(same.int().argmin())]]
        raise ValueError(
            f"{file} expects the state of slot {name!r} that other ranks saved but has another one; the ranks had "
            "drifted apart, load another save"
        )
    new = [i for i, name in enumerate(columns.names) if name not in position]
    if not new:
        return union
    names = [columns.names[i] for i in new]
    added = Columns(names, columns.history[:, new], columns.scale[new], columns.warm[new])
    return _state.joined([union, added])


def _recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON data, equal in every process that has an equal one."""
    content = {field.name: _canonical(getattr(recipe, field.name)) for field in fields(recipe)}
    plain: dict[str, Any] = json.loads(json.dumps({"class": type(recipe).__qualname__, **content}))
    return plain


def _check_recipe(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    differing = sorted(key for key in {*saved, *own} if saved.get(key) != own.get(key))
    listed = "; ".join(f"{key}: saved {saved.get(key)}, now {own.get(key)}"[:200] for key in differing)
    if any(key in differing for key in _MUST_AGREE):
        raise ValueError(
            f"{folder} expects the recipe it was saved with but got another one ({listed}); keep "
            f"{' and '.join(_MUST_AGREE)}, or start afresh"
        )
    if differing:
        logger.warning("%s goes on with another recipe than it was saved with: %s", folder, listed)
