"""One rank's state in one safetensors file: a label, three tensors, a checksum over both. No pickle.

The tensors are `history` [n, L], `scale` [n] and `warm` [n]; the label names the n slots. They are not a tensor per
slot, which takes a hundred times longer to write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as serialize

from ._slot_table import Columns

FORMAT = "fp8dist"
VERSION = 1


@dataclass(frozen=True)
class Label:
    """What a file says about itself."""

    generation: int
    moment: str
    """Names the save: equal in its files, and different in those of any other save."""
    rank: int
    world: int
    coordinator: str
    order: int
    """On rank 0: larger in later saves of a directory. Generations fall when a run goes back. Else 0."""
    recipe: dict[str, Any]
    names: list[str]

    def shared(self) -> dict[str, Any]:
        """What is equal in all files of a save."""
        own = ("rank", "order", "names")
        return {key: value for key, value in asdict(self).items() if key not in own}


class NotOurs(ValueError):
    """A file that is well but not for this code."""


def write(target: Path, label: Label, columns: Columns) -> None:
    """Make the file. Under its name it is whole, also after a crash of the machine."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(_encode(label, columns))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Put on the disk which files a folder has."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(file: Path) -> tuple[Label, Columns]:
    """Label and state, after a look at the checksum.

    Raises:
        ValueError: the file is damaged, foreign or newer; the message names it.
    """
    with _opened(file) as opened:
        metadata = _ours(file, opened.metadata())
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        if metadata.pop("checksum") != _checksum(metadata, tensors):
            raise ValueError("its checksum does not match its content")
        label = _label(metadata)
        _check_form(tensors, len(label.names))
        columns = Columns(label.names, tensors["history"].T, tensors["scale"], tensors["warm"])
    return label, columns


def read_label(file: Path) -> Label:
    """The label alone; neither tensors nor checksum are looked at.

    Raises:
        ValueError: see `read`.
    """
    with _opened(file) as opened:
        return _label(_ours(file, opened.metadata()))


def same_state(a: Columns, b: Columns) -> bool:
    """Whether both hold the same slots in the same order, with the same bits."""
    pairs = zip(_tensors(a).values(), _tensors(b).values(), strict=True)
    return list(a.names) == list(b.names) and all(
        x.shape == y.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs
    )


def _encode(label: Label, columns: Columns) -> bytes:
    tensors = _tensors(columns)
    metadata = {key: json.dumps(value, sort_keys=True) for key, value in asdict(label).items()}
    metadata |= {"format": FORMAT, "version": str(VERSION)}
    return serialize(tensors, {**metadata, "checksum": _checksum(metadata, tensors)})


def _tensors(columns: Columns) -> dict[str, torch.Tensor]:
    return {
        "history": columns.history.T.contiguous(),
        "scale": columns.scale.contiguous(),
        "warm": columns.warm.contiguous(),
    }


def _checksum(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _label(metadata: dict[str, str]) -> Label:
    values = {field.name: json.loads(metadata[field.name]) for field in fields(Label)}
    kinds = {"generation": int, "moment": str, "rank": int, "world": int, "coordinator": str, "order": int,
             "recipe": dict, "names": list}  # fmt: skip
    wrong = [name for name, kind in kinds.items() if type(values[name]) is not kind]
    if wrong or len(set(values["names"])) < len(values["names"]):
        raise ValueError(f"its label does not fit: {', '.join(wrong) or 'a name comes twice'}")
    return Label(**values)


def _check_form(tensors: dict[str, torch.Tensor], n: int) -> None:
    expected = {"history": (torch.float32, 2), "scale": (torch.float32, 1), "warm": (torch.bool, 1)}
    for name, (dtype, dims) in expected.items():
        value = tensors[name]
        if (value.dtype, value.dim(), value.shape[0]) != (dtype, dims, n):
            raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, for {n} slots")


def _ours(file: Path, metadata: dict[str, str] | None) -> dict[str, str]:
    if metadata is None or metadata.get("format") != FORMAT:
        raise NotOurs(
            f"{file} expects a file written by fp8dist but another program wrote it; check the path"
        )
    if (version := int(metadata["version"])) > VERSION:
        raise NotOurs(
            f"{file} expects a newer fp8dist: its format version is {version}, this one reads up to {VERSION}; upgrade"
        )
    return dict(metadata)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The open file; whatever goes wrong within becomes a `ValueError` that names it."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except NotOurs:
        raise
    except Exception as error:  # a parser of damaged bytes may raise anything
        raise ValueError(
            f"{file} expects a whole file of fp8dist but cannot be read ({type(error).__name__}: {error}); remove its "
            "folder to load the save before it"
        ) from error
