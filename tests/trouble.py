"""How random schedules of trouble are drawn, judged by the model, and shrunk.

seed ──draw──▶ Schedule ──play──▶ what each rank saw after each event ──┐
                   └─────model────▶ what it should have seen ───────────┴─▶ complaint ──shrink──▶ shorter one
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from forkpool import RankHung
from trouble_model import Ended, Model, Unfit
from trouble_players import KINDS, Seen, play
from trouble_schedules import (
    EVERYONE,
    WORLD,
    Act,
    Drift,
    Evaluate,
    Event,
    Load,
    Recover,
    Reopen,
    Rule,
    RuleSet,
    Save,
    Schedule,
    Step,
)

NAMES = ("a.input", "b.input", "c.weight", "d.grad_output", "e.grad_output", "f.weight", "g.input")


# -- drawing ------------------------------------------------------------------------------------------------


class _Drawer:
    """Draws events that fit the state that the model is in."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.schedule = Schedule(self.rule(), self.slots(), ())
        self.model = Model(self.schedule)
        self.tag = 0

    def chance(self, percent: float) -> bool:
        return self.rng.random() * 100 < percent

    def some_ranks(self, most: int = WORLD) -> tuple[int, ...]:
        return tuple(sorted(self.rng.sample(EVERYONE, self.rng.randint(1, most))))

    def rule(self) -> Rule:
        rng = self.rng
        rule_sets: tuple[RuleSet, ...] = ("fp8dist", "fp8dist", "fp8dist", "te_fused", "te_unfused")
        rule_set = rng.choice(rule_sets)
        rule = Rule(
            length=rng.choice((1, 2, 3, 4, 5, 8, 16, 17, 20)),
            algo=rng.choice(("max", "max", "most_recent")),
            rule_set=rule_set,
            margin=rng.choice((0, 0, 0, 1, 7, -3)),
            e4m3=self.chance(20),
        )
        if rule_set != "fp8dist":
            return rule
        return replace(
            rule,
            idle=rng.choice(("age", "hold")),
            non_finite=rng.choice(("absent", "freeze")),
            first_step=rng.choice(("current", "current", "unit")),
        )

    def slots(self) -> tuple[tuple[str, ...], ...]:
        """Some slots on all ranks, some on a few; now and then a rank without any."""
        names = self.rng.sample(NAMES, self.rng.randint(1, len(NAMES)))
        holders = {name: EVERYONE if self.chance(50) else self.some_ranks() for name in names}
        return tuple(tuple(name for name in names if r in holders[name]) for r in EVERYONE)

    def amax(self) -> float:
        rng = self.rng
        special = (0.0, 1e-41, 1.2e-38, 3e38, 3.4028234663852886e38, math.inf, math.nan)
        value = rng.choice(special) if self.chance(25) else 2.0 ** rng.uniform(-20, 20)
        return float(torch.tensor(value)) if value == value else math.nan

    def event(self) -> Event:
        ranks, rng = self.model.ranks, self.rng
        if any(rank.broken for rank in ranks) and self.chance(65):
            return Recover(rng.choice((*[None] * 4, *EVERYONE)))
        if self.model.drifted() and self.chance(20):
            return Recover(rng.choice(EVERYONE))
        kinds: dict[Callable[[], Event], int] = {
            self.step: 66,
            Save: 6,
            self.load: 12,
            lambda: Recover(rng.choice((None, *EVERYONE))): 3,
            lambda: Reopen(rng.choice((None, -1, rng.randrange(9))), self.loading_ranks()): 4,
            self.drift: 7,
            lambda: Evaluate(self.some_ranks(), self.amax()): 4,
        }
        return rng.choices(list(kinds), list(kinds.values()))[0]()

    def load(self) -> Event:
        if not self.model.checkpoints:
            return Save()
        return Load(self.rng.choice((-1, self.rng.randrange(9))), self.loading_ranks())

    def loading_ranks(self) -> tuple[int, ...]:
        return self.some_ranks() if self.chance(45) else EVERYONE

    def drift(self) -> Event:
        row = None if self.chance(40) else self.rng.randrange(self.schedule.rule.length)
        layout = self.model.ranks[0].layout or {}
        shared = sorted(name for name, holders in layout.items() if len(holders) > 1)
        name = self.rng.choice(shared or NAMES)
        return Drift(self.rng.choice(layout.get(name, EVERYONE)), name, row)

    def step(self) -> Event:
        self.tag += 1
        tag = self.rng.choice((None, self.tag, self.tag, f"step {self.tag}"))
        acts = [self.act(r, tag) for r in EVERYONE]
        # A rank that is hit does not join the search for what has drifted, and its peers would wait for it.
        moods = {
            "well": 60,
            "fails": 14,
            "aborts": 8,
            "other tag": 3,
            "lost": 0 if self.model.drifted() else 9,
        }
        mood = self.rng.choices(list(moods), list(moods.values()))[0]
        grows = any(act.new or rank.new for act, rank in zip(acts, self.model.ranks, strict=True))
        for r in self.some_ranks(2):
            match mood:
                case "fails":
                    acts[r] = replace(acts[r], fail=self.rng.choice(list(KINDS)), fail_first=self.chance(40))
                case "aborts":
                    acts[r] = replace(acts[r], abort=True)
                case "other tag":
                    acts[r] = replace(acts[r], tag=self.rng.choice((None, 0, "another", 2**40)))
                case "lost":
                    acts[r] = replace(acts[r], lost=2 if grows else 1)
        return Step(tuple(acts))

    def act(self, r: int, tag: int | str | None) -> Act:
        names = self.model.ranks[r].declared
        new = tuple(self.rng.sample(NAMES, self.rng.randint(1, 2))) if self.chance(6) else ()
        every = (*dict.fromkeys((*names, *new)),)
        return Act(
            late=self.rng.choice((1, 3, 8)) if self.chance(8) else 120 * self.chance(0.5),
            tag=tag,
            nested=self.chance(10),
            new=tuple(name for name in new if name not in names),
            records=tuple((name, self.amax()) for name in every for _ in range(2) if self.chance(45)),
            paused=tuple((name, self.amax()) for name in every if self.chance(5)),
            request=self.chance(80),
        )


