"""Which rank was the first to differ: judges the flight recorder dumps of all ranks.

Ranks are aligned by the number of the scope, not by clock. Within one scope the order is: a field that ranks
brought to the exit's collective with different values; a rank that left by an error of its own; a rank that did
not come. What shows only at the end follows: different numbers of scopes, a rank without a dump, and last errors
that merely echo what happened elsewhere.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ._flight import PATTERN, Dump, Event, read_dump
from ._layout import format_ranks
from ._notes import MENDS

COMPARED = ("tag", "generation", "layout", "recipe", "part", "scales", "communicator")
PATIENCE = 1.0  # seconds; where nothing failed, a rank that peers have awaited for less is only the slowest

# Errors that a rank gets because of what another rank did, and how it reads where a peer's process is gone.
ECHOES = {
    "PeerAborted", "CollectiveTimeout", "RanksDisagree", "LayoutMismatch", "TransportError", "NeedsRecovery",
    "DistBackendError", "DistNetworkError", "DistStoreError",
}  # fmt: skip
LOST_CONNECTION = ("connection closed", "connection reset", "connection refused", "broken pipe")

ECHO_MENDS = {
    "CollectiveTimeout": "every rank that left a dump has entered, so the network or a dying process held it up: see "
    "the hosts' logs",
    "PeerAborted": "the rank that it names has recorded no error of its own: read that rank's log",
    "NeedsRecovery": "call recover() on every rank after a failed step; the first error has left the records",
}


@dataclass(frozen=True)
class Finding:
    """The first disagreement of the ranks of one coordinator.

    Attributes:
        kind: `field`, `error`, `exit` (never entered), `scopes` (at close), `dump` (none), `echo`.
        ranks: who is wrong; with `echo`, who says so.
        serial: number of the scope, or None where it is about none.
        summary: rank, step, and what differs, one line.
        mend: what to do, one line.
    """

    kind: str
    ranks: tuple[int, ...]
    serial: int | None
    summary: str
    mend: str


@dataclass(frozen=True)
class Row:
    """Where one rank is.

    Attributes:
        rank: in the coordinator's group.
        host: machine; empty without a dump.
        pid: process; None without a dump.
        committed: the last step that it has committed, or `none`.
        where: in scope, in exit, between scopes, closed, left by an error, no dump.
        last: its last event.
        age: seconds between that and the newest event of any rank; None without an event.
        dump: why it was written.
    """

    rank: int
    host: str = ""
    pid: int | None = None
    committed: str = ""
    where: str = "no dump"
    last: str = ""
    age: float | None = None
    dump: str = ""


@dataclass(frozen=True)
class Judgement:
    """What the dumps of one coordinator say.

    Attributes:
        coordinator: its name.
        world: number of ranks.
        finding: the first disagreement, or None.
        agreed: the last step that some rank has committed.
        recoveries: failures that all ranks have recovered from; what came before the last is not judged.
        rows: one per rank.
    """

    coordinator: str
    world: int
    finding: Finding | None
    agreed: str
    recoveries: int
    rows: tuple[Row, ...]

    @property
    def lines(self) -> tuple[str, str]:
        """The answer, in two lines."""
        if self.finding is not None:
            return f"first disagreement: {self.finding.summary}", f"what to do: {self.finding.mend}"
        ranks = "the one rank agrees" if self.world == 1 else f"all {self.world} ranks agree"
        upto = "and nothing was committed" if self.agreed == "none" else f"up to {self.agreed}"
        return "first disagreement: none", f"what to do: nothing, {ranks} {upto}"

    @property
    def caption(self) -> str:
        """What a reader of the table must know, or nothing."""
        times = "once" if self.recoveries == 1 else f"{self.recoveries} times"
        return f"all ranks have recovered {times}; judged from there on" if self.recoveries else ""

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"lines": list(self.lines)}


def read_directory(directory: Path) -> dict[str, dict[int, Dump]]:
    """All dumps of a directory, by coordinator and rank.

    Raises:
        ValueError: there are none, one is damaged, or they cannot be of one run.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory}: expected a directory with flight recorder dumps")
    found: dict[str, dict[int, Dump]] = {}
    for path in sorted(directory.glob(PATTERN)):
        dump = read_dump(path)
        others = found.setdefault(dump.coordinator, {})
        for other in others.values():
            if other.rank == dump.rank or other.world != dump.world:
                raise ValueError(
                    f"{path}, line 1: expected another rank than {other.path.name} of the same {other.world} ranks but "
                    f"got rank {dump.rank} of {dump.world}; keep the dumps of one run only in a directory"
                )
        others[dump.rank] = dump
    if not found:
        raise ValueError(f"{directory}: expected dumps named {PATTERN} but got none")
    return found


