"""Each kind of trouble is named in two lines, from dumps written by hand; healthy runs accuse nobody."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fp8dist._flight import FlightRecorder
from fp8dist.cli import app

WORLD = 4
Events = list[dict[str, Any]]
Run = dict[int, Events]


def event(
    time: float, kind: str, serial: int = 0, tag: int | str | None = None, **detail: Any
) -> dict[str, Any]:
    return {"time": time, "kind": kind, "serial": serial, "tag": tag, "detail": detail}


def scope(serial: int, rank: int, start: float, **enter: Any) -> Events:
    """One healthy step: 4 seconds, of which the last is the wait in the exit; the tag runs one behind."""
    tag = serial - 1
    digests = {"scales of ranks 0-1": "aa"} if rank < 2 else {"scales of ranks 2-3": "bb"}
    claims = {"generation": serial - 1, "layout": "1f", "active": 1, **digests, **enter}
    return [
        event(start, "open", serial, tag, place="train.py:8"),
        event(start + 1, "chunk", serial, tag, action="F", stage=rank, microbatch=0),
        event(start + 2, "request", serial, tag),
        event(start + 2.5, "chunk", serial, tag, action="B", stage=rank, microbatch=0),
        event(start + 3, "enter", serial, tag, **claims),
        event(start + 4, "commit", serial, tag, generation=serial, digest="d", wait_s=1.0),
    ]


def healthy(steps: int = 3, world: int = WORLD, *, close: bool = True) -> Run:
    """Scope s runs from second 10 s on; then all close, 10 seconds after the last scope began."""
    run: Run = {}
    for rank in range(world):
        connect = event(1, "connect", communicator="c0ffee", layout="1f", recipe="7e")
        end = [event(10 * steps + 10, "close", steps, scopes=steps)] if close else []
        run[rank] = [connect, *(e for s in range(1, steps + 1) for e in scope(s, rank, 10 * s)), *end]
    return run


def write(
    directory: Path,
    run: Run,
    *,
    world: int = WORLD,
    name: str = "main",
    skew: dict[int, float] | None = None,
    dumped: float = 100,
    dropped: int = 0,
) -> Path:
    """Files by hand. Monotonic clocks start elsewhere on each rank; wall clocks are off by `skew`."""
    for rank, events in run.items():
        off = (skew or {}).get(rank, 0.0)
        header = {
            "fp8dist_flight": 1, "coordinator": name, "rank": rank, "world": world, "host": f"node{rank // 2}",
            "pid": 1000 + rank, "reason": "test", "dropped": dropped, "time": dumped + off,
            "elapsed": dumped + 5000 * rank,
        }  # fmt: skip
        lines = [header]
        lines += [e | {"time": e["time"] + off, "elapsed": e["time"] + 5000 * rank} for e in events]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"flight-{name}-rank{rank}.jsonl").write_text(text)
    return directory


def command(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["blame", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def answer(directory: Path) -> tuple[int, str, str]:
    code, output, _ = command(directory)
    first, second = output.splitlines()[:2]
    return code, first, second


# -- each kind of trouble ---------------------------------------------------------------------------------

ERROR = "error"
STACK = "look at the stack of process 1003 on node1"


def _last_scope(run: Run, rank: int, change: Callable[[Events], Events]) -> None:
    """Replace the events of scope 3 and later of one rank."""
    before = [e for e in run[rank] if e["serial"] < 3]
    run[rank] = before + change([e for e in run[rank] if e["serial"] >= 3])


def _claims(rank: int, **claims: Any) -> Callable[[Run], None]:
    """Scope 3 disagrees: what a rank enters with, and how it ends for all."""

    def change(run: Run) -> None:
        for each in run:
            entered = scope(3, each, 30, **(claims if each == rank else {}))[:5]
            error = event(34, ERROR, 3, 2, type="RanksDisagree", message="the ranks disagree")
            _last_scope(run, each, lambda _, e=entered, error=error: [*e, error])  # type: ignore[misc]

    return change


def _tag(run: Run) -> None:
    _claims(3)(run)
    _last_scope(run, 3, lambda events: [e | {"tag": 3} for e in events])


def _tag_types(run: Run) -> None:
    _tag(run)
    _last_scope(run, 3, lambda events: [e | {"tag": "2"} for e in events])


def _recipe(run: Run) -> None:
    _claims(3)(run)
    run[3][0]["detail"]["recipe"] = "99"


def _three_generations(run: Run) -> None:
    _claims(3, generation=9)(run)
    next(e for e in run[1] if e["kind"] == "enter" and e["serial"] == 3)["detail"]["generation"] = 8


def _tie(run: Run) -> None:
    _claims(3, generation=9)(run)
    next(e for e in run[1] if e["kind"] == "enter" and e["serial"] == 3)["detail"]["generation"] = 9


def _old_dump(run: Run) -> None:
    run[2][0]["detail"]["communicator"] = "beef"


def _raises(run: Run) -> None:
    for rank in run:
        failed = [
            event(31.7, "abort", 3, 2, what="ValueError: bad batch", place="data.py:5"),
            event(31.8, ERROR, 3, 2, type="ValueError", message="bad\nbatch"),
        ]
        peer = [*scope(3, rank, 30)[:5], event(33.1, ERROR, 3, 2, type="PeerAborted", message="rank 3 left")]
        _last_scope(run, rank, lambda _, r=rank, f=failed, p=peer: f if r == 3 else p)  # type: ignore[misc]


def _two_raise(run: Run) -> None:
    _raises(run)
    _last_scope(run, 1, lambda _: [event(32.2, ERROR, 3, 2, type="OSError", message="no file")])


def _aborts_only(run: Run) -> None:
    _raises(run)
    run[3] = [e for e in run[3] if e["kind"] != ERROR]


def _others_time_out(run: Run, missing: int) -> None:
    for rank in run:
        timeout = event(90, ERROR, 3, 2, type="CollectiveTimeout", message=f"rank {missing} has not entered")
        waited = [*scope(3, rank, 30)[:5], timeout]
        _last_scope(run, rank, lambda _, w=waited: w)  # type: ignore[misc]


def _stuck_inside(run: Run) -> None:
    _others_time_out(run, 3)
    _last_scope(run, 3, lambda _: scope(3, 3, 30)[:2])


def _does_not_come(run: Run) -> None:
    _others_time_out(run, 3)
    _last_scope(run, 3, lambda _: [])


def _two_stuck(run: Run) -> None:
    _others_time_out(run, 3)
    _last_scope(run, 3, lambda _: scope(3, 3, 30)[:2])
    _last_scope(run, 1, lambda _: scope(3, 1, 30)[:3])


def _hangs(run: Run) -> None:
    """No error yet: peers wait while the dumps are made."""
    for rank in run:
        count = 2 if rank == 3 else 5
        _last_scope(run, rank, lambda events, n=count: events[:n])  # type: ignore[misc]


def _closes_early(run: Run) -> None:
    for rank in run:
        error = event(33.1, ERROR, 3, 2, type="RanksDisagree", message="rank 3 closed after 2 scopes")
        closed = [event(24.5, "close", 2, scopes=2)]
        waited = [*scope(3, rank, 30)[:5], error]
        _last_scope(run, rank, lambda _, r=rank, c=closed, w=waited: c if r == 3 else w)  # type: ignore[misc]


def _counts_differ(run: Run) -> None:
    run[3][-1]["detail"]["scopes"] = 2


def _counts_differ_and_one_is_gone(run: Run) -> None:
    _counts_differ(run)
    del run[1]


def _killed(run: Run) -> None:
    _others_time_out(run, 3)
    del run[3]


def _killed_quietly(run: Run) -> None:
    del run[2], run[3]


def _peer_lost(run: Run) -> None:
    """A killed rank: its neighbour's receive fails with an error of the schedule, which is no cause."""
    _killed(run)
    lost = event(31.5, ERROR, 3, 2, type="RuntimeError", message="Connection closed by peer [10.0.0.3]")
    _last_scope(run, 2, lambda _: [*scope(3, 2, 30)[:2], lost])


