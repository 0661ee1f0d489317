"""One fault on four ranks: from a good step before it to two good steps behind it, and what must be seen meanwhile."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from faults import make, record
from report import Row, saw
from torch import nn

import fp8dist as f8

PATIENCE = 8.0  # seconds; the timeout of faults that nobody may wait out
T = 1.8  # seconds; the timeout of those that are waited out
W = 0.6  # seconds; their stall warning; a rank publishes where it is at least every 0.5 s
WINDOW = 4
WORLD = 4
ODD = 2


class Boom(Exception):
    """What a failing rank raises."""


@dataclass(frozen=True)
class Told:
    """What a rank must get to see.

    Attributes:
        error: names of the types it may be, `None` among them if it may be none; empty: the rank sees no error.
        says: regular expressions that its text must match.
        within: seconds after the fault.
        not_before: seconds after the fault.
        warned: regular expression for the one stall warning that the rank must log; empty: it logs none;
            None: it may log or not.
    """

    error: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    within: float = 2.5
    not_before: float = 0.0
    warned: str | None = ""


def value(rank: int, number: int) -> float:
    """An amax that tells ranks and steps apart."""
    return 2.0 + (3 * rank + 5 * number) % 11


def usual_amaxes(rank: int, number: int) -> dict[str, float]:
    """What a rank records in a step, beside its model."""
    return {"a.input": value(rank, number)}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, how it is done to the ranks, and what each of them must see and keep.

    Attributes:
        name: also the test's id.
        what: one sentence for a reader.
        inject: what every rank does instead of a good step.
        own: what the faulty rank sees.
        peers: what the others see.
        odd: the faulty ranks.
        others: what ranks see that are neither.
        commits: numbers of the steps that are committed when the fault is over.
        ahead: the same of ranks that got further, until they recover.
        kept: the same after the ranks have recovered; None: as `commits`.
        goes_on: `nothing` to do, `recover`, `heal` (recover from rank 0's state) or `new` coordinators.
        timeout: of the coordinator, in seconds.
        stall_warning: of the coordinator, in seconds.
        amaxes: what a rank records in a step.
        recipe: what the faulty ranks use.
        early: it strikes before the first step.
        nonfinite: infinite and NaN amaxes that every rank must have counted in the end.
        transports: on which it is run.
    """

    name: str
    what: str
    inject: Callable[[Run], None]
    own: Told = Told()
    peers: Told = Told()
    odd: tuple[int, ...] = (2,)
    others: dict[int, Told] = field(default_factory=dict)
    commits: tuple[int, ...] = ()
    ahead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    kept: tuple[int, ...] | None = None
    goes_on: Literal["nothing", "recover", "heal", "new"] = "recover"
    timeout: float = PATIENCE
    stall_warning: float | None = None
    amaxes: Callable[[int, int], dict[str, float]] = usual_amaxes
    recipe: f8.DelayedScaling = field(default_factory=lambda: f8.DelayedScaling(amax_history_len=WINDOW))
    early: bool = False
    nonfinite: int = 0
    transports: tuple[str, ...] = ("gloo", "mpi")

    def told(self, rank: int) -> Told:
        """What that rank must see."""
        return self.others.get(rank, self.own if rank in self.odd else self.peers)


@dataclass
class Seen:
    """How a fault went on one rank. Moments are of the host's monotonic clock."""

    error: str | None
    text: str
    notes: str
    warnings: list[str]
    struck: float
    ended: float
    before: dict[str, str]
    after: dict[str, str]
    refused: str | None
    final: dict[str, str] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    nonfinite: int = 0
    recovery: str = ""


@dataclass(frozen=True)
class Place:
    """Where a rank of a trial stands. `group` is what its coordinator is given."""

    rank: int
    transport: str = "gloo"
    group: Any = None

    def together(self) -> None:
        """Wait for all ranks, on the default group."""
        dist.barrier()