def judge(dumps: Mapping[int, Dump]) -> Judgement:
    """Compare the dumps of one coordinator.

    Args:
        dumps: by rank; at least one. Ranks that are not there have left none.
    """
    first = dumps[min(dumps)]
    shifts = clock_shifts(dumps)
    recovered = _common_recovery(dumps)
    lanes = [Lane(dumps[rank], shifts[rank], recovered) for rank in sorted(dumps)]
    commits = [e for dump in dumps.values() for e in dump.events if e.kind == "commit"]
    newest = max((lane.at(e) for lane in lanes for e in lane.dump.events[-1:]), default=0.0)
    rows = {lane.rank: lane.row(newest) for lane in lanes}
    return Judgement(
        coordinator=first.coordinator,
        world=first.world,
        finding=_find(lanes, first.world),
        agreed=_label(max(commits, key=lambda e: e.serial)) if commits else "none",
        recoveries=0 if recovered is None else max(_count_recoveries(dump) for dump in dumps.values()),
        rows=tuple(rows.get(rank, Row(rank)) for rank in range(first.world)),
    )


def clock_shifts(dumps: Mapping[int, Dump]) -> dict[int, float]:
    """Seconds to add to each rank's clock so that its commits fall on those of the lowest rank.

    All ranks leave a collective at almost the same time; the median of the differences is the clocks'.
    """
    commits = {
        rank: {e.serial: _wall(dump, e) for e in dump.events if e.kind == "commit"}
        for rank, dump in dumps.items()
    }
    reference = commits[min(dumps)]
    shifts = {}
    for rank, times in commits.items():
        common = [reference[serial] - times[serial] for serial in times.keys() & reference.keys()]
        shifts[rank] = statistics.median(common) if common else 0.0
    return shifts


def _wall(dump: Dump, event: Event) -> float:
    """Wall time by the monotonic clock: a clock that was set back in between does not turn events around."""
    return dump.time - dump.elapsed + event.elapsed


def _common_recovery(dumps: Mapping[int, Dump]) -> int | None:
    """Serial of the last recovery that every rank's records show, or None."""
    serials = [{e.serial for e in dump.events if e.kind == "recover"} for dump in dumps.values()]
    return max(set.intersection(*serials), default=None)


def _count_recoveries(dump: Dump) -> int:
    return sum(e.kind == "recover" for e in dump.events)


class Lane:
    """One rank's records, sorted for judging.

    Attributes:
        rank: whose.
        dump: its file.
        claims: what it brought to each exit's collective: tag, digests and more, by serial.
        enters: when it entered, by serial.
        commits: serials of the collectives that it has finished.
        failures: errors, and aborts before the exit.
        close: its `close`, if it came so far.
    """

    def __init__(self, dump: Dump, shift: float, recovered: int | None) -> None:
        self.rank = dump.rank
        self.dump = dump
        self._shift = shift
        self.claims: dict[int, dict[str, Any]] = {}
        self.enters: dict[int, float] = {}
        self.commits: set[int] = set()
        self.failures: list[Event] = []
        self.close: Event | None = None
        connection: dict[str, Any] = {}
        for event in dump.events:
            if event.kind == "connect":
                connection = event.detail
            elif event.kind == "enter":
                self.claims[event.serial] = {"tag": event.tag} | connection | event.detail
                self.enters[event.serial] = self.at(event)
            elif event.kind == "commit":
                self.commits.add(event.serial)
            elif event.kind == "error" or (event.kind == "abort" and not self._agreed_on(event)):
                self.failures.append(event)
            elif event.kind == "close":
                self.close = event
            elif event.kind == "recover" and event.serial == recovered:
                for judged in (self.claims, self.enters, self.commits, self.failures):
                    judged.clear()
        self.since = min((e.serial for e in dump.events if e.serial), default=0) if dump.dropped else 0
        """The first scope that the ring has not lost."""

    def at(self, event: Event) -> float:
        """Its time on the clock of the lowest rank."""
        return _wall(self.dump, event) + self._shift

    @property
    def dumped_at(self) -> float:
        """When the file was written, on the clock of the lowest rank."""
        return self.dump.time + self._shift

    @property
    def through(self) -> set[int]:
        """Serials of the collectives that it has entered, also where the ring has lost the `enter`."""
        return self.commits | self.enters.keys()

    @property
    def process(self) -> str:
        """For a person who wants to look at it."""
        return f"process {self.dump.pid} on {self.dump.host}"

    def _agreed_on(self, abort: Event) -> bool:
        """Whether the ranks abandoned the step together: this one had entered, or the ring may have lost that."""
        return abort.serial in self.enters or (self.dump.dropped > 0 and abort is self.dump.events[0])

    def place(self, serial: int) -> str:
        """Where it failed in a scope, or nothing."""
        places = [e.detail.get("place") for e in self.failures if e.serial == serial]
        return next((f" ({_line(place)})" for place in places if place), "")

    def row(self, newest: float) -> Row:
        """Where this rank is; ages count from `newest`."""
        events = self.dump.events
        commits = [e for e in events if e.kind == "commit"]
        return Row(
            rank=self.rank,
            host=_line(self.dump.host),
            pid=self.dump.pid,
            committed=_label(commits[-1]) if commits else "none",
            where=self._where(),
            last=describe(events[-1]) if events else "",
            age=newest - self.at(events[-1]) if events else None,
            dump=_line(self.dump.reason) + (", cut off" if self.dump.truncated else ""),
        )

    def _where(self) -> str:
        for event in reversed(self.dump.events):
            if event.kind == "open":
                return f"in scope ({_label(event)})"
            if event.kind == "enter":
                return f"in exit ({_label(event)})"
            if event in self.failures:
                return f"left by error ({_error_type(event)})"
            if event.kind == "close":
                return "closed"
            if event.kind in ("commit", "abort", "recover"):
                return "between scopes"
        return "before the first scope"


