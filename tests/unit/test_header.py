"""The header tells every rank, from one MAX, who failed and whether all sent the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8dist._header import INT32_MIN, Header, decode, encode, header_words, tag_words

WORLD = 5


def header(rank: int, **fields: object) -> Header:
    base: dict[str, object] = {"tag": 3, "layout": 11, "recipe": 12, "generation": 4}
    return Header(rank=rank, world=WORLD, **{**base, **fields})  # type: ignore[arg-type]


def reduce(headers: list[Header], classes: list[list[int | None]] | None = None) -> list[int]:
    """The MAX as a transport would take it."""
    rows = []
    for i, h in enumerate(headers):
        words = encode(h)
        for digest in classes[i] if classes else []:
            words += [INT32_MIN, INT32_MIN] if digest is None else [digest, -digest]
        assert all(INT32_MIN <= word < 2**31 for word in words)
        rows.append(words)
    return [max(column) for column in zip(*rows, strict=True)]


def test_equal_headers_agree() -> None:
    verdict = decode(reduce([header(r) for r in range(WORLD)]), WORLD)
    assert verdict.disagreements == verdict.classes == ()
    assert verdict.failed_rank is verdict.abandoned_rank is verdict.growing_rank is None
    assert not verdict.active


@pytest.mark.parametrize(("flag", "result"), [
    ("failed", "failed_rank"), ("abandoned", "abandoned_rank"), ("grows", "growing_rank"),
])  # fmt: skip
@given(ranks=st.sets(st.integers(0, WORLD - 1), min_size=1))
def test_the_lowest_rank_that_raises_a_flag_is_named(flag: str, result: str, ranks: set[int]) -> None:
    verdict = decode(reduce([header(r, **{flag: r in ranks}) for r in range(WORLD)]), WORLD)
    assert getattr(verdict, result) == min(ranks)


@pytest.mark.parametrize(("field", "other", "named"), [
    ("tag", 4, "tag"), ("tag", None, "tag"), ("tag", "3", "tag"), ("tag", 3 + 2**31, "tag"), ("tag", -3, "tag"),
    ("layout", 10, "layout"), ("recipe", 0, "recipe"), ("generation", 5, "generation"),
])  # fmt: skip
@pytest.mark.parametrize("odd_one", range(WORLD))
def test_one_rank_with_another_value_is_seen(field: str, other: object, named: str, odd_one: int) -> None:
    headers = [header(r, **({field: other} if r == odd_one else {})) for r in range(WORLD)]
    assert decode(reduce(headers), WORLD).disagreements == (named,)


@given(a=st.integers(-(2**61), 2**61 - 1), b=st.integers(-(2**61), 2**61 - 1))
def test_integer_tags_are_sent_exactly(a: int, b: int) -> None:
    assert (tag_words(a) == tag_words(b)) == (a == b)


@pytest.mark.parametrize("tag", [2**61, -(2**61) - 1, True, 1.5, b"x", (1,)])
def test_an_unfit_tag_is_refused(tag: object) -> None:
    with pytest.raises(ValueError, match="step tag"):
        tag_words(tag)  # type: ignore[arg-type]


def test_classes_are_compared_among_their_holders_only() -> None:
    classes: list[list[int | None]] = [
        [7, None, 1],
        [7, None, 1],
        [None, 9, 1],
        [None, 9, 2],
        [None, None, None],
    ]
    words = reduce([header(r) for r in range(WORLD)], classes)
    assert len(words) == header_words(3)
    assert decode(words, WORLD).classes == (2,)


@given(values=st.lists(st.one_of(st.none(), st.integers(0, 2**31 - 1)), min_size=WORLD, max_size=WORLD))
def test_a_class_differs_exactly_if_two_holders_differ(values: list[int | None]) -> None:
    words = reduce([header(r) for r in range(WORLD)], [[v] for v in values])
    held = {v for v in values if v is not None}
    assert (decode(words, WORLD).classes == (0,)) == (len(held) > 1)
