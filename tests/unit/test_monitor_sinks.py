"""Each sink shows the records it got where its readers look, and never stops a training."""

from __future__ import annotations

import io
import json
import logging
import math
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fp8dist as f8
from fp8dist import monitor as fm

Record = dict[str, Any]
NAMES = ["a.input", "b.input", "c[0].weight", "d.grad_output"]


def start(**fields: Any) -> Record:
    return {
        "kind": "start", "version": 1, "rank": 0, "world": 4, "host": "node1", "name": "main", "recipe": {},
        "time": 1000.0, "slots": NAMES, "stages": [], **fields,
    }  # fmt: skip


def sample(step: int, **fields: Any) -> Record:
    return {
        "kind": "sample", "step": step, "time": 1000.0 + step, "rank": 0, "generation": step, "commits": step,
        "aborts": 0, "collectives": step + 1, "wait_s": 0.0125, "loss": 2.5 / step, "numbers": {"lr": 0.25},
        "scale": [2.0, None, 8.0, 0.5], "amax": [1.0, None, 3.0, 4.0], "headroom": [1.0, None, -1.5, 0.5],
        "saturated": [0.0, None, 0.25, 0.0], "flushed": [0.125, None, 0.0, 0.5], "stale": [0, 7, 0, 0],
        "nonfinite": [0, 0, 0, 2], **fields,
    }  # fmt: skip


def warning(step: int, **fields: Any) -> Record:
    return {
        "kind": "warning", "step": step, "time": 1000.0 + step, "rank": 0, "what": "saturating", "slot": "c[0].weight",
        "message": "c[0].weight saturates, [red]25%[/red] of its values", **fields,
    }  # fmt: skip


# -- JSON lines ---------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_are_the_records_and_are_there_at_once(tmp_path: Path) -> None:
    sink = fm.JsonLines(tmp_path / "new" / "run")
    path = tmp_path / "new" / "run" / "monitor-rank3.jsonl"
    records = [start(rank=3), sample(1, rank=3), warning(1, rank=3)]
    for count, record in enumerate(records, 1):
        sink.write(record)
        assert lines(path) == records[:count]
    sink.close()


def test_a_resumed_run_goes_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "monitor-rank0.jsonl"
    path.write_text(json.dumps(start()) + "\n" + '{"kind":"sam')
    sink = fm.JsonLines(tmp_path)
    sink.write(sample(1))
    sink.close()
    first, cut, last = path.read_text().splitlines()
    assert (json.loads(first), cut, json.loads(last)) == (start(), '{"kind":"sam', sample(1))


# -- terminal -----------------------------------------------------------------------------------------------------


def test_the_live_table_shows_the_worst_slots_first() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    sink = fm.LiveView(slots=2, console=console)
    for record in (start(), sample(10), warning(10)):
        sink.write(record)
    sink.write(sample(20))
    sink.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = text[text.rindex("step 20") :]
    assert "loss 0.125" in last and "rank 0 of 4" in last and "12.50 ms" in last
    assert last.index("c[0].weight") < last.index("d.grad_output")
    assert "25.000%" in last and "-1.5" in last
    assert "a.input" not in last and "b.input" not in last
    assert "[red]25%[/red]" in last, "a message is no markup"


def test_without_a_terminal_it_prints_a_line_now_and_then_and_every_warning() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=60)
    sink = fm.LiveView(line_every_s=3600, console=console)
    for record in (start(), sample(10), sample(20), warning(20), warning(30)):
        sink.write(record)
    sink.close()
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "step 10, loss 0.25, rank 0 of 4, waits 12.50 ms a step; worst slot c[0].weight: saturated 25.000%, "
        "flushed 0.0%, headroom -1.5, scale 8, amax 3, stale 0",
        "step 20: warning: c[0].weight saturates, [red]25%[/red] of its values",
        "step 30: warning: c[0].weight saturates, [red]25%[/red] of its values",
    ]


@pytest.mark.parametrize(("rank", "shows"), [(0, False), (2, True), (None, True)])
def test_only_the_chosen_rank_is_shown(rank: int | None, shows: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    sink = fm.LiveView(rank=rank, console=console)
    for record in (start(rank=2), sample(1, rank=2)):
        sink.write(record)
    assert bool(console.file.getvalue()) is shows  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_rank_without_slots_is_shown(terminal: bool) -> None:
    empty: dict[str, Any] = {
        key: [] for key in ("scale", "amax", "headroom", "saturated", "flushed", "stale")
    }
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    sink = fm.LiveView(console=console)
    sink.write(start(slots=[]))
    sink.write(sample(1, **{**empty, "saturated": None, "flushed": None, "loss": None, "wait_s": None}))
    sink.close()
    assert "step 1, rank 0 of 4" in console.file.getvalue()  # type: ignore[attr-defined]


# -- TensorBoard --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_curves_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = fm.TensorBoard(tmp_path, slots=["b.*", "d.*"])
    for record in (start(rank=1), sample(10, rank=1), sample(20, rank=1, loss=None), warning(20, rank=1)):
        sink.write(record)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "rank1"))
    events.Reload()

    def curve(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(tag)]

    assert curve("loss") == [(10, 0.25)]
    assert curve("fp8/wait_s") == [(10, pytest.approx(0.0125)), (20, pytest.approx(0.0125))]
    assert curve("numbers/lr") == [(10, 0.25), (20, 0.25)]
    assert curve("fp8/headroom_min")[0] == (10, -1.5)
    assert curve("fp8/saturated_max")[0] == (10, 0.25)
    assert curve("fp8/stale_max")[0] == (10, 7.0)
    assert curve("slots/d.grad_output/flushed")[0] == (10, 0.5)
    tags = events.Tags()["scalars"]
    assert [tag for tag in tags if "b.input" in tag] == ["slots/b.input/stale"], "nothing else is known of it"
    assert not [tag for tag in tags if "a.input" in tag]
    histogram = events.Histograms("fp8/log2_scale")[0].histogram_value
    assert (histogram.num, histogram.min, histogram.max) == (3, -1.0, 3.0)
    assert any("saturating" in tag for tag in events.Tags()["tensors"])
    sink.close()