def _find(lanes: Sequence[Lane], world: int) -> Finding | None:
    serials = {s for lane in lanes for s in lane.through} | {
        e.serial for lane in lanes for e in lane.failures
    }
    for serial in sorted(serials):
        found = (
            _differing_field(lanes, serial)
            or _own_error(lanes, serial)
            or _never_entered(lanes, serial, world)
        )
        if found is not None:
            return found
    return _differing_scopes(lanes) or _no_dump(lanes, world) or _echo(lanes)


def _differing_field(lanes: Sequence[Lane], serial: int) -> Finding | None:
    values: dict[str, dict[int, Any]] = defaultdict(dict)
    for lane in lanes:
        for field, value in lane.claims.get(serial, {}).items():
            values[field][lane.rank] = value
    if not values:
        return None
    tag = _majority(values["tag"])[0]
    for base in COMPARED:
        for field in sorted(f for f in values if f.partition(" ")[0] == base):
            right, wrong = _majority(values[field])
            if wrong:
                step = f"scope {serial}" if field == "tag" else _step(serial, tag)
                return _differ("field", serial, step, field, right, wrong)
    return None


def _own_error(lanes: Sequence[Lane], serial: int) -> Finding | None:
    own = sorted(
        ((lane.at(e), lane.rank, lane, e) for lane in lanes for e in lane.failures if e.serial == serial),
        key=lambda failure: failure[:2],
    )
    own = [failure for failure in own if not _is_echo(failure[3])]
    if not own:
        return None
    _, rank, lane, event = own[0]
    later = sorted({other for _, other, _, _ in own} - {rank})
    others = f"later also {format_ranks(later)}" if later else "all others none of their own"
    return Finding(
        "error", (rank,), serial,
        f"rank {rank}, {_label(event)}, error: {_error_text(event)}{lane.place(serial)}, {others}",
        f"read the traceback in the log of rank {rank} ({lane.process}); to go on after such an error, every rank "
        "catches its own and calls recover()",
    )  # fmt: skip


def _never_entered(lanes: Sequence[Lane], serial: int, world: int) -> Finding | None:
    """Ranks that did not come to a collective which others entered and nobody could finish."""
    came = [lane for lane in lanes if serial in lane.enters]
    if not came or any(serial in lane.commits for lane in lanes):
        return None
    patience = 0.0 if any(lane.failures for lane in lanes) else PATIENCE
    awaited = min(lane.enters[serial] for lane in came) + patience
    absent = [
        lane
        for lane in lanes
        if serial not in lane.enters and serial >= lane.since and lane.dumped_at >= awaited
        and lane.close is None and not lane.failures and not lane.dump.truncated
    ]  # fmt: skip
    if not absent:
        return None
    silent = min(absent, key=lambda lane: lane.at(lane.dump.events[-1]) if lane.dump.events else 0.0)
    last = silent.dump.events[-1] if silent.dump.events else None
    ranks = tuple(lane.rank for lane in absent)
    who = "its" if len(ranks) == 1 else f"the silent one is rank {silent.rank}, its"
    act = (
        "nothing"
        if last is None
        else f"{describe(last)}, {silent.dumped_at - silent.at(last):.1f} s before its dump"
    )
    others = "all others entered" if len(came) + len(ranks) == world else (
        f"{format_ranks([lane.rank for lane in came])} entered"
    )  # fmt: skip
    tag = _majority({lane.rank: lane.claims[serial]["tag"] for lane in came})[0]
    return Finding(
        "exit", ranks, serial,
        f"{format_ranks(ranks)}, {_step(serial, tag)}, exit: never entered ({who} last event: {act}), {others}",
        _mend_absence(silent, last),
    )  # fmt: skip


