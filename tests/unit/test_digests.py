"""The digests of slot classes: on a GPU the same as on the CPU, and no change of one slot stays hidden."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from fp8dist._digests import MOST_ROWS, WORDS, ClassDigests, DeviceDigests, HostDigests, rows_a_step
from fp8dist._header import INT32_MIN

torch.set_num_threads(1)


class Given:
    """A recipe state whose digests are given."""

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values, dtype=np.int32)

    def digests(self, generation: int, rows: int, out: Any) -> None:
        out[:] = torch.from_numpy(self.values) if isinstance(out, torch.Tensor) else self.values


def layout(seed: int) -> tuple[int, torch.Tensor, list[int], list[bool], int]:
    """Sizes, positions and classes of a rank that holds some classes of a group in both directions."""
    chance = random.Random(seed)
    held = [chance.random() < 0.7 for _ in range(chance.randint(0, 5))]
    mine = [c for c, is_held in enumerate(held) if is_held]
    forward = sorted(chance.choices(mine, k=chance.randint(0, 9))) if mine else []
    backward = sorted(chance.choices(mine, k=chance.randint(0, 9))) if mine else []
    n = len(forward) + len(backward)
    positions = sorted(chance.sample(range(50), n))
    return 50, torch.tensor(positions, dtype=torch.int64), forward + backward, held, len(forward)


def words(kind: type[ClassDigests], place: Any, values: list[int]) -> list[int]:
    digests = kind(*place)
    split = place[4]
    digests.refresh([Given(values[:split]), Given(values[split:])], 3)
    if kind is HostDigests:
        assert digests.of_class == {c: digests.words[2 * c].item() for c, mine in enumerate(place[3]) if mine}
    return digests.words.tolist()


def chosen(seed: int, n: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.choice([0, -1, 2**31 - 1, INT32_MIN, chance.randrange(-(2**31), 2**31)]) for _ in range(n)]


@pytest.mark.parametrize("seed", range(40))
def test_both_devices_have_the_same_words_and_neutral_ones_for_others_classes(seed: int) -> None:
    place = layout(seed)
    values = chosen(seed, len(place[2]))
    host = words(HostDigests, place, values)
    assert host == words(DeviceDigests, place, values)
    for c, mine in enumerate(place[3]):
        pair = host[2 * c : 2 * c + 2]
        assert pair == ([pair[0], -pair[0]] if mine else [INT32_MIN, INT32_MIN])
        assert pair[0] >= 0 or not mine


@pytest.mark.parametrize("kind", [HostDigests, DeviceDigests])
@pytest.mark.parametrize("seed", range(8))
def test_a_changed_bit_of_one_slot_changes_its_class_and_no_other(
    kind: type[ClassDigests], seed: int
) -> None:
    place = layout(seed)
    values = chosen(seed, len(place[2]))
    before = words(kind, place, values)
    for i, c in enumerate(place[2]):
        for bit in (0, 1, 15, 16, 30, 31):
            changed = np.array(values, dtype=np.int32)
            changed.view(np.uint32)[i] ^= np.uint32(1 << bit)
            after = words(kind, place, changed.tolist())
            assert [k for k in range(len(place[3])) if before[2 * k] != after[2 * k]] == [c]


def test_two_slots_that_swap_their_values_show() -> None:
    place = 4, torch.arange(4), [0] * 4, [True], 2
    assert words(HostDigests, place, [1, 2, 3, 4]) != words(HostDigests, place, [2, 1, 3, 4])
    assert words(HostDigests, place, [1, 2, 3, 4]) != words(HostDigests, place, [1, 3, 2, 4])


@pytest.mark.parametrize("n_union", [0, 1, 100, 1000, 1025, 10_000, 10**6])
def test_a_step_covers_a_bounded_part_of_the_histories_and_never_nothing(n_union: int) -> None:
    rows = rows_a_step(n_union)
    assert 1 <= rows <= MOST_ROWS
    assert rows == 1 or rows * n_union <= WORDS
    assert rows == MOST_ROWS or (rows + 1) * n_union > WORDS