def _network(run: Run) -> None:
    _others_time_out(run, 0)


def _layouts(run: Run) -> None:
    for rank in run:
        run[rank] = [event(1, ERROR, type="LayoutMismatch", message="slot 'a.input' has two shapes")]


CASES: dict[str, tuple[Callable[[Run], None], str, str]] = {
    "tag": (
        _tag, "rank 3, scope 3, tag: 3, all others 2",
        "Some rank is at another step: see that all ranks skip and repeat the same steps.",
    ),
    "tags of two types": (
        _tag_types, "rank 3, scope 3, tag: '2', all others 2",
        "Some rank is at another step: see that all ranks skip and repeat the same steps.",
    ),
    "generation": (
        _claims(3, generation=1), "rank 3, step 2, generation: 1, all others 2",
        "Load the same checkpoint on every rank.",
    ),
    "generations of three kinds": (
        _three_generations, "ranks 1, 3, step 2, generation: 8 (rank 1), 9 (rank 3), all others 2",
        "Load the same checkpoint on every rank.",
    ),
    "as many ranks as others": (
        _tie, "ranks 1, 3, step 2, generation: 9, all others 2",
        "Load the same checkpoint on every rank.",
    ),
    "rank 0 alone": (
        _claims(0, generation=1), "rank 0, step 2, generation: 1, all others 2",
        "Load the same checkpoint on every rank.",
    ),
    "generation before layout": (
        _claims(3, layout="2e", generation=1), "rank 3, step 2, generation: 1, all others 2",
        "Load the same checkpoint on every rank.",
    ),
    "layout": (
        _claims(2, layout="2e"), "rank 2, step 2, layout: 2e, all others 1f",
        "Create the coordinator anew on every rank.",
    ),
    "recipe": (
        _recipe, "rank 3, step 0, recipe: 99, all others 7e",
        "Build the recipe from the same configuration on every rank.",
    ),
    "scales of one class": (
        _claims(3, **{"scales of ranks 2-3": "cc"}), "rank 3, step 2, scales of ranks 2-3: cc, all others bb",
        "They have drifted apart (memory corruption, or a state loaded on some ranks only): load one checkpoint "
        "on every rank, or let every rank call recover(heal_from=RANK) with a rank that is right.",
    ),
    "a dump of another run": (
        _old_dump, "rank 2, step 0, communicator: beef, all others c0ffee",
        "These dumps are of different runs, or of before and after a recovery: use a fresh directory for every run.",
    ),
    "an exception": (
        _raises, "rank 3, step 2, error: ValueError: bad batch (data.py:5), all others none of their own",
        "read the traceback in the log of rank 3 (process 1003 on node1); to go on after such an error, every rank "
        "catches its own and calls recover()",
    ),
    "two exceptions": (
        _two_raise, "rank 3, step 2, error: ValueError: bad batch (data.py:5), later also rank 1",
        "read the traceback in the log of rank 3 (process 1003 on node1); to go on after such an error, every rank "
        "catches its own and calls recover()",
    ),
    "an abort before the exit": (
        _aborts_only, "rank 3, step 2, error: ValueError: bad batch (data.py:5), all others none of their own",
        "read the traceback in the log of rank 3 (process 1003 on node1); to go on after such an error, every rank "
        "catches its own and calls recover()",
    ),
    "stuck inside": (
        _stuck_inside,
        "rank 3, step 2, exit: never entered (its last event: chunk F, stage 3, microbatch 0, 69.0 s before its dump), "
        "all others entered",
        f"rank 3 is still inside forward, backward or the schedule's communication: {STACK}, and whether a peer sends "
        "what it waits for",
    ),
    "does not come": (
        _does_not_come,
        "rank 3, step 2, exit: never entered (its last event: commit of step 1, 76.0 s before its dump), all others "
        "entered",
        "rank 3 has not opened this scope: every rank opens one per optimizer step, also without data or FP8 layers; "
        f"if it is on the way there, {STACK}",
    ),
    "two stuck": (
        _two_stuck,
        "ranks 1, 3, step 2, exit: never entered (the silent one is rank 3, its last event: chunk F, stage 3, "
        "microbatch 0, 69.0 s before its dump), all others entered",
        f"rank 3 is still inside forward, backward or the schedule's communication: {STACK}, and whether a peer sends "
        "what it waits for",
    ),
    "hangs, nobody gave up": (
        _hangs,
        "rank 3, step 2, exit: never entered (its last event: chunk F, stage 3, microbatch 0, 69.0 s before its dump), "
        "all others entered",
        f"rank 3 is still inside forward, backward or the schedule's communication: {STACK}, and whether a peer sends "
        "what it waits for",
    ),
    "closes while others wait": (
        _closes_early, "rank 3, at close, scopes: 2, all others 3",
        "Some rank skipped a step or ran one more: every rank opens one scope per optimizer step.",
    ),
    "counts differ at close": (
        _counts_differ, "rank 3, at close, scopes: 2, all others 3",
        "Some rank skipped a step or ran one more: every rank opens one scope per optimizer step.",
    ),
    "counts differ and a dump is missing": (
        _counts_differ_and_one_is_gone, "rank 3, at close, scopes: 2, all others 3",
        "Some rank skipped a step or ran one more: every rank opens one scope per optimizer step.",
    ),
    "killed": (
        _killed, "rank 3, after step 1, dump: none, all others one",
        "the process was killed (signal, out of memory, lost node), or hangs in native code: read its log and its "
        "host's kernel log, or look at its stack; what the others say: ranks 0-2, step 2, error: CollectiveTimeout: "
        "rank 3 has not entered, all ranks the same",
    ),
    "killed, its neighbour lost it": (
        _peer_lost, "rank 3, after step 1, dump: none, all others one",
        "the process was killed (signal, out of memory, lost node), or hangs in native code: read its log and its "
        "host's kernel log, or look at its stack; what the others say: rank 2, step 2, error: RuntimeError: Connection "
        "closed by peer [10.0.0.3], the others none before it",
    ),
    "two killed after the end": (
        _killed_quietly, "ranks 2-3, after step 2, dump: none, all others one",
        "the process was killed (signal, out of memory, lost node), or hangs in native code: read its log and its "
        "host's kernel log, or look at its stack",
    ),
    "all entered and waited": (
        _network,
        "ranks 0-3, step 2, error: CollectiveTimeout: rank 0 has not entered, all ranks the same",
        "every rank that left a dump has entered, so the network or a dying process held it up: see the hosts' logs",
    ),
    "layouts differ": (
        _layouts,
        "ranks 0-3, before the first scope, error: LayoutMismatch: slot 'a.input' has two shapes, all ranks the same",
        "the message names what differs or broke; the records do not show who caused it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("skew", [{}, {1: 3600.0, 3: -40.0}], ids=["clocks agree", "clocks are off"])
@pytest.mark.parametrize("case", CASES)
def test_trouble_is_named_in_two_lines(tmp_path: Path, case: str, skew: dict[int, float]) -> None:
    change, disagreement, mend = CASES[case]
    run = healthy()
    change(run)
    code, first, second = answer(write(tmp_path, run, skew=skew))
    assert first == f"first disagreement: {disagreement}"
    assert second == f"what to do: {mend}"
    assert code == 1


def test_who_raised_first_does_not_hang_on_a_clock_that_is_off(tmp_path: Path) -> None:
    run = healthy()
    _two_raise(run)  # rank 3 first, rank 1 half a second later
    first = answer(write(tmp_path, run, skew={3: 600.0}))[1]
    assert first.startswith("first disagreement: rank 3, step 2, error: ValueError")


def test_the_earlier_scope_comes_first_whatever_the_kind(tmp_path: Path) -> None:
    run = healthy()
    _claims(3, generation=1)(run)
    for rank in run:
        run[rank] = [e for e in run[rank] if e["serial"] != 2]
        run[rank] += scope(2, rank, 20)[:5] if rank else []
    first = answer(write(tmp_path, run))[1]
    assert first.startswith("first disagreement: rank 3, step 2, generation"), (
        "rank 0 has failed in scope 3 as well"
    )
    run[2].append(event(20, ERROR, 2, 1, type="KeyError", message="'x'"))
    first = answer(write(tmp_path, run))[1]
    assert first.startswith("first disagreement: rank 2, step 1, error: KeyError")


# -- nothing wrong ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(world=st.integers(1, 5), steps=st.integers(1, 4), seed=st.integers(0, 2**20), data=st.data())
def test_a_healthy_run_accuses_nobody(
    tmp_path_factory: pytest.TempPathFactory, world: int, steps: int, seed: int, data: st.DataObject
) -> None:
    """Clocks may be off, rings may have lost different events, and dumps need not be of one moment."""
    run = healthy(steps, world)
    generator = random.Random(seed)
    for events in run.values():
        for e in events:
            if e["kind"] not in ("commit", "close"):
                e["time"] -= generator.random() * 0.4
        events.sort(key=lambda e: e["time"])
    directory = tmp_path_factory.mktemp("healthy")
    for rank, events in run.items():
        lost = data.draw(st.integers(0, len(events)))
        skew = generator.uniform(-1e4, 1e4)
        write(directory, {rank: events[lost:]}, world=world, skew={rank: skew}, dropped=lost)
    code, first, second = answer(directory)
    assert first == "first disagreement: none"
    assert second.startswith("what to do: nothing, ")
    assert code == 0


def test_nothing_wrong_says_how_far(tmp_path: Path) -> None:
    assert answer(write(tmp_path, healthy()))[1:] == (
        "first disagreement: none",
        "what to do: nothing, all 4 ranks agree up to step 2",
    )


def test_dumps_of_different_moments_of_a_healthy_run_accuse_nobody(tmp_path: Path) -> None:
    """Rank 3 was asked first, in the middle of scope 2; the others two scopes later."""
    run = healthy(4, close=False)
    for rank in range(3):
        write(tmp_path, {rank: run[rank]}, dumped=45)
    write(tmp_path, {3: [e for e in run[3] if e["time"] < 22.2]}, dumped=22.2)
    assert answer(tmp_path)[0] == 0


def test_a_rank_that_peers_await_for_an_instant_only_is_not_accused(tmp_path: Path) -> None:
    run = healthy()
    _hangs(run)
    assert answer(write(tmp_path, run, dumped=33.9))[0] == 0
    assert answer(write(tmp_path, run, dumped=34.1))[0] == 1
    run[0].append(event(33.5, ERROR, 3, 2, type="CollectiveTimeout", message="gave up"))
    first = answer(write(tmp_path, run, dumped=33.9))[1]
    assert first.startswith("first disagreement: rank 3, step 2, exit: never entered")


def test_a_step_that_was_abandoned_in_agreement_is_nothing_wrong(tmp_path: Path) -> None:
    run = healthy()
    for rank in run:
        gone = event(34, "abort", 3, 2, what="step.abort()", place="train.py:9")
        _last_scope(run, rank, lambda e, g=gone: [*e[:5], g, e[-1]])  # type: ignore[misc]
    assert answer(write(tmp_path, run))[0] == 0
    run[2] = run[2][-2:]  # its ring has lost that it entered
    assert answer(write(tmp_path, run, dropped=50))[0] == 0
    for rank in run:  # and that there was such a step
        run[rank] = (run[rank][:-1] if rank != 2 else []) + scope(4, rank, 60)
    assert answer(write(tmp_path, run, dropped=50))[0] == 0


def test_what_all_ranks_have_recovered_from_is_not_judged(tmp_path: Path) -> None:
    run = healthy()
    _raises(run)
    for rank in run:
        run[rank] += [event(50, "connect", communicator="fee"), event(50.1, "recover", 3, generation=2)]
        run[rank] += scope(4, rank, 60)
    code, output, _ = command(write(tmp_path, run))
    assert code == 0
    assert "all ranks have recovered once" in output
    run[2] = [e for e in run[2] if e["time"] < 50]  # one did not come to recover()
    code, first, _ = answer(write(tmp_path, run))
    assert first.startswith("first disagreement: rank 3, step 2, error: ValueError")
    assert code == 1


def test_what_failed_after_a_recovery_is_judged(tmp_path: Path) -> None:
    run = healthy()
    _raises(run)
    for rank in run:
        run[rank] += [
            event(50, "recover", 3, generation=2),
            *scope(4, rank, 60, generation=5 + (rank == 1))[:5],
        ]
    assert (
        answer(write(tmp_path, run))[1] == "first disagreement: rank 1, step 3, generation: 6, all others 5"
    )


def test_a_file_that_was_cut_off_proves_no_absence(tmp_path: Path) -> None:
    run = healthy()
    _hangs(run)
    write(tmp_path, run)
    path = tmp_path / "flight-main-rank3.jsonl"
    path.write_text(path.read_text()[:-20])
    code, output, _ = command(tmp_path)
    assert code == 0
    assert "test, cut off" in output


# -- the table, JSON, several coordinators ------------------------------------------------------------------


def _rows(output: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows}


def test_the_table_says_where_each_rank_is(tmp_path: Path) -> None:
    run = healthy(3)
    run[0] = run[0][:-1]
    _last_scope(run, 1, lambda events: events[:2])
    _last_scope(
        run, 2, lambda events: [*events[:5], event(39.5, ERROR, 3, 2, type="PeerAborted", message="m")]
    )
    del run[3]
    code, output, _ = command(write(tmp_path, run))
    assert code == 1
    assert _rows(output) == {
        "0": ["node0", "step 2", "between scopes", "commit of step 2", "5.5 s", "test"],
        "1": ["node0", "step 1", "in scope (step 2)", "chunk F, stage 1, microbatch 0", "8.5 s", "test"],
        "2": ["node1", "step 1", "left by error (PeerAborted)", "error of step 2", "0.0 s", "test"],
        "3": ["", "", "no dump", "", "", ""],
    }


@pytest.mark.parametrize(
    ("count", "where"), [(0, "before the first scope"), (1, "before the first scope"), (2, "in scope (scope 1)"),
                         (6, "in exit (scope 1)"), (7, "between scopes"), (8, "closed")],
)  # fmt: skip
def test_where_a_rank_is_follows_its_last_events(tmp_path: Path, count: int, where: str) -> None:
    run = {0: [e | {"tag": None} for e in healthy(1, 1)[0][:count]]}
    code, output, _ = command("--json", write(tmp_path, run, world=1))
    assert code == 0
    assert json.loads(output)[0]["rows"][0]["where"] == where


def test_json_holds_the_same_answer_and_no_table(tmp_path: Path) -> None:
    run = healthy()
    _raises(run)
    write(tmp_path, run)
    code, output, _ = command(tmp_path, "--json")
    assert code == 1
    (judged,) = json.loads(output)
    assert judged["lines"] == list(answer(tmp_path)[1:])
    assert (judged["coordinator"], judged["world"], judged["finding"]["ranks"]) == ("main", 4, [3])
    assert (judged["finding"]["kind"], judged["finding"]["serial"]) == ("error", 3)
    assert [row["rank"] for row in judged["rows"]] == [0, 1, 2, 3]


def test_each_coordinator_is_judged_and_one_can_be_picked(tmp_path: Path) -> None:
    bad = healthy(2, 2)
    bad[1][-1]["detail"]["scopes"] = 1
    write(tmp_path, healthy(), name="actor")
    write(tmp_path, bad, world=2, name="critic")
    code, output, _ = command(tmp_path)
    lines = output.splitlines()
    where = lines.index("coordinator 'critic':")
    assert code == 1
    assert lines[:2] == ["coordinator 'actor':", "first disagreement: none"]
    assert lines[where + 1] == "first disagreement: rank 1, at close, scopes: 1, all others 2"
    assert command(tmp_path, "--coordinator", "actor")[0] == 0
    code, output, _ = command(tmp_path, "--coordinator", "critic")
    assert (code, output.splitlines()[0]) == (1, lines[where + 1])


def test_text_from_a_run_cannot_break_the_output(tmp_path: Path) -> None:
    run = healthy()
    _raises(run)
    run[3] = [e for e in run[3] if e["kind"] != "abort"]
    run[3][-1]["detail"]["message"] = "[red]\ud800\x1b[2J\n" + "x" * 5000
    run[1][2]["detail"]["action"] = "[b]F"
    run[1] = run[1][:3]
    code, first, second = answer(write(tmp_path, run, name="[b]"))
    output = command(tmp_path)[1]
    assert code == 1
    assert "coordinator '[b]', 4 ranks" in output
    assert "chunk [b]F, stage 1" in output
    assert first.startswith("first disagreement: rank 3, step 2, error: ValueError: [red]\\ud800\\x1b[2J xxx")
    assert len(first) < 400
    assert second.startswith("what to do: ")


def test_real_recorders_and_the_command_understand_each_other(tmp_path: Path) -> None:
    for rank in range(2):
        recorder = FlightRecorder("main", rank, 2)
        recorder.record("open", 1, 17, place="train.py:1")
        recorder.record("enter", 1, 17, generation=16 + rank, layout="1f", active=1)
        recorder.dump(tmp_path, "RanksDisagree")
    assert answer(tmp_path)[1] == "first disagreement: rank 1, step 17, generation: 17, all others 16"


# -- unusable input ---------------------------------------------------------------------------------------


def _unusable(tmp_path: Path, kind: str) -> list[object]:
    directory = tmp_path / "dumps"
    if kind == "no directory":
        return [directory]
    directory.mkdir()
    (directory / "other.txt").write_text("not ours, and not looked at")
    if kind == "no dumps":
        return [directory]
    write(directory, healthy())
    if kind == "foreign":
        (directory / "flight-plan.jsonl").write_text('{"from": "ZRH"}\n')
    elif kind == "another world":
        write(directory, {5: healthy()[0]}, world=8)
    elif kind == "twice":
        (directory / "flight-main-rank9.jsonl").write_text(
            (directory / "flight-main-rank1.jsonl").read_text()
        )
    elif kind == "coordinator":
        return [directory, "--coordinator", "critic"]
    elif kind == "trace":
        return [directory, "--perfetto", directory / "missing" / "out.json"]
    return [directory]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no directory", "expected a directory with flight recorder dumps"),
        ("no dumps", "expected dumps named flight-*.jsonl but got none"),
        ("foreign", "flight-plan.jsonl, line 1: expected a header"),
        ("another world", "flight-main-rank5.jsonl, line 1: expected another rank than flight-main-rank0.jsonl of the "
                          "same 4 ranks but got rank 5 of 8"),
        ("twice", "flight-main-rank9.jsonl, line 1: expected another rank than flight-main-rank1.jsonl"),
        ("coordinator", "expected a coordinator 'critic' but got 'main'"),
        ("trace", "out.json"),
    ],
)  # fmt: skip
def test_unusable_input_is_refused_in_one_line(tmp_path: Path, kind: str, says: str) -> None:
    code, output, error = command(*_unusable(tmp_path, kind))
    assert code == 2
    assert output == ""
    assert len(error.splitlines()) == 1
    assert error.startswith("fp8dist blame: ")
    assert says in error