def _mend_absence(lane: Lane, last: Event | None) -> str:
    if last is not None and lane._where().startswith("in scope"):
        return (
            f"rank {lane.rank} is still inside forward, backward or the schedule's communication: look at the stack of "
            f"{lane.process}, and whether a peer sends what it waits for"
        )
    return (
        f"rank {lane.rank} has not opened this scope: every rank opens one per optimizer step, also without data or "
        f"FP8 layers; if it is on the way there, look at the stack of {lane.process}"
    )


def _differing_scopes(lanes: Sequence[Lane]) -> Finding | None:
    counts: dict[int, Any] = {
        lane.rank: lane.close.detail.get("scopes") for lane in lanes if lane.close is not None
    }
    if not counts:
        return None
    fewest = min((count for count in counts.values() if isinstance(count, int)), default=0)
    for lane in lanes:  # a rank that waits where others have closed has opened more
        if lane.close is None and (most := max(lane.through, default=0)) > fewest:
            counts[lane.rank] = most
    right, wrong = _majority(counts)
    return _differ("scopes", None, "at close", "scopes", right, wrong) if wrong else None


def _no_dump(lanes: Sequence[Lane], world: int) -> Finding | None:
    ranks = tuple(sorted(set(range(world)) - {lane.rank for lane in lanes}))
    if not ranks:
        return None
    commits = [e for lane in lanes for e in lane.dump.events if e.kind == "commit"]
    after = f"after {_label(max(commits, key=lambda e: e.serial))}" if commits else "before any commit"
    echo = _echo(lanes)
    said = "" if echo is None else f"; what the others say: {echo.summary}"
    return Finding(
        "dump", ranks, None, f"{format_ranks(ranks)}, {after}, dump: none, all others one",
        "the process was killed (signal, out of memory, lost node), or hangs in native code: read its log and its "
        f"host's kernel log, or look at its stack{said}",
    )  # fmt: skip


def _echo(lanes: Sequence[Lane]) -> Finding | None:
    """The first error that some other rank must have caused, where nobody has recorded the cause."""
    failures = [(e.serial, lane.at(e), lane.rank, e) for lane in lanes for e in lane.failures]
    if not failures:
        return None
    serial, _, _, first = min(failures, key=lambda failure: failure[:3])
    kind = _error_type(first)
    ranks = tuple(sorted({rank for s, _, rank, e in failures if s == serial and _error_type(e) == kind}))
    rest = "all ranks the same" if len(ranks) == len(lanes) else "the others none before it"
    return Finding(
        "echo", ranks, serial,
        f"{format_ranks(ranks)}, {_label(first)}, error: {_error_text(first)}, {rest}",
        ECHO_MENDS.get(kind, "the message names what differs or broke; the records do not show who caused it"),
    )  # fmt: skip


# -- words ------------------------------------------------------------------------------------------------


