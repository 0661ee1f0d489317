"""The update rules against a reference that handles one slot at a time, with lists as windows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dist._recipe_state import RecipeState
from fp8dist.recipe import CurrentScaling, DelayedScaling, Format

torch.set_num_threads(1)

F32 = np.float32
NAMES = ("history", "scale", "scale_inv", "warm", "nonfinite")
OPTIONS = [
    {"idle": idle, "non_finite": non_finite, "amax_compute_algo": algo, "amax_history_len": length}
    for idle, non_finite, algo, length in itertools.product(
        ("age", "hold"), ("absent", "freeze"), ("max", "most_recent"), (1, 2, 5)
    )
]
RULES = [*OPTIONS, {"rule_set": "te_fused", "amax_history_len": 3}, {"rule_set": "te_unfused"}]
SPECIAL = [
    -1.0,
    -1.0,
    0.0,
    1.4e-45,
    1e-41,
    1.17549435e-38,
    1e-36,
    0.3,
    448.0,
    57344.0,
    3.4e38,
    math.inf,
    math.nan,
]
AMAX = st.one_of(st.sampled_from(SPECIAL), st.floats(0, 65536, width=32))
N = 3
ROWS = st.lists(st.lists(AMAX, min_size=N, max_size=N), min_size=1, max_size=14)
RULE_IDS = ["-".join(map(str, rule.values())) for rule in RULES]


class ReferenceSlot:
    """One slot under our rule."""

    def __init__(self, recipe: DelayedScaling, backward: bool) -> None:
        self.recipe = recipe
        fp8_max = 57344.0 if backward and recipe.fp8_format is Format.HYBRID else 448.0
        self.target = F32(fp8_max * 2.0**-recipe.margin)
        self.window: list[float] = [-1.0] * recipe.amax_history_len
        self.scale, self.warm, self.nonfinite = F32(1), False, 0

    def step(self, amax: float) -> None:
        broken = math.isnan(amax) or math.isinf(amax)
        self.nonfinite += broken
        entered = -1.0 if broken and self.recipe.non_finite == "absent" else amax
        if entered != -1.0 or self.recipe.idle == "age":
            self.window = [*self.window[1:], entered]
        if entered == -1.0 and (broken or self.recipe.idle == "hold"):
            return
        seen = self.window if self.recipe.amax_compute_algo == "max" else [entered]
        if any(math.isnan(a) or math.isinf(a) for a in seen) or max(seen) <= 0:
            return
        with np.errstate(all="ignore"):
            scale = self.target / F32(max(seen))
        self.scale = min(max(scale, np.finfo(F32).tiny), np.finfo(F32).max)
        self.warm = True


def bits(x: torch.Tensor) -> list[Any]:
    """Comparable bits; all NaNs are one."""
    if x.dtype != torch.float32:
        return x.tolist()
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(torch.int32).tolist()


def logical(state: RecipeState) -> dict[str, list[Any]]:
    """All that a state's future depends on, whatever its ring looks like."""
    values = {**{name: getattr(state, name) for name in NAMES}, "history": state.history_rows()}
    return {name: bits(value) for name, value in values.items()}


def raw(state: RecipeState) -> dict[str, list[Any]]:
    return {"head": [state.head], **{name: bits(value) for name, value in state.tensors().items()}}


def make(backward: bool = False, n: int = N, **fields: Any) -> RecipeState:
    return DelayedScaling(**fields).make_state(n, backward=backward)


def run(state: RecipeState, rows: list[list[float]]) -> RecipeState:
    for row in rows:
        state.commit(torch.tensor(row))
    return state


