"""From the flight recorder: what each rank did in one step, and everything that went wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._flight import Dump, Event
from .._layout import format_ranks
from ..blame import Judgement, Lane, clock_shifts

ENDS = ("commit", "abort", "error")
FAULTS = ("abort", "error", "recover")
MAX_LANES = 32
MAX_SPANS = 3000  # of one picture, some 200 bytes each
MAX_FAULTS = 60


@dataclass(frozen=True)
class Span:
    """One thing that a rank did for a while.

    Attributes:
        kind: `F`, `B`, `I`, `W`, `scope` (no chunks are known) or `collective`.
        start, end: seconds since the first event of the step.
        text: for the tooltip.
        label: a few characters to write into it.
    """

    kind: str
    start: float
    end: float
    text: str
    label: str


@dataclass(frozen=True)
class Picture:
    """One step of all ranks.

    Attributes:
        title: which step, and why it is shown.
        lanes: (rank, spans, how it ended), by rank.
        seconds: length of the step.
        left_out: ranks that are not shown since there are too many.
    """

    title: str
    lanes: tuple[tuple[int, tuple[Span, ...], str], ...]
    seconds: float
    left_out: int


@dataclass(frozen=True)
class Fault:
    """An error, an abort or a recovery, and the ranks that say the same of it.

    Attributes:
        ranks: who.
        hosts: where.
        step: its label.
        kind: `error`, `abort` or `recover`.
        text: what they said.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    step: str
    kind: str
    text: str

    @property
    def who(self) -> str:
        """The ranks, for people."""
        return format_ranks(self.ranks).partition(" ")[2]


def pictures(dumps: Mapping[int, Dump], judgement: Judgement) -> list[Picture]:
    """The step that failed, if any, and the newest one that most ranks have committed."""
    shifts = clock_shifts(dumps)
    lanes = [Lane(dumps[rank], shifts[rank], None) for rank in sorted(dumps)]
    finding = judgement.finding
    guilty = finding.ranks if finding is not None else ()
    found = []
    if finding is not None and finding.serial:
        found.append(_picture(lanes, finding.serial, "first trouble", guilty))
    whole = _last_whole(lanes)
    if whole is not None and not (found and finding is not None and finding.serial == whole):
        found.append(_picture(lanes, whole, "the newest whole one", guilty))
    return [picture for picture in found if picture.lanes]


def _last_whole(lanes: Sequence[Lane]) -> int | None:
    counts: Counter[int] = Counter()
    for lane in lanes:
        opened = {e.serial for e in lane.dump.events if e.kind == "open"}
        counts.update(opened & {e.serial for e in lane.dump.events if e.kind == "commit"})
    most = max(counts.values(), default=0)
    return max((serial for serial, count in counts.items() if count == most), default=None)


def _picture(lanes: Sequence[Lane], serial: int, why: str, guilty: Sequence[int]) -> Picture:
    of_step = {lane.rank: [e for e in lane.dump.events if e.serial == serial] for lane in lanes}
    present = [lane for lane in lanes if of_step[lane.rank]]
    shown = sorted(present, key=lambda lane: (lane.rank not in guilty, lane.rank))[:MAX_LANES]
    shown.sort(key=lambda lane: lane.rank)
    starts = [lane.at(of_step[lane.rank][0]) for lane in shown]
    start = min(starts, default=0.0)
    drawn = [(lane.rank, *_spans(lane, of_step[lane.rank], start)) for lane in shown]
    while len(drawn) > 1 and sum(len(spans) for _, spans, _ in drawn) > MAX_SPANS:
        drawn.pop(next((i for i in range(len(drawn) - 1, -1, -1) if drawn[i][0] not in guilty), 0))
    end = max((span.end for _, spans, _ in drawn for span in spans), default=0.0)
    tags = [event.tag for events in of_step.values() for event in events if event.tag is not None]
    title = f"Step {tags[0]}" if tags else f"Scope {serial}"
    return Picture(f"{title}, {why}", tuple(drawn), end, len(present) - len(drawn))


def _spans(lane: Lane, events: Sequence[Event], start: float) -> tuple[tuple[Span, ...], str]:
    """What a rank did in one scope, and a word on how that ended."""
    # A request is raised in the middle of a backward and ends nothing.
    marks = [e for e in events if e.kind in ("open", "chunk", "enter", *ENDS)]
    chunks = any(e.kind == "chunk" for e in marks)
    spans = []
    for i, event in enumerate(marks):
        begin = max(0.0, lane.at(event) - start)
        end = max(begin, (lane.at(marks[i + 1]) if i + 1 < len(marks) else lane.dumped_at) - start)
        if event.kind == "chunk":
            action, stage = str(event.detail.get("action", "?")), event.detail.get("stage", "?")
            number = event.detail.get("microbatch")
            which = "" if number is None else f", microbatch {number}"
            text = f"{WORDS.get(action, action)} of stage {stage}{which}"
            spans.append(Span(action, begin, end, text, action if number is None else f"{action}{number}"))
        elif event.kind == "enter":
            spans.append(Span("collective", begin, end, "waits in the collective", ""))
        elif event.kind == "open" and not chunks:
            spans.append(Span("scope", begin, end, "forward and backward", ""))
        if event.kind in ENDS:
            break
    ending = next((e for e in marks if e.kind in ENDS), None)
    if ending is None:
        return tuple(spans), "unfinished"
    return tuple(spans), str(ending.detail.get("type", "error")) if ending.kind == "error" else ending.kind


WORDS = {
    "F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights",
    "scope": "forward and backward (no schedule)", "collective": "waits in the collective",
}  # fmt: skip


def faults(dumps: Mapping[int, Dump]) -> list[Fault]:
    """Everything that went wrong, in the order of the scopes."""
    found: dict[tuple[int, str, str, str], list[int]] = defaultdict(list)
    for rank, dump in sorted(dumps.items()):
        for event in dump.events:
            if event.kind in FAULTS:
                label = f"step {event.tag}" if event.tag is not None else f"scope {event.serial}"
                found[event.serial, label, event.kind, _said(event)].append(rank)
    return [
        Fault(tuple(ranks), tuple(sorted({dumps[rank].host for rank in ranks})), label, kind, said)
        for (_, label, kind, said), ranks in sorted(found.items())
    ]


def _said(event: Event) -> str:
    detail = event.detail
    if event.kind == "error":
        return f"{detail.get('type', 'error')}: {detail.get('message', '')}"
    if event.kind == "recover":
        return f"recovered at generation {detail.get('generation', '?')}"
    if "what" in detail:
        place = detail.get("place")
        return f"{detail['what']}" + (f" ({place})" if place else "")
    return f"all ranks gave the step up; rank {detail.get('rank', '?')} asked for it"
