"""Random schedules of trouble do on four ranks what a model in one process says; see `trouble` and `trouble_model`.

`--troubles N` plays N schedules, of the seeds from `--troubles-seed` on. A failure prints its seed, and its schedule
shrunk; `REGRESSIONS` keeps those that failed once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import trouble
import trouble_players
import trouble_schedules
from forkpool import RankHung
from trouble_model import Model
from trouble_schedules import (
    Act,
    Drift,
    Load,
    Recover,
    Reopen,
    Rule,
    Save,
    Schedule,
    Step,
)

CHUNK = 50  # schedules that one pool of ranks plays
IDLE = (Act(),) * 4
BOTH = (("a.input", "d.grad_output"),) * 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each pool; its seeds are in its name."""
    if "seeds" in metafunc.fixturenames:
        first = metafunc.config.getoption("--troubles-seed")
        end = first + metafunc.config.getoption("--troubles")
        chunks = [range(i, min(i + CHUNK, end)) for i in range(first, end, CHUNK)]
        metafunc.parametrize("seeds", chunks, ids=lambda chunk: f"seeds={chunk[0]}-{chunk[-1]}")


@pytest.mark.timeout(400)  # it takes some seconds; a schedule that hangs, or is shrunk, takes more
def test_what_four_ranks_see_of_any_trouble_is_what_the_model_says(seeds: range) -> None:
    schedules = [trouble.draw(seed) for seed in seeds]
    found = trouble.complaints(schedules)
    if found:
        i, text = next(iter(found.items()))
        shrunk = trouble.shrink(schedules[i])
        pytest.fail(
            f"--troubles-seed {seeds[i]}: {text}\nshrunk to\n{shrunk!r}\nfrom\n{schedules[i]!r}\n"
            f"{len(found)} of {len(schedules)} schedules went wrong",
            pytrace=False,
        )


def step(*acts: Act) -> Step:
    """A step whose later ranks do nothing."""
    return Step((*acts, *IDLE[len(acts) :]))


def records(amax: float, fail: str = "") -> Act:
    """Records one amax in a slot that all ranks hold."""
    return Act(records=(("a.input", amax),), fail=fail)


NEW = Act(new=("b.input",), records=(("b.input", 2.0),))

REGRESSIONS = {
    "a new holder that missed the growth gets the others' state": Schedule(
        Rule(),
        ((), ("b.input",), (), ()),
        (step(Act(), NEW), step(Act(), Act(), replace(NEW, lost=2)), Recover(), step()),
    ),
    "a rank that never committed cannot go back by a commit": Schedule(
        Rule(), BOTH, (step(records(3.0)), Save(), Reopen(-1, ranks=(2,)), step(), Recover(), step())
    ),
}


@pytest.mark.parametrize("schedule", REGRESSIONS.values(), ids=REGRESSIONS.keys())
def test_what_went_wrong_once_goes_well(schedule: Schedule) -> None:
    assert trouble.complaints([schedule]) == {}


# -- the search itself --------------------------------------------------------------------------------------


def test_a_schedule_is_its_repr() -> None:
    names = {**vars(trouble_schedules), "inf": math.inf, "nan": math.nan}
    for seed in range(200):
        schedule = trouble.draw(seed)
        assert eval(repr(schedule), names) == schedule
        assert trouble.draw(seed) == schedule


def outcomes(schedule: Schedule) -> Iterator[str]:
    """What a schedule makes happen, in words."""
    model = Model(schedule)
    yield schedule.rule.rule_set
    for event in schedule.events:
        before = [(rank.generation, rank.layout) for rank in model.ranks]
        for r, ended in enumerate(model.apply(event)):
            rank = model.ranks[r]
            fields = sorted(ended.about & {"tag", "generation", "scales"})
            yield " ".join([type(event).__name__, ended.error or str(ended.committed), *fields])
            if isinstance(event, Recover) and rank.generation < before[r][0]:
                yield "rolled back"
            if isinstance(event, Step) and before[r][1] not in (None, rank.layout):
                yield "grown"


def test_every_trouble_comes_up_in_a_short_run() -> None:
    seen = Counter(what for seed in range(150) for what in set(outcomes(trouble.draw(seed))))
    expected = {
        *("fp8dist", "te_fused", "te_unfused", "rolled back", "grown"),
        *("Step True", "Step False", "Step PeerAborted", "Step NeedsRecovery", "Step Lost"),
        *(f"Step {kind}" for kind in trouble_players.KINDS),
        *(f"Step RanksDisagree {field}" for field in ("tag", "generation", "scales")),
        *("Recover None", "Load None", "Load ValueError"),
        *("Reopen None", "Save None", "Drift None", "Evaluate None"),
    }
    assert sorted(expected - seen.keys()) == []


def test_a_rank_that_does_something_else_is_complained_of() -> None:
    told = Schedule(Rule(), BOTH, (step(records(1.0)), Save(), Drift(1, "d.grad_output"), step()))
    untold = replace(told, events=(told.events[0], Save(), Save(), told.events[3]))
    played = trouble_players.play([told])[0]
    assert trouble.complaint(told, played) == ""
    text = trouble.complaint(untold, played)
    assert text.startswith("event 2, Save(), rank 1: expected slot d.grad_output to have bits")


def test_a_schedule_is_shrunk_to_what_matters() -> None:
    matters = step(Act(), records(3.0, fail="KeyError"))
    other = (step(records(1.0)), Save(), Load(), step(records(2.0)), Recover())
    long = Schedule(Rule(), BOTH, (*other, step(records(1.0), matters.acts[1], NEW), *other))

    def still(candidate: Schedule) -> bool:
        return any(isinstance(event, Step) and event.acts[1].fail for event in candidate.events)

    assert trouble.shrink(long, still).events == (matters,)


def test_a_schedule_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble_players, "POOL_SECONDS", 3.0)
    quick, hangs = (Schedule(Rule(), BOTH, (step(Act(late=late)),)) for late in (0, 60_000))
    with pytest.raises(RankHung) as caught:
        trouble_players.play([quick, hangs])
    assert any(repr(hangs) in note for note in caught.value.__notes__)
    assert not any(repr(quick) in note for note in caught.value.__notes__)
