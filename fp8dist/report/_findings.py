"""What the records mean, in plain words: the verdicts at the top of the page, and an advice for each slot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from .._layout import format_ranks
from ..blame import Judgement
from ._read import Run
from ._series import SlotSeries, Warned
from ._waits import Waiting

# The same limits as the monitor's warnings.
SATURATING = 1e-3
ROUNDING = (
    0.05  # powers of two; what lies so little above the largest value would have been rounded to it anyway
)
FLUSHING = 0.5
UNSEEN_HISTORIES = 2
LARGEST_SCALE = float(np.finfo(np.float32).max)

NAMED = 3  # slots named in one verdict; the table has the rest
LAST_LOSSES = 20
LOSS_GOOD, LOSS_BAD = 1.0, 5.0  # percent above FP32's


class Level(Enum):
    """How a verdict reads; the value is the word that stands before it."""

    PROBLEM = "Problem"
    NOTE = "Note"
    GOOD = "Good"
    UNKNOWN = "Not known"


@dataclass(frozen=True)
class Verdict:
    """One line at the top.

    Attributes:
        level: how bad it is.
        text: what is the case.
        advice: what to do, or nothing.
    """

    level: Level
    text: str
    advice: str = ""


def verdicts(run: Run, judgements: Sequence[Judgement], waits: Waiting) -> list[Verdict]:
    """All verdicts, the worst first."""
    found = [
        *_failures(run, judgements),
        *_slots(run),
        *_earlier_warnings(run),
        *_slow(run, waits),
        *_losses(run),
        *_agreement(run),
    ]
    order = list(Level)
    return sorted(found, key=lambda verdict: order.index(verdict.level))


# -- failures ---------------------------------------------------------------------------------------------

_FAILED = {
    "error": "A rank failed", "exit": "A rank did not come to the collective", "field": "The ranks disagree",
    "scopes": "The ranks ran different numbers of steps", "dump": "A rank left no records", "echo": "A step failed",
}  # fmt: skip


def _failures(run: Run, judgements: Sequence[Judgement]) -> list[Verdict]:
    found = []
    for judgement in judgements:
        name = f" (coordinator {judgement.coordinator})" if len(judgements) > 1 else ""
        if judgement.finding is not None:
            said = _FAILED.get(judgement.finding.kind, "A rank differs")
            text = (
                f"{said}{name}: {judgement.finding.summary.removesuffix(', all others none of their own')}."
            )
            found.append(Verdict(Level.PROBLEM, text, _sentence(judgement.finding.mend)))
        if judgement.recoveries:
            times = "once" if judgement.recoveries == 1 else f"{judgement.recoveries} times"
            found.append(Verdict(Level.NOTE, f"A failed step was recovered from {times}{name}."))
    aborts = aborted_steps(run)
    if aborts:
        steps = "step was" if aborts == 1 else "steps were"
        advice = "See who asked for it below." if run.dumps else "The flight recorder tells who asked for it."
        found.append(Verdict(Level.NOTE, f"{aborts} {steps} aborted: no rank changed a scale there.", advice))
    found += _early_ends(run)
    if any(v.level is Level.PROBLEM for v in found):
        return found
    if judgements:
        upto = ", ".join(j.agreed for j in judgements)
        return [
            *found,
            Verdict(Level.GOOD, f"No rank failed: all flight records agree (last commit: {upto})."),
        ]
    missing = "Whether a rank failed: there are no flight records."
    return [*found, Verdict(Level.UNKNOWN, missing, "See “What is missing” for how to get them.")]


def aborted_steps(run: Run) -> int:
    """Steps that all ranks gave up together, by whoever knows of most."""
    counts = [rank.aborts for rank in run.ranks.values()]
    if isinstance(run.summary.get("aborts"), int):
        counts.append(run.summary["aborts"])
    for dumps in run.dumps.values():
        # An abort without a rank is that of a rank which failed.
        given_up = {
            e.serial for d in dumps.values() for e in d.events if e.kind == "abort" and "rank" in e.detail
        }
        counts.append(len(given_up))
    return max(counts, default=0)


def _early_ends(run: Run) -> list[Verdict]:
    """Ranks whose monitor stopped long before the others': their process is gone, or hangs."""
    if not run.ranks:
        return []
    end = max(rank.last_step for rank in run.ranks.values())
    found = []
    for rank in run.ranks.values():
        if rank.samples and rank.last_step < end - 2 * max(1, rank.interval):
            text = f"Rank {rank.rank} on host {rank.host}: its records end at step {rank.last_step}, others' at {end}."
            found.append(Verdict(Level.PROBLEM, text, "Read that rank's log: the process ended or hangs."))
    return found[:NAMED]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