def draw(seed: int) -> Schedule:
    """The schedule of this seed."""
    drawer = _Drawer(seed)
    events: list[Event] = []
    for _ in range(drawer.rng.randint(3, 10)):
        event = drawer.event()
        with contextlib.suppress(Unfit):
            drawer.model.apply(event)
            events.append(event)
    if len({rank.broken for rank in drawer.model.ranks}) > 1:
        events.append(Recover())  # or those that close would wait for those that do not
    return replace(drawer.schedule, events=tuple(events))


# -- judging ------------------------------------------------------------------------------------------------


def complaint(schedule: Schedule, seen: Sequence[Sequence[Seen]]) -> str:
    """The first thing that a rank saw and the model did not expect; empty if there is none."""
    model = Model(schedule)
    for i, event in enumerate(schedule.events):
        expected = model.apply(event)
        for r in EVERYONE:
            if i >= len(seen[r]):
                return f"rank {r} stopped before event {i}, {event!r}"
            wrong = _difference(model, r, expected[r], seen[r][i])
            if wrong:
                return f"event {i}, {event!r}, rank {r}: {wrong}\n  its error: {seen[r][i].text}"
        wrong = _digests(model, [seen[r][i].digests for r in EVERYONE])
        if wrong:
            return f"event {i}, {event!r}: {wrong}"
    return ""


