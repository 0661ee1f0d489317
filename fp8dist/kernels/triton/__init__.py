"""The kernels of GPUs. Importing this needs Triton, so import it only where a CUDA tensor is at hand."""

from .activation import activation_backward_cast, activation_cast
from .cast import Cast, cast, cast_gradient, fp8_transpose
from .norm import NormCast, norm_backward, norm_cast
from .update import update

__all__ = [
    "Cast",
    "NormCast",
    "activation_backward_cast",
    "activation_cast",
    "cast",
    "cast_gradient",
    "fp8_transpose",
    "norm_backward",
    "norm_cast",
    "update",
]
