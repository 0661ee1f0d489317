"""One quantized tensor's place (`Slot`), and the contiguous buffers behind all places of a rank (`SlotTable`).

The life of an amax::

    module ──record──▶ amax row ──MAX over ranks──▶ reduced row ──update──▶ history ring ──▶ scale
      ▲                  (-1: nobody ran this tensor)                                          │
      └───────────────────────── quantize with the scale of the last commit ◀─────────────────┘

Amaxes and scales live in separate buffers: views of one buffer share autograd's version counter, and a
scale that was saved for backward must notice an update, but must not mind that some other slot recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._amax import ABSENT, record_amax, tensor_amax

if TYPE_CHECKING:
    from ._scope import ScopeState

ROLES = ("input", "weight", "grad_output")


class Slot:
    """One quantized tensor's place: its amax, its scale. Hold the slot, never an index into the table.

    Until the layout is frozen a slot has cells of its own, which the table takes over.

    Attributes:
        name: global name, `<FQN>.<role>`.
        role: `input`, `weight` or `grad_output`.
        dtype: the FP8 dtype that tensors of this slot are cast to.
        scaled_max: largest value after scaling, `fp8_max * 2**-margin`.
        amax: float32 [1], largest absolute value recorded in this step; -1 if none.
        scale: float32 [1], multiply by it, clamp, cast. Constant inside a step.
        scale_inv: float32 [1], `1 / scale`.
        warm: bool [1] on the CPU (asking it never waits for a GPU). While False the slot has no history,
            and its tensors are quantized with their own amax.
        casts: int64 [3] = values, saturated, flushed to zero; or None while casts are not counted.
        scope: the request handle shared with the coordinator.
    """

    __slots__ = (
        "amax", "casts", "dtype", "name", "role", "scale", "scale_inv", "scaled_max", "scope", "warm",
    )  # fmt: skip

    def __init__(
        self, name: str, *, dtype: torch.dtype, scaled_max: float, scope: ScopeState, warm: bool = False
    ) -> None:
        role = name.rpartition(".")[2]
        if role not in ROLES:
            raise ValueError(f"a slot's name ends in its role, one of {', '.join(ROLES)}; got {name!r}")
        self.name = name
        self.role = role
        self.dtype = dtype
        self.scaled_max = scaled_max
        self.scope = scope
        self.casts: torch.Tensor | None = None
        # On the CPU also where models are made on the meta device.
        self.amax = torch.full((1,), ABSENT, device="cpu")
        self.scale = torch.ones(1, device="cpu")
        self.scale_inv = torch.ones(1, device="cpu")
        self.warm = torch.full((1,), warm, device="cpu")

    @property
    def backward(self) -> bool:
        """True for gradients, which have their own FP8 format and history ring."""
        return self.role == "grad_output"

    def record(self, value: torch.Tensor) -> None:
        """Record a tensor, or its amax as a one-element tensor. A MAX, so repeating it is harmless.

        Does nothing where nothing is to be recorded: no open scope, a shut gate, an empty tensor.

        Raises:
            ValueError: the tensor is not floating point, or lies on another device than the slot.
        """
        if not value.is_floating_point():
            raise ValueError(f"slot {self.name!r} records floating-point tensors, got {value.dtype}")
        if not self.scope.recording or value.numel() == 0:
            return
        if value.device != self.amax.device:
            raise ValueError(
                f"slot {self.name!r} lives on {self.amax.device}, the tensor on {value.device}; move the model "
                "before the first step (or before freeze())"
            )
        self.scope.record()
        record_amax(self.amax, tensor_amax(value))

    def request(self) -> None:
        """Flag that this slot recorded something in a backward; see `ScopeState.request`."""
        self.scope.request()

    def __deepcopy__(self, memo: dict[int, object]) -> Slot:
        # A copied model (an EMA, say) reads the same scales; two cells for one name would drift apart.
        return self

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError(
            f"slot {self.name!r} belongs to its coordinator and cannot be pickled; "
            "save model.state_dict() and coordinator.state_dict() instead of the module"
        )

    def __repr__(self) -> str:
        return f"Slot({self.name!r}, dtype={self.dtype}, amax={self.amax.item()}, scale={self.scale.item()})"
