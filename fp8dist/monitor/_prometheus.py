"""The newest sample for a Prometheus server to fetch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._record import Record, check_positive_int, extremes, worst

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_PLAIN = {
    "step": "step of the newest sample",
    "loss": "loss of that step",
    "wait_s": "seconds a step that this rank waits for the others",
    "generation": "commits behind the current scales",
    "commits": "steps that moved the scales",
    "aborts": "steps that moved nothing",
    "collectives": "reductions started",
}
_OF_SLOTS = {
    "scale": "multiply by it and cast",
    "amax": "newest largest absolute value",
    "headroom": "powers of two to the format's largest value",
    "saturated": "part of the values that were clamped",
    "flushed": "part of the values that became zero",
    "stale": "steps since the slot got an amax",
}


class Prometheus:
    """Serves the newest sample on `http://<addr>:<port>/metrics`, from a registry of its own.

    The number of series is bounded: totals over all slots, and the worst slots with the label `slot`. Ranks of one host
    need a port each, such as `9400 + local_rank`.

    Args:
        port: to listen on, from the first record on; 0 takes a free one, see `port`.
        addr: IP address to listen on; other hosts reach it only if it is not the loopback one.
        slots: how many of the worst slots are told.

    Attributes:
        port: where it listens.

    Raises:
        ValueError: an argument is out of its range.
        ImportError: prometheus-client is not installed.
    """

    def __init__(self, *, port: int = 9400, addr: str = "127.0.0.1", slots: int = 20) -> None:
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
            raise ValueError(f"port expects an int in 0..65535 but got {port!r}")
        if not isinstance(addr, str) or not addr:
            raise ValueError(f"addr expects an IP address but got {addr!r}")
        check_positive_int("slots", slots)
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(
                "the Prometheus sink expects prometheus-client to be installed; pip install 'fp8dist[monitor]'"
            ) from error
        self.port = port
        self._addr, self._slots = addr, slots
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._serve: Any = prometheus_client.start_http_server
        self._server: Any = None
        # Replaced as a whole: the server's threads read it.
        self._newest: tuple[Record, Record] | None = None
        self._start: Record = {}
        self._warnings: Counter[str] = Counter()

    def write(self, record: Record) -> None:
        """Serve it from now on.

        Raises:
            OSError: the port is taken or the address is not of this host.
        """
        if self._server is None:
            self._server = self._serve(self.port, self._addr, self._registry)
            self.port = self._server[0].server_port
        if record["kind"] == "start":
            self._start = record
        elif record["kind"] == "warning":
            self._warnings = self._warnings + Counter([record["what"]])
        else:
            self._newest = (self._start, record)

    def collect(self) -> Iterator[Metric]:
        """What one request sees; called by the server's threads."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        newest, warnings = self._newest, self._warnings
        if newest is None:
            return
        start, sample = newest
        facts = {"rank": str(start["rank"]), "world": str(start["world"]), "coordinator": start["name"]}
        yield InfoMetricFamily("fp8dist", "what is served here", value={**facts, "host": start["host"]})
        for field, text in _PLAIN.items():
            if sample[field] is not None:
                yield GaugeMetricFamily(f"fp8dist_{field}", text, value=sample[field])
        yield from self._totals(sample)
        told = CounterMetricFamily("fp8dist_warnings", "warnings since the start", labels=["what"])
        for what, count in sorted(warnings.items()):
            told.add_metric([what], count)
        yield told
        shown = worst(sample, self._slots)
        for field, text in _OF_SLOTS.items():
            family = GaugeMetricFamily(f"fp8dist_slot_{field}", text, labels=["slot"])
            for i in shown:
                if sample[field] is not None and sample[field][i] is not None:
                    family.add_metric([start["slots"][i]], sample[field][i])
            yield family

    def _totals(self, sample: Record) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        yield GaugeMetricFamily("fp8dist_slots", "slots of this rank", value=len(sample["scale"]))
        for name, value in extremes(sample).items():
            field, _, word = name.partition("_")
            yield GaugeMetricFamily(
                f"fp8dist_{name}", f"{_OF_SLOTS[field]}, {word} over all slots", value=value
            )
        numbers = GaugeMetricFamily("fp8dist_number", "what the training loop gave", labels=["name"])
        for name, value in sample["numbers"].items():
            if value is not None:
                numbers.add_metric([name], value)
        yield numbers
        count = sum(sample["nonfinite"])
        yield GaugeMetricFamily("fp8dist_nonfinite_amaxes", "infinite and NaN amaxes", value=count)

    def close(self) -> None:
        """Stop listening."""
        server, self._server = self._server, None
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
            server[1].join(timeout=5)
