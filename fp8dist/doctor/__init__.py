"""What this machine can do for FP8 training, what is wrong with it, and what to change.

fp8dist doctor
"""

from ._findings import Finding, Level, worst
from ._group import Constants, GroupHealth, measure

__all__ = ["Constants", "Finding", "GroupHealth", "Level", "measure", "worst"]
