"""Checkpoints: written beside the old ones, renamed when whole, and read by any number of ranks.

<checkpoint_dir>/
  step-00000010/          complete: it got its name when all of it was on the disk
    .metadata             where which part of which tensor lies
    __0_0.distcp          tensors of rank 0
    run.json              step and configuration
  step-00000020.partial/  being written, or left by a run that was killed there
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from .config import Ranks, TrainConfig
from .experts import pieces
from .options import plain

if TYPE_CHECKING:
    import fp8dist as f8

KEPT = 2
"""Complete checkpoints that stay: the newest, and the one before it in case that a disk fails."""

_NAME = re.compile(r"step-(\d{8,})")
_RUN = "run.json"
# What gives the model its shape; a run can go on with any other value of everything else.
_SHAPE = ("layers", "hidden", "heads", "seq_len", "experts", "moe_every", "top_k")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk.

    Attributes:
        path: its folder.
        step: optimizer steps behind it, which is the number of the step to go on with.
        config: the run's values when it was written.
    """

    path: Path
    step: int
    config: Mapping[str, Any]


def find_start(config: TrainConfig, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint that a run goes on from; None to start at step 0.

    A launcher that starts all processes anew after a failure repeats the command line, so then the run's own newest
    checkpoint counts, whatever `--resume` says about the first start.

    Raises:
        ValueError: there is none where one is asked for, it is of another model, or the run would overwrite others.
    """
    complete = list_complete(config.checkpoints)
    if complete and (config.resume == "auto" or (ranks.restarts and config.checkpoint_every)):
        start = read_checkpoint(complete[-1])
    elif config.resume in ("auto", "never"):
        start = None
    else:
        start = read_checkpoint(Path(config.resume))
    first = start.step if start else 0
    newer = [path for path in complete if step_of(path) > first]
    if newer and config.checkpoint_every:
        raise ValueError(
            f"expected no checkpoints after step {first} in {config.checkpoints} with --resume {config.resume} but got "
            f"{newer[-1].name}; go on from it (--resume auto), remove it, or name another --checkpoint-dir"
        )
    if start:
        _check_fits(config, start)
    return start


def _check_fits(config: TrainConfig, start: Checkpoint) -> None:
    own, was, names = plain(config), start.config, [*_SHAPE]
    if config.precision == was.get("precision") == "fp8":
        names.append("amax_history_len")  # a window of another length is another recipe
    for name in names:
        if own[name] != was.get(name):
            raise ValueError(
                f"expected --{name.replace('_', '-')} {was.get(name)}, as in the checkpoint {start.path}, but got "
                f"{own[name]}; take its value, or start a new run with --resume never and another --run-dir"
            )
    if start.step > config.steps:
        raise ValueError(
            f"expected --steps to be at least {start.step}, the step of the checkpoint {start.path}, but got "
            f"{config.steps}"
        )


def list_complete(directory: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    folders = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in folders if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.partition("-")[2])


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what a checkpoint is of.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    try:
        run = json.loads((path / _RUN).read_text(encoding="utf-8"))
        return Checkpoint(path, run["step"], run["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a complete checkpoint of this program at {path} but got {type(error).__name__}: {error}; "
            "name one of the step-... folders of a --checkpoint-dir"
        ) from None


class RunState:
    """All that a run needs to go on: weights, moments, scales and random numbers, as tensors by their names."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.AdamW,
        coordinator: f8.ReductionGroupCoordinator | None,
        ranks: Ranks,
        first_expert: int = 0,
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.coordinator = coordinator
        self.ranks = ranks
        self.first_expert = first_expert

    def tensors(self) -> dict[str, Any]:
        """The state in the form of `torch.distributed.checkpoint`; tensors are views, so that a load fills them."""
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            for part, value in pieces(name, parameter, parameter.detach(), self.first_expert).items():
                weights[part] = value
            for key, moment in self._moments(parameter).items():
                if key == "step":  # a number, equal for all experts
                    moments[f"{name}.{key}"] = moment
                    continue
                for part, value in pieces(name, parameter, moment, self.first_expert).items():
                    moments[f"{part}.{key}"] = value
        state: dict[str, Any] = {
            "model": weights,
            "optimizer": moments,
            "rng": {str(self.ranks.rank): torch.get_rng_state()},
        }
        return state | ({"fp8": self.coordinator} if self.coordinator else {})

    def _moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """AdamW's state of a parameter; before the first step it is what AdamW would begin with."""
        state = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return dict(state)


class Checkpoints:
    """Writes the checkpoints of a run. Every rank calls the same methods."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks

    def save(self, step: int, state: RunState) -> None:
        """Write a checkpoint; it appears under its name in one instant, when it is whole. A collective."""
        path = self.config.checkpoints / f"step-{step:08d}"
        partial = path.with_suffix(".partial")
        if self.ranks.rank == 0:
            # Nobody else writes before rank 0 has planned with all ranks who writes what.
            _clear(self.config.checkpoints, keep=None)
            partial.mkdir(parents=True, exist_ok=True)
        with _quiet_dcp():
            dcp.save(
                state.tensors(),
                storage_writer=dcp.FileSystemWriter(partial, sync_files=True),
                no_dist=not dist.is_initialized(),
            )
        if self.ranks.rank == 0:
            run = {"step": step, "config": plain(self.config)}
            write_synced(partial / _RUN, json.dumps(run, indent=2) + "\n")
            sync_folder(partial)
            partial.rename(path)
            sync_folder(path.parent)
            _clear(self.config.checkpoints, keep=KEPT)


def load(start: Checkpoint, state: RunState) -> None:
    """Fill a run's state from a checkpoint of any number of ranks. A collective."""
    reader = SafeReader(start.path)
    held = reader.read_metadata().state_dict_metadata
    tensors = state.tensors()
    # Another number of ranks, or the first FP8 steps of a run that began in high precision.
    tensors["rng"] = {rank: value for rank, value in tensors["rng"].items() if f"rng.{rank}" in held}
    if not any(name.startswith("fp8.") for name in held):
        tensors.pop("fp8", None)
    with _quiet_dcp():
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    for value in tensors["rng"].values():
        torch.set_rng_state(value)


class SafeReader(dcp.FileSystemReader):
    """Reads `.metadata`, a pickle, without running anything that it might hold. Tensors never were pickles."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read where which part of which tensor lies.

        Raises:
            ValueError: the file holds something that no checkpoint of this program holds.
        """
        content = (Path(self.path) / ".metadata").read_bytes()
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (
            (module == "torch.distributed.checkpoint.metadata" and name in _METADATA_CLASSES)
            or (module, name)
            in (("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"))
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
            or (module, name) == ("torch.serialization", "_get_layout")
            or (module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"))
        )
        if not known:
            raise ValueError(
                f"expected a checkpoint of tensors but its .metadata names {module}.{name}; it is not of this program"
            )
        return super().find_class(module, name)


# Not among them: the class for values that are no tensors, which would be unpickled when they are read.
_METADATA_CLASSES = (
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


def _clear(directory: Path, *, keep: int | None) -> None:
    """Remove what a killed run left, and of the complete checkpoints all but the newest `keep`."""
    if keep is not None:
        for old in list_complete(directory)[:-keep]:
            old.rename(old.with_suffix(".partial"))  # so that half of one never passes for one
    for partial in directory.glob("step-*.partial"):
        shutil.rmtree(partial)


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        _sync(file)


def _sync(file: IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring a folder's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _quiet_dcp() -> Iterator[None]:
    """A single process is meant to be one; no need to warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