def _majority(values: Mapping[int, Any]) -> tuple[Any, list[tuple[Any, list[int]]]]:
    """The value of most ranks (of the lowest one, if equally many), and the other values with their ranks."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(values):
        groups[json.dumps(values[rank], sort_keys=True)].append(rank)
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return values[ordered[0][0]], [(values[ranks[0]], ranks) for ranks in ordered[1:]]


def _differ(
    kind: str, serial: int | None, step: str, field: str, right: Any, wrong: list[tuple[Any, list[int]]]
) -> Finding:
    ranks = tuple(sorted(rank for _, group in wrong for rank in group))
    # A tag that is a string looks like one, since 17 and "17" differ.
    shown = [
        _line(repr(v) if field == "tag" and isinstance(v, str) else v)
        for v in (right, *(v for v, _ in wrong))
    ]
    got = shown[1]
    if len(wrong) > 1:
        got = ", ".join(
            f"{value} ({format_ranks(group)})" for value, (_, group) in zip(shown[1:5], wrong, strict=False)
        )
        got += f" and {len(wrong) - 4} more values" if len(wrong) > 4 else ""
    mend = MENDS.get(
        field.partition(" ")[0],
        "These dumps are of different runs, or of before and after a recovery: use a fresh directory for every run.",
    )
    summary = f"{format_ranks(ranks)}, {step}, {field}: {got}, all others {shown[0]}"
    return Finding(kind, ranks, serial, summary, mend)


def _step(serial: int, tag: Any) -> str:
    if tag is not None:
        return f"step {_line(tag)}"
    return f"scope {serial}" if serial else "before the first scope"


def _label(event: Event) -> str:
    return _step(event.serial, event.tag)


def _line(value: Any) -> str:
    """A value on one line, fit for any terminal."""
    text = "none" if value is None else " ".join(str(value).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _error_text(event: Event) -> str:
    detail = event.detail
    if event.kind == "abort":
        return _line(detail.get("what", "abort"))
    return _line(f"{detail.get('type', 'unknown')}: {detail.get('message', '')}")


def _error_type(event: Event) -> str:
    return _error_text(event).partition(":")[0]


def _is_echo(event: Event) -> bool:
    return _error_type(event) in ECHOES or any(sign in _error_text(event).lower() for sign in LOST_CONNECTION)


def describe(event: Event) -> str:
    """An event in a few words, such as `chunk B, stage 1, microbatch 2` or `commit of step 17`."""
    if event.kind != "chunk":
        return f"{_line(event.kind)} of {_label(event)}" if event.serial else _line(event.kind)
    where = (f"{name} {_line(value)}" for name, value in event.detail.items() if name != "action")
    return ", ".join([f"chunk {event.detail.get('action', '')}".rstrip(), *where])


# -- export -----------------------------------------------------------------------------------------------


def trace(runs: Mapping[str, Mapping[int, Dump]]) -> dict[str, Any]:
    """All dumps as Chrome trace events, which ui.perfetto.dev opens. Times are microseconds.

    A process per rank, a thread per coordinator; a slice for each scope with its exit nested in it, and an
    instant for everything else. Clocks are aligned by the commits.
    """
    lanes = {}
    for name, dumps in runs.items():
        shifts = clock_shifts(dumps)
        lanes[name] = [Lane(dumps[rank], shifts[rank], None) for rank in sorted(dumps)]
    every = [lane for group in lanes.values() for lane in group]
    start = min((lane.at(e) for lane in every for e in lane.dump.events), default=0.0)
    events: list[dict[str, Any]] = []
    for lane in {lane.rank: lane for lane in every}.values():
        title = {"name": f"rank {lane.rank} ({lane.dump.host})"}
        events.append({"ph": "M", "name": "process_name", "pid": lane.rank, "tid": 0, "args": title})
        order = {"sort_index": lane.rank}
        events.append({"ph": "M", "name": "process_sort_index", "pid": lane.rank, "tid": 0, "args": order})
    for thread, (name, group) in enumerate(lanes.items(), start=1):
        for lane in group:
            where = {"pid": lane.rank, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": f"fp8dist {name}"}})
            events += [event | where for event in _drawn(lane, start)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _drawn(lane: Lane, start: float) -> Iterator[dict[str, Any]]:
    """Slices and instants of one lane, a scope before the exit nested in it."""
    pending: list[tuple[str, int, Event]] = []  # the open scope, then its exit

    def finish(end: int, **more: bool) -> Iterator[dict[str, Any]]:
        for name, begin, event in pending:
            args = {"serial": event.serial, "tag": event.tag, **event.detail, **more}
            yield {"ph": "X", "cat": "fp8dist", "name": name, "ts": begin, "dur": end - begin, "args": args}
        pending.clear()

    # Whole microseconds: rounded sums of fractions would let an exit end after its scope.
    for event in lane.dump.events:
        now = round((lane.at(event) - start) * 1e6)
        if event.kind == "enter":
            pending.append((f"exit of {_label(event)}", now, event))
            continue
        if event.kind in ("open", "commit", "abort", "error", "recover", "close"):
            yield from finish(now)
        if event.kind == "open":
            pending.append((_label(event), now, event))
            continue
        args = {"serial": event.serial, "tag": event.tag, **event.detail}
        yield {"ph": "i", "s": "t", "cat": "fp8dist", "name": describe(event), "ts": now, "args": args}
    yield from finish(round((lane.dumped_at - start) * 1e6), unfinished=True)
