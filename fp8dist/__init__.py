"""FP8 training with delayed scaling on many ranks: one self-checking collective per optimizer step."""

from . import schedules
from ._header import Tag
from ._recipe_state import RecipeState
from ._slots import Slot
from ._step import Step
from .coordinator import ReductionGroupCoordinator, Stats
from .errors import (
    CollectiveTimeout,
    Fp8DistError,
    LayoutMismatch,
    MissingScope,
    NeedsRecovery,
    PeerAborted,
    RanksDisagree,
    ScheduleMismatch,
    ScopeError,
    TransportError,
)
from .modules.convert import convert
from .modules.layernorm_linear import LayerNormLinear
from .modules.linear import Linear
from .recipe import CurrentScaling, DelayedScaling, Format, Recipe

__all__ = [
    "CollectiveTimeout",
    "CurrentScaling",
    "DelayedScaling",
    "Format",
    "Fp8DistError",
    "LayerNormLinear",
    "LayoutMismatch",
    "Linear",
    "MissingScope",
    "NeedsRecovery",
    "PeerAborted",
    "RanksDisagree",
    "Recipe",
    "RecipeState",
    "ReductionGroupCoordinator",
    "ScheduleMismatch",
    "ScopeError",
    "Slot",
    "Stats",
    "Step",
    "Tag",
    "TransportError",
    "convert",
    "schedules",
]
