"""A run is read back from whatever its ranks have written, and the rank that the others wait for is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8dist.monitor import read_run
from fp8dist.monitor._lines import Records

Record = dict[str, Any]


def start(rank: int, slots: list[str], **fields: Any) -> Record:
    return {
        "kind": "start", "version": 1, "rank": rank, "world": 4, "host": f"node{rank}", "name": "main", "recipe": {},
        "time": 0.0, "slots": slots, "stages": [], **fields,
    }  # fmt: skip


def sample(rank: int, step: int, *, wait: float | None = 0.0, n: int = 1, **fields: Any) -> Record:
    ones = [1.0] * n
    return {
        "kind": "sample", "step": step, "time": step * 0.01, "rank": rank, "generation": step, "commits": step,
        "aborts": 0, "collectives": step, "wait_s": wait, "loss": None, "numbers": {}, "scale": ones, "amax": ones,
        "headroom": ones, "saturated": ones, "flushed": None, "stale": ones, **fields,
    }  # fmt: skip


def write(directory: Path, rank: int, records: list[Record | str]) -> None:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    (directory / f"monitor-rank{rank}.jsonl").write_text(text)


def test_bad_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    good = [start(0, ["a.input"]), sample(0, 10), sample(0, 20)]
    bad: list[Record | str] = [
        "", "{", "[1]", "null", '"sample"', "\ufffd\x00", '{"kind":"unknown"}', '{"kind":["start"]}',
        '{"kind":"sample"}', sample(0, 30, n=2), sample(0, 30, amax=[1.0, 2.0]), {**sample(0, 30), "step": "30"},
        {**sample(0, 30), "wait_s": "long"}, sample(0, 30, stale=["x"]), sample(0, 30, scale=[[1.0]]),
        json.dumps(sample(0, 30, scale=[float("inf")])), "[" * 100_000, {**start(0, []), "slots": [1]},
        {**start(0, []), "slots": None}, json.dumps(sample(0, 30))[:50],
    ]  # fmt: skip
    write(tmp_path, 0, [sample(0, 5), *good, *bad])
    (tmp_path / "monitor-rankx.jsonl").write_text("{}")
    run = read_run(tmp_path)
    assert list(run.ranks) == [0]
    assert list(run.ranks[0].samples.values()) == good[1:]
    assert run.skipped_lines == len(bad) + 1, "and a sample before any start"


WARNING = {
    "kind": "warning",
    "step": 3,
    "time": 0.0,
    "rank": 0,
    "what": "flushing",
    "slot": None,
    "message": ".",
}


START, SAMPLE = start(0, ["a"]), sample(0, 3)
NEEDED = {
    "start": ("rank", "world", "slots"),
    "sample": (
        "step", "time", "rank", "generation", "commits", "aborts", "collectives", "wait_s",
        "scale", "amax", "headroom", "stale",
    ),
    "warning": ("step", "rank", "what", "slot", "message"),
}  # fmt: skip


def read(directory: Path, records: list[Record | str]) -> tuple[list[Record], Records]:
    write(directory, 0, records)
    lines = Records(directory / "monitor-rank0.jsonl")
    return list(lines), lines


@pytest.mark.parametrize(
    ("record", "field"),
    [(r, field) for r in (START, SAMPLE, WARNING) for field in NEEDED[r["kind"]]],
    ids=lambda x: x if isinstance(x, str) else x["kind"],
)
@pytest.mark.parametrize("value", ["absent", True, -1, 2**53, {}, [[1.0]], [True], [1.0, 1.0]], ids=str)
def test_a_record_whose_needed_field_is_absent_or_unfit_is_skipped(
    tmp_path: Path, record: Record, field: str, value: Any
) -> None:
    bad = {key: of for key, of in record.items() if key != field}
    if value != "absent":
        bad[field] = value
    found, lines = read(tmp_path, [START, bad, SAMPLE])
    assert found == [START, SAMPLE]
    assert (lines.good, lines.skipped, lines.empty) == (2, 1, 0)


def test_fields_that_are_not_needed_and_lists_with_gaps_are_taken(tmp_path: Path) -> None:
    gaps = {name: [None] for name in ("scale", "amax", "headroom", "saturated", "flushed", "stale")}
    records: list[Record | str] = [
        {"kind": "start", "version": 1, "rank": 0, "world": 1, "slots": ["a"], "more": 1}, {**SAMPLE, **gaps},
        {**SAMPLE, "wait_s": None, "saturated": None}, {**SAMPLE, "time": 3, "stale": [3]},
        {**WARNING, "slot": "a"},
    ]  # fmt: skip
    found, lines = read(tmp_path, [*records, "", "  "])
    assert found == records
    assert (lines.good, lines.skipped, lines.empty) == (5, 0, 2)


def test_a_sample_goes_with_the_newest_start_that_is_one(tmp_path: Path) -> None:
    none, no_rank = start(0, []), start(4, [])  # there are ranks 0 to 3
    found, lines = read(
        tmp_path,
        [SAMPLE, WARNING, none, SAMPLE, sample(0, 4, n=0), START, no_rank, SAMPLE, sample(0, 4, n=0)],
    )
    assert found == [WARNING, none, sample(0, 4, n=0), START, SAMPLE]
    assert lines.skipped == 4


def test_a_repeated_step_counts_once_and_slots_go_with_their_samples(tmp_path: Path) -> None:
    again = sample(0, 20, n=2, loss=7.0)
    write(
        tmp_path,
        0,
        [
            start(0, ["a.input"]), sample(0, 10), sample(0, 20), sample(0, 30),
            start(0, ["a.input", "b.input"]), again,
        ],
    )  # fmt: skip
    (rank,) = read_run(tmp_path).ranks.values()
    assert list(rank.samples) == [10, 20, 30]
    assert rank.samples[20] == again
    assert rank.slots_of == {10: ["a.input"], 20: ["a.input", "b.input"], 30: ["a.input"]}
    assert len(rank.starts) == 2


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (None, "has none"),
        (["{"], "none of its 1 lines"),
        ([start(0, [], version=2)], "expects version 1 but got 2"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, records: list[Any] | None, message: str) -> None:
    if records is not None:
        write(tmp_path, 0, records)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="has none"):
        read_run(tmp_path / "nowhere")


def run_of(directory: Path, waits: np.ndarray) -> Any:
    """A run with these waits in seconds, [samples, ranks], one sample every 10 steps of 10 ms."""
    for rank in range(waits.shape[1]):
        samples: list[Record | str] = [
            sample(rank, 10 * (i + 1), wait=float(wait)) for i, wait in enumerate(waits[:, rank])
        ]
        write(directory, rank, [start(rank, ["a.input"]), *samples])
    return read_run(directory)


def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    waits = np.full((10, 4), 0.041)
    waits[:, 2] = 0.002
    waits[3] = [0.0, 0.041, 0.041, 0.041]  # in one sample it was another
    run = run_of(tmp_path, waits)
    assert run.awaited_rank == 2
    assert run.waits == {rank: pytest.approx(waits[:, rank].mean()) for rank in range(4)}
    (warning,) = run.warnings
    assert (warning["what"], warning["rank"], warning["slot"], warning["step"]) == (
        "always_last",
        2,
        None,
        100,
    )
    others = np.delete(waits, 2, 1).mean() * 1e3
    assert f"they wait {others:.1f} ms a step, it {waits[:, 2].mean() * 1e3:.1f} ms" in warning["message"]
    assert "rank 2 on node2" in warning["message"]


@pytest.mark.parametrize(
    "case", ["equal", "in turns", "often", "too little", "too short", "one rank", "long steps"]
)
def test_no_rank_is_accused_without_a_reason(tmp_path: Path, case: str) -> None:
    noise = np.random.default_rng(0).uniform(0.9, 1.1, (10, 4))
    waits = 0.02 * noise
    if case == "in turns":
        for i in range(10):
            waits[i, i % 4] = 0.001
    elif case == "often":
        waits[:7, 1] = waits[7:, 3] = 0.0
    elif case == "too little":
        waits = 0.0009 * noise
        waits[:, 1] = 0.0
    elif case == "too short":
        waits[:, 1] = 0.0
        waits = waits[:4]
    elif case == "one rank":
        waits = waits[:, :1]
    elif case == "long steps":
        waits = 0.002 * noise  # of 0.3 s that the steps below take
        waits[:, 1] = 0.0
    run = run_of(tmp_path, waits)
    if case == "long steps":
        for path in tmp_path.iterdir():
            records = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps({**r, "time": 30 * r["time"]}) + "\n" for r in records))
        assert run.awaited_rank == 1, "of the short steps it is told"
        run = read_run(tmp_path)
    assert run.awaited_rank is None and run.warnings == []


def test_steps_without_a_wait_and_ranks_of_other_lengths_are_compared_where_they_meet(tmp_path: Path) -> None:
    for rank in range(2):
        samples: list[Record | str] = [sample(rank, i, wait=0.05 * rank) for i in range(1, 9 - 2 * rank)]
        write(tmp_path, rank, [start(rank, ["a.input"]), sample(rank, 0, wait=None), *samples])
    assert read_run(tmp_path).awaited_rank == 0
