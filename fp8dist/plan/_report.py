"""A plan as plain data for JSON, and as lines and tables for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .._layout import format_ranks
from ._actions import COLLECTIVES, Program, stages_of
from ._plan import Group, Plan

if TYPE_CHECKING:
    from rich.table import Table

RANKS_SHOWN = 8
FIRST_SHOWN, LAST_SHOWN = 10, 4  # actions of a rank
EXAMPLES_SHOWN = 3


def as_plain(plan: Plan) -> dict[str, Any]:
    """Everything, as JSON values. Times are milliseconds from the start of the step."""
    timed = {(span.rank, span.action): span for span in plan.run.spans}
    ranks = []
    for rank, program in enumerate(plan.programs):
        actions: list[dict[str, Any]] = []
        for action in program:
            entry: dict[str, Any] = {"action": str(action)}
            if span := timed.get((rank, action)):
                entry |= {"start_ms": span.start, "end_ms": span.end, "waited_ms": span.start - span.since}
            actions.append(entry)
        stages = list(stages_of(program))
        ranks.append(
            {"pipeline_rank": rank, "stages": stages, "busy_ms": plan.busy_ms[rank], "actions": actions}
        )
    stuck = plan.deadlock
    return {
        "schedule": plan.schedule,
        "layout": asdict(plan.layout) | {"world": plan.layout.world},
        "microbatches": plan.microbatches,
        "updates": plan.updates,
        "group": plan.members,
        "costs": asdict(plan.costs),
        "ok": plan.good,
        "makespan_ms": plan.makespan_ms,
        "bubble": plan.bubble,
        "exposed_reduction_ms": plan.exposed_ms,
        "groups": [_plain_group(group) for group in plan.groups],
        "per_step": asdict(plan.per_step),
        "per_microbatch": asdict(plan.per_microbatch),
        "deadlock": stuck
        and {
            "where": stuck.where,
            "why": stuck.why,
            "cycle": list(stuck.cycle),
            "waits": [
                {"pipeline_rank": w.rank, "action": str(w.action), "for": list(w.ranks)} for w in stuck.waits
            ],
        },
        "ranks": ranks,
    }


def _plain_group(group: Group) -> dict[str, Any]:
    plain = asdict(group) | {"same_order": not group.counter_examples}
    return plain | {"counter_examples": [str(example) for example in group.counter_examples]}


def lines(plan: Plan) -> list[str]:
    """What it is, whether it works and what it costs."""
    layout = plan.layout
    chunks = sorted({len(stages_of(program)) for program in plan.programs})
    shared = f", experts over {layout.ep}" if layout.ep > 1 else ""
    ranks = f"{layout.world} ranks = {layout.pp} pipeline x {layout.dp} data x {layout.tp} tensor{shared}"
    held = f"{len(plan.placement)} stages, {'/'.join(map(str, chunks))} on a rank"
    told = [
        f"{plan.schedule}: {ranks}; {held}; {plan.microbatches} microbatches",
        *_order(plan),
    ]
    if plan.deadlock is not None:
        return [*told, plan.deadlock.where, plan.deadlock.why]
    assert plan.makespan_ms is not None and plan.bubble is not None
    exposed = (
        ""
        if plan.exposed_ms is None
        else f"; {plan.exposed_ms:.3f} ms of it are reductions that nothing hides"
    )
    return [
        *told,
        f"simulated: no deadlock; a step takes {plan.makespan_ms:.2f} ms, bubble {plan.bubble:.1%}{exposed}",
    ]


def _order(plan: Plan) -> list[str]:
    groups = plan.groups
    kinds = sum(group.count for group in groups)
    number = max(group.collectives for group in groups)
    of_each = f"{number} collective{'s' * (number > 1)} a step"
    head = f"{kinds} reduction group{'s' * (kinds > 1)} of {groups[0].size}, {of_each}"
    examples = [(group, example) for group in groups for example in group.counter_examples]
    if not examples:
        return [f"{head}: all members come to the same ones in the same order"]
    shown = [f"  {example}" for _, example in examples[:EXAMPLES_SHOWN]]
    more = [f"  ... {len(examples) - EXAMPLES_SHOWN} more"] if len(examples) > EXAMPLES_SHOWN else []
    return [f"{head}: the members differ in {len(examples)}", *shown, *more]


def tables(plan: Plan, *, full: bool = False) -> list[Table]:
    """Programs, loads, and the ranks that are stuck; large plans are cut unless `full`."""
    made = [_programs(plan, full), _loads(plan)]
    if plan.deadlock is not None:
        made.append(_waits(plan, full))
    return made


def _programs(plan: Plan, full: bool) -> Table:
    from rich.table import Table

    stands = plan.layout.dp * plan.layout.tp
    title = f"what each pipeline rank does{f'; each stands for {stands} ranks' if stands > 1 else ''}"
    table = Table(title=title)
    table.add_column("rank", justify="right")
    table.add_column("stages", justify="right")
    table.add_column("in order")
    for rank in _shown(len(plan.programs), full):
        if rank is None:
            table.add_row(
                "...", "", f"{len(plan.programs) - RANKS_SHOWN} more ranks; --full or --json shows all"
            )
            continue
        program = plan.programs[rank]
        stages = ", ".join(map(str, stages_of(program)))
        table.add_row(str(rank), stages, _shorten(program, full))
    return table


def _shown(number: int, full: bool) -> Sequence[int | None]:
    if full or number <= RANKS_SHOWN:
        return range(number)
    half = RANKS_SHOWN // 2
    return [*range(half), None, *range(number - half, number)]


def _shorten(program: Program, full: bool) -> str:
    words = [_word(str(action), action.kind in COLLECTIVES) for action in program]
    left = len(words) - FIRST_SHOWN - LAST_SHOWN
    if full or left <= 0:
        return " ".join(words)
    return " ".join((*words[:FIRST_SHOWN], f"[dim]... {left} more ...[/]", *words[-LAST_SHOWN:]))


def _word(text: str, collective: bool) -> str:
    return f"[bold]{text}[/]" if collective else text


def _loads(plan: Plan) -> Table:
    from rich.table import Table

    table = Table(title="reductions of one rank in one step")
    table.add_column("updates")
    for heading in ("collectives", "bytes", "ms, without waiting"):
        table.add_column(heading, justify="right")
    often = "one per microbatch, chunk and direction (Transformer Engine)"
    for name, load in (("one per step", plan.per_step), (often, plan.per_microbatch)):
        table.add_row(name, str(load.collectives), f"{load.n_bytes:,}", f"{load.ms:.3f}")
    return table


def _waits(plan: Plan, full: bool) -> Table:
    from rich.table import Table

    assert plan.deadlock is not None
    waits = plan.deadlock.waits
    table = Table(title=f"{len(waits)} of {len(plan.programs)} pipeline ranks are stuck")
    table.add_column("rank", justify="right")
    for heading in ("at", "waits for", "of"):
        table.add_column(heading)
    for index in _shown(len(waits), full):
        if index is None:
            table.add_row("...", "", "", f"{len(waits) - RANKS_SHOWN} more")
            continue
        wait = waits[index]
        style = "bold red" if wait.rank in plan.deadlock.cycle else None
        what = "the others in its group" if wait.message is None else f"the {wait.message.what}"
        table.add_row(str(wait.rank), str(wait.action), what, format_ranks(wait.ranks), style=style)
    return table
