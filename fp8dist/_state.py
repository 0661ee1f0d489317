"""The coordinator's state as named plain tensors, and back. No pickle: every value is a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._slot_table import Columns

FIELDS = ("history", "scale", "warm")


def to_plain(generation: int, columns: Columns | None) -> dict[str, Any]:
    """`{"generation": int64 [], "slots": {name: {"history", "scale", "warm"}}}`."""
    slots = {}
    if columns is not None:
        rows = columns.history.T.contiguous().unbind(0)
        parts = zip(columns.names, rows, columns.scale.unbind(0), columns.warm.unbind(0), strict=True)
        slots = {name: dict(zip(FIELDS, values, strict=True)) for name, *values in parts}
    return {"generation": torch.tensor(generation), "slots": slots}


def from_plain(
    state: Mapping[str, Any], own: Sequence[str], history_len: int, *, strict: bool
) -> tuple[int, Columns]:
    """The generation, and the state of the slots in `own`, checked before anything is changed.

    Raises:
        ValueError: a part is missing or has another shape or dtype; the message names it.
    """
    for key in ("generation", "slots"):
        if key not in state:
            raise ValueError(f"the state expects {key!r} but has {sorted(state)}")
    slots = state["slots"]
    missing = [name for name in own if name not in slots]
    if missing and strict:
        raise ValueError(
            f"the state has no entry for {len(missing)} of {len(own)} slots of this rank, e.g. {missing[:3]}; pass "
            "strict=False to start those afresh"
        )
    names = [name for name in own if name in slots]
    for name in names:
        _check(name, slots[name], history_len)
    if not names:
        empty = torch.empty(0)
        return int(state["generation"]), Columns([], torch.empty(history_len, 0), empty, empty.bool())
    history, scale, warm = (
        torch.stack([slots[name][field].detach().cpu() for name in names], dim=-1) for field in FIELDS
    )
    return int(state["generation"]), Columns(names, history, scale, warm)


def _check(name: str, fields: Mapping[str, Any], history_len: int) -> None:
    expected = {
        "history": (torch.float32, (history_len,)),
        "scale": (torch.float32, ()),
        "warm": (torch.bool, ()),
    }
    for field, (dtype, shape) in expected.items():
        value = fields.get(field)
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"the state of slot {name!r} expects a tensor {field!r} but has {type(value).__name__}"
            )
        if value.dtype != dtype or tuple(value.shape) != shape:
            hint = "; load it with the amax_history_len it was saved with" if field == "history" else ""
            raise ValueError(
                f"the state of slot {name!r} expects {field!r} as {dtype} of shape {shape} but has {value.dtype} of "
                f"shape {tuple(value.shape)}{hint}"
            )