# -- slots ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trouble:
    """One kind of trouble that a slot can have.

    Attributes:
        what: as the monitor calls it.
        level: of its verdict.
        slots: positions, the worst first.
        words: what is the case with the slot at a position.
        plural: what is the case with many.
        advice: what to do about the slot at a position.
    """

    what: str
    level: Level
    slots: Sequence[int]
    words: Callable[[int], str]
    plural: str
    advice: Callable[[int], str]


def troubles(run: Run) -> list[Trouble]:
    """What ails which slots in the last samples."""
    s = run.slots
    with np.errstate(invalid="ignore"):
        uncounted = np.isnan(s.saturated)
        saturating = (s.saturated > SATURATING) & ~(s.headroom > -ROUNDING)
        saturating |= uncounted & (s.below > 0.5) & (s.headroom < -ROUNDING)
        flushing = (s.flushed > FLUSHING) & ~saturating
        at_limit = (s.scale >= LARGEST_SCALE * 0.999) | (s.scale <= 2.0**-126)
    unseen = ~s.contributed & _long_enough(run)
    return [
        Trouble("saturating", Level.PROBLEM, _worst(saturating, -np.nan_to_num(s.saturated)),
                lambda i: _saturates(s, i), "slots saturate", lambda i: _mend_saturation(s, i)),
        Trouble("flushing", Level.PROBLEM, _worst(flushing, -np.nan_to_num(s.flushed)),
                lambda i: f"flushes {_percent(s.flushed[i])} of its values to zero in the last samples",
                "slots flush most of their values to zero", _mend_flush),
        Trouble("scale_at_limit", Level.PROBLEM, _worst(at_limit, s.scale),
                lambda i: f"has a scale at the limit of FP32 ({s.scale[i]:.3g})",
                "slots have a scale at the limit of FP32",
                lambda i: "The tensor is (almost) all zero or overflows: check its layer's initialisation and inputs."),
        Trouble("never_contributed", Level.NOTE, _worst(unseen, s.scale),
                lambda i: "never got an amax: its layer did not run",
                "slots never got an amax: their layers did not run",
                lambda i: "Is the layer used in training? If not, leave it out: convert(..., skip=(...))."),
    ]  # fmt: skip


def _long_enough(run: Run) -> bool:
    """Whether the run is old enough to say that a slot never contributes."""
    histories = [r.recipe.get("amax_history_len", 1) for r in run.ranks.values()]
    longest = max((h for h in histories if isinstance(h, int)), default=1)
    return max((r.commits for r in run.ranks.values()), default=0) >= UNSEEN_HISTORIES * longest


def _worst(which: np.ndarray, key: np.ndarray) -> list[int]:
    found = np.flatnonzero(which)
    return [int(i) for i in found[np.argsort(key[found], kind="stable")]]


def _saturates(s: SlotSeries, i: int) -> str:
    if math.isnan(s.saturated[i]):
        return f"saturates: its largest values lie beyond the format in {_percent(s.below[i])} of the last samples"
    return f"saturates: {_percent(s.saturated[i])} of its values in the last samples (rank {s.saturated_rank[i]})"


def _mend_saturation(s: SlotSeries, i: int) -> str:
    lacking = s.headroom[i]
    if lacking < 0:
        more = math.ceil(-lacking)
        return f"Raise margin by {more} (it lacks {-lacking:.1f} powers of two), or take a longer amax_history_len."
    return "Raise margin by 1, or take a longer amax_history_len so that past peaks count for longer."


def _mend_flush(_: int) -> str:
    return (
        "A few outliers set the scale: find them, lower margin, or keep this layer in high precision: "
        "convert(..., skip=(...))."
    )


def _slots(run: Run) -> list[Verdict]:
    names, found = run.slots.names, []
    for trouble in troubles(run):
        for i in trouble.slots[:NAMED]:
            found.append(Verdict(trouble.level, f"{names[i]} {trouble.words(i)}.", trouble.advice(i)))
        if len(trouble.slots) > NAMED:
            text = f"{len(trouble.slots)} {trouble.plural} in all; these are the worst."
            found.insert(len(found) - NAMED, Verdict(trouble.level, text))
    counted = bool(names) and not np.isnan(run.slots.saturated).all()
    if any(v.level is Level.PROBLEM for v in found):
        return found
    if counted:
        return [*found, Verdict(Level.GOOD, f"No slot saturates or flushes ({len(names)} slots).")]
    return [*found, _roles(run)]