@pytest.mark.parametrize("options", OPTIONS, ids=RULE_IDS[: len(OPTIONS)])
@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    margin=st.sampled_from([0, 3, -2, 64]),
    backward=st.booleans(),
    prepared=st.lists(st.integers(0, 2), min_size=16, max_size=16),
)
def test_our_rule_equals_the_scalar_reference_bit_for_bit(
    options: dict[str, Any], rows: list[list[float]], margin: int, backward: bool, prepared: list[int]
) -> None:
    """Also where commits were prepared, once or again after a step that was given up."""
    state = make(margin=margin, backward=backward, **options)
    slots = [ReferenceSlot(state.recipe, backward) for _ in range(N)]  # type: ignore[arg-type]
    for row, times in zip(rows, prepared, strict=False):
        before = raw(state)
        for _ in range(times):
            state.prepare()
        assert raw(state) == before, "preparing changes nothing"
        state.commit(torch.tensor(row))
        for slot, amax in zip(slots, row, strict=True):
            slot.step(amax)
        scale = np.array([slot.scale for slot in slots], dtype=F32)
        assert bits(state.scale) == scale.view(np.int32).tolist()
        assert bits(state.scale_inv) == (F32(1) / scale).view(np.int32).tolist()
        assert state.warm.tolist() == [slot.warm for slot in slots]
        assert state.nonfinite.tolist() == [slot.nonfinite for slot in slots]
        windows = np.array([slot.window for slot in slots], dtype=F32).T
        assert bits(state.history_rows()) == bits(torch.from_numpy(windows.copy()))
    assert state.scale.isfinite().all()
    assert state.scale_inv.isfinite().all()


@pytest.mark.parametrize("margin", [0, 3, -2, -64, 64])
@pytest.mark.parametrize("backward", [False, True])
@settings(max_examples=60, deadline=None)
@given(
    size=st.floats(-150, 128),
    near=st.sampled_from(["lowest", "highest", "anywhere"]),
    ulps=st.integers(-3, 3),
)
def test_an_amax_of_any_size_makes_the_scale_of_the_scalar_reference(
    margin: int, backward: bool, size: float, near: str, ulps: int
) -> None:
    """Above all where the quotient leaves what float32 holds as a normal number."""
    state = make(n=2, margin=margin, backward=backward, amax_history_len=2)
    slot = ReferenceSlot(state.recipe, backward)  # type: ignore[arg-type]
    limits = np.finfo(np.float32)
    borders = {"lowest": float(limits.max), "highest": float(limits.tiny)}
    amax = float(slot.target) / borders[near] if near in borders else 2.0**size
    with np.errstate(all="ignore"):
        given = F32(min(amax, float(limits.max)))
        for _ in range(abs(ulps)):
            given = np.nextafter(given, F32(math.inf if ulps > 0 else 0), dtype=F32)
    for _ in range(2):
        state.commit(torch.full((2,), float(given)))
        slot.step(float(given))
        assert bits(state.scale) == [int(np.asarray(slot.scale, F32).view(np.int32))] * 2
        with np.errstate(all="ignore"):
            assert bits(state.scale_inv) == [int(np.asarray(F32(1) / slot.scale, F32).view(np.int32))] * 2


@pytest.mark.parametrize("options", RULES, ids=RULE_IDS)
@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS,
    cut=st.integers(0, 14),
    rejected=st.lists(AMAX, min_size=N, max_size=N),
    prepare=st.booleans(),
)
def test_an_undone_commit_leaves_no_trace(
    options: dict[str, Any], rows: list[list[float]], cut: int, rejected: list[float], prepare: bool
) -> None:
    state = run(make(**options), rows[:cut])
    before = raw(state)
    if prepare:
        state.prepare()
    state.commit(torch.tensor(rejected))
    assert state.undoable
    assert state.undo()
    assert raw(state) == before
    assert not state.undoable
    assert not state.undo(), "an undo takes back one commit only"
    assert raw(state) == before
    assert raw(run(state, rows[cut:])) == raw(run(make(**options), rows))


@pytest.mark.parametrize("options", RULES, ids=RULE_IDS)
@settings(max_examples=25, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 14))
def test_a_loaded_state_goes_on_as_if_never_stopped(
    options: dict[str, Any], rows: list[list[float]], cut: int
) -> None:
    whole = run(make(**options), rows[:cut])
    resumed = run(make(**options), rows[-2:])  # loading replaces whatever was there
    resumed.prepare()
    resumed.load(whole.history_rows(), whole.scale, whole.warm)
    resumed.nonfinite.copy_(whole.nonfinite)
    assert logical(resumed) == logical(whole)
    assert bits(resumed.te_history()) == bits(whole.te_history())
    assert not resumed.undo(), "a loaded state has no commit to take back"
    for row in rows[cut:]:
        assert logical(run(resumed, [row])) == logical(run(whole, [row]))


