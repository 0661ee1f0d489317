"""A plan's clock against longest paths, its bubbles against the textbook, its tables against torch's."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import get_schedule_class

from fp8dist.plan import NAMES, Costs, Model, plan
from fp8dist.plan._actions import COMPUTE, Action, Kind, Program, needs, with_messages
from fp8dist.plan._simulate import Run, simulate
from fp8dist.plan._tables import TORCH_NAMES, _stand_ins, table, table_from_csv
from fp8dist.plan._verdict import counter_examples, deadlock, with_updates

FREE = Costs(p2p_us=0.0, alpha_us=0.0, beta_gbps=1e30)
TIMES = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.25, Kind.W: 0.75}
MESSAGE, COLLECTIVE = 0.125, 0.5  # binary fractions: sums are exact in any order
TABLES = [name for name in NAMES if TORCH_NAMES[name][1] != 1]


def actions(text: str) -> Program:
    """`0F0 0SEND_F0` as actions."""
    words = {"open": Action(Kind.OPEN), "exit": Action(Kind.EXIT)}
    return tuple(words.get(word) or parsed(word) for word in text.split())


def parsed(word: str) -> Action:
    letters = word.strip("0123456789")
    stage, microbatch = word.split(letters)
    return Action(Kind(letters), int(stage), int(microbatch))


def torch_schedule(name: str, pp: int, chunks: int, microbatches: int) -> Any:
    return get_schedule_class(TORCH_NAMES[name][0])(_stand_ins(pp, chunks), microbatches, loss_fn=print)


# -- the clock, against longest paths in a graph of all actions --------------------------------------------


def longest_paths(programs: list[Program], placement: list[int]) -> dict[tuple[int, int], float] | None:
    """The end of each action by (rank, position), all ranks in one reduction group; None if there is a circle.

    An action follows the one before it and whoever makes its input; the n-th collectives of all ranks are one node.
    """
    before: dict[Any, dict[Any, float]] = {}
    nodes: dict[tuple[int, int], Any] = {}
    length: dict[Any, float] = {}
    makers = {}
    for rank, program in enumerate(programs):
        entered = 0
        for at, action in enumerate(program):
            node: Any = (rank, at)
            if action.kind in (Kind.UPDATE, Kind.EXIT):
                node, entered = ("collective", entered), entered + 1
            nodes[rank, at] = node
            length[node] = COLLECTIVE if node[0] == "collective" else TIMES.get(action.kind, 0.0)
            before.setdefault(node, {})
            if at:
                before[node][nodes[rank, at - 1]] = 0.0
            if action.kind in (Kind.F, Kind.B, Kind.I):
                makers["F" if action.kind is Kind.F else "B", action.stage, action.microbatch] = node
    for rank, program in enumerate(programs):
        for at, action in enumerate(program):
            wanted = needs(action, len(placement))
            if action.kind in COMPUTE and wanted is not None:
                maker = makers[wanted.direction, wanted.source, wanted.microbatch]
                other = placement[wanted.source] != rank
                behind = after_update(programs, maker, nodes) if other else maker
                before[nodes[rank, at]][behind] = MESSAGE if other else 0.0
    ends: dict[Any, float] = {}
    try:
        for node in TopologicalSorter({node: list(edges) for node, edges in before.items()}).static_order():
            ends[node] = max((ends[n] + lag for n, lag in before[node].items()), default=0.0) + length[node]
    except CycleError:
        return None
    return {place: ends[node] for place, node in nodes.items()}


def after_update(programs: list[Program], maker: tuple[int, int], nodes: dict[tuple[int, int], Any]) -> Any:
    """A send lies behind the collective that its backward may end with."""
    rank, at = maker
    updates = at + 1 < len(programs[rank]) and programs[rank][at + 1].kind is Kind.UPDATE
    return nodes[rank, at + 1] if updates else maker


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[Program], list[int]]:
    """Compute actions of a few stages in an order that may or may not be possible."""
    pp, chunks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n_stages = pp * chunks
    placement = [stage % pp for stage in range(n_stages)]
    if chunks == 2 and draw(st.booleans()):
        placement = [min(stage, n_stages - 1 - stage) for stage in range(n_stages)]
    split = draw(st.booleans())
    programs = []
    for rank in range(pp):
        own = [stage for stage in range(n_stages) if placement[stage] == rank]
        todo = [
            Action(kind, stage, i) for kind in ((Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B))
            for stage in (own if kind is Kind.F else own[::-1]) for i in range(microbatches)
        ]  # fmt: skip
        for _ in range(draw(st.integers(0, 3))):
            i = draw(st.integers(0, len(todo) - 1))
            todo.insert(draw(st.integers(0, len(todo) - 1)), todo.pop(i))
        programs.append(tuple(todo))
    return programs, placement


@settings(max_examples=300, deadline=None, derandomize=True)
@given(orders(), st.sampled_from(("none", "per-step", "per-microbatch")))
def test_times_and_deadlocks_are_those_of_longest_paths(
    order: tuple[list[Program], list[int]], updates: str
) -> None:
    compute, placement = order
    programs = list(with_messages(compute, placement))
    if updates != "none":
        kind = Kind.EXIT if updates == "per-step" else Kind.UPDATE
        programs = [with_updates(program, kind) for program in programs]
    run = simulate(
        programs, placement, compute_ms=TIMES, message_ms=MESSAGE, collective_ms=[COLLECTIVE]
    )  # fmt: skip
    expected = longest_paths(programs, placement)
    assert (expected is None) is bool(run.waits)
    if expected is not None:
        ends = {(span.rank, programs[span.rank].index(span.action)): span.end for span in run.spans}
        timed = {
            place
            for place in expected
            if programs[place[0]][place[1]].kind in (*COMPUTE, Kind.UPDATE, Kind.EXIT)
        }
        assert ends == {place: expected[place] for place in timed}


@pytest.mark.parametrize("updates", ["per-step", "per-microbatch"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved1f1b", "zbv"])
def test_one_rank_stands_for_all_replicas(name: str, updates: Any) -> None:
    replicas, pp = 3, 2
    for group in ("all", "stage"):
        planned = plan(name, pp=pp, dp=replicas, microbatches=4, updates=updates, group=group)
        by_rank = [0] * (replicas * pp) if group == "all" else [*range(pp)] * replicas
        whole = simulate(
            planned.programs * replicas, planned.placement, compute_ms=planned.costs.compute_ms,
            message_ms=planned.costs.message_ms, groups=by_rank, collective_ms=[g.ms for g in planned.groups],
            replicas=replicas,
        )  # fmt: skip
        assert bool(whole.waits) == (planned.deadlock is not None)
        for replica in range(replicas):
            here = [s._replace(rank=s.rank - replica * pp) for s in whole.spans if s.rank // pp == replica]
            assert tuple(here) == planned.run.spans


# -- what is known about schedules -------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(2, 1, 4), (4, 1, 8), (4, 3, 8), (8, 2, 16)])
def test_bubbles_are_the_textbooks(pp: int, chunks: int, microbatches: int) -> None:
    names = ("gpipe", "1f1b") if chunks == 1 else ("interleaved1f1b", "loopedbfs")
    for name in names:
        planned = plan(name, pp=pp, chunks=chunks, microbatches=microbatches, costs=FREE)
        assert planned.bubble == pytest.approx((pp - 1) / (chunks * microbatches + pp - 1))
        assert planned.busy_ms == (3.0 * chunks * microbatches,) * pp


def test_splitting_the_backward_shrinks_the_bubble() -> None:
    bubbles = [
        plan(name, pp=4, microbatches=8, costs=FREE).bubble
        for name in ("1f1b", "interleaved1f1b", "interleavedzerobubble")
    ]
    assert None not in bubbles
    assert bubbles == sorted(bubbles, reverse=True)  # type: ignore[type-var]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", [1, 2, 5])
def test_every_stage_runs_every_microbatch_once_each_way_in_one_scope(name: str, pp: int) -> None:
    planned = plan(name, pp=pp, microbatches=4 * pp)
    for rank, program in enumerate(planned.programs):
        assert (program[0].kind, program[-1].kind) == (Kind.OPEN, Kind.EXIT)
        assert sum(action.kind in (Kind.OPEN, Kind.EXIT) for action in program) == 2
        for stage in (s for s, where in enumerate(planned.placement) if where == rank):
            for i in range(4 * pp):
                kinds = [a.kind.value for a in program if a[1:] == (stage, i) and a.kind in COMPUTE]
                assert kinds in (["F", "B"], ["F", "I", "W"])


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_torchs_and_survive_both_kinds_of_file(name: str, tmp_path: Path) -> None:
    chunks, microbatches = 2, 8
    schedule = torch_schedule(name, 4, chunks, microbatches)
    expected = [
        [
            str(part)
            for action in schedule.pipeline_order_with_comms[rank]
            for part in action.sub_actions or (action,)
            if "SHARD" not in str(part) and "REDUCE" not in str(part)
        ]
        for rank in range(4)
    ]
    assert [[*map(str, program)] for program in table(name, 4, chunks, microbatches).programs] == expected
    for form in ("compute_only", "compute_comms"):
        path = tmp_path / f"{form}.csv"
        schedule._dump_csv(str(path), format=form)
        planned = plan(path)
        assert [[*map(str, program[1:-1])] for program in planned.programs] == expected
        assert (planned.layout.pp, planned.microbatches) == (4, microbatches)


# -- deadlocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", [2, 4])
def test_a_group_over_stages_without_a_scope_deadlocks_at_the_first_backward(name: str, pp: int) -> None:
    planned = plan(name, pp=pp, microbatches=2 * pp, updates="per-microbatch", group="all")
    assert planned.deadlock is not None
    last = planned.placement[-1]
    inside = [wait for wait in planned.deadlock.waits if wait.message is None]
    assert [wait.rank for wait in inside] == [last]
    assert inside[0].action.stage == len(planned.placement) - 1
    assert len(planned.deadlock.waits) == pp
    assert not any(planned.run.collectives)
    assert (planned.makespan_ms, planned.bubble, planned.exposed_ms, planned.good) == (
        None,
        None,
        None,
        False,
    )
    for group in ("stage", "dp"):
        assert plan(name, pp=pp, microbatches=2 * pp, dp=2, updates="per-microbatch", group=group).good


def test_a_deadlock_is_told_in_two_lines_that_name_the_circle() -> None:
    stuck = plan("1f1b", pp=4, microbatches=8, updates="per-microbatch").deadlock
    assert stuck is not None
    assert stuck.cycle == (3, 2)
    assert stuck.where == (
        "deadlock: rank 3 waits in its collective 3UPDATE0 for ranks 0-2; "
        "rank 2 waits before 2B0 for the gradient of microbatch 0 from stage 3, rank 3"
    )
    assert stuck.why == (
        "why: rank 3 sends that gradient only behind its 3UPDATE0: ranks 3 -> 2 -> 3 wait in a circle; "
        "take one update per step, or a reduction group within one stage"
    )


def run_texts(*texts: str, placement: tuple[int, ...] = (0, 1)) -> Run:
    return simulate([actions(text) for text in texts], placement, compute_ms=TIMES)


def test_what_no_rank_would_ever_do_is_named_and_no_circle_is_made_up() -> None:
    stuck = deadlock(run_texts("0F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"))
    assert stuck is not None
    assert stuck.cycle == ()
    assert stuck.where.startswith("deadlock: rank 0 waits before 0B0 for the gradient")
    assert "rank 0 has no send of it left in its program" in stuck.why
    stuck = deadlock(run_texts("0F0 0SEND_F0 exit", "1RECV_F0 1F0"))
    assert stuck is not None
    assert "rank 0 waits in the exit of its scope for rank 1" in stuck.where
    assert "rank 1 has no collective for it left in its program" in stuck.why


def test_a_rank_may_wait_for_itself() -> None:
    stuck = deadlock(run_texts("1F0 0F0", placement=(0, 0)))
    assert stuck is not None
    assert stuck.cycle == (0,)
    assert "rank 0 -> 0" not in stuck.why and "ranks 0 -> 0" in stuck.why


def test_an_order_that_torch_cannot_complete_is_shown_where_it_waits(tmp_path: Path) -> None:
    path = tmp_path / "crossed.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    planned = plan(path)
    assert planned.deadlock is not None
    assert set(planned.deadlock.cycle) == {0, 1}
    assert planned.makespan_without_ms is None
    assert "change the order" in planned.deadlock.why


# -- the order of collectives ------------------------------------------------------------------------------


def test_ranks_that_pair_different_microbatches_are_a_counter_example() -> None:
    programs = [
        with_updates(actions(text), Kind.UPDATE) for text in ("0B0 0B1 0B2", "1B0 1B2 1B1", "2B0 2B1")
    ]
    first, second, third = "reduces for microbatch {} of its chunk 0", "has none", (0, 1, 2)
    found = counter_examples(programs, third)
    assert [(each.index, each.ranks) for each in found] == [(1, (0, 1)), (2, (0, 1))]
    assert found[0].what == (first.format(1), first.format(2))
    assert counter_examples(programs, (0, 2))[0].what == (first.format(2), second)
    assert counter_examples(programs, (1,)) == ()


def test_chunks_are_counted_within_a_rank() -> None:
    programs = [with_updates(actions(text), Kind.UPDATE) for text in ("2B0 0B0", "3B0 1B0")]
    assert counter_examples(programs, (0, 1)) == ()
    programs[1] = with_updates(actions("1B0 3B0"), Kind.UPDATE)
    assert len(counter_examples(programs, (0, 1))) == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", ["all", "stage", "dp"])
def test_one_update_per_step_is_one_collective_for_everyone(name: str, group: Any) -> None:
    planned = plan(name, pp=4, microbatches=8, dp=6, tp=2, group=group)
    assert planned.good
    assert sum(each.size * each.count * len(each.ranks) for each in planned.groups) == 48 * (
        4 if group == "all" else 1
    )
    assert {each.collectives for each in planned.groups} == {1}
    assert [len(left) for left in planned.run.collectives] == [1] * 4


# -- counts and bytes --------------------------------------------------------------------------------------


def test_counts_and_bytes_are_those_of_the_slots() -> None:
    planned = plan(
        "interleaved1f1b", pp=2, chunks=2, microbatches=4, dp=4, model=Model(layers=8, linears_per_layer=4)
    )
    # 12 slots a layer, 4 layers a rank; a header of 4 flags and 7 pairs, and a pair for each rank's set of slots.
    assert planned.per_step.collectives == 1
    assert planned.per_step.n_bytes == 4 * (4 + 2 * (7 + 2) + 8 * 12)
    assert planned.per_microbatch.collectives == 2 * 4 * 2
    assert planned.per_microbatch.n_bytes == 4 * 2 * 4 * 48


def test_experts_are_in_every_row_but_not_on_every_rank() -> None:
    model = Model(layers=2, linears_per_layer=2, experts=8)
    planned = plan("1f1b", pp=2, microbatches=2, dp=4, ep=4, model=model)
    per_layer, routed = 2 * 3, 8 * 2 * 3
    assert planned.layout.world == 8
    assert planned.per_step.n_bytes == 4 * (4 + 2 * (7 + 2 * (1 + 4)) + 2 * (per_layer + routed))
    assert planned.per_microbatch.n_bytes == 4 * 2 * (per_layer + routed // 4)


def test_slots_may_be_given_as_one_number_and_layers_spread_unevenly() -> None:
    assert plan("1f1b", pp=2, microbatches=2, model=Model(slots=101)).groups[0].n_bytes == 4 * (4 + 18 + 101)
    assert Model(layers=5, linears_per_layer=1).slots_of_stages(3) == [(6, 0), (6, 0), (3, 0)]


@pytest.mark.parametrize(
    ("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)]
)
def test_an_all_reduce_takes_a_latency_per_round_and_its_bytes_once(ranks: int, rounds: int) -> None:
    costs = Costs(alpha_us=10.0, beta_gbps=2.0)
    expected = rounds * 0.010 + (4000 / 2e9 * 1e3 if ranks > 1 else 0.0)
    assert costs.all_reduce_ms(ranks, 4000) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_reduction_at_the_end_is_exposed_by_its_own_length(name: str) -> None:
    planned = plan(name, pp=4, microbatches=8, costs=Costs(alpha_us=500.0))
    assert planned.exposed_ms == pytest.approx(planned.groups[0].ms)
    within = plan(
        name, pp=4, microbatches=8, dp=2, updates="per-microbatch", group="dp", costs=Costs(alpha_us=500.0)
    )
    assert within.exposed_ms is not None and within.exposed_ms > 8 * 0.5


# -- bad input ---------------------------------------------------------------------------------------------

BAD = [
    ({"schedule": "2f2b", "pp": 2}, "gpipe, 1f1b"),
    ({"schedule": "1f1b"}, "number of pipeline ranks"),
    ({"schedule": "1f1b", "pp": 0}, "pp >= 1"),
    ({"schedule": "1f1b", "pp": 4, "microbatches": 3}, "at least as many microbatches as ranks, 4, but got 3"),
    ({"schedule": "gpipe", "pp": 4, "chunks": 2}, "--chunks 1"),
    ({"schedule": "zbv", "pp": 4, "chunks": 3}, "--chunks 2"),
    ({"schedule": "interleaved1f1b", "pp": 4, "microbatches": 9}, "torch refuses.*multiple of the number of rounds"),
    ({"schedule": "dualpipev", "pp": 4, "microbatches": 4}, "torch refuses.*at least as many microbatches"),
    ({"schedule": "1f1b", "pp": 2, "dp": 4, "ep": 3}, "ep to divide dp"),
    ({"schedule": "1f1b", "pp": 2, "dp": 4, "ep": 4, "model": Model(experts=6)}, "ep to divide the experts"),
    ({"schedule": "1f1b", "pp": 2, "tp": 0}, "tp >= 1"),
    ({"schedule": "1f1b", "pp": 2, "updates": "never"}, "per-step or per-microbatch"),
    ({"schedule": "1f1b", "pp": 2, "group": "tp"}, "all or stage or dp"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "told"), BAD)
def test_numbers_that_do_not_fit_are_refused_in_one_line(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        plan(**arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Costs(forward_ms=-1.0), "forward_ms >= 0"),
        (lambda: Costs(weight_ms=float("nan")), "weight_ms >= 0"),
        (lambda: Costs(beta_gbps=0.0), "beta_gbps > 0"),
        (lambda: Model(layers=0), "layers >= 1"),
        (lambda: Model(layers=2, slots=3), "either slots or layers"),
    ],
)
def test_costs_and_models_are_validated(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


TABLES_THAT_ARE_NONE = {
    "empty": ("", "a row of actions"),
    "a word": ("0F0,hello\n", "row 1: expected actions like 0F0"),
    "a missing stage": ("0F0,0B0\n2F0,2B0\n", "stages 0, 2"),
    "a rank too many": ("0F0,0B0\n\n", "each of 2 ranks"),
    "no backward": ("0F0\n1F0,1B0\n", "torch refuses it.*0 microbatches|torch refuses it.*total backwards"),
    "a backward before its forward": ("0B0,0F0\n1F0,1B0\n", "without first running Forward"),
    "a stage twice": ("0F0,0B0,1F0,1B0\n1F0,1B0\n", "assigned to both"),
    "no receive": ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", "a receive before 1F0"),
    "a send too early": ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "computed before.*0SEND_F0"),
    "crossed messages": (
        "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n",
        "microbatch 0 from stage 0 next.*microbatch 1",
    ),
    "half a pair": ("0F0,(0F1\n", "row 1"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "told"), TABLES_THAT_ARE_NONE.values(), ids=TABLES_THAT_ARE_NONE)
def test_a_file_that_is_no_table_is_refused_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=told) as refused:
        table_from_csv(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_message_that_is_never_sent_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    planned = plan(path)
    assert planned.deadlock is not None
    assert "for the activation of microbatch 0 from stage 0, rank 0" in str(planned.deadlock)


def test_numbers_beside_a_file_must_be_its_own(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    assert plan(path, pp=2, chunks=1, microbatches=2).good
    for name, value in (("pp", 4), ("chunks", 2), ("microbatches", 3)):
        with pytest.raises(ValueError, match=f"{name} {value} but got"):
            plan(path, **{name: value})  # type: ignore[arg-type]
