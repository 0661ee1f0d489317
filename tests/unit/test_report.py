"""The report names exactly what ails a run, says what it does not know, and stands any input."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from _report_runs import SICK, Simulated, troubled, write_lines
from typer.testing import CliRunner

from fp8dist._commands.report import report_command
from fp8dist.blame import judge
from fp8dist.report import build_report
from fp8dist.report._events import faults, pictures
from fp8dist.report._read import read_run
from fp8dist.report._series import MAX_COLUMNS, Columns
from fp8dist.report._svg import thin, ticks

app = typer.Typer()
app.command()(report_command)

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<img src=x onerror=alert(2)>",
    "\"'><svg onload=alert(3)>",
    "]]>{{ 7*7 }}{% raw %}",
    "\u202eevil\u0000\u001b[31m\ud800",
    "a&amp;<b>.weight",
)


def problems(headlines: tuple[str, ...]) -> list[str]:
    return [line for line in headlines if line.startswith("Problem")]


# -- verdicts ---------------------------------------------------------------------------------------------


def test_a_healthy_run_accuses_nobody(tmp_path: Path) -> None:
    report = build_report(Simulated().write(tmp_path))
    assert report.problems == 0
    assert all(line.startswith("Good") for line in report.headlines), report.headlines
    assert "No rank failed" in report.headlines[0]


def test_trouble_of_every_kind_is_named_and_nothing_else(tmp_path: Path) -> None:
    report = build_report(troubled().write(tmp_path))
    failed, saturates, slow = problems(report.headlines)
    assert "rank 3, step 199, error: ValueError: bad batch" in failed
    assert saturates.startswith(f"Problem: {SICK} saturates: 0.8% of its values in the last samples")
    assert "Rank 2 on host b is the one the others wait for: they wait 41 ms a step, it 2.3 ms" in slow
    assert [line for line in report.headlines if line.startswith("Note")] == [
        "Note: 1 step was aborted: no rank changed a scale there."
    ]
    assert "Raise margin by 1 (it lacks 0.6 powers of two)" in report.html


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_the_slow_rank_is_named_whichever_it_is(tmp_path: Path, slow: int) -> None:
    report = build_report(Simulated(slow={slow: 0.03}).write(tmp_path))
    (problem,) = problems(report.headlines)
    assert f"Rank {slow} on host {'ab'[slow // 2]}" in problem


def test_two_slow_ranks_of_one_host_are_named_together(tmp_path: Path) -> None:
    run = Simulated(world=6, slow={4: 0.03, 5: 0.03}, hosts=("a", "b", "c"))
    (problem,) = problems(build_report(run.write(tmp_path)).headlines)
    assert "Ranks 4-5 on host c are the ones the others wait for" in problem


@pytest.mark.parametrize("late", [0.004, 0.03], ids=["3 % of a step", "12 % of a step"])
def test_a_rank_is_slow_by_the_length_of_a_step(tmp_path: Path, late: float) -> None:
    report = build_report(Simulated(slow={1: late}).write(tmp_path))
    assert bool(problems(report.headlines)) is (late > 0.0125)


def test_the_last_stage_of_a_pipeline_is_no_fault_but_its_slow_replica_is(tmp_path: Path) -> None:
    stages = {0: ["0"], 1: ["0"], 2: ["1"], 3: ["1"]}
    healthy = Simulated(stages=stages, slow={0: 0.03, 1: 0.03})
    report = build_report(healthy.write(tmp_path / "healthy"))
    assert problems(report.headlines) == []
    assert "Ranks 0-1" in report.headlines[0] and report.headlines[0].startswith("Note")
    assert '<span class="flag">late' not in report.html
    sick = Simulated(stages=stages, slow={0: 0.03, 1: 0.03, 2: 0.025})
    (problem,) = problems(build_report(sick.write(tmp_path / "sick")).headlines)
    assert "Rank 2 " in problem


def test_waits_come_from_the_flight_records_where_there_is_no_monitor(tmp_path: Path) -> None:
    Simulated(slow={1: 0.04}).write(tmp_path)
    for path in tmp_path.glob("monitor-*"):
        path.unlink()
    (problem,) = problems(build_report(tmp_path).headlines)
    assert "Rank 1 on host a" in problem


def test_many_sick_slots_are_summed_up(tmp_path: Path) -> None:
    run = Simulated()
    sick = {slot: 0.002 * (i + 1) for i, slot in enumerate(run.slots[:10])}
    report = build_report(Simulated(saturating=sick).write(tmp_path))
    found = problems(report.headlines)
    assert len(found) == 4 and "10 slots saturate" in found[0]
    assert run.slots[9] in found[1] and run.slots[8] in found[2] and run.slots[7] in found[3]


def test_a_slot_that_never_ran_is_noted_once_its_history_is_long_over(tmp_path: Path) -> None:
    slot = "layers.3.mlp.up.weight"
    old = build_report(Simulated(unused=(slot,)).write(tmp_path / "old"))
    assert problems(old.headlines) == [] and f"Note: {slot} never got an amax" in old.headlines[0]
    young = build_report(Simulated(unused=(slot,), steps=30).write(tmp_path / "young"))
    assert slot not in "".join(young.headlines)


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    write_lines(path, lines)


@pytest.mark.parametrize(("headroom", "named"), [(-0.04, False), (-0.06, True), (None, True)])
def test_what_rounding_would_have_clamped_anyway_is_no_saturation(
    tmp_path: Path, headroom: float | None, named: bool
) -> None:
    Simulated().write(tmp_path)

    def change(line: dict[str, Any]) -> None:
        if line["kind"] == "sample":
            line["headroom"][3], line["saturated"][3] = headroom, 0.002

    for rank in range(4):
        _edit(tmp_path / f"monitor-rank{rank}.jsonl", change)
    assert bool(problems(build_report(tmp_path).headlines)) is named


def test_the_rank_on_which_a_slot_saturates_most_is_told(tmp_path: Path) -> None:
    run = Simulated(saturating={SICK: 0.004})
    run.write(tmp_path)
    at = run.slots.index(SICK)

    def change(line: dict[str, Any]) -> None:
        if line["kind"] == "sample":
            line["saturated"][at] *= 3

    _edit(tmp_path / "monitor-rank2.jsonl", change)
    (problem,) = problems(build_report(tmp_path).headlines)
    assert problem.endswith(f"{SICK} saturates: 1.2% of its values in the last samples (rank 2).")


def test_saturation_is_told_by_headroom_where_casts_were_not_counted(tmp_path: Path) -> None:
    run = Simulated(saturating={SICK: 0.008})
    run.write(tmp_path)
    for rank in range(4):
        _edit(tmp_path / f"monitor-rank{rank}.jsonl", lambda line: line.update(saturated=None, flushed=None))
    (problem,) = problems(build_report(tmp_path).headlines)
    assert f"{SICK} saturates: its largest values lie beyond the format in 100% of the last" in problem


def test_collectives_a_step_leave_out_what_happens_once(tmp_path: Path) -> None:
    Simulated().write(tmp_path)
    for rank in range(4):
        path = tmp_path / f"monitor-rank{rank}.jsonl"
        _edit(path, lambda line: line.update(collectives=line["collectives"] + 3) if "step" in line else None)
    assert "<dt>collectives per step</dt><dd>1</dd>" in build_report(tmp_path).html


def test_flushing_and_a_scale_at_its_limit_are_named(tmp_path: Path) -> None:
    run = Simulated()
    run.write(tmp_path)

    def change(line: dict[str, Any]) -> None:
        if line["kind"] == "sample":
            line["flushed"][4], line["scale"][7] = 0.7, 3.4028234663852886e38

    _edit(tmp_path / "monitor-rank1.jsonl", change)
    _edit(tmp_path / "monitor-rank3.jsonl", change)
    found = problems(build_report(tmp_path).headlines)
    assert [line.split()[1] for line in found] == [run.slots[4], run.slots[7]]
    assert "70% of its values to zero" in found[0] and "limit of FP32" in found[1]


def test_a_rank_whose_records_end_early_is_named(tmp_path: Path) -> None:
    Simulated().write(tmp_path, flight=False)
    path = tmp_path / "monitor-rank2.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:9]))
    (problem,) = problems(build_report(tmp_path).headlines)
    assert "Rank 2 on host b: its records end at step 70, others' at 190" in problem


def test_a_loss_that_is_no_number_is_a_problem(tmp_path: Path) -> None:
    Simulated().write(tmp_path)
    _edit(tmp_path / "metrics.jsonl", lambda line: line.update(loss=math.nan if line["step"] >= 150 else 2.0))
    (problem,) = problems(build_report(tmp_path).headlines)
    assert "loss of the FP8 run is not a number at step 150 (50 steps" in problem


@pytest.mark.parametrize(
    ("factor", "level"), [(1.0, "Good"), (1.03, "Note"), (1.2, "Problem"), (0.8, "Good")]
)
def test_a_loss_above_the_fp32_run_counts_by_its_size(tmp_path: Path, factor: float, level: str) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": s, "loss": 2.0 * factor} for s in range(40)])
    write_lines(tmp_path / "metrics-fp32.jsonl", [{"step": s, "loss": 2.0} for s in range(40)])
    (line,) = [line for line in build_report(tmp_path).headlines if "FP32's" in line]
    assert line.startswith(level)


def test_past_warnings_are_noted_with_their_advice(tmp_path: Path) -> None:
    run = Simulated()
    run.write(tmp_path)
    warning = {"kind": "warning", "step": 40, "time": 0, "rank": 1, "what": "saturating", "slot": run.slots[2],
               "message": "raise the margin of <this> slot"}  # fmt: skip
    with (tmp_path / "monitor-rank1.jsonl").open("a") as file:
        file.write(json.dumps(warning) + "\n")
    report = build_report(tmp_path)
    assert report.problems == 0
    assert report.headlines[0] == f"Note: {run.slots[2]}: the monitor warned at step 40 (saturating)."
    assert "raise the margin of &lt;this&gt; slot" in report.html


# -- what is not there ------------------------------------------------------------------------------------


def test_what_is_missing_is_said_with_a_way_to_get_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": s, "loss": 2.0} for s in range(3)])
    report = build_report(tmp_path)
    unknown = [line for line in report.headlines if line.startswith("Not known")]
    assert len(unknown) == len(report.headlines) == 3
    text = html.unescape(report.html)
    for way in ("f8.monitor.Monitor(coordinator", "coordinator.dump_flight(", "bash launch/quickstart.sh"):
        assert way in text


def test_scales_and_casts_of_metrics_serve_where_there_is_no_monitor(tmp_path: Path) -> None:
    casts = {"input": {"saturated": 0.02, "flushed": 0.0}, "weight": {"saturated": 0.0, "flushed": 0.0}}
    lines = [
        {"step": s, "loss": 2.0, "scales": {"a.input": 2.0**s, "a.weight": 4.0}, "casts": casts}
        for s in range(4)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    report = build_report(tmp_path)
    assert problems(report.headlines) == ["Problem: Values saturate: input 2%, weight 0% of all."]
    assert "a: scale 2^0.0 to 2^3.0" in report.html


def test_bad_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = troubled()
    run.write(tmp_path)
    path = tmp_path / "monitor-rank0.jsonl"
    start, *samples = path.read_text().splitlines()
    sample = json.loads(samples[-1])
    bad = [
        "{", "[]", "null", '{"kind": "sample"}', "\xff", '{"kind": ["sample"]}', "[" * 100_000,
        json.dumps(sample | {"scale": sample["scale"][1:]}), json.dumps(sample | {"scale": "high"}),
        json.dumps(sample | {"scale": [1.0]}), json.dumps(sample | {"amax": 1.0}),
        json.dumps(sample | {"step": -1}), json.dumps(sample | {"step": 10**30}),
        json.dumps(sample | {"amax": [[1]] * len(run.slots)}), json.dumps(sample | {"commits": True}),
        json.dumps({"kind": "warning", "step": 1, "rank": 0, "what": 3, "message": ""}), samples[-1][:-30],
        json.dumps(sample | {"stale": [10**400] * len(run.slots)}),
        json.dumps(sample | {"scale": ["1.5"] * len(run.slots)}),
    ]  # fmt: skip
    path.write_text("\n".join([start, *bad[:7], *samples, "", *bad[7:]]), encoding="latin-1")
    report = build_report(tmp_path)
    assert f"monitor-rank0.jsonl: {len(bad)} damaged or unknown lines were skipped" in report.html
    assert len(problems(report.headlines)) == 3  # the same as without the damage


def test_a_damaged_dump_is_left_out_and_said(tmp_path: Path) -> None:
    Simulated().write(tmp_path)
    (tmp_path / "flight" / "flight-main-rank1.jsonl").write_text("no dump\n")
    report = build_report(tmp_path)
    assert "flight-main-rank1.jsonl, line 1: expected a JSON object" in html.unescape(report.html)


@pytest.mark.parametrize("version", [2, None, "1", "<b>"])
def test_another_version_is_refused_with_one_line(tmp_path: Path, version: object) -> None:
    Simulated().write(tmp_path)
    _edit(tmp_path / "monitor-rank2.jsonl", lambda line: line.update(version=version))
    with pytest.raises(
        ValueError, match=r"monitor-rank2.jsonl: expected version 1 but got '.*'; make the report"
    ):
        build_report(tmp_path)


# -- numbers ----------------------------------------------------------------------------------------------


def test_the_figures_of_slots_are_those_of_the_samples(tmp_path: Path) -> None:
    """Against plain loops over the same files."""
    run = Simulated(world=2, saturating={SICK: 0.008})
    run.write(tmp_path)
    series = read_run(tmp_path).slots
    samples = [
        [json.loads(line) for line in (tmp_path / f"monitor-rank{rank}.jsonl").read_text().splitlines()][1:]
        for rank in range(2)
    ]
    for i in (0, run.slots.index(SICK), len(run.slots) - 1):
        at = series.names.index(run.slots[i])
        parts = [[s["saturated"][i] for s in of_rank] for of_rank in samples]
        assert series.saturated[at] == pytest.approx(max(sum(p[-5:]) / 5 for p in parts))
        assert series.worst[at] == max(max(p) for p in parts)
        assert series.headroom[at] == min(s["headroom"][i] for of_rank in samples for s in of_rank[-5:])
        assert series.scale[at] == samples[0][-1]["scale"][i]
        logs = [math.log2(s["scale"][i]) for s in samples[0]]
        assert series.lowest[at].tolist() == [pytest.approx(v, rel=1e-6) for v in logs]


@pytest.mark.parametrize("count", [1, 2, 199, 200, 201, 999, 100_000])
def test_columns_are_few_and_cover_every_step_in_order(count: int) -> None:
    steps = [1000 + 7 * i for i in range(count)]
    columns = Columns(steps)
    assert len(columns) <= MAX_COLUMNS
    found = [columns.of(step) for step in steps]
    assert found == sorted(found) and set(found) == set(range(len(columns)))
    assert max(np.bincount(found)) == -(-count // MAX_COLUMNS) or count == 1


def test_thinned_curves_keep_their_peaks() -> None:
    values = np.zeros(100_000)
    values[54_321] = 9.0
    steps, shown = thin(np.arange(100_000.0), values)
    assert len(steps) <= 400 and 54_321 in steps and shown.max() == 9.0
    assert (np.diff(steps) > 0).all()


@pytest.mark.parametrize(
    ("low", "high"), [(0, 199), (2.07, 5.0), (3, 3), (-1e-7, 1e-7), (0, 0), (1e9, 1e9 + 5)]
)
def test_ticks_are_few_and_enclose_the_range(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-9 and found[-1] >= high - 1e-9 and 2 <= len(found) <= 8


def test_a_huge_run_still_gives_a_small_page(tmp_path: Path) -> None:
    """9 000 slots and 100 000 steps with noise everywhere, which compresses worst."""
    rng = np.random.default_rng(3)
    slots = [f"layers.{i}.{role}" for i in range(3000) for role in ("input", "weight", "grad_output")]
    start = Simulated().monitor(0)[0] | {"world": 1, "slots": slots}
    with (tmp_path / "monitor-rank0.jsonl").open("w") as file:
        file.write(json.dumps(start) + "\n")
        flat, half, low = ([value] * len(slots) for value in (0.0, 0.5, -1.0))
        for step in range(0, 100_000, 2500):
            scale = np.exp2(rng.uniform(0, 20, len(slots))).round(3).tolist()
            sample = Simulated(steps=1).monitor(0)[1] | dict.fromkeys(("amax", "flushed", "stale"), flat)
            file.write(
                json.dumps(sample | {"step": step, "scale": scale, "saturated": half, "headroom": low}) + "\n"
            )
    write_lines(tmp_path / "metrics.jsonl", [{"step": s, "loss": float(s % 977)} for s in range(100_000)])
    report = build_report(tmp_path)
    assert len(report.html.encode()) < 3_000_000
    assert "9000 slots saturate" in report.headlines[0]
    assert report.html.count('class="hit"') <= 200


def test_the_timeline_shows_who_did_what_when(tmp_path: Path) -> None:
    dumps = read_run(troubled().write(tmp_path)).dumps["main"]
    failed, whole = pictures(dumps, judge(dumps))
    assert (failed.title, whole.title) == ("Step 199, first trouble", "Step 197, the newest whole one")
    assert [end for _, _, end in failed.lanes] == ["PeerAborted"] * 3 + ["ValueError"]
    spans = {rank: spans for rank, spans, _ in whole.lanes}
    assert [span.label for span in spans[2]] == ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3", ""]
    collective = {rank: spans[rank][-1] for rank in spans}
    for rank, late in {0: 0.0, 1: 0.0, 2: 0.039, 3: 0.0}.items():
        assert collective[rank].start == pytest.approx(0.17 + late, abs=1e-5)
        assert collective[rank].end == pytest.approx(whole.seconds) == pytest.approx(0.214, abs=1e-5)
        assert spans[rank][7].end == collective[rank].start  # the request in between ends nothing
        assert spans[rank][5].end - spans[rank][5].start == pytest.approx(0.02 + late / 4, abs=1e-5)


def test_ranks_that_say_the_same_share_a_row(tmp_path: Path) -> None:
    found = faults(read_run(troubled().write(tmp_path)).dumps["main"])
    assert [(fault.who, fault.step, fault.kind) for fault in found] == [
        ("0-3", "step 198", "abort"), ("0-2", "step 199", "error"), ("3", "step 199", "error"),
    ]  # fmt: skip


# -- hostile input ----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects elements, attributes and scripts as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.comments: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def hostile_run(directory: Path) -> Path:
    """Every string of every file tries to break out."""
    slots = tuple(f"{text}.input" for text in HOSTILE) + HOSTILE
    run = Simulated(
        extra_slots=slots, hosts=(HOSTILE[0], HOSTILE[1]), saturating=dict.fromkeys(slots, 0.3), slow={2: 0.05},
        failed=(3, HOSTILE[0] + HOSTILE[4]), stages={0: [HOSTILE[2]]},
    )  # fmt: skip
    run.write(directory)

    def poison(line: dict[str, Any]) -> None:
        if line["kind"] == "start":
            line.update(
                name=HOSTILE[0], recipe={HOSTILE[0]: HOSTILE[1], "nested": {HOSTILE[2]: [HOSTILE[3]]}}
            )
        else:
            line["numbers"] = {HOSTILE[0]: 1.0, HOSTILE[4]: 2.0}

    _edit(directory / "monitor-rank0.jsonl", poison)
    warning = {"kind": "warning", "step": 4, "time": 0, "rank": 0, "what": HOSTILE[0], "slot": HOSTILE[1],
               "message": HOSTILE[2]}  # fmt: skip
    with (directory / "monitor-rank0.jsonl").open("a") as file:
        file.write(json.dumps(warning) + "\n")
    (directory / "summary.json").write_text(json.dumps({"schedule": HOSTILE[0], HOSTILE[1]: HOSTILE[2]}))
    (directory / "flight" / f"flight-{'<b>&x' * 3}-rank9.jsonl").write_text("<script>alert(9)</script>\n")

    def act(line: dict[str, Any]) -> None:
        if line.get("kind") == "chunk":
            line["detail"].update(action=HOSTILE[0][:8], stage=HOSTILE[1])
        if line.get("kind") == "open":
            line["tag"] = HOSTILE[2]

    _edit(directory / "flight" / "flight-main-rank0.jsonl", act)
    return directory


def test_no_string_of_a_run_becomes_markup(tmp_path: Path) -> None:
    clean, hostile = Tags(), Tags()
    clean.feed(build_report(troubled().write(tmp_path / "clean")).html)
    page = build_report(hostile_run(tmp_path / "hostile")).html
    hostile.feed(page)
    assert set(hostile.tags) <= set(clean.tags) | {"ul", "h3", "pre", "code"}
    assert hostile.tags.count("script") == 1 and hostile.comments == []
    assert hostile.attributes <= clean.attributes
    assert "{{ 7*7 }}" in html.unescape(page)  # shown, not evaluated
    assert not re.search("[\u0000-\u0008\u000b-\u001f\u202e\ud800-\udfff]", page)
    page.encode("utf-8")


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    page = build_report(hostile_run(tmp_path)).html
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", page)
    assert "url(" not in page and "@import" not in page


# -- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "code"), [(Simulated(), 0), (troubled(), 1)], ids=["healthy", "troubled"])
def test_the_exit_code_tells_whether_there_is_a_problem(tmp_path: Path, run: Simulated, code: int) -> None:
    run.write(tmp_path)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == code, result.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for line in result.stdout.splitlines()[:-1]:
        assert line.partition(": ")[2] in html.unescape(page)
    assert result.stdout.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"


def test_the_page_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    Simulated().write(tmp_path / "run")
    result = CliRunner().invoke(app, [str(tmp_path / "run"), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0 and (tmp_path / "page.html").is_file()
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("case", ["absent", "a file", "empty", "garbage", "unwritable", "version"])
def test_bad_input_is_refused_with_one_line(tmp_path: Path, case: str) -> None:
    run, arguments = tmp_path / "run", []
    if case == "a file":
        run.write_text("")
    elif case != "absent":
        run.mkdir()
    if case == "garbage":
        (run / "metrics.jsonl").write_text("garbage\n")
        (run / "monitor-rank0.jsonl").write_bytes(b"\x00\xff\n")
    elif case in ("unwritable", "version"):
        Simulated().write(run)
    if case == "unwritable":
        arguments = ["-o", str(tmp_path / "no" / "such" / "folder.html")]
    elif case == "version":
        _edit(run / "monitor-rank0.jsonl", lambda line: line.update(version=9))
    result = CliRunner().invoke(app, [str(run), *arguments])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("fp8dist report: ")
    assert not (run / "report.html").exists()
