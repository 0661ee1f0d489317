"""Adapters that open and close the step scope. They know no FP8 and no transport."""

from .torch_pipelining import AttachedSchedule, attach
from .wrap import wrap_step

__all__ = ["AttachedSchedule", "attach", "wrap_step"]
