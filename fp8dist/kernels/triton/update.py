"""The update of all slots of one direction in one launch, by the rule of `AgingState`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._amax import ABSENT
from ._launch import Launcher, blocks
from ._tile import nan_max

_ABSENT = tl.constexpr(ABSENT)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit(
    do_not_specialize=["n", "length", "head"],
    do_not_specialize_on_alignment=[
        "amax_ptr",
        "history_ptr",
        "scale_ptr",
        "scale_inv_ptr",
        "warm_ptr",
        "nonfinite_ptr",
        "old_row_ptr",
        "old_scale_ptr",
        "old_nonfinite_ptr",
    ],
)
def _update_kernel(
    amax_ptr: tl.tensor, history_ptr: tl.tensor, scale_ptr: tl.tensor, scale_inv_ptr: tl.tensor,
    warm_ptr: tl.tensor, nonfinite_ptr: tl.tensor, old_row_ptr: tl.tensor, old_scale_ptr: tl.tensor,
    old_nonfinite_ptr: tl.tensor, n: tl.tensor, length: tl.tensor, head: tl.tensor,
    scaled_max: tl.constexpr, inv_stride: tl.constexpr, freeze: tl.constexpr, most_recent: tl.constexpr,
    reset: tl.constexpr, tile_l: tl.constexpr, tile_n: tl.constexpr,
) -> None:  # fmt: skip
    slot = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    inside = slot < n
    amax = tl.load(amax_ptr + slot, mask=inside, other=_ABSENT)
    finite = amax < float("inf")
    entered = amax if freeze else tl.where(finite, amax, _ABSENT)
    at_head = history_ptr + head.to(tl.int64) * n + slot
    if old_row_ptr is not None:
        tl.store(old_row_ptr + slot, tl.load(at_head, mask=inside), mask=inside)
        tl.debug_barrier()  # whoever writes the new row need not be the thread that has read the old one
    tl.store(at_head, entered, mask=inside)
    if most_recent:
        window = amax
    else:
        row = tl.arange(0, tile_l)
        top = tl.full([tile_l, tile_n], _ABSENT, tl.float32)
        for start in range(0, length, tile_l):
            # The row at the head may or may not have been written by now.
            wanted = ((start + row < length) & (start + row != head))[:, None] & inside[None, :]
            offsets = (start + row).to(tl.int64)[:, None] * n + slot[None, :]
            top = nan_max(top, tl.load(history_ptr + offsets, mask=wanted, other=_ABSENT))
        window = nan_max(tl.reduce(top, 0, nan_max), entered)
    usable = window > 0.0
    if not freeze:
        usable = usable & finite
    if freeze or most_recent:
        usable = usable & (window < float("inf"))
    quotient = tl.div_rn(tl.full([tile_n], scaled_max, tl.float32), window)
    scale = tl.load(scale_ptr + slot, mask=inside, other=1.0)
    if old_scale_ptr is not None:
        tl.store(old_scale_ptr + slot, scale, mask=inside)
    scale = tl.where(usable, tl.minimum(tl.maximum(quotient, _TINY), _MAX), scale)
    tl.store(scale_ptr + slot, scale, mask=inside)
    tl.store(
        scale_inv_ptr + slot * inv_stride, tl.div_rn(tl.full([tile_n], 1.0, tl.float32), scale), mask=inside
    )
    if warm_ptr is not None:
        tl.store(warm_ptr + slot, True, mask=inside & usable)
    if old_nonfinite_ptr is not None:
        tl.store(old_nonfinite_ptr + slot, tl.load(nonfinite_ptr + slot, mask=inside), mask=inside)
    if nonfinite_ptr is not None:
        lost = inside & (finite == 0)
        tl.store(nonfinite_ptr + slot, tl.load(nonfinite_ptr + slot, mask=lost, other=0) + 1, mask=lost)
    if reset:
        tl.store(amax_ptr + slot, _ABSENT, mask=inside)


_launch_update = Launcher(_update_kernel)


def update(
    amax: torch.Tensor,
    history: torch.Tensor,
    head: int,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    warm: torch.Tensor | None,
    nonfinite: torch.Tensor | None,
    scaled_max: float,
    *,
    freeze: bool = False,
    most_recent: bool = False,
    reset: bool = True,
    old: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Enter one step's amaxes into the ring, recompute all scales, and empty the row, all in place.

    The caller moves `head` on, to `(head + 1) % L`.

    Args:
        amax: float32 [n], reduced: -1 where nobody ran the tensor, else >= 0, inf or NaN. Contiguous, like the rest.
        history: float32 ring [L, n].
        head: the row to overwrite.
        scale: float32 [n].
        scale_inv: float32 [n], becomes `1 / scale`; any stride.
        warm: bool [n], set where a scale was computed; or None.
        nonfinite: int64 [n], raised by one where the amax is inf or NaN; or None.
        scaled_max: a scale is this by the window's amax.
        freeze: a non-finite amax enters the ring, and its slot keeps its scale until it leaves. Otherwise it counts
            as absent, and the scale is kept this once.
        most_recent: the window's amax is this step's alone.
        reset: fill `amax` with -1.
        old: float32, float32 and int64 [n], which take what was there: the row at the head, scales and counts.
            Only with `nonfinite`.
    """
    length, n = history.shape
    if n == 0:
        return
    bn = 32 if n <= 8192 else 128
    bl = min(triton.next_power_of_2(length), 4096 // bn)
    _launch_update(
        (blocks(n, bn), 1, 1),
        (amax, history, scale, scale_inv, warm, nonfinite, *(old or (None, None, None))),
        (n, length, head),
        (scaled_max, scale_inv.stride(0), freeze, most_recent, reset, bl, bn),
        4,
    )