@pytest.mark.parametrize("options", RULES, ids=RULE_IDS)
@pytest.mark.parametrize("prepared", [False, True])
def test_autograd_notices_an_update_between_a_forward_and_its_backward(
    options: dict[str, Any], prepared: bool
) -> None:
    state = run(make(**options), [[1.0] * N])
    for kept in (state.scale, state.scale_inv):
        x = torch.ones(N, requires_grad=True)
        y = x * kept
        if prepared:
            state.prepare()
        run(state, [[2.0] * N])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("idle", ["age", "hold"])
def test_te_history_is_the_last_rows_behind_a_zero_row(idle: str) -> None:
    state = run(make(n=1, idle=idle, amax_history_len=3), [[float(a)] for a in (1, 2, 3, 4, 5)])
    assert state.history_rows().flatten().tolist() == [3, 4, 5]
    assert state.te_history().flatten().tolist() == [0, 4, 5]


def test_an_infinite_amax_costs_one_step_by_default_and_a_window_under_freeze() -> None:
    rows = [[4.0], [math.inf], [1.0], [1.0], [1.0]]
    scales: dict[str, list[float]] = {}
    for policy in ("absent", "freeze"):
        state = make(n=1, non_finite=policy, amax_history_len=3)
        scales[policy] = [run(state, [row]).scale.item() for row in rows]
        assert state.nonfinite.tolist() == [1]
    assert scales == {"absent": [112, 112, 112, 448, 448], "freeze": [112, 112, 112, 112, 448]}


def test_an_idle_window_ages_or_stands_still() -> None:
    rows = [[4.0], [-1.0], [-1.0], [1.0], [-1.0]]
    scales = {
        idle: [run(state, [row]).scale.item() for row in rows]
        for idle, state in ((idle, make(n=1, idle=idle, amax_history_len=2)) for idle in ("age", "hold"))
    }
    assert scales == {"age": [112, 112, 112, 448, 448], "hold": [112, 112, 112, 112, 112]}


@pytest.mark.parametrize("rule_set", ["te_fused", "te_unfused"])
def test_absent_counts_as_zero_under_te_rules(rule_set: str) -> None:
    rows = [[4.0], [-1.0], [1.0], [-1.0], [2.0], [math.nan], [-1.0]]
    absent, zero = (
        make(n=1, rule_set=rule_set, amax_history_len=3),
        make(n=1, rule_set=rule_set, amax_history_len=3),
    )
    for row in rows:
        assert logical(run(absent, [row])) == logical(
            run(zero, [[max(row[0], 0.0)] if row[0] == -1 else row])
        )
    assert not (absent.te_history() < 0).any()


@pytest.mark.parametrize(
    ("fields", "warm"),
    [
        ({}, False),
        ({"idle": "hold"}, False),
        ({"first_step": "unit"}, True),
        ({"rule_set": "te_fused"}, True),
        ({"rule_set": "te_unfused"}, True),
    ],
)
def test_slots_start_cold_unless_a_scale_of_one_is_asked_for(fields: dict[str, Any], warm: bool) -> None:
    state = make(**fields)
    assert state.warm.tolist() == [warm] * N
    assert state.scale.tolist() == [1.0] * N
    assert state.warm.device.type == "cpu"


@pytest.mark.parametrize("fields", [{}, {"idle": "hold"}, {"rule_set": "te_fused"}])
def test_seeding_sets_scales_and_leaves_histories_alone(fields: dict[str, Any]) -> None:
    state = run(make(n=5, **fields), [[2.0, 2.0, 2.0, 2.0, 2.0]])
    before = logical(state)
    state.seed([3, 0, 1, 2], torch.tensor([7.0, 0.0, math.nan, math.inf]))
    expected = [224.0, 224.0, 224.0, 64.0, 224.0]
    assert state.scale.tolist() == expected
    assert bits(state.scale_inv) == bits(1 / torch.tensor(expected))
    assert logical(state)["history"] == before["history"]
    assert not state.undo(), "undo would take the seeds away with the commit"


def test_seeding_warms_only_the_slots_that_got_a_scale() -> None:
    state = make(n=3)
    state.seed(torch.tensor([0, 2]), torch.tensor([0.0, 4.0]))
    assert state.warm.tolist() == [False, False, True]
    assert run(state, [[-1.0, -1.0, -1.0]]).scale.tolist() == [1.0, 1.0, 112.0]