# -- the trace --------------------------------------------------------------------------------------------


def traced(tmp_path: Path) -> list[dict[str, Any]]:
    out = tmp_path / "trace.json"
    command(tmp_path, "--perfetto", out)
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return events


def test_the_trace_is_well_formed_and_its_slices_nest(tmp_path: Path) -> None:
    run = healthy(50)
    generator = random.Random(7)
    for events in run.values():
        for e in events:
            e["time"] += generator.random() * 0.1
    write(tmp_path, run, name="actor", dumped=600)
    write(tmp_path, healthy(2), name="critic")
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for e in traced(tmp_path):
        assert e["ph"] in ("M", "X", "i")
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int) and isinstance(e["name"], str)
        if e["ph"] == "M":
            continue
        assert isinstance(e["ts"], int) and e["ts"] >= 0
        if e["ph"] == "X":
            assert isinstance(e["dur"], int) and e["dur"] >= 0
            tracks.setdefault((e["pid"], e["tid"]), []).append(e)
        else:
            assert e["s"] == "t"
    assert len(tracks) == 2 * WORLD
    for (_, thread), slices in tracks.items():
        assert len(slices) == (100 if thread == 1 else 4)
        stack: list[int] = []
        for e in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1] <= e["ts"]:
                stack.pop()
            assert not stack or e["ts"] + e["dur"] <= stack[-1]
            stack.append(e["ts"] + e["dur"])
        exits = [e for e in slices if e["name"].startswith("exit of ")]
        assert len(exits) == len(slices) // 2


