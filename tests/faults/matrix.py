"""The faults as values: how each is done to the ranks, and what every rank must see and keep.

Four ranks; rank 2 is the faulty one where nothing else is said. After those of `FAULTS` every rank lives and training
goes on; in those of `DEADLY` a process dies or stops for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import injections as do
from trial import ODD, WINDOW, Fault, Run, T, Told, W

import fp8dist as f8

NAN, INF = float("nan"), float("inf")

SOON = Told(within=1.0)
UNHARMED = Told(within=5.0)  # as many steps as the fault takes
ABORTED = ("PeerAborted",)
LATE: dict[str, Any] = {"timeout": T, "stall_warning": W}


def own(error: str, *says: str, within: float = 1.0) -> Told:
    """The faulty rank's own exception, at once and with advice."""
    return Told((error,), (*says, r"call.* coordinator\.recover\(\)"), within)


def aborted(*says: str) -> Told:
    """What peers of a failed rank see: long before any timeout."""
    return Told(ABORTED, (rf"rank {ODD} left step", *says))


def gave_up(*says: str, missing: str = f"Rank {ODD} has") -> Told:
    """What waiting ranks see that give up, after one warning."""
    says = (rf"{missing} not entered", *says, r"call recover\(\) on every rank")
    return Told(("CollectiveTimeout",), says, T + 2.5, not_before=0.9 * T, warned=rf"{missing} not entered")


def disagree(*says: str) -> Told:
    """What every rank sees when they do not fit together."""
    return Told(("RanksDisagree",), says)


def legal(name: str, what: str, inject: Callable[[Run], None] = do.two_steps, **more: Any) -> Fault:
    """Nothing is wrong: every step commits on every rank."""
    more = {"commits": (1, 2), **more}
    return Fault(name, what, inject, UNHARMED, UNHARMED, goes_on="nothing", **more)


def late_but_in_time(name: str, what: str, inject: Callable[[Run], None], *says: str, **more: Any) -> Fault:
    """The others are warned once, and all goes well."""
    warned = Told(within=5.0, warned="".join((rf"Rank {ODD} has not entered(.|\n)*", *says)))
    more = {"commits": (1,), **more}
    return Fault(name, what, inject, UNHARMED, warned, goes_on="nothing", stall_warning=W, **more)


def raises(words: str, where: str) -> Fault:
    """Rank 2 raises somewhere in its scope."""
    told = aborted(r"with Boom: out of luck at .*injections\.py:\d")
    return Fault(f"raises {words}", f"rank 2 raises {words}", do.at(where), own("Boom", "^out of luck"), told)


MISSING = (
    Fault(
        "never enters",
        "rank 2 does not open its scope",
        do.never,
        SOON,
        gave_up("it left step 0 .* has opened no scope since"),
        **LATE,
    ),
    Fault(
        "two never enter",
        "ranks 1 and 2 do not open their scopes",
        do.never,
        SOON,
        gave_up(r"rank 1 \(host", r"rank 2 \(host", missing="Ranks 1-2 have"),
        odd=(1, ODD),
        **LATE,
    ),
    Fault(
        "stuck inside its scope",
        "rank 2 hangs in its own code, inside its scope, and comes out when the others have given up",
        do.stuck_inside,
        Told(ABORTED, ("CollectiveTimeout|gave up|has not entered|not entered",), within=T + 3.0),
        gave_up("it opened step 1 at .* is still inside", r"now in .*wait \("),
        **LATE,
    ),
    late_but_in_time("enters late", "rank 2 comes after the warning and before the timeout", do.late),
    Fault(
        "enters after the timeout",
        "rank 2 comes when the others have given up",
        do.after_the_others_gave_up,
        Told(ABORTED, (r"rank \d left step", "not entered")),
        Told(("CollectiveTimeout",), ("Rank 2 has not entered",), warned="Rank 2 has not entered"),
        **LATE,
    ),
    late_but_in_time(
        "stopped for a while",
        "SIGSTOP, and SIGCONT after the warning and before the timeout",
        do.stopped_for_a_while,
        r"its process is stopped",
    ),
    late_but_in_time(
        "holds the interpreter's lock",
        "C code on rank 2 keeps the interpreter's lock, so no thread of it can answer",
        do.hold_the_gil,
        r"(?!.*its process is).*it left step",
    ),
    late_but_in_time(
        "a clock an hour fast",
        "rank 2's wall clock is an hour ahead, and it is late",
        do.clock_set_forward,
        r" [0-4]\.\d s ago",
        commits=(0, 1),
    ),
    Fault(
        "one scope fewer",
        "rank 2 leaves early: it closes its coordinator while the others open another scope",
        do.closes,
        Told(within=2.0),
        disagree(rf"rank {ODD} closed it after 1 and rank \d is in number 2"),
        goes_on="new",
    ),
)