@pytest.mark.parametrize("options", RULES[::5], ids=RULE_IDS[::5])
def test_a_bound_state_lives_in_the_given_buffers(options: dict[str, Any]) -> None:
    rows = [[1.0, -1.0, 3.0], [0.5, 2.0, math.nan], [8.0, 0.0, 1.0]]
    bound, free = run(make(**options), rows[:1]), run(make(**options), rows[:1])
    table, inverses = torch.zeros(10), torch.zeros(10)
    warm = torch.zeros(10, dtype=torch.bool)
    bound.bind(table[4:7], inverses[4:7], warm[4:7])
    run(bound, rows[1:])
    bound.undo()
    run(free, rows[1:2])
    assert bits(table[4:7]) == bits(free.scale)
    assert bits(inverses[4:7]) == bits(free.scale_inv)
    assert warm[4:7].tolist() == free.warm.tolist()
    assert table[:4].tolist() + table[7:].tolist() == [0.0] * 7
    bound.load(free.history_rows(), torch.full((N,), 5.0), torch.ones(N, dtype=torch.bool))
    bound.seed([0], torch.tensor([1.0]))
    assert table[4:7].tolist() == [448.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("field", "broken"),
    [
        ("history_rows", torch.zeros(15, N)),
        ("history_rows", torch.zeros(16, N, dtype=torch.float64)),
        ("scale", torch.zeros(N + 1)),
        ("warm", torch.ones(N)),
    ],
)
def test_loading_other_shapes_or_dtypes_names_the_field_and_changes_nothing(
    field: str, broken: torch.Tensor
) -> None:
    state = run(make(), [[1.0, 2.0, 3.0]])
    before = raw(state)
    good = {
        "history_rows": torch.zeros(16, N),
        "scale": torch.ones(N),
        "warm": torch.ones(N, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=rf"^{field}: expected .* but got .*; load"):
        state.load(**{**good, field: broken})
    assert raw(state) == before


def test_foreign_histories_with_inf_do_not_freeze_the_default_rule() -> None:
    state = make(n=1, amax_history_len=3)
    state.load(torch.tensor([[2.0], [math.inf], [math.nan]]), torch.ones(1), torch.ones(1, dtype=torch.bool))
    assert run(state, [[4.0]]).scale.item() == 112.0


# Functions of the user


@pytest.mark.parametrize("fields", [{}, {"idle": "hold"}, {"rule_set": "te_unfused"}], ids=str)
def test_an_amax_function_sees_this_step_first_then_oldest_to_newest(fields: dict[str, Any]) -> None:
    seen = []

    def second(history: torch.Tensor) -> torch.Tensor:
        seen.append(history.flatten().tolist())
        history.mul_(-7)  # it has a copy
        return history[0] * -0 + 2.0

    state = make(n=1, amax_history_len=3, amax_compute_algo=second, **fields)
    run(state, [[1.0], [2.0], [3.0], [4.0]])
    assert seen == [[1, 0, 0], [2, 0, 1], [3, 1, 2], [4, 2, 3]]
    assert state.scale.item() == 224.0


@pytest.mark.parametrize("fields", [{}, {"idle": "hold"}, {"rule_set": "te_unfused"}], ids=str)
def test_a_scale_function_gets_amax_old_scale_fp8_max_and_recipe(fields: dict[str, Any]) -> None:
    seen = []

    def half(amax: torch.Tensor, old: torch.Tensor, fp8_max: float, recipe: DelayedScaling) -> torch.Tensor:
        seen.append((amax.tolist(), old.tolist(), fp8_max, recipe.margin))
        return old.mul_(0.5)

    state = make(n=1, backward=True, margin=2, scaling_factor_compute_algo=half, **fields)
    run(state, [[4.0], [2.0]])
    assert seen == [([4.0], [1.0], 57344.0, 2), ([4.0], [0.5], 57344.0, 2)]
    assert (state.scale.item(), state.scale_inv.item()) == (0.25, 4.0)


def test_a_scale_function_cannot_break_a_scale_under_our_rule() -> None:
    answers = iter([[1.0, 2.0, 3.0, 5.0], [math.nan, -1.0, math.inf, 9.0]])
    state = make(n=4, scaling_factor_compute_algo=lambda *_: torch.tensor(next(answers)))
    run(state, [[1.0] * 4, [1.0, 1.0, 1.0, math.inf]])
    assert state.scale.tolist() == [1.0, 2.0, torch.finfo(torch.float32).max, 5.0]


def test_a_scale_function_that_works_in_place_cannot_move_a_scale_that_is_kept() -> None:
    state = make(n=1, scaling_factor_compute_algo=lambda amax, old, fp8_max, recipe: old.mul_(0.5))
    assert run(state, [[4.0], [math.inf]]).scale.item() == 0.5


def test_a_held_slot_keeps_its_scale_whatever_a_function_or_a_seed_says() -> None:
    answers = iter([2.0, 7.0])
    state = make(n=1, idle="hold", amax_compute_algo=lambda history: history[0] * 0 + next(answers))
    assert run(state, [[4.0], [-1.0]]).scale.item() == 224.0
    state = run(make(n=1, idle="hold"), [[4.0]])
    state.seed([0], torch.tensor([1.0]))
    assert run(state, [[-1.0]]).scale.item() == 448.0


@pytest.mark.parametrize("field", ["amax_compute_algo", "scaling_factor_compute_algo"])
@pytest.mark.parametrize("rule", [{}, {"idle": "hold"}, {"rule_set": "te_unfused"}], ids=str)
@pytest.mark.parametrize(
    "result", [torch.ones(N + 1), torch.ones(N).double(), torch.ones(1, N), 1.0, None], ids=str
)
def test_a_function_with_a_wrong_result_is_named_and_changes_nothing(
    field: str, rule: dict[str, Any], result: Any
) -> None:
    state = make(**rule, **{field: lambda *_: result})
    before = raw(state)
    with pytest.raises(
        ValueError, match=rf"^{field}: expected its result to be float32 \[3\] on cpu but got"
    ):
        state.commit(torch.tensor([1.0, math.nan, 3.0]))
    assert raw(state) == before


# Subclasses


class EveryRow(RecipeState):
    """Touches every tensor it has, one of its own too."""

    def __init__(self, recipe: DelayedScaling, n: int, **where: Any) -> None:
        super().__init__(recipe, n, **where)
        self.mean = torch.zeros(n)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), "mean": self.mean}

    def update(self, amax: torch.Tensor) -> None:
        self.mean.lerp_(amax, 0.5)
        self.history += amax
        self.head = 1
        self.scale.copy_(448 / self.mean)
        self.scale_inv.copy_(self.mean)
        self.warm.logical_not_()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("base", [{}, {"idle": "hold"}, {"rule_set": "te_fused"}], ids=str)
