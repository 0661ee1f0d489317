"""FP8 training with delayed scaling on many ranks: one self-checking collective per optimizer step."""

from . import checkpoints, graphs, monitor, schedules, te_state
from ._committed import Stats
from ._flight import dump_on_signal
from ._header import Tag
from ._recipe_state import RecipeState
from ._slots import Slot
from ._step import Step
from .compat import (
    activation_recompute_forward,
    autocast,
    backward_quantization_update_needed,
    checkpoint,
    fp8_autocast,
    quantization_backward_scope,
    reduce_and_update_fp8_tensors,
    reduce_and_update_quantization_state,
    request_backward_quantization_update,
)
from .coordinator import ReductionGroupCoordinator
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
from .modules._fsdp import enable_fp8_all_gather
from .modules.convert import convert
from .modules.grouped_linear import GroupedLinear
from .modules.layernorm_linear import LayerNormLinear
from .modules.layernorm_mlp import LayerNormMLP
from .modules.linear import Linear
from .modules.sequential import Residual, Sequential
from .recipe import CurrentScaling, DelayedScaling, Format, Recipe

__all__ = [
    "CollectiveTimeout",
    "CurrentScaling",
    "DelayedScaling",
    "Format",
    "Fp8DistError",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "LayoutMismatch",
    "Linear",
    "MissingScope",
    "NeedsRecovery",
    "PeerAborted",
    "RanksDisagree",
    "Recipe",
    "RecipeState",
    "ReductionGroupCoordinator",
    "Residual",
    "ScheduleMismatch",
    "ScopeError",
    "Sequential",
    "Slot",
    "Stats",
    "Step",
    "Tag",
    "TransportError",
    "activation_recompute_forward",
    "autocast",
    "backward_quantization_update_needed",
    "checkpoint",
    "checkpoints",
    "convert",
    "dump_on_signal",
    "enable_fp8_all_gather",
    "fp8_autocast",
    "graphs",
    "monitor",
    "quantization_backward_scope",
    "reduce_and_update_fp8_tensors",
    "reduce_and_update_quantization_state",
    "request_backward_quantization_update",
    "schedules",
    "te_state",
]
