"""Adapters that open and close the step scope. They know no FP8 and no transport."""

from . import deepspeed, dualpipe, megatron, torchtitan
from .torch_pipelining import AttachedSchedule, attach, dw_builder
from .wrap import wrap_step

__all__ = [
    "AttachedSchedule",
    "attach",
    "deepspeed",
    "dualpipe",
    "dw_builder",
    "megatron",
    "torchtitan",
    "wrap_step",
]
