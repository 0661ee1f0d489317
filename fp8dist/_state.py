"""The coordinator's state as named plain tensors, and back. No pickle: every value is a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._amax import ABSENT
from ._layout import is_backward
from ._slot_table import Columns, SlotTable
from .recipe import Recipe

FIELDS = ("history", "scale", "warm")
_SHOWN = 3  # slots that a message lists


def fresh(recipe: Recipe, names: Sequence[str], device: torch.device | str = "cpu") -> Columns:
    """The state that slots have before anything was recorded."""
    parts = []
    for backward in (False, True):
        chosen = [name for name in names if is_backward(name) == backward]
        state = recipe.make_state(len(chosen), backward=backward, device=device)
        parts.append(Columns(chosen, state.history_rows(), state.scale, state.warm))
    return joined(parts)


def joined(parts: Sequence[Columns]) -> Columns:
    """Columns side by side; they share no name."""
    return Columns(
        [name for part in parts for name in part.names],
        torch.cat([part.history for part in parts], dim=1),
        torch.cat([part.scale for part in parts]),
        torch.cat([part.warm for part in parts]),
    )


def current(table: SlotTable, waiting: Columns | None) -> Columns | None:
    """State of all slots that this rank declared, whether the ranks have agreed on them or not.

    A loader asks a fresh process for its state to learn what to read, before any agreement, and writes into what it
    gets: these are copies.

    Args:
        table: the slots.
        waiting: a loaded state that the first agreement will take over.
    """
    if table.recipe.stateless:
        return None
    known = table.export() if table.bound else waiting
    # A slot that is new here but not to other ranks has a state there; an empty one must not compete with it.
    taken = set(table.layout.position).union(() if known is None else known.names)
    new = fresh(table.recipe, [name for name in table.slots if name not in taken], table.device)
    return new if known is None else joined([known, new])


def loadable(table: SlotTable, *, strict: bool) -> list[str]:
    """The slots that can take a loaded state.

    Raises:
        ValueError: some are declared, but will only be agreed on by the next step (strict).
    """
    if not table.has_new_slots or not table.bound:
        return list(table.slots)
    agreed = table.export().names
    new = sorted(set(table.slots).difference(agreed))
    if strict:
        raise ValueError(
            f"load_state_dict() expects slots that the ranks have agreed on but {len(new)} were declared since, e.g. "
            f"{new[:_SHOWN]}; load before the first step (or freeze()), or run a step first, or pass strict=False to "
            "start those afresh"
        )
    return list(agreed)


def to_plain(generation: int, columns: Columns | None) -> dict[str, Any]:
    """`{"generation": int64 [], "slots": {name: {"history", "scale", "warm"}}}`, views of the columns."""
    slots = {}
    if columns is not None:
        rows = columns.history.T.contiguous().unbind(0)
        parts = zip(columns.names, rows, columns.scale.unbind(0), columns.warm.unbind(0), strict=True)
        slots = {name: dict(zip(FIELDS, values, strict=True)) for name, *values in parts}
    return {"generation": torch.tensor(generation), "slots": slots}


def from_plain(
    state: Mapping[str, Any], own: Sequence[str], recipe: Recipe, *, strict: bool
) -> tuple[int, Columns]:
    """The generation, and the state of the slots in `own`, checked before anything is changed.

    Args:
        state: what `to_plain` gave.
        own: the slots to take; the state of others is passed over.
        recipe: tells the length of a history, and how a slot starts.
        strict: refuse if one of `own` is missing; otherwise it starts afresh.

    Raises:
        ValueError: a part is missing, has another shape or dtype, or holds what no run writes; the message
            names it.
    """
    generation, slots = _outer(state)
    if recipe.stateless:
        return generation, Columns([], torch.empty(0, 0), torch.empty(0), torch.empty(0, dtype=torch.bool))
    missing = [name for name in own if name not in slots]
    if missing and strict:
        raise ValueError(
            f"the state has no entry for {len(missing)} of {len(own)} slots of this rank, e.g. {missing[:_SHOWN]}; "
            "pass strict=False to start those afresh"
        )
    names = [name for name in own if name in slots]
    for name in names:
        _check_form(name, slots[name], recipe.history_len)
    parts = [fresh(recipe, missing)]
    if names:
        history, scale, warm = (
            torch.stack([slots[name][field].detach().cpu() for name in names], dim=-1) for field in FIELDS
        )
        parts.append(Columns(names, history, scale, warm))
        _check_values(parts[-1])
    return generation, joined(parts)


def _outer(state: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state expects a mapping but is a {type(state).__name__}; pass a state_dict()")
    for key in ("generation", "slots"):
        if key not in state:
            raise ValueError(f"the state expects {key!r} but has {sorted(map(str, state))}")
    generation, slots = state["generation"], state["slots"]
    if not isinstance(generation, torch.Tensor) or (generation.dtype, generation.shape) != (torch.int64, ()):
        raise ValueError(f"the state expects 'generation' as int64 of shape () but has {_shown(generation)}")
    if int(generation) < 0:
        raise ValueError(f"the state expects 'generation' >= 0 but has {int(generation)}")
    if not isinstance(slots, Mapping):
        raise ValueError(f"the state expects 'slots' as a mapping but has {_shown(slots)}")
    return int(generation), slots


def _check_form(name: str, fields: Any, history_len: int) -> None:
    expected = {
        "history": (torch.float32, (history_len,)),
        "scale": (torch.float32, ()),
        "warm": (torch.bool, ()),
    }
    if not isinstance(fields, Mapping):
        raise ValueError(f"the state of slot {name!r} expects the tensors {FIELDS} but has {_shown(fields)}")
    for field, (dtype, shape) in expected.items():
        value = fields.get(field)
        if isinstance(value, torch.Tensor) and (value.dtype, tuple(value.shape)) == (dtype, shape):
            continue
        hint = "; load it with the amax_history_len it was saved with" if field == "history" else ""
        raise ValueError(
            f"the state of slot {name!r} expects {field!r} as {dtype} of shape {shape} but has {_shown(value)}{hint}"
        )


def _check_values(columns: Columns) -> None:
    """Refuse what no run writes. Histories may hold inf and NaN: some rules keep them."""
    history, scale = columns.history, columns.scale
    fits = {
        "scale": ("a finite number > 0", scale[None], (scale > 0) & (scale < torch.inf)),
        "history": (
            f"amaxes >= 0, or {ABSENT:g} where the tensor did not run",
            history,
            (history >= 0) | (history == ABSENT) | history.isnan(),
        ),
    }
    for field, (expected, values, fit) in fits.items():
        wrong = (~fit.reshape(values.shape)).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise ValueError(
                f"the state of slot {columns.names[column]!r} expects {field!r} to be {expected} but has "
                f"{values[row, column].item()}; it is damaged, load another one"
            )


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"