class Run:
    """One process of a trial: a small model, slots, and what the rank, or all ranks at once, do in a step."""

    def __init__(self, fault: Fault, place: Place, plays: Sequence[int], *, name: str | None = None) -> None:
        self.fault, self.place, self.plays = fault, place, plays
        self.rank = place.rank
        self.odd = len(plays) == 1 and plays[0] in fault.odd
        self.name = fault.name if name is None else name
        self.coordinators: list[f8.ReductionGroupCoordinator] = []
        self.struck = 0.0
        self.punctual = False
        """It enters a collective together with those that are not faulty, which a busy machine makes late, too."""
        self._trap: tuple[str, Callable[[], object]] | None = None
        self.build(fault.recipe if self.odd else f8.DelayedScaling(amax_history_len=WINDOW))

    def build(self, recipe: f8.DelayedScaling, **options: Any) -> None:
        """A coordinator, and a model on it."""
        self.coordinator = self.another(self.name, recipe, **options)
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.model = f8.convert(layers, self.coordinator)
        first, middle = next(self.model.children()), self.model.get_submodule("1")
        middle.register_forward_pre_hook(lambda *_: self._reach("forward"))
        next(first.parameters()).register_hook(lambda _: self._reach("hook"))
        for rank in self.plays:
            for slot in self.fault.amaxes(rank, 0):
                self.coordinator.slot(slot)

    def another(self, name: str, recipe: f8.Recipe | None = None, **options: Any) -> Any:
        """One more coordinator over the same ranks."""
        times = {"timeout": self.fault.timeout, "stall_warning": self.fault.stall_warning}
        made = make(recipe, group=self.place.group, name=name, **{**times, **options})
        self.coordinators.append(made)
        return made

    def strike(self) -> None:
        """The fault happens now."""
        self.struck = time.monotonic()

    def _reach(self, where: str) -> None:
        if self._trap is not None and self._trap[0] == where:
            action, self._trap = self._trap[1], None
            self.strike()
            action()

    def step(
        self, number: int, *, tag: Any = "number", at: str = "", do: Callable[[], object] = lambda: None
    ) -> None:
        """One step.

        Args:
            number: tells its data.
            tag: of the scope; its number if not given.
            at: where the faulty rank does something else: `before` the scope, its `start`, `forward`,
                `backward`, `hook` (of a tensor) or `end`.
            do: what it does there.
        """
        self._trap = (at, do) if at and self.odd else None
        self._reach("before")
        with self.coordinator.step(number if tag == "number" else tag):
            self._reach("start")
            self.work(number)
            self._reach("end")
            if self.punctual:
                self.meet_the_others()

    def meet_the_others(self) -> None:
        """Wait for those that are not faulty; the store must be alive."""
        meetings, here = self.coordinator._transport.control.under("meetings"), self.coordinator.moment()
        meetings.count(here, 1)
        deadline = time.monotonic() + PATIENCE
        while meetings.count(here) < WORLD - len(self.fault.odd):
            assert time.monotonic() < deadline, "the others do not come"
            time.sleep(0.005)

    def work(self, number: int) -> None:
        """What is inside a step."""
        y = self.model(torch.full((16, 16), 1.0 + number))
        y.register_hook(lambda _: self._reach("backward"))
        y.sum().backward()
        for rank in self.plays:
            for name, amax in self.fault.amaxes(rank, number).items():
                record(self.coordinator.slot(name), amax)

    def suffer(self) -> Seen:
        """Inject the fault and see what comes of it."""
        before, aborts, error = bits(self.coordinator), self.coordinator.stats.aborts, None
        with heard() as warnings:
            self.strike()
            try:
                self.fault.inject(self)
            except AssertionError:
                raise
            except BaseException as caught:
                error = caught
            ended = time.monotonic()
        refused = None
        if self.coordinator.stats.aborts > aborts:
            try:
                self.coordinator.step("refused").__enter__()
            except f8.Fp8DistError as refusal:
                refused = type(refusal).__name__
        return Seen(
            error=type(error).__name__ if error else None,
            text=str(error) if error else "",
            notes="\n".join(getattr(error, "__notes__", [])),
            warnings=warnings,
            struck=self.struck,
            ended=ended,
            before=before,
            after=bits(self.coordinator),
            refused=refused,
        )

    def go_on(self) -> None:
        """What the ranks do about the fault, then two good steps."""
        for coordinator in self.coordinators:
            coordinator._timeout = PATIENCE
        if self.fault.goes_on == "new":
            self.drop()
            self.place.together()
            self.build(f8.DelayedScaling(amax_history_len=WINDOW))
        elif self.fault.goes_on != "nothing":
            for coordinator in self.coordinators:
                coordinator.recover(heal_from=0 if self.fault.goes_on == "heal" else None)
        for number in (10, 11):
            self.step(number)

    def drop(self) -> None:
        """Leave the coordinators, whatever state they are in."""
        for coordinator in self.coordinators:
            coordinator.__exit__(Boom, None, None)
        self.coordinators.clear()


