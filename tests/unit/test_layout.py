"""The union layout depends on names and holders only, and one name never means two things."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8dist._layout import (
    Entry,
    entries_from_plain,
    entries_to_plain,
    format_ranks,
    is_backward,
    layout_from_plain,
    layout_to_plain,
    merge,
    pack,
    unpack,
)
from fp8dist.errors import LayoutMismatch

NAMES = [f"l{i}.{role}" for i in range(4) for role in ("input", "weight", "grad_output")]
holdings = st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=5)


def declare(held: list[set[str]]) -> list[tuple[list[Entry], list[int]]]:
    return [([Entry(name) for name in sorted(names)], [rank]) for rank, names in enumerate(held)]


@given(held=holdings)
def test_every_name_appears_once_with_exactly_its_holders(held: list[set[str]]) -> None:
    layout = merge(declare(held))
    assert sorted(layout.names) == sorted(set().union(*held))
    for name, c in zip(layout.names, layout.class_of, strict=True):
        assert layout.holders[c] == tuple(r for r, names in enumerate(held) if name in names)


@given(held=holdings)
def test_forward_slots_come_first_and_classes_are_contiguous(held: list[set[str]]) -> None:
    layout = merge(declare(held))
    directions = [is_backward(name) for name in layout.names]
    assert directions == sorted(directions)
    for _, run in itertools.groupby(zip(directions, layout.class_of, strict=True), key=lambda p: p[0]):
        classes = [c for _, c in run]
        assert classes == sorted(classes)


@given(held=holdings, seed=st.randoms(use_true_random=False))
def test_the_order_of_declarations_plays_no_part(held: list[set[str]], seed: object) -> None:
    declared = declare(held)
    shuffled = list(declared)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert merge(shuffled).digest == merge(declared).digest


@given(held=holdings, other=holdings)
def test_equal_digests_mean_equal_layouts(held: list[set[str]], other: list[set[str]]) -> None:
    a, b = merge(declare(held)), merge(declare(other))
    assert (a.digest == b.digest) == (a == b)


@given(held=holdings)
def test_layouts_and_entries_travel_unchanged(held: list[set[str]]) -> None:
    layout = merge(declare(held))
    assert layout_from_plain(unpack(pack(layout_to_plain(layout)))) == layout
    entries = [Entry("a.weight", (3, 4), 2, "ff"), Entry("a.input")]
    back = entries_from_plain(unpack(pack(entries_to_plain(entries))))
    assert back == sorted(entries, key=lambda e: e.name)


@pytest.mark.parametrize(("a", "b", "told"), [
    (Entry("x.weight", stage=0), Entry("x.weight", stage=1), "x.weight: stage 0 on ranks 0, 2; 1 on rank 1"),
    (Entry("x.weight", (2, 3)), Entry("x.weight", (3, 2)), r"x.weight: shape \(2, 3\) on ranks 0, 2; \(3, 2\) on"),
    (Entry("x.weight", fingerprint="a"), Entry("x.weight", fingerprint="b"), "x.weight: fingerprint a on ranks 0, 2"),
])  # fmt: skip
def test_one_name_with_two_meanings_is_refused_and_listed(a: Entry, b: Entry, told: str) -> None:
    with pytest.raises(LayoutMismatch, match=told):
        merge([([a, Entry("y.input")], [0, 2]), ([b, Entry("y.input")], [1])])


def test_what_only_one_rank_knows_is_no_contradiction() -> None:
    layout = merge([([Entry("x.weight", (2, 3), 0, "a")], [0]), ([Entry("x.weight")], [1])])
    assert layout.names == ("x.weight",)


def test_a_message_lists_at_most_sixteen_entries() -> None:
    many = [[Entry(f"l{i:03}.input", stage=s) for i in range(100)] for s in (0, 1)]
    with pytest.raises(LayoutMismatch) as raised:
        merge([(many[0], [0]), (many[1], [1])])
    assert str(raised.value).count("stage 0") == 16
    assert "and 84 more" in str(raised.value)


@pytest.mark.parametrize(("ranks", "text"), [
    ([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 1], "ranks 0-1, 5"), (list(range(0, 80, 2)), "and 24 more runs"),
])  # fmt: skip
def test_ranks_are_printed_as_runs(ranks: list[int], text: str) -> None:
    assert text in format_ranks(ranks)