def test_commit_and_undo_cover_a_subclass_that_changes_more_than_the_rule_it_extends(
    base: dict[str, Any], prepared: bool
) -> None:
    rule = type(make(**base))

    class Shrinking(rule):  # type: ignore[misc, valid-type]
        def update(self, amax: torch.Tensor) -> None:
            super().update(amax)
            self.history.mul_(0.5)
            self.scale_inv.fill_(3.0)

    recipe = DelayedScaling(amax_history_len=3, **base)
    for kind in (Shrinking, EveryRow):
        state, plain = kind(recipe, N, backward=False), kind(recipe, N, backward=False)
        for each in (state, plain):
            run(each, [[1.0, 2.0, 4.0], [3.0, -1.0, 2.0]])
        before = raw(state)
        if prepared:
            state.prepare()
        state.commit(torch.tensor([5.0, 6.0, 7.0]))
        plain.update(torch.tensor([5.0, 6.0, 7.0]))
        assert raw(state) == raw(plain) != before
        assert state.undo()
        assert raw(state) == before


def test_a_recipe_of_ones_own_brings_its_own_state() -> None:
    class Mine(DelayedScaling):
        def make_state(self, n: int, *, backward: bool, device: Any = "cpu") -> RecipeState:
            return EveryRow(self, n, backward=backward, device=device)

    state = run(Mine().make_state(1, backward=False), [[8.0]])
    assert state.scale.item() == 112.0


def test_a_state_without_a_rule_says_so() -> None:
    with pytest.raises(NotImplementedError, match="RecipeState must define update"):
        RecipeState(DelayedScaling(), 1, backward=False).commit(torch.ones(1))


def test_a_stateless_recipe_has_slots_that_stay_cold() -> None:
    state = run(CurrentScaling().make_state(N, backward=False), [[1.0, 2.0, 3.0]])
    assert state.scale.tolist() == [1.0] * N
    assert not state.warm.any()


