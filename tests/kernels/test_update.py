"""On a GPU one kernel updates all slots, with the bits of the CPU's update, and can be taken back."""

from __future__ import annotations

import math

import pytest
import torch

from fp8dist import DelayedScaling

SPECIAL = [0.0, -1.0, math.inf, math.nan, 1e-40, 3e38, 1e-36]


def row(n: int, step: int) -> torch.Tensor:
    """Amaxes as they come out of a reduction: some absent, some extreme."""
    generator = torch.Generator().manual_seed(step)
    values = torch.rand(n, generator=generator) * 10 ** (torch.rand(n, generator=generator) * 8 - 4)
    odd = torch.rand(n, generator=generator) < 0.3
    picks = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n,), generator=generator)]
    return torch.where(odd, picks, values)


def bits(state) -> list[list[int]]:
    tensors = (state.history_rows(), state.scale, state.scale_inv)
    return [t.cpu().view(torch.int32).flatten().tolist() for t in tensors] + [
        state.nonfinite.tolist(), state.warm.tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 7, 1000])
@pytest.mark.parametrize("length", [1, 4, 40])
@pytest.mark.parametrize("non_finite", ["absent", "freeze"])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("first_step", ["current", "unit"])
def test_it_has_the_bits_of_the_cpu(n: int, length: int, non_finite: str, algo: str, first_step: str) -> None:
    recipe = DelayedScaling(
        amax_history_len=length, non_finite=non_finite, amax_compute_algo=algo, first_step=first_step
    )
    states = [recipe.make_state(n, backward=False, device=device) for device in ("cpu", "cuda")]
    for step in range(length + 6):
        before = bits(states[1])
        for state in states:
            state.prepare()
            state.commit(row(n, step).to(state.device))
        assert bits(states[0]) == bits(states[1]), step
        if step % 3 == 2:
            assert states[1].undo()
            assert bits(states[1]) == before, step
            states[1].commit(row(n, step).cuda())
            assert bits(states[0]) == bits(states[1]), step
