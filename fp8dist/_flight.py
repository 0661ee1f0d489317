"""What one rank did last: a ring of events, its file, and the reader of that file.

Kinds of events and their details, as the coordinator and the schedules record them:

    connect   communicator, layout, recipe     a communicator was built (digests as hex)
    open      place                            the outermost scope opens
    request                                    the first request of a scope
    chunk     action, stage, microbatch        a schedule runs F, B, W or I
    enter     generation, layout, active,      the exit's collective starts. The digests of scales have one
              "scales of <ranks>"              field for each set of ranks that share slots
    commit    generation, digest, wait_s       the scales moved
    abort     what, place                      they did not; without an `enter` before it this rank gave up
    grow, recover (generation), close (scopes)
    error     type, message                    an exception left the scope or the collective

`serial` is the number of the scope, the same on all ranks; 0 where there is none. After a recovery it is the
last one that the ranks agree to have used up. `tag` is the caller's step tag.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import quote

logger = logging.getLogger("fp8dist")

FORMAT = 1
FORMAT_KEY = "fp8dist_flight"
PATTERN = "flight-*.jsonl"
BLOCKED_SECONDS = 0.5  # after which a signal's handler is taken to be held up
LONGEST_NAME = 120  # characters of an escaped coordinator name; file systems stop at 255 for all of it

Detail = int | float | str


class Event(NamedTuple):
    """One thing that one rank did."""

    time: float
    """Seconds since the epoch, `time.time()`: comparable between hosts as far as their clocks agree."""
    elapsed: float
    """Seconds of `time.monotonic()`: comparable within one process only, but never set back."""
    kind: str
    serial: int
    tag: int | str | None
    detail: dict[str, Detail]


class FlightRecorder:
    """The newest events of one coordinator on one rank. Any thread may record; a signal handler may dump.

    Args:
        coordinator: its name; with the rank it names the file, so it must differ between groups that write
            into one directory.
        rank: of this process, in the coordinator's group.
        world: number of ranks in the group.
        capacity: events that are kept; older ones are dropped and counted.

    Raises:
        ValueError: the rank is outside the group, or nothing would be kept.
    """

    def __init__(self, coordinator: str, rank: int, world: int, capacity: int = 4096) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"a flight recorder expects a rank in [0, {world}) but got {rank}")
        if capacity < 1:
            raise ValueError(f"a flight recorder expects a capacity >= 1 but got {capacity}")
        self.coordinator = coordinator
        self.rank = rank
        self.world = world
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self._recorded = 0
        # Reentrant, since a signal handler may dump while its own thread is inside `record`.
        self._lock = threading.RLock()

    def record(self, kind: str, serial: int = 0, tag: int | str | None = None, **detail: Detail) -> None:
        """Keep one event, about a microsecond.

        Args:
            kind: one of the kinds above; unknown ones are kept, too.
            serial: number of the scope, 0 if there is none.
            tag: the step tag.
            **detail: plain numbers and short strings.
        """
        with self._lock:
            # A plain tuple: the named one costs as much as everything else here.
            self._ring.append((time.time(), time.monotonic(), kind, serial, tag, detail))
            self._recorded += 1

    def last(self, kinds: Sequence[str] | None = None) -> Event | None:
        """The newest event that is kept, or the newest one of these kinds; None if there is none."""
        with self._lock:
            for event in reversed(self._ring):
                if kinds is None or event[2] in kinds:
                    return Event(*event)
        return None

    def events(self) -> list[Event]:
        """A copy of what is kept, oldest first."""
        return [Event(*event) for event in self._snapshot()[0]]

    def dump(self, directory: Path | str, reason: str) -> Path:
        """Write the events to `flight-<coordinator>-rank<rank>.jsonl`; an earlier dump is replaced as a whole.

        A file system that refuses is logged, not raised: the error that led here matters more.

        Args:
            directory: made if it is missing. Use a fresh one for every run.
            reason: why the dump is made, for the reader.

        Returns:
            The path of the file, also where it could not be written.
        """
        path = Path(directory) / file_name(self.coordinator, self.rank)
        events, recorded = self._snapshot()
        header = {
            FORMAT_KEY: FORMAT,
            "coordinator": self.coordinator,
            "rank": self.rank,
            "world": self.world,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reason": reason,
            "dropped": recorded - len(events),
            "time": time.time(),
            "elapsed": time.monotonic(),
        }
        lines = [header, *(dict(zip(Event._fields, event, strict=True)) for event in events)]
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
        try:
            _replace(path, text)
        except OSError as error:
            logger.warning(
                "the flight recorder of coordinator %r on rank %d could not write %s: %s",
                self.coordinator, self.rank, path, error,
            )  # fmt: skip
        return path

    def _snapshot(self) -> tuple[list[tuple[Any, ...]], int]:
        with self._lock:
            return list(self._ring), self._recorded


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old or the new one, and never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A random name, since a signal handler may dump in the middle of this very function.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text, encoding="ascii")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def file_name(coordinator: str, rank: int) -> str:
    """The name of a dump: different for different coordinators and ranks, and fit for any file system."""
    escaped = quote(coordinator, safe=" @+=,", errors="surrogatepass")
    if len(escaped) > LONGEST_NAME:
        digest = hashlib.sha256(escaped.encode()).hexdigest()[:16]
        escaped = f"{escaped[:LONGEST_NAME]}~{digest}"
    return f"flight-{escaped}-rank{rank}.jsonl"


# -- reading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dump:
    """One file, read.

    Attributes:
        path: where it came from.
        coordinator: name of the coordinator.
        rank: who wrote it.
        world: number of ranks in its group.
        host: machine.
        pid: process on that machine.
        reason: why it was written.
        dropped: older events that the ring had lost.
        time: `time.time()` when it was written.
        elapsed: `time.monotonic()` at the same moment.
        events: oldest first.
        truncated: the last line was cut off, so the newest events are lost.
    """

    path: Path
    coordinator: str
    rank: int
    world: int
    host: str
    pid: int
    reason: str
    dropped: int
    time: float
    elapsed: float
    events: list[Event]
    truncated: bool


_NUMBER = (int, float)
_WORDS = {
    int: "a whole number", float: "a number", str: "a string", dict: "an object", type(None): "null",
}  # fmt: skip
_HEADER = {
    "coordinator": str, "rank": int, "world": int, "host": str, "pid": int, "reason": str, "dropped": int,
    "time": _NUMBER, "elapsed": _NUMBER,
}  # fmt: skip
_EVENT = {
    "time": _NUMBER, "elapsed": _NUMBER, "kind": str, "serial": int, "tag": (int, str, type(None)), "detail": dict,
}  # fmt: skip


def read_dump(path: Path) -> Dump:
    """Read one dump. A last line that was cut off is left out.

    Raises:
        ValueError: the file cannot be read, is none of ours, or is damaged; names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a flight recorder dump but it cannot be read: {error}") from None
    # Not splitlines(), which splits at more characters than the writer ends lines with.
    *lines, rest = text.split("\n")
    truncated = False
    if rest:
        try:
            json.loads(rest)
            lines.append(rest)
        except ValueError:
            truncated = True
    if not lines:
        raise _unfit(path, 1, "a header", "an empty file" if not text else "a line without an end")
    header = _parse(path, 1, lines[0])
    if FORMAT_KEY not in header:
        raise _unfit(path, 1, f"a header with {FORMAT_KEY!r}", lines[0])
    if header[FORMAT_KEY] != FORMAT:
        version = header[FORMAT_KEY]
        raise _unfit(
            path, 1, f"format {FORMAT}", f"format {version!r}; read it with the fp8dist that wrote it"
        )
    fields = _checked(path, 1, header, _HEADER)
    if not 0 <= fields["rank"] < fields["world"]:
        raise _unfit(path, 1, f"a rank in [0, {fields['world']})", str(fields["rank"]))
    events = [
        Event(**_checked(path, number, _parse(path, number, line), _EVENT))
        for number, line in enumerate(lines[1:], start=2)
    ]
    return Dump(path=path, events=events, truncated=truncated, **fields)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise _unfit(path, number, "a JSON object", line) from None
    if not isinstance(value, dict):
        raise _unfit(path, number, "a JSON object", line)
    return value