@pytest.mark.parametrize("options", RULES[::4], ids=RULE_IDS[::4])
def test_a_rank_without_slots_commits_too(options: dict[str, Any]) -> None:
    state = run(make(n=0, **options), [[], []])
    assert state.undo()
    assert state.te_history().shape == (state.recipe.history_len, 0)


def digests_of(state: RecipeState, generation: int, rows: int) -> list[int]:
    out = np.zeros(state.n, dtype=np.int32)
    state.digests(generation, rows, out)
    return [int(digest) for digest in out]


@pytest.mark.parametrize(("length", "rows"), [(1, 1), (1, 16), (4, 3), (4, 4), (16, 1), (16, 16), (40, 16)])
@pytest.mark.parametrize(
    "options", [{}, {"idle": "hold"}, {"rule_set": "te_fused", "first_step": "unit"}], ids=str
)
def test_the_digests_of_a_whole_turn_see_every_value(options: dict[str, str], length: int, rows: int) -> None:
    """Long histories are covered in turns; a changed bit shows within one round of them."""
    recipe = DelayedScaling(amax_history_len=length, **options)
    state = recipe.make_state(3, backward=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(length + 5):
        state.commit(torch.rand(3, generator=generator))

    def turn() -> list[list[int]]:
        return [digests_of(state, generation, rows) for generation in range(-(-length // rows))]

    before = turn()
    first = 1 if "rule_set" in options else 0  # the row where Transformer Engine gathers holds nothing
    for row in range(first, length):
        for column, bit in itertools.product(range(3), (0, 22, 30, 31)):
            cell = state.history.view(torch.int32)[row, column]
            kept = cell.clone()
            cell.bitwise_xor_(torch.tensor(-(2**31) if bit == 31 else 1 << bit, dtype=torch.int32))
            changed = [
                [a != b for a, b in zip(new, old, strict=True)]
                for new, old in zip(turn(), before, strict=True)
            ]
            assert [any(seen) for seen in zip(*changed, strict=True)] == [i == column for i in range(3)]
            cell.copy_(kept)
    assert turn() == before


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_changed_scale_shows_in_every_digest(rows: int) -> None:
    state = run(DelayedScaling(amax_history_len=4).make_state(3, backward=False), [[1.0, 2.0, 3.0]] * 5)
    for generation in range(4):
        before = digests_of(state, generation, rows)
        for bit in range(32):
            cell = state.scale.view(torch.int32)[1]
            cell.bitwise_xor_(torch.tensor(-(2**31) if bit == 31 else 1 << bit, dtype=torch.int32))
            changed = digests_of(state, generation, rows)
            assert changed[1] != before[1]
            assert changed[::2] == before[::2]
            cell.bitwise_xor_(torch.tensor(-(2**31) if bit == 31 else 1 << bit, dtype=torch.int32))


@pytest.mark.parametrize("rows", [1, 3, 4, 16])
@pytest.mark.parametrize("idle", ["age", "hold"])
def test_digests_as_on_a_gpu_are_those_of_the_cpu(
    idle: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = DelayedScaling(amax_history_len=4, idle=idle).make_state(3, backward=False)
    run(state, [[1.0, -1.0, 3.0], [2.5, 7.0, -1.0]] * 3)
    arrays = state._row_bits([0, 1, 2, 3])
    expected = [digests_of(state, generation, rows) for generation in range(5)]
    monkeypatch.setattr(state, "_row_bits", lambda ages: [torch.from_numpy(arrays[age]) for age in ages])
    monkeypatch.setattr(state, "_scale_bits", state.scale.view(torch.int32))
    for generation in range(5):
        out = torch.zeros(3, dtype=torch.int32)
        state.digests(generation, rows, out)
        assert out.tolist() == expected[generation]


def test_digests_do_not_depend_on_where_the_ring_starts() -> None:
    state = DelayedScaling(amax_history_len=4).make_state(2, backward=False)
    for step in range(6):
        state.commit(torch.tensor([1.0 + step, 2.0]))
    other = DelayedScaling(amax_history_len=4).make_state(2, backward=False)
    other.load(state.history_rows(), state.scale, state.warm)
    assert state.head != other.head
    for rows in (1, 3, 4):
        assert digests_of(state, 5, rows) == digests_of(other, 5, rows)