def _roles(run: Run) -> Verdict:
    """Without the monitor only the sums over a role may be known."""
    if not run.casts:
        text = "Whether a slot saturates: no casts were counted."
        return Verdict(Level.UNKNOWN, text, "See “What is missing” for how to get them.")
    bad = [role for role, parts in run.casts.items() if parts.get("saturated", 0) > SATURATING]
    shown = ", ".join(f"{role} {_percent(parts.get('saturated', 0))}" for role, parts in run.casts.items())
    if bad:
        return Verdict(
            Level.PROBLEM, f"Values saturate: {shown} of all.", "The monitor tells in which slots."
        )
    return Verdict(
        Level.GOOD, f"Hardly any value saturates: {shown} of all.", "The monitor tells it for each slot."
    )


def _earlier_warnings(run: Run) -> list[Verdict]:
    """Warnings of the monitor that the last samples do not show any more."""
    now = {(t.what, run.slots.names[i]) for t in troubles(run) for i in t.slots}
    past = [w for key, w in run.warnings.items() if w.what != "always_last" and key not in now]
    past.sort(key=lambda w: (-w.last, w.slot or ""))
    found = [Verdict(Level.NOTE, _earlier(w), w.message) for w in past[:NAMED]]
    if len(past) > NAMED:
        found.append(
            Verdict(Level.NOTE, f"{len(past) - NAMED} more earlier warnings are in the table below.")
        )
    return found


def _earlier(w: Warned) -> str:
    when = f"at step {w.first}" if w.first == w.last else f"between steps {w.first} and {w.last}"
    return (
        f"{w.slot or format_ranks(sorted(w.ranks))}: the monitor warned {when} ({w.what.replace('_', ' ')})."
    )


def _percent(part: float) -> str:
    return f"{100 * part:.2g}%" if part < 0.1 else f"{100 * part:.0f}%"


# -- ranks and losses -------------------------------------------------------------------------------------


def _slow(run: Run, waits: Waiting) -> list[Verdict]:
    if not waits.rows:
        return [
            Verdict(Level.UNKNOWN, "Which rank is slow: no waits were recorded.", "See “What is missing”.")
        ]
    if len(waits.rows) == 1:
        return []
    late = waits.late
    if late is None:
        return [Verdict(Level.GOOD, f"No rank keeps the others waiting ({len(waits.rows)} ranks compared).")]
    hosts = sorted({row.host for row in waits.rows if row.rank in late.ranks})
    one = len(late.ranks) == 1
    where = f" on {'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts[:NAMED])}" if any(hosts) else ""
    text = (
        f"{_sentence(format_ranks(late.ranks))[:-1]}{where} {'is the one' if one else 'are the ones'} the others wait "
        f"for: they wait {milliseconds(late.others)} a step, {'it' if one else 'these'} {milliseconds(late.own)}."
    )
    if late.by_pipeline:
        advice = "They hold other pipeline stages, and a schedule has stages that end last: this alone is no fault."
        return [Verdict(Level.NOTE, text, advice)]
    advice = "Look for other load, a slower or throttled device, or more data on that machine."
    if any(row.stages for row in waits.rows) and not one:
        advice += " In a pipeline a slow rank makes its neighbours late, too."
    return [Verdict(Level.PROBLEM, text, advice)]


def milliseconds(seconds: float) -> str:
    """A time for a person."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"


def _losses(run: Run) -> list[Verdict]:
    found = []
    for label, losses in run.losses.items():
        broken = sorted(step for step, loss in losses.items() if not math.isfinite(loss))
        if broken:
            text = f"The loss of the {label} run is not a number at step {broken[0]} ({len(broken)} steps in all)."
            found.append(
                Verdict(Level.PROBLEM, text, "Look at the slots below from that step on, and at the data.")
            )
    fp8, fp32 = run.losses.get("FP8"), run.losses.get("FP32")
    if found or not fp8 or not fp32:
        return found
    steps = sorted(fp8.keys() & fp32.keys())[-LAST_LOSSES:]
    reference = statistics.fmean(fp32[s] for s in steps) if steps else 0.0
    if reference <= 0:
        return found
    off = 100 * (statistics.fmean(fp8[s] for s in steps) / reference - 1)
    level = Level.GOOD if off <= LOSS_GOOD else Level.NOTE if off <= LOSS_BAD else Level.PROBLEM
    side = "above" if off > 0 else "below"
    text = f"FP8's loss is {abs(off):.2f}% {side} FP32's (mean of the last {len(steps)} steps)."
    return [Verdict(level, text, "" if level is Level.GOOD else "Look at the slots that saturate or flush.")]


def _agreement(run: Run) -> list[Verdict]:
    agree = run.summary.get("ranks_agree")
    if agree is False:
        text = "The ranks ended with different scales."
        return [Verdict(Level.PROBLEM, text, "Run fp8dist blame on the flight records of all ranks.")]
    return [Verdict(Level.GOOD, "All ranks ended with the same scales.")] if agree is True else []