def test_the_trace_shows_seconds_as_microseconds_and_names_ranks(tmp_path: Path) -> None:
    events = traced(write(tmp_path, healthy(1)))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 (node0)", 1: "rank 1 (node0)", 2: "rank 2 (node1)", 3: "rank 3 (node1)"}
    mine = [e for e in events if e["pid"] == 2 and e["ph"] != "M"]
    slices = {e["name"]: (e["ts"], e["dur"]) for e in mine if e["ph"] == "X"}
    assert slices == {"step 0": (9_000_000, 4_000_000), "exit of step 0": (12_000_000, 1_000_000)}
    instants = {e["name"]: e["ts"] for e in mine if e["ph"] == "i"}
    assert instants == {
        "connect": 0, "chunk F, stage 2, microbatch 0": 10_000_000, "request of step 0": 11_000_000,
        "chunk B, stage 2, microbatch 0": 11_500_000, "commit of step 0": 13_000_000, "close of scope 1": 19_000_000,
    }  # fmt: skip


def test_the_trace_aligns_clocks_by_the_exits(tmp_path: Path) -> None:
    exact = traced(write(tmp_path, healthy(3)))
    shifted = traced(write(tmp_path, healthy(3), skew={1: 12.25, 2: -3600.5}))
    assert len(exact) == len(shifted)
    for a, b in zip(exact, shifted, strict=True):
        assert abs(a.pop("ts", 0) - b.pop("ts", 0)) <= 1
        assert abs(a.pop("dur", 0) - b.pop("dur", 0)) <= 1
        assert a == b


def test_one_late_exit_does_not_move_a_rank(tmp_path: Path) -> None:
    run = healthy(5)
    late = next(e for e in run[1] if e["kind"] == "commit" and e["serial"] == 3)
    late["time"] += 2.0
    starts = {e["pid"]: e["ts"] for e in traced(write(tmp_path, run)) if e["name"] == "step 4"}
    assert starts == dict.fromkeys(range(WORLD), 49_000_000)


def test_what_never_ended_is_drawn_until_the_dump(tmp_path: Path) -> None:
    run = healthy(1, 1)
    run[0] = run[0][:6]
    slices = [e for e in traced(write(tmp_path, run, world=1, dumped=21.5)) if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("step 0", 9_000_000, 11_500_000),
        ("exit of step 0", 12_000_000, 8_500_000),
    ]
    assert all(e["args"]["unfinished"] for e in slices)
