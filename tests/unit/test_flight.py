"""The ring keeps the newest events in order, and a dump is read back as it was written, or refused by line."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8dist import _flight
from fp8dist._flight import Event, FlightRecorder, dump_on_signal, file_name, read_dump

ANY_TEXT = st.text(
    st.characters(exclude_categories=()), max_size=20
)  # with NUL, line ends and lone surrogates
NAMES = ANY_TEXT.filter(lambda name: name and "/" not in name)
KEYS = st.text(string.ascii_lowercase + " -0123456789", min_size=1, max_size=20).filter(
    lambda key: key not in ("self", "kind", "serial", "tag")
)
TAGS = st.none() | st.integers(-(2**61), 2**61 - 1) | ANY_TEXT
DETAILS = st.dictionaries(KEYS, st.integers() | st.floats(allow_nan=False) | ANY_TEXT, max_size=4)
EVENTS = st.lists(st.tuples(ANY_TEXT, st.integers(0, 2**40), TAGS, DETAILS), max_size=6)


# -- the ring ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "recorded"), [(1, 3), (5, 3), (5, 5), (5, 12), (4096, 10)])
def test_the_newest_events_stay_in_order(capacity: int, recorded: int) -> None:
    recorder = FlightRecorder("main", 0, 1, capacity)
    for serial in range(recorded):
        recorder.record("open", serial)
    kept = [event.serial for event in recorder.events()]
    assert kept == list(range(recorded))[-capacity:]


def test_threads_lose_no_event_and_each_stays_in_its_order(tmp_path: Path) -> None:
    per_thread, threads, capacity = 500, 4, 700
    recorder = FlightRecorder("main", 0, 1, capacity)
    start = threading.Barrier(threads)

    def work(name: int) -> None:
        start.wait(timeout=10)
        for i in range(per_thread):
            recorder.record("chunk", serial=i, tag=name)

    workers = [threading.Thread(target=work, args=(name,)) for name in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        recorder.events()  # reading does not disturb writing
    for worker in workers:
        worker.join(timeout=10)
    dump = read_dump(recorder.dump(tmp_path, "test"))
    assert len(dump.events) == capacity
    assert dump.dropped == threads * per_thread - capacity
    assert [e.elapsed for e in dump.events] == sorted(e.elapsed for e in dump.events)
    for name in range(threads):
        serials = [e.serial for e in dump.events if e.tag == name]
        assert serials == list(range(per_thread))[per_thread - len(serials) :]


def test_last_finds_the_newest_event_of_the_asked_kinds() -> None:
    recorder = FlightRecorder("main", 0, 1)
    assert recorder.last() is None
    for serial, kind in enumerate(["open", "enter", "commit", "open", "chunk"]):
        recorder.record(kind, serial, tag=10 * serial, stage=serial)
    assert recorder.last() == recorder.events()[-1]
    found = recorder.last(["commit", "enter"])
    assert found is not None
    assert found[2:] == ("commit", 2, 20, {"stage": 2})
    assert recorder.last(["close"]) is None


def test_both_clocks_are_those_of_the_moment() -> None:
    recorder = FlightRecorder("main", 0, 1)
    before = (time.time(), time.monotonic())
    recorder.record("open")
    after = (time.time(), time.monotonic())
    event = recorder.events()[0]
    assert before[0] <= event.time <= after[0]
    assert before[1] <= event.elapsed <= after[1]


@pytest.mark.parametrize(("rank", "world", "capacity"), [(1, 1, 8), (-1, 2, 8), (0, 0, 8), (0, 1, 0)])
def test_a_recorder_that_could_not_work_is_refused(rank: int, world: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="a flight recorder expects"):
        FlightRecorder("main", rank, world, capacity)


# -- the file ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(name=NAMES, reason=ANY_TEXT, events=EVENTS)
def test_a_dump_reads_back_what_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, name: str, reason: str, events: list[Any]
) -> None:
    recorder = FlightRecorder(name, 2, 3, capacity=4)
    for kind, serial, tag, detail in events:
        recorder.record(kind, serial, tag, **detail)
    path = recorder.dump(tmp_path_factory.mktemp("dump"), reason)
    dump = read_dump(path)
    assert dump.events == recorder.events()
    assert [type(e.tag) for e in dump.events] == [type(tag) for _, _, tag, _ in events[-4:]]
    assert (dump.coordinator, dump.rank, dump.world, dump.reason) == (name, 2, 3, reason)
    assert dump.dropped == max(0, len(events) - 4)
    assert (dump.pid, dump.truncated) == (os.getpid(), False)
    assert os.listdir(path.parent) == [path.name]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, st.integers(0, 20)), min_size=2, max_size=2, unique=True))
@example([("\ud800", 0), ("\ud801", 0)])
@example([("a", 10), ("a-rank1", 0)])
def test_different_writers_have_different_files(writers: list[tuple[str, int]]) -> None:
    first, second = (file_name(*writer) for writer in writers)
    assert first != second
    assert len(first) < 200
    assert set(first) <= set(string.ascii_letters + string.digits + "-_.~% @+=,")


def test_long_names_are_cut_and_stay_different() -> None:
    names = ["x" * 400 + end for end in "ab"] + ["\N{SNOWMAN}" * 200]
    files = {file_name(name, 0) for name in names}
    assert len(files) == 3
    assert all(len(file) < 200 for file in files)


def test_a_later_dump_replaces_the_earlier_one_as_a_whole(tmp_path: Path) -> None:
    recorder = FlightRecorder("main", 0, 1, capacity=100)
    for serial in range(100):
        recorder.record("open", serial)
    recorder.dump(tmp_path, "first")
    recorder = FlightRecorder("main", 0, 1)
    recorder.record("close")
    dump = read_dump(recorder.dump(tmp_path, "second"))
    assert (dump.reason, [e.kind for e in dump.events]) == ("second", ["close"])


@pytest.mark.parametrize("refuses", ["the directory", "the disk"])
def test_a_dump_that_cannot_be_written_is_logged_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    recorder = FlightRecorder("main", 0, 1)
    old = recorder.dump(tmp_path, "old").read_bytes()
    directory = tmp_path
    if refuses == "the directory":
        directory = tmp_path / "flight-main-rank0.jsonl" / "below"  # a file is no directory
    else:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(_flight.os, "replace", full)
    with caplog.at_level(logging.WARNING, "fp8dist"):
        meant = recorder.dump(directory, "new")
    assert meant == directory / "flight-main-rank0.jsonl"
    assert str(meant) in caplog.text
    assert os.listdir(tmp_path) == ["flight-main-rank0.jsonl"]
    assert (tmp_path / "flight-main-rank0.jsonl").read_bytes() == old


def test_a_value_that_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    recorder = FlightRecorder("main", 0, 1)
    recorder.record("error", place=Path("train.py"))  # type: ignore[arg-type]
    assert read_dump(recorder.dump(tmp_path, "x")).events[0].detail == {"place": "train.py"}


# -- files that are cut off, damaged or foreign -------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    recorder = FlightRecorder("main", 1, 2)
    for serial in range(3):
        recorder.record("open", serial, tag=serial, place="train.py:1")
    return recorder.dump(tmp_path, "x")


def test_a_file_cut_anywhere_gives_its_whole_lines(written: Path) -> None:
    data = written.read_bytes()
    starts = [0] + [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(starts[1], len(data) + 1, 7):
        written.write_bytes(data[:cut])
        dump = read_dump(written)
        whole = max(i for i, start in enumerate(starts) if start <= cut)
        at_end = cut + 1 in starts  # only the line end is missing
        assert [e.serial for e in dump.events] == list(range(whole - 1 + at_end))
        assert dump.truncated is (cut not in starts and not at_end)


def _edit(line: int, **change: Any) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        lines = data.split(b"\n")
        value = {k: v for k, v in (json.loads(lines[line - 1]) | change).items() if v != "absent"}
        lines[line - 1] = json.dumps(value).encode()
        return b"\n".join(lines)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda _: b"", ", line 1: expected a header but got an empty file"),
        (lambda data: data[:30], ", line 1: expected a header but got a line without an end"),
        (lambda _: b"hello\n", ", line 1: expected a JSON object but got hello"),
        (lambda _: b"[1]\n", ", line 1: expected a JSON object but got [1]"),
        (lambda _: b'{"ph": "X"}\n', ", line 1: expected a header with 'fp8dist_flight' but got"),
        (lambda _: b"\xff\xfe\x00", "cannot be read"),
        (lambda data: data.replace(b'{"time"', b'{"ti', 2), ", line 2: expected a JSON object but got"),
        (_edit(1, fp8dist_flight=2), ", line 1: expected format 1 but got format 2"),
        (_edit(1, rank=2), ", line 1: expected a rank in [0, 2) but got 2"),
        (_edit(1, host="absent"), ", line 1: expected the field 'host' but got fp8dist_flight, "),
        (_edit(1, world="2"), ", line 1: expected the field 'world' to be a whole number but got '2'"),
        (_edit(3, kind="absent"), ", line 3: expected the field 'kind' but got time, "),
        (_edit(3, serial=True), ", line 3: expected the field 'serial' to be a whole number but got True"),
        (_edit(4, time=None), ", line 4: expected the field 'time' to be a whole number or a number but got None"),
    ],
)  # fmt: skip
def test_what_is_no_dump_is_refused_with_file_and_line(
    written: Path, edit: Callable[[bytes], bytes], says: str
) -> None:
    written.write_bytes(edit(written.read_bytes()))
    with pytest.raises(ValueError) as caught:
        read_dump(written)
    assert str(written) in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_dump(tmp_path / "flight-main-rank0.jsonl")


def test_fields_of_later_releases_are_left_out(written: Path) -> None:
    before = read_dump(written)
    written.write_bytes(_edit(1, colour="red")(_edit(2, colour="red")(written.read_bytes())))
    assert read_dump(written) == before


# -- on a signal ------------------------------------------------------------------------------------------


@pytest.fixture
def previous() -> Iterator[list[int]]:
    """A handler that was there before, as the list of the signals it has got."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGUSR2, before)