# -- Prometheus ---------------------------------------------------------------------------------------------------


def scrape(port: int) -> dict[tuple[str, str], float]:
    """Value of each series by name and the value of its one label."""
    from prometheus_client.parser import text_string_to_metric_families

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (s.name, "" if s.name == "fp8dist_info" else ",".join(s.labels.values())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_a_prometheus_server_fetches_the_newest_sample() -> None:
    pytest.importorskip("prometheus_client")
    sink = fm.Prometheus(port=0, slots=2)
    try:
        sink.write(start())
        assert scrape(sink.port) == {}, "nothing is known yet"
        for record in (sample(10), warning(10), warning(15), sample(20, loss=None, aborts=3)):
            sink.write(record)
        found = scrape(sink.port)
    finally:
        sink.close()
    assert found["fp8dist_step", ""] == 20 and found["fp8dist_aborts", ""] == 3
    assert ("fp8dist_loss", "") not in found
    assert found["fp8dist_wait_s", ""] == 0.0125
    assert found["fp8dist_number", "lr"] == 0.25
    assert found["fp8dist_warnings_total", "saturating"] == 2
    assert found["fp8dist_slots", ""] == 4 and found["fp8dist_nonfinite_amaxes", ""] == 2
    assert found["fp8dist_headroom_min", ""] == -1.5 and found["fp8dist_stale_max", ""] == 7
    of_slots = {key: value for key, value in found.items() if key[0].startswith("fp8dist_slot_")}
    assert {slot for _, slot in of_slots} == {"c[0].weight", "d.grad_output"}, "the worst two"
    assert of_slots["fp8dist_slot_saturated", "c[0].weight"] == 0.25
    assert of_slots["fp8dist_slot_scale", "d.grad_output"] == 0.5
    assert ("fp8dist_info", "") in found
    socket.create_server(("127.0.0.1", sink.port)).close()  # the port is free again


def test_the_number_of_series_is_bounded_for_any_number_of_slots() -> None:
    pytest.importorskip("prometheus_client")

    def series(n: int) -> int:
        column = [1.0] * n
        columns = dict.fromkeys(
            ("scale", "amax", "headroom", "saturated", "flushed", "stale", "nonfinite"), column
        )
        sink = fm.Prometheus(port=0, slots=5)
        try:
            sink.write(start(slots=[f"l{i}.input" for i in range(n)]))
            sink.write(sample(1, **columns))
            return len(scrape(sink.port))
        finally:
            sink.close()

    assert series(5) == series(3000)


# -- sinks that fail ----------------------------------------------------------------------------------------------


def run_with(sinks: list[Any]) -> int:
    """Commits of a short monitored run."""
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=3))
    slot = coordinator.slot("a.input")
    with fm.Monitor(coordinator, sinks, every=1) as monitor:
        for step in range(4):
            with coordinator.step():
                slot.record(torch.tensor([1.0 + step]))
            monitor.step(step=step)
    return coordinator.stats.commits


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
def test_a_full_disk_stops_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "monitor-rank0.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="fp8dist"):
        assert run_with([fm.JsonLines(tmp_path / "bad"), fm.JsonLines(tmp_path / "good")]) == 4
    (told,) = caplog.records
    assert (
        "JsonLines failed and is switched off" in told.getMessage() and "No space left" in told.getMessage()
    )
    assert len(lines(tmp_path / "good" / "monitor-rank0.jsonl")) == 4


def test_a_port_that_is_taken_stops_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING, logger="fp8dist"):
        prometheus = fm.Prometheus(port=taken.getsockname()[1])
        assert run_with([prometheus, fm.JsonLines(tmp_path)]) == 4
    (told,) = caplog.records
    assert "Prometheus failed and is switched off" in told.getMessage()
    assert len(lines(tmp_path / "monitor-rank0.jsonl")) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_directory_that_cannot_be_made_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    sinks = [fm.JsonLines(tmp_path / "file" / "run"), fm.TensorBoard(tmp_path / "file" / "run")]
    with caplog.at_level(logging.WARNING, logger="fp8dist"):
        assert run_with(sinks) == 4
    assert [record.getMessage().split()[3] for record in caplog.records] == ["JsonLines", "TensorBoard"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fm.JsonLines(3), "run_dir expects the path"),
        (lambda: fm.JsonLines(""), "run_dir expects the path"),
        (lambda: fm.JsonLines(__file__), "got the file"),
        (lambda: fm.TensorBoard(None), "run_dir expects the path"),
        (lambda: fm.TensorBoard("run", slots="a.*"), "slots expects a list"),
        (lambda: fm.LiveView(slots=0), "slots expects an int >= 1"),
        (lambda: fm.LiveView(rank=-1), "rank expects"),
        (lambda: fm.LiveView(line_every_s=math.nan), "line_every_s expects"),
        (lambda: fm.Prometheus(port=70000), "port expects"),
        (lambda: fm.Prometheus(port="9400"), "port expects"),
        (lambda: fm.Prometheus(addr=""), "addr expects"),
        (lambda: fm.Prometheus(slots=True), "slots expects"),
    ],
)
def test_a_sink_refuses_a_wrong_argument_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