RAISING = (
    raises("before its model", "start"),
    raises("in a forward", "forward"),
    raises("in a backward", "backward"),
    raises("in a tensor hook", "hook"),
    raises("after the schedule", "end"),
    Fault(
        "two ranks raise",
        "ranks 1 and 2 raise, each its own exception",
        do.two_raise,
        own("Boom", r"^rank 2 is out of luck"),
        Told(ABORTED, (r"rank [12] left step 1",)),
        others={1: own("KeyError", "^'rank 1 is out of luck")},
    ),
    Fault(
        "raises in the optimizer",
        "rank 2 raises behind the scope: the step is committed, and the others miss it in the next one",
        do.in_the_optimizer,
        Told(("Boom",), within=1.0),
        gave_up("it left step 1 .* has opened no scope since"),
        commits=(1,),
        **LATE,
    ),
    Fault(
        "raises in the update rule",
        "rank 2 raises between the reduction and its commit; the others are one commit ahead",
        do.in_the_update_rule,
        Told(("Boom",), ("in the rule",), within=1.0),
        aborted("with Boom: in the rule"),
        commits=(1,),
        ahead={ODD: ()},
        kept=(),
    ),
    Fault(
        "exits inside its scope",
        "rank 2 calls sys.exit() inside its scope",
        do.at("end", do.leave_the_program),
        own("SystemExit"),
        aborted("with SystemExit"),
    ),
    Fault(
        "Ctrl-C in a forward",
        "SIGINT in a forward of rank 2",
        do.at("forward", do.interrupt),
        own("KeyboardInterrupt"),
        aborted("with KeyboardInterrupt"),
    ),
    Fault(
        "Ctrl-C while it waits",
        "SIGINT while rank 2 waits for rank 3, which does not come",
        do.interrupted_while_it_waits,
        Told(("KeyboardInterrupt",), within=1.5),
        aborted("with KeyboardInterrupt"),
        others={3: SOON},
    ),
    Fault(
        "Ctrl-C, and a rank that comes later",
        "the same, and rank 3 comes when the others have given up: if its reduction is complete, it commits alone",
        do.interrupted_and_one_comes_later,
        Told(("KeyboardInterrupt",), within=1.5),
        aborted("with KeyboardInterrupt"),
        others={3: Told(("None", *ABORTED), within=4.0)},
        ahead={3: (1,)},
    ),
    Fault(
        "a scope nested wrongly",
        "rank 2 opens another step inside its step",
        do.inner_scope_of_another_step,
        own("ValueError", "expects the outer scope's tag 1 but got 7"),
        aborted("with ValueError: a nested scope expects"),
    ),
    Fault(
        "scopes closed in the wrong order",
        "rank 2 closes its outer scope while the inner one is open",
        do.outer_scope_closed_first,
        Told(("ScopeError",), ("still open; nest them with `with`",), within=1.0),
        aborted("with ScopeError: the outer scope"),
    ),
    Fault(
        "recover() misses a rank",
        "rank 2 raises, and does not come to the first recover(); all come to the second",
        do.absent_from_recover,
        SOON,
        Told(("CollectiveTimeout",), (rf"agreement on 'recover' .* but rank {ODD} did not come",)),
    ),
    Fault(
        "the user's own group",
        "rank 2 raises while a reduction of the user's own group is pending; that group stays whole",
        do.innocent_group,
        own("Boom"),
        aborted("with Boom"),
    ),
)