def trial(fault: Fault, place: Place) -> Seen:
    """One rank's part: a good step, the fault, what mends it, two good steps."""
    run = Run(fault, place, [place.rank])
    if not fault.early:
        run.step(0)
    run.punctual = fault.stall_warning is not None and not run.odd
    place.together()
    seen = run.suffer()
    place.together()
    run.go_on()
    seen.final = bits(run.coordinator)
    seen.history = (
        run.coordinator.state_dict()["slots"].get("a.input", {"history": torch.empty(0)})["history"].tolist()
    )
    seen.nonfinite = run.coordinator.stats.nonfinite_amaxes
    place.together()
    for coordinator in run.coordinators:
        coordinator.close()  # compares how many scopes the ranks have run
    return seen


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The stall warnings that this process logs."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fp8dist")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def bits(coordinator: f8.ReductionGroupCoordinator) -> dict[str, str]:
    """The state's exact bits by slot and field."""
    state = coordinator.state_dict()
    return {"generation": str(int(state["generation"]))} | {
        f"{name}.{field}": tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes().hex()
        for name, fields in state["slots"].items()
        for field, tensor in fields.items()
    }


def reference(fault: Fault, steps: Sequence[int], group: Any = None) -> dict[str, str]:
    """The state's bits after those steps, by one process that does what all ranks do, without a fault."""
    run = Run(fault, Place(0, group=group), range(WORLD), name=f"reference of {fault.name}")
    for number in steps:
        run.step(number)
    found = bits(run.coordinator)
    run.drop()
    return found


def history_by_hand(fault: Fault, steps: Sequence[int]) -> list[float]:
    """The history of `a.input` after those steps, by no library: the MAX of each, or -1."""
    window = [-1.0] * WINDOW
    for number in steps:
        amaxes = [a["a.input"] for rank in range(WORLD) if "a.input" in (a := fault.amaxes(rank, number))]
        window.append(max(amaxes) if amaxes and all(map(math.isfinite, amaxes)) else -1.0)
    return window[-WINDOW:]


def check(fault: Fault, seen: Sequence[Seen], group: Any = None) -> None:
    """Every rank saw what it must, in time; states are those of the steps that count; all went on."""

    @functools.cache
    def expected(steps: tuple[int, ...]) -> dict[str, str]:
        return reference(fault, steps, group)

    before = () if fault.early else (0,)
    kept = (*before, *(fault.commits if fault.kept is None else fault.kept))
    for rank, one in enumerate(seen):
        check_told(fault, rank, seen)
        if fault.goes_on == "heal" and rank in fault.odd:
            assert one.after != one.before, "the fault is there"
        elif fault.early and not fault.commits:
            assert one.before.items() <= one.after.items(), f"the state of rank {rank} has changed"
        else:
            ahead = rank in fault.ahead and (rank in fault.odd or one.error is None)
            steps = (*before, *(fault.ahead[rank] if ahead else fault.commits))
            assert_same(one.after, expected(steps), f"rank {rank} after the fault")
    steps = (10, 11) if fault.goes_on == "new" else (*kept, 10, 11)
    final = expected(steps)
    for rank, one in enumerate(seen):
        assert_same(one.final, final, f"rank {rank} in the end")
        assert not one.history or one.history == history_by_hand(fault, steps), rank
        assert one.nonfinite == fault.nonfinite, (rank, one.nonfinite)
    assert {key for one in seen for key in one.final} == set(final), "no slot got lost"


