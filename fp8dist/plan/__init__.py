"""Plans one training step without devices: who does what in which order, whether it ends, what it costs."""

from ._costs import Costs
from ._payload import Model
from ._plan import Layout, Plan, plan
from ._tables import NAMES

__all__ = ["NAMES", "Costs", "Layout", "Model", "Plan", "plan"]