DISAGREEING = (
    Fault(
        "one scope more",
        "rank 2 runs a scope more than the others, without tags",
        do.one_scope_more,
        Told(("RanksDisagree",), (r"rank \d closed it after 2 and rank 2 is in number 3",)),
        Told(within=2.5),
        commits=(1,),
        goes_on="new",
    ),
    Fault(
        "one scope twice",
        "rank 2 repeats a step that the others do not, so its tag lags behind",
        do.another_number,
        disagree(rf"the same tag but have (2 on ranks 0-1, 3; 1 on rank {ODD})"),
        disagree(rf"the same tag but have (2 on ranks 0-1, 3; 1 on rank {ODD})"),
        commits=(1,),
    ),
    Fault(
        "a step skipped",
        "rank 2 skips a step that the others run",
        do.skipped,
        disagree(rf"the same tag but have (1 on ranks 0-1, 3; 2 on rank {ODD})"),
        disagree(rf"the same tag but have (1 on ranks 0-1, 3; 2 on rank {ODD})"),
    ),
    *(
        Fault(
            f"another recipe: {field}",
            f"rank 2 has another {field}",
            do.first_step,
            disagree(rf"{field}: .* on ranks 0-1, 3; .* on rank {ODD}"),
            disagree(rf"{field}: .* on ranks 0-1, 3; .* on rank {ODD}"),
            early=True,
            goes_on="new",
            recipe=recipe,
        )
        for field, recipe in (
            ("margin", f8.DelayedScaling(amax_history_len=WINDOW, margin=1)),
            ("amax_history_len", f8.DelayedScaling(amax_history_len=WINDOW + 1)),
            ("fp8_format", f8.DelayedScaling(amax_history_len=WINDOW, fp8_format=f8.Format.E4M3)),
        )
    ),
    Fault(
        "another shape",
        "one name is a tensor of another shape on rank 2; of equally many values, so buffers would fit",
        do.another_shape,
        Told(("LayoutMismatch",), (r"b\.input: shape \(4, 16\) on ranks 0-1, 3; \(8, 8\) on rank 2",)),
        Told(("LayoutMismatch",), (r"b\.input: shape \(4, 16\) on ranks 0-1, 3; \(8, 8\) on rank 2",)),
        early=True,
        goes_on="new",
    ),
    Fault(
        "another group of equal size",
        "rank 0 is given ranks 0 and 2, rank 1 is given ranks 0 and 1",
        do.another_group,
        Told(("RanksDisagree", "CollectiveTimeout"), ("rank",), within=5.0),
        Told(within=5.0),
        odd=(0,),
        others={1: Told(("RanksDisagree",), ("was given the group ranks 0-1 .* ranks 0, 2 on rank 0",))},
        goes_on="nothing",
        transports=("gloo",),
    ),
    Fault(
        "two coordinators in another order",
        "rank 2 opens the scopes of two coordinators in another order",
        do.another_order,
        Told(("CollectiveTimeout", "PeerAborted"), ("'a'", "'b'"), T + 3.0),
        Told(("CollectiveTimeout", "PeerAborted"), ("'a'", "'b'"), T + 3.0),
    ),
    Fault(
        "one ulp in a history",
        "one value of a history on rank 2 is off by one ulp, as a flipped bit in memory leaves it",
        do.one_ulp,
        disagree(rf"'a\.input': rank {ODD} has .* and another history", "heal_from"),
        disagree(rf"'a\.input': rank {ODD} has .* and another history", "heal_from"),
        goes_on="heal",
    ),
)

