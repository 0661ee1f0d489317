"""The plan command: exit codes, one line on bad input, JSON, tables that are cut, pictures and traces."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from fp8dist._commands.plan import SCHEDULES, plan_command
from fp8dist.plan import NAMES, plan
from fp8dist.plan._report import as_plain

app = typer.Typer()
app.command("plan")(plan_command)

SMALL = ("--schedule", "1f1b", "--pp", "4", "--microbatches", "8")
STUCK = (*SMALL, "--updates", "per-microbatch")
LARGE = ("--schedule", "interleaved1f1b", "--pp", "16", "--chunks", "4", "--microbatches", "64", "--dp", "64")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "120"})


def test_a_step_that_ends_is_told_and_exits_0() -> None:
    result = call(*SMALL, "--dp", 8)
    assert result.exit_code == 0
    assert "1 reduction group of 32, 1 collective a step: all members come to the same ones" in result.output
    assert "no deadlock" in result.output
    assert "each stands for 8 ranks" in result.output
    assert not result.stderr


def test_a_deadlock_is_told_in_two_lines_with_a_table_and_exits_1() -> None:
    result = call(*STUCK)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    where = next(i for i, line in enumerate(lines) if line.startswith("deadlock: "))
    assert lines[where].startswith("deadlock: rank 3 waits in its collective 3UPDATE0 for ranks 0-2")
    assert lines[where + 1].startswith("why: rank 3 sends that gradient only behind its 3UPDATE0")
    assert "4 of 4 pipeline ranks are stuck" in result.stdout
    assert "takes" not in result.stdout


def test_members_that_disagree_are_counter_examples() -> None:
    result = call("--schedule", "zbv", "--pp", 4, "--microbatches", 8, "--updates", "per-microbatch")
    assert result.exit_code == 1
    assert "the members differ in 14" in result.stdout
    assert "collective 1: rank 0 reduces for microbatch 1 of its chunk 1, rank" in result.stdout
    assert "11 more" in result.stdout


def test_json_holds_everything() -> None:
    result = call(*SMALL, "--tp", 2, "--json", "--forward-ms", 3)
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    planned = plan("1f1b", pp=4, microbatches=8, tp=2)
    assert told["ok"] and told["deadlock"] is None
    assert told["layout"]["world"] == 8
    for rank, program in enumerate(planned.programs):
        assert [entry["action"] for entry in told["ranks"][rank]["actions"]] == [*map(str, program)]
    assert told["ranks"][0]["actions"][1] == {
        "action": "0F0",
        "start_ms": 0.0,
        "end_ms": 3.0,
        "waited_ms": 0.0,
    }
    assert told["groups"][0]["same_order"] and told["groups"][0]["size"] == 8
    assert told["per_microbatch"]["collectives"] == 16


def test_json_of_a_deadlock_has_no_times_but_the_circle() -> None:
    result = call(*STUCK, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert (told["ok"], told["makespan_ms"], told["bubble"], told["exposed_reduction_ms"]) == (
        False,
        None,
        None,
        None,
    )
    assert told["deadlock"]["cycle"] == [3, 2]
    assert told["deadlock"]["waits"][3] == {"pipeline_rank": 3, "action": "3UPDATE0", "for": [0, 1, 2]}
    assert told == json.loads(
        json.dumps(as_plain(plan("1f1b", pp=4, microbatches=8, updates="per-microbatch")))
    )


def test_a_large_plan_is_cut_unless_asked() -> None:
    short, full = call(*LARGE), call(*LARGE, "--full")
    assert (short.exit_code, full.exit_code) == (0, 0)
    assert len(short.stdout.splitlines()) < 60
    assert "8 more ranks" in short.stdout and "more ..." in short.stdout
    assert "63B63" in full.stdout and "7SEND_B31" in full.stdout and "more ..." not in full.stdout


def test_constants_come_from_the_doctors_file_and_a_flag_wins(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({"alpha_us": 1000.0, "beta_gbps": 1.0, "other": []}))
    costs = json.loads(call(*SMALL, "--constants", path, "--json").stdout)["costs"]
    assert (costs["alpha_us"], costs["beta_gbps"]) == (1000.0, 1.0)
    told = json.loads(call(*SMALL, "--constants", path, "--alpha-us", 7, "--json").stdout)
    assert (told["costs"]["alpha_us"], told["costs"]["beta_gbps"]) == (7.0, 1.0)
    assert told["groups"][0]["ms"] == pytest.approx(2 * 0.007 + told["groups"][0]["n_bytes"] / 1e6)


BAD: list[tuple[tuple[Any, ...], str]] = [
    (("--schedule", "no-such", "--pp", 2), "expected a schedule out of gpipe"),
    (("--schedule", "1f1b"), "number of pipeline ranks"),
    ((*SMALL, "--chunks", 2), "--chunks 1"),
    ((*SMALL, "--updates", "often"), "expected updates"),
    ((*SMALL, "--dp", 0), "dp >= 1"),
    ((*SMALL, "--p2p-gbps", 0), "p2p_gbps > 0"),
    ((*SMALL, "--constants", "{}/none.json"), "none.json"),
    ((*SMALL, "--constants", "{}/list.json"), "expected a JSON object"),
    ((*SMALL, "--constants", "{}/half.json"), "expected a number 'beta_gbps'"),
    ((*SMALL, "--constants", "{}/zero.json"), "beta_gbps > 0"),
    ((*SMALL, "--constants", "{}/text.json"), "expected a JSON object"),
    ((*SMALL, "--draw", "{}/plan.jpeg"), "expected a picture to end in .png or .svg"),
    ((*SMALL, "--draw", "{}/none/plan.png"), "plan.png"),
    ((*SMALL, "--perfetto", "{}/none/plan.json"), "plan.json"),
    (("--schedule", "{}/text.json"), "row 1: expected actions"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD)
def test_bad_input_is_one_line_and_exits_2(tmp_path: Path, arguments: tuple[Any, ...], told: str) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text('{"alpha_us": 1, "beta_gbps": true}')
    (tmp_path / "zero.json").write_text('{"alpha_us": 1, "beta_gbps": 0}')
    (tmp_path / "text.json").write_text("hello")
    result = call(*(str(argument).replace("{}", str(tmp_path)) for argument in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("fp8dist plan: ") and told in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_help_names_every_schedule() -> None:
    assert tuple(SCHEDULES.split(", ")) == NAMES


PICTURES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (SMALL, {"schedule": "1f1b", "pp": 4, "microbatches": 8}),
    (STUCK, {"schedule": "1f1b", "pp": 4, "microbatches": 8, "updates": "per-microbatch"}),
    (("--schedule", "dualpipev", "--pp", "2"), {"schedule": "dualpipev", "pp": 2}),
    (LARGE, {"schedule": "interleaved1f1b", "pp": 16, "chunks": 4, "microbatches": 64, "dp": 64}),
]


@pytest.mark.parametrize(("flags", "arguments"), PICTURES)
def test_a_picture_has_a_bar_for_every_span_and_every_stuck_rank(
    tmp_path: Path, flags: tuple[str, ...], arguments: dict[str, Any]
) -> None:
    pytest.importorskip("matplotlib")
    png, svg = tmp_path / "plan.png", tmp_path / "plan.svg"
    for path in (png, svg):
        assert call(*flags, "--draw", path).exit_code == (1 if flags == STUCK else 0)
    head = png.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    assert 800 <= width <= 4000 and 200 <= height <= 8000
    collections = [
        group for group in ElementTree.parse(svg).getroot().iter()
        if group.get("id", "").startswith(("PolyCollection", "FillBetweenPolyCollection"))
    ]  # fmt: skip
    bars = [shape for group in collections for shape in group.iter() if shape.tag.endswith(("}path", "}use"))]
    run = plan(**arguments).run
    assert len(bars) >= len(run.spans) + len(run.waits)


def test_a_trace_has_every_span_and_no_two_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert call("--schedule", "zbv", "--pp", 4, "--microbatches", 8, "--perfetto", path).exit_code == 0
    planned = plan("zbv", pp=4, microbatches=8)
    assert planned.makespan_ms is not None
    events = json.loads(path.read_text())["traceEvents"]
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"]].append(event)
    for rank, program in enumerate(planned.programs):
        names = [event["name"] for event in slices[rank] if event["name"] != "wait"]
        assert names == [str(a) for a in program if a.kind.value in ("F", "B", "I", "W", "exit")]
        waited = sum(event["dur"] for event in slices[rank] if event["name"] == "wait")
        busy = sum(event["dur"] for event in slices[rank] if event["name"] != "wait")
        assert waited > 0
        assert waited + busy == pytest.approx(planned.makespan_ms * 1e3, abs=0.1)
        for one, other in zip(slices[rank], slices[rank][1:], strict=False):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.002
        assert slices[rank][-1]["ts"] + slices[rank][-1]["dur"] == pytest.approx(
            planned.makespan_ms * 1e3, abs=0.01
        )


def test_a_trace_of_a_deadlock_ends_in_slices_that_never_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert call(*STUCK, "--perfetto", path).exit_code == 1
    begun = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "B"]
    assert [event["name"] for event in begun] == [
        "stuck at 0B0",
        "stuck at 1B0",
        "stuck at 2B0",
        "stuck at 3UPDATE0",
    ]
