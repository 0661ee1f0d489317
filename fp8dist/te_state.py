"""States of Transformer Engine's modules, into and out of a coordinator's state. Plain tensors; nothing is unpickled.

Transformer Engine keeps two pairs of tensors in each module, with three columns forward and two backward for every
matrix product (GEMM) in it::

    scale_fwd [3g], amax_history_fwd [L, 3g]    input  weight  output     input  weight  output   ...
    scale_bwd [2g], amax_history_bwd [L, 2g]    grad_output  grad_input   grad_output  grad_input ...

Row 0 of a history gathers the amaxes of the next update; then come the last L - 1 updates, oldest first, 0 where a
tensor did not run. Outputs and input gradients have no slot here, since nobody quantizes them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import _state
from ._amax import ABSENT
from ._slot_table import Columns

LINEAR = ("",)
"""The GEMMs of `Linear` and `LayerNormLinear`."""

LAYERNORM_MLP = ("fc1", "fc2")
"""The GEMMs of `LayerNormMLP`."""

_COLUMNS: dict[str, tuple[str | None, ...]] = {
    "fwd": ("input", "weight", None),
    "bwd": ("grad_output", None),
}
"""Roles of one GEMM's columns in each direction; None where there is no slot."""

_EXTRACT = """where Transformer Engine is installed, load the checkpoint into the model and write its tensors with
    torch.save({name: {"scale_fwd": m.fp8_meta["scaling_fwd"].scale.cpu(),
                       "amax_history_fwd": m.fp8_meta["scaling_fwd"].amax_history.cpu(),
                       "scale_bwd": m.fp8_meta["scaling_bwd"].scale.cpu(),
                       "amax_history_bwd": m.fp8_meta["scaling_bwd"].amax_history.cpu()}
                for name, m in model.named_modules() if "scaling_bwd" in getattr(m, "fp8_meta", {})}, "te_state.pt")
and pass torch.load("te_state.pt", weights_only=True) here"""


def experts(first: int, count: int) -> tuple[str, ...]:
    """The GEMMs of a `GroupedLinear` that holds `count` experts from the global index `first` on."""
    return tuple(f"expert.{first + i}" for i in range(count))


def from_te(
    module_states: Mapping[str, Any],
    *,
    gemms: Mapping[str, Sequence[str]] | None = None,
    generation: int = 0,
    drop_pending: bool = False,
) -> dict[str, Any]:
    """A state for `load_state_dict`, which then goes on with the scales that Transformer Engine would have made.

    To continue with the same bits, use its rule: `DelayedScaling(rule_set="te_fused", first_step="unit")`.

    Args:
        module_states: by the layer's name here, `{"scale_fwd": float32 [3g], "amax_history_fwd": float32 [L, 3g],
            "scale_bwd": float32 [2g], "amax_history_bwd": float32 [L, 2g]}`; other keys are passed over. Or the
            module's `_extra_state`, if torch can read it without unpickling foreign objects.
        gemms: the GEMMs of each layer that has not just one: `LAYERNORM_MLP`, or `experts(first, count)`.
        generation: the commits that the state stands for; equal on all ranks.
        drop_pending: drop amaxes that were recorded but not taken into the scales yet.

    Raises:
        ValueError: a tensor is missing or has another shape or dtype, a state is a pickle, or holds pending
            amaxes.
    """
    parts = []
    for layer, state in module_states.items():
        state = state if isinstance(state, Mapping) else _unpacked(layer, state)
        names = (gemms or {}).get(layer, LINEAR)
        for direction in _COLUMNS:
            scale, history = _checked(layer, state, direction, len(names))
            slots, picked = _slots(layer, names, direction)
            if not drop_pending and bool((history[0, picked] != 0).any()):
                raise ValueError(
                    f"the state of layer {layer!r} expects zeros in row 0 of amax_history_{direction} but has amaxes "
                    "that no update has taken; save it after an update, or pass drop_pending=True to do without them"
                )
            history = history[:, picked]
            history[0] = ABSENT
            # Its tensors start with a scale of 1, which it trusts.
            parts.append(Columns(slots, history, scale[picked], torch.ones(len(slots), dtype=torch.bool)))
    lengths = {len(part.history) for part in parts}
    if len(lengths) > 1:
        raise ValueError(
            f"all layers expect one amax_history_len but have {sorted(lengths)}; one coordinator has one"
        )
    return _state.to_plain(generation, _state.joined(parts) if parts else None)