UNHARMING = (
    legal("NaN on one rank", "one amax of rank 2 is NaN: the scale is kept, on all ranks alike",
          amaxes=do.on_rank(ODD, **{"a.input": NAN}), nonfinite=1),
    legal("inf on one rank", "one amax of rank 2 is infinite: the scale is kept, on all ranks alike",
          amaxes=do.on_rank(ODD, **{"a.input": INF}), nonfinite=1),
    legal("no request on one rank", "rank 2 records nothing of a slot in one step", amaxes=do.without(ODD)),
    legal("no request anywhere", "no rank records anything of a slot in one step", amaxes=do.without(0, 1, 2, 3)),
    legal("evaluation on one rank", "rank 2 evaluates inside its scope while the others train", do.evaluates,
          amaxes=do.without(ODD)),
    legal("a module more", "rank 2 has a slot that no other rank has", amaxes=do.module_more),
    legal("a module dropped", "a module of rank 2 stays idle for two steps", amaxes=do.module_dropped),
    legal("another name, equal size", "rank 2 has one slot of another name", amaxes=do.other_name),
    legal("another order of slots", "rank 2 declares and records its slots in another order",
          amaxes=do.other_sequence),
    legal("a new slot on one rank", "rank 2 declares a slot in the middle of the run: the layout grows",
          amaxes=do.on_rank(ODD, **{"new.input": 9.0})),
    legal("nested scopes", "rank 2 nests scopes, also in a running backward, around a reentrant checkpoint",
          do.nested),
    legal("a step on another thread", "rank 2 runs its steps on another thread", do.on_another_thread),
    legal("the user's collectives", "the user's own collectives run on the default group, in and between steps",
          do.users_collectives),
    legal("coordinators made in another order", "rank 2 makes two coordinators in another order",
          do.made_in_another_order),
    legal("a forked child", "a forked copy of rank 2's process uses its coordinator: refused there, at once",
          do.forked_child, transports=("gloo",)),
)  # fmt: skip

STORE_GONE = Fault(
    "store gone",
    "the process that serves the store dies; all ranks live. Steps go on, since they need no store; recover() does not",
    do.without_a_store,
    Told(("TransportError",), ("the store that the ranks talk through .* is gone",), within=4.0),
    Told(("TransportError",), ("the store that the ranks talk through .* is gone",), within=4.0),
    commits=(1, 2),
    early=True,
    goes_on="new",
    transports=("gloo",),
)

FAULTS: tuple[Fault, ...] = (*MISSING, *RAISING, *DISAGREEING, STORE_GONE, *UNHARMING)


def deadly(
    name: str, what: str, inject: Callable[[Run], None], peers: Told | None = None, **more: Any
) -> Fault:
    """A process ends, long before any timeout."""
    gone = Told(("TransportError", "PeerAborted"), (rf"[Rr]ank {ODD}\b",), within=3.5)
    return Fault(name, what, inject, peers=gone if peers is None else peers, **more)


STOPPED = Told(
    ("CollectiveTimeout",), (r"rank \d \(host .*its process is stopped",), T + 3.0, 0.9 * T, warned=None
)

DEADLY: tuple[Fault, ...] = (
    deadly("killed before its scope", "SIGKILL before rank 2 opens its scope", do.killed("before")),
    deadly("killed in its scope", "SIGKILL in a forward of rank 2", do.killed("forward")),
    deadly(
        "killed while it waits", "SIGKILL while rank 2 waits for rank 3, which is late", do.killed_waiting
    ),
    deadly("killed in the reduction", "SIGKILL as soon as rank 2's reduction has begun", do.killed_reducing),
    deadly(
        "killed before its commit",
        "SIGKILL between rank 2's reduction and its commit; the others commit, and miss it in the next step",
        do.killed_committing,
        commits=(1,),
    ),
    deadly(
        "killed after its commit",
        "SIGKILL when rank 2 has left its scope; the others miss it in the next one",
        do.killed_afterwards,
        commits=(1,),
    ),
    deadly("exits", "rank 2's process ends with exit code 0 and without close()", do.exits, commits=(1,)),
    deadly(
        "the store's host killed",
        "SIGKILL of rank 0, which serves the store, too",
        do.killed("before"),
        Told(("TransportError", "PeerAborted"), (r"[Rr]ank 0\b",), within=4.0),
        odd=(0,),
    ),
    deadly("stopped for good", "SIGSTOP, and no SIGCONT", do.stopped, STOPPED, **LATE),
    deadly(
        "the store's host stopped",
        "SIGSTOP of rank 0, which serves the store, too; nobody can ask it who is missing",
        do.stopped,
        STOPPED,
        odd=(0,),
        **LATE,
    ),
)

ENDS = Fault(
    "ends without close()", "the program ends on all ranks, and none has closed its coordinator", do.two_steps
)

NAMES = tuple(fault.name for fault in (*FAULTS, *DEADLY, ENDS))