def _difference(model: Model, r: int, expected: Ended, seen: Seen) -> str:
    ended = seen.ended
    if (ended.error, ended.committed) != (expected.error, expected.committed):
        return f"expected {expected} but it ended with {ended}"
    if expected.about and not ended.about & expected.about:
        return f"expected an error about {set(expected.about)} but it is about {set(ended.about)}"
    stats = model.ranks[r].stats()
    if seen.stats != stats:
        return (
            f"expected (commits, collectives, aborts, generation, nonfinite) {stats} but it has {seen.stats}"
        )
    slots = {name: cell.bits() for name, cell in model.state(model.ranks[r]).items()}
    if slots.keys() != seen.slots.keys():
        return f"expected slots {sorted(slots)} but it has {sorted(seen.slots)}"
    for name, bits in slots.items():
        if seen.slots[name] != bits:
            return f"expected slot {name} to have bits (history, scale, warm)\n  {bits}\nbut got\n  {seen.slots[name]}"
    for name, (shown, inverse) in seen.inverses.items():
        scale = torch.tensor(shown, dtype=torch.int32).view(torch.float32)
        if shown != slots[name][1] or inverse != float(scale.reciprocal()):
            return f"the slot {name} in use shows scale {float(scale)} and inverse {inverse}, not those of the state"
    return ""


def _digests(model: Model, digests: Sequence[dict[str, int]]) -> str:
    """Ranks that share slots must have one digest of them just where the model's copies are equal."""
    layouts = [rank.layout for rank in model.ranks]
    if layouts[0] is None or layouts.count(layouts[0]) < WORLD:
        return ""
    for holders in set(layouts[0].values()):
        names = [name for name, held in layouts[0].items() if held == holders]
        copies = {tuple(model.ranks[r].cells[name].bits() for name in names) for r in holders}
        label = {label for r in holders for label in digests[r] if _ranks_of(label) == holders}
        told = {digests[r].get(next(iter(label), "")) for r in holders}
        if len(told) != len(copies) or None in told:
            return f"ranks {holders} have digests {told} but {len(copies)} different states"
    return ""


def _ranks_of(label: str) -> tuple[int, ...]:
    """`ranks 0-1, 3` as numbers."""
    ranks: list[int] = []
    for run in label.partition(" ")[2].split(", "):
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


# -- finding ------------------------------------------------------------------------------------------------


def complaints(schedules: Sequence[Schedule]) -> dict[int, str]:
    """Play them in one pool; what is wrong with each, by index. It stops at a schedule that a rank did not finish."""
    return {i: text for i, seen in enumerate(play(schedules)) if (text := complaint(schedules[i], seen))}


def goes_wrong(schedule: Schedule) -> bool:
    """Whether there is anything wrong with it, a hang included."""
    try:
        return bool(complaints([schedule]))
    except RankHung:
        return True


def shrink(
    schedule: Schedule,
    still: Callable[[Schedule], bool] = goes_wrong,
    tries: int = 60,
    seconds: float = 90.0,
) -> Schedule:
    """Leave out events, then what ranks do in steps, as long as `still` holds.

    Args:
        schedule: one for which it holds.
        still: as a rule that something is wrong.
        tries: how often it is asked.
        seconds: until no more is tried.
    """
    end = time.monotonic() + seconds
    smaller = _smaller(schedule)
    while (candidate := next(smaller, None)) is not None and tries > 0 and time.monotonic() < end:
        if not _fits(candidate):
            continue
        tries -= 1
        if still(candidate):
            schedule, smaller = candidate, _smaller(candidate)
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    events = schedule.events
    size = len(events)
    while size := size // 2:
        for i in range(len(events) - size, -1, -size):
            yield replace(schedule, events=events[:i] + events[i + size :])
    for i, event in enumerate(events):
        if isinstance(event, Step):
            for r, act in enumerate(event.acts):
                quiet = Act(tag=act.tag)
                if act != quiet:
                    acts = (*event.acts[:r], quiet, *event.acts[r + 1 :])
                    yield replace(schedule, events=(*events[:i], Step(acts), *events[i + 1 :]))


def _fits(schedule: Schedule) -> bool:
    model = Model(schedule)
    try:
        for event in schedule.events:
            model.apply(event)
    except Unfit:
        return False
    return True