def to_te(state: Mapping[str, Any], gemms: Mapping[str, Sequence[str]]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of Transformer Engine's modules, to be copied into their `fp8_meta`.

    Its histories keep one step less: the oldest row, which the next commit would drop, makes room for row 0. Columns
    that have no slot get a scale of 1 and an empty history.

    Args:
        state: what `state_dict()` of the coordinator, or `checkpoints.read`, gave.
        gemms: the layers wanted, each with its GEMMs: `LINEAR`, `LAYERNORM_MLP` or `experts(first, count)`.

    Returns:
        By layer the four tensors of `from_te`.

    Raises:
        ValueError: a slot is missing.
    """
    modules = {}
    for layer, names in gemms.items():
        tensors: dict[str, torch.Tensor] = {}
        for direction, columns in _COLUMNS.items():
            slots, picked = _slots(layer, names, direction)
            missing = [name for name in slots if name not in state["slots"]]
            if missing:
                raise ValueError(
                    f"layer {layer!r} expects the slots of {list(names)} but {missing} are not in the state; check the "
                    "names in gemms="
                )
            entries = [state["slots"][name] for name in slots]
            scale = torch.ones(len(columns) * len(names))
            history = torch.zeros(len(entries[0]["history"]), len(scale))
            scale[picked] = torch.stack([entry["scale"].cpu() for entry in entries])
            history[1:, picked] = torch.stack([entry["history"][1:].cpu() for entry in entries], 1).clamp(
                min=0
            )
            tensors |= {f"scale_{direction}": scale, f"amax_history_{direction}": history}
        modules[layer] = tensors
    return modules


def _slots(layer: str, gemms: Sequence[str], direction: str) -> tuple[list[str], list[int]]:
    """The slots of one direction, and the column of each."""
    columns = _COLUMNS[direction]
    found = {
        g * len(columns) + i: ".".join(filter(None, (layer, gemm, role)))
        for g, gemm in enumerate(gemms)
        for i, role in enumerate(columns)
        if role is not None
    }
    return list(found.values()), list(found)


def _checked(
    layer: str, state: Mapping[str, Any], direction: str, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and history of one direction, on the CPU."""
    n = len(_COLUMNS[direction]) * count
    scale, history = state.get(f"scale_{direction}"), state.get(f"amax_history_{direction}")
    for key, value, dims in (("scale", scale, 1), ("amax_history", history, 2)):
        if isinstance(value, torch.Tensor):
            form = (value.dtype, value.dim(), value.shape[-1:], value.numel() > 0)
            if form == (torch.float32, dims, (n,), True):
                continue
            got = f"{value.dtype} {list(value.shape)}"
        else:
            got = type(value).__name__
        raise ValueError(
            f"the state of layer {layer!r} expects {key}_{direction} as torch.float32 {'[L, ' if dims == 2 else '['}"
            f"{n}], for {count} GEMM(s), but has {got}; say in gemms= which GEMMs it has: LINEAR, LAYERNORM_MLP or "
            "experts(first, count)"
        )
    assert isinstance(scale, torch.Tensor) and isinstance(history, torch.Tensor)
    return scale.detach().cpu(), history.detach().cpu()


def _unpacked(layer: str, extra_state: Any) -> Mapping[str, Any]:
    """The mapping in an `_extra_state`, if `torch.load` reads it with `weights_only=True`."""
    if isinstance(extra_state, torch.Tensor):
        if extra_state.dtype != torch.uint8:
            raise ValueError(
                f"the state of layer {layer!r} expects a mapping of tensors but has a tensor of {extra_state.dtype}; "
                f"{_EXTRACT}"
            )
        extra_state = extra_state.detach().cpu().contiguous().numpy().tobytes()
    elif isinstance(extra_state, io.BytesIO):
        extra_state = extra_state.getvalue()
    if not isinstance(extra_state, bytes | bytearray):
        got = type(extra_state).__name__
        raise ValueError(
            f"the state of layer {layer!r} expects a mapping of tensors but has a {got}; {_EXTRACT}"
        )
    if not extra_state:
        raise ValueError(f"the state of layer {layer!r} is empty: it did not compute in FP8; leave it out")
    try:
        state = torch.load(io.BytesIO(extra_state), weights_only=True, map_location="cpu")
    except Exception as error:  # a parser of foreign bytes may raise anything
        raise ValueError(
            f"the state of layer {layer!r} is a pickle of foreign objects, which could run any code and is not opened "
            f"here ({type(error).__name__}); {_EXTRACT}"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of layer {layer!r} expects a mapping but has a {type(state).__name__}")
    return state