def last_trial(fault: Fault, place: Place) -> Seen:
    """One rank's part in a fault that ends or stops a process; also what recover() then says."""
    run = Run(fault, place, [place.rank])
    run.step(0)
    place.together()
    run.struck = time.monotonic()
    seen = run.suffer()
    run.coordinator._timeout = 0.6
    start = time.monotonic()
    with pytest.raises((f8.CollectiveTimeout, f8.TransportError)) as refused:
        run.coordinator.recover()
    assert time.monotonic() - start < 4.0
    seen.recovery = str(refused.value)
    return seen


def check_survivors(fault: Fault, seen: dict[int, Seen]) -> None:
    """All that live were told who is gone, in time; their states are those of the steps that count."""
    for rank in seen:
        check_told(fault, rank, seen)
        assert_same(seen[rank].after, reference(fault, (0, *fault.commits)), f"rank {rank}")
        assert re.search(
            rf"rank {fault.odd[0]} did not come|the store .* (is gone|not answered)", seen[rank].recovery
        )


def check_told(fault: Fault, rank: int, seen: Sequence[Seen] | Mapping[int, Seen]) -> None:
    """Error, text, time and warnings of one rank."""
    one, told = seen[rank], fault.told(rank)
    context = f"rank {rank}: {one.error}: {one.text}\n{one.notes}\nwarnings: {one.warnings}"
    assert str(one.error) in (told.error or ("None",)), context
    for pattern in told.says:
        assert re.search(pattern, f"{one.text}\n{one.notes}"), f"{pattern!r} is not told to {context}"
    assert told.not_before <= seconds_after(fault, rank, seen) <= told.within, context
    assert one.refused in (None, "NeedsRecovery"), context
    if told.warned is not None:
        assert len(one.warnings) == bool(told.warned), context
        assert all(re.search(told.warned, text) for text in one.warnings), context


def seconds_after(fault: Fault, rank: int, seen: Sequence[Seen] | Mapping[int, Seen]) -> float:
    """From the fault to what a rank saw of it; where the faulty rank cannot tell when it was, as the rank says."""
    told_by = fault.odd[0] if len(seen) == WORLD else rank
    return max(0.0, seen[rank].ended - seen[told_by].struck)


def assert_same(mine: dict[str, str], theirs: dict[str, str], whose: str) -> None:
    """What this rank holds is, bit for bit, what the reference holds."""
    assert {key: theirs.get(key) for key in mine} == mine, whose


GOES_ON = {
    "nothing": "itself",
    "recover": "`recover()`",
    "heal": "`recover(heal_from=0)`",
    "new": "new coordinators",
    "restart": "a restart",
    "refused": "a restart; `recover()` names the dead",
}


def row(fault: Fault, transport: str, seen: Mapping[int, Seen], *, died: str = "") -> Row:
    """The line of the table for a fault: `seen` by rank; `died` says how the faulty ranks ended."""
    ours = [rank for rank in fault.odd if rank in seen]
    others = [rank for rank in seen if rank not in fault.odd]
    told = {rank: saw(seen[rank].error, seen[rank].text) for rank in seen}
    # Where some peers see nothing by design, the table tells of those that see something.
    peer = max(others, key=lambda rank: (seen[rank].error is not None, fault.told(rank) is fault.peers))
    warned = "a warning, then success" if seen[peer].warnings and seen[peer].error is None else ""
    same = bool(ours) and seen[peer].error is not None and told[peer] == told[ours[0]]
    if fault.ahead:
        state = "one commit apart; the higher ones are rolled back"
    elif fault.early and not fault.commits:
        state = "there is none yet"
    elif fault.goes_on == "nothing":
        state = "committed"
    elif fault.goes_on == "heal":
        state = "untouched, the one bit still wrong"
    else:
        state = "as the last commit left it"
    return Row(
        fault=fault.name,
        what=fault.what,
        transport=transport,
        own=died or told[ours[0]],
        peers="the same" if same else warned or told[peer],
        seconds=max(
            seconds_after(fault, rank, seen) for rank in seen if seen[rank].error or not fault.peers.error
        ),
        state=state,
        goes_on=GOES_ON[("refused" if seen[peer].recovery else "restart") if died else fault.goes_on],
    )