def test_a_signal_dumps_every_recorder_and_then_calls_the_previous_handler(
    tmp_path: Path, previous: list[int]
) -> None:
    recorders = [FlightRecorder(name, 0, 1) for name in ("actor", "critic")]
    restore = dump_on_signal(lambda: recorders, tmp_path)
    for count in (1, 2):
        for recorder in recorders:
            recorder.record("open", count)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert previous == [signal.SIGUSR2] * count
        for recorder in recorders:
            dump = read_dump(tmp_path / file_name(recorder.coordinator, 0))
            assert (dump.reason, len(dump.events)) == ("signal SIGUSR2", count)
    restore()
    handled = signal.getsignal(signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert previous == [signal.SIGUSR2] * 3
    assert len(read_dump(tmp_path / file_name("actor", 0)).events) == 2
    restore()
    assert signal.getsignal(signal.SIGUSR2) is handled


def test_restoring_leaves_a_handler_that_came_later(tmp_path: Path, previous: list[int]) -> None:
    restore = dump_on_signal(list, tmp_path)
    later = signal.SIG_IGN
    signal.signal(signal.SIGUSR2, later)
    restore()
    assert signal.getsignal(signal.SIGUSR2) is later


def test_a_signal_that_killed_before_dumps_and_does_not_kill(tmp_path: Path, previous: list[int]) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    recorder = FlightRecorder("main", 0, 1)
    restore = dump_on_signal(lambda: [recorder], tmp_path)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert read_dump(tmp_path / file_name("main", 0)).events == []
    restore()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_handler_that_cannot_dump_raises_nothing_and_still_calls_the_previous_one(
    tmp_path: Path, previous: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[FlightRecorder]:
        raise KeyError("gone")

    restore = dump_on_signal(broken, tmp_path)
    with caplog.at_level(logging.ERROR, "fp8dist"):
        os.kill(os.getpid(), signal.SIGUSR2)
    restore()
    assert previous == [signal.SIGUSR2]
    assert "KeyError" in caplog.text


def test_a_signal_inside_record_does_not_lock_the_process_up(tmp_path: Path, previous: list[int]) -> None:
    recorder = FlightRecorder("main", 0, 1)
    restore = dump_on_signal(lambda: [recorder], tmp_path)
    with recorder._lock:  # as if `record` were interrupted half-way
        os.kill(os.getpid(), signal.SIGUSR2)
    restore()
    assert previous == [signal.SIGUSR2]
    assert (tmp_path / file_name("main", 0)).exists()


def test_another_thread_than_the_main_one_is_told_what_to_do(tmp_path: Path) -> None:
    said: list[str] = []

    def work() -> None:
        try:
            dump_on_signal(list, tmp_path)
        except ValueError as error:
            said.append(str(error))

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join(timeout=10)
    assert len(said) == 1
    assert "main thread but got 'loader'" in said[0]
    assert "call it where the program starts" in said[0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, 9999])
def test_a_signal_that_cannot_be_handled_is_refused(tmp_path: Path, signum: int) -> None:
    with pytest.raises(ValueError, match="a signal that can be handled"):
        dump_on_signal(list, tmp_path, signum)


def test_an_event_is_what_the_reader_expects() -> None:
    """The writer takes its field names from `Event`, the reader has its own list."""
    assert Event._fields == tuple(_flight._EVENT)


BLOCKED = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from fp8dist._flight import FlightRecorder, dump_on_signal
recorder = FlightRecorder("main", 0, 1)
recorder.record("open", 1, 17)
restore = dump_on_signal(lambda: [recorder], sys.argv[1])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
threading.Timer(3.0, lambda: print(os.listdir(sys.argv[1]), flush=True)).start()
try:
    store.wait(["never"], timedelta(seconds=5))  # no signal gets through to Python in here
except dist.DistStoreError:
    pass
restore()
assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
"""


def test_a_signal_dumps_also_while_the_main_thread_is_blocked_in_native_code(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "['flight-main-rank0.jsonl']"
