"""Watch a training run: scales, headroom, saturation and waiting times, without a collective and without a wait."""

from ._json_lines import JsonLines
from ._live import LiveView
from ._monitor import Monitor
from ._prometheus import Prometheus
from ._read import RankRun, Run, read_run
from ._record import Sink
from ._tensorboard import TensorBoard

__all__ = [
    "JsonLines",
    "LiveView",
    "Monitor",
    "Prometheus",
    "RankRun",
    "Run",
    "Sink",
    "TensorBoard",
    "read_run",
]
