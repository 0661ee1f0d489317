"""Records as lines of a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ._record import Record

PATTERN = "monitor-rank*.jsonl"


class JsonLines:
    """Appends every record as one JSON line to `<run_dir>/monitor-rank<R>.jsonl`; `fp8dist report` reads them.

    Each line is written at once and as a whole, so a run that dies keeps what it has. A run that resumes goes on in the
    same file. Give each coordinator a directory of its own.

    Args:
        run_dir: made when the first record comes.

    Raises:
        ValueError: `run_dir` is no path, or a file has that name.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = checked_directory("run_dir", run_dir)
        self._file: int | None = None

    def write(self, record: Record) -> None:
        """Append one line.

        Raises:
            OSError: the file system refuses.
        """
        if self._file is None:
            self._file = self._open(record["rank"])
        data = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self._write(self._file, data)

    def _open(self, rank: int) -> int:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / PATTERN.replace("*", str(rank))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(file).st_size
        if size > 0 and os.pread(file, 1, size - 1) != b"\n":
            self._write(file, b"\n")  # the run before this one died in the middle of a line
        return file

    @staticmethod
    def _write(file: int, data: bytes) -> None:
        while data:
            data = data[os.write(file, data) :]

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def checked_directory(what: str, path: object) -> Path:
    """The path of a directory that may have to be made.

    Raises:
        ValueError: it is no path, or a file has that name.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ValueError(f"{what} expects the path of a directory but got {path!r}")
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{what} expects the path of a directory but got the file {directory}")
    return directory