def _checked(path: Path, number: int, found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The expected fields, of the expected types; others, of later releases, are left out."""
    for name, types in expected.items():
        if name not in found:
            raise _unfit(path, number, f"the field {name!r}", ", ".join(found) or "no field")
        if not isinstance(found[name], types) or isinstance(found[name], bool):
            words = " or ".join(_WORDS[t] for t in (types if isinstance(types, tuple) else (types,)))
            raise _unfit(path, number, f"the field {name!r} to be {words}", repr(found[name]))
    return {name: found[name] for name in expected}


def _unfit(path: Path, number: int, expected: str, got: str) -> ValueError:
    shown = got if len(got) <= 80 else f"{got[:80]}..."
    return ValueError(f"{path}, line {number}: expected {expected} but got {shown}")


# -- on a signal ------------------------------------------------------------------------------------------


def dump_on_signal(
    recorders: Callable[[], Iterable[FlightRecorder]],
    directory: Path | str,
    signum: int = signal.SIGUSR2,
) -> Callable[[], None]:
    """Dump whenever this process gets a signal; a handler that was there before is called afterwards.

    Python runs handlers between two bytecodes of the main thread, which may be blocked in native code for long (in a
    receive of the schedule, say). So a thread waits beside it, and dumps if the handler has not done so after half a
    second. It needs Python's wakeup file descriptor; where that is taken (an asyncio loop has it), the dump waits.

    Args:
        recorders: gives the recorders to dump; called at each signal.
        directory: where the files go.
        signum: the signal.

    Returns:
        A function that puts the previous handler back; call it on the main thread. It does nothing if somebody
        has installed another handler since.

    Raises:
        ValueError: not called on the main thread, or a signal that cannot be handled.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"dump_on_signal expects the main thread but got {threading.current_thread().name!r}; Python lets no "
            "other thread handle signals: call it where the program starts"
        )
    handled = threading.Event()

    def dump(reason: str) -> None:
        try:
            for recorder in recorders():
                recorder.dump(directory, reason)
        except Exception:
            # It would surface at an arbitrary line of the training program.
            logger.exception("no flight recorder dump could be made on signal %d", signum)

    def handle(number: int, frame: FrameType | None) -> None:
        handled.set()
        dump(f"signal {signal.Signals(number).name}")
        if callable(previous):
            previous(number, frame)

    try:
        previous = signal.getsignal(signum)
        signal.signal(signum, handle)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"dump_on_signal expects a signal that can be handled but got {signum}: {error}"
        ) from error
    stop = _watch_for(signum, handled, dump)

    def restore() -> None:
        if signal.getsignal(signum) is handle:
            # None says that native code had installed the handler; Python cannot name it.
            signal.signal(signum, signal.SIG_DFL if previous is None else previous)
        stop()

    return restore


def _watch_for(signum: int, handled: threading.Event, dump: Callable[[str], None]) -> Callable[[], None]:
    """Dump on a thread where the handler does not get to run; returns what ends that thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    taken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if taken != -1:
        signal.set_wakeup_fd(taken)
        os.close(reading)
        os.close(writing)
        return lambda: None

    def watch() -> None:
        while numbers := os.read(reading, 64):
            if signum in numbers and not handled.wait(BLOCKED_SECONDS):
                dump(
                    f"signal {signal.Signals(signum).name}, while the main thread was blocked in native code"
                )
            handled.clear()
        os.close(reading)

    threading.Thread(target=watch, name="fp8dist-signal", daemon=True).start()

    stopped = threading.Event()

    def stop() -> None:
        if stopped.is_set():
            return
        stopped.set()
        now = signal.set_wakeup_fd(-1)
        if now != writing and now != -1:  # somebody has taken it since
            signal.set_wakeup_fd(now)
        os.close(writing)  # ends the thread

    return stop
