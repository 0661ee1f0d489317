"""What compute, messages and collectives cost, in milliseconds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ._actions import Kind


@dataclass(frozen=True)
class Costs:
    """Times of one chunk, of one message between stages, and the two constants of an all-reduce.

    An all-reduce of `bytes` over `n` ranks takes `alpha * ceil(log2(n)) + bytes / beta`: the latency of recursive
    doubling (or of a tree) with that many rounds, and each byte once over the slowest link. It is the alpha-beta model
    that the literature of collectives uses, cut to its latency term and one bandwidth term: a row of amaxes is
    small, so what large buffers would pay more is left out. `fp8dist doctor` measures both constants.

    Raises:
        ValueError: a time below 0, a bandwidth not above 0, or either not finite.
    """

    forward_ms: float = 1.0
    """One forward of one stage and microbatch."""
    backward_ms: float = 2.0
    """One full backward."""
    input_ms: float | None = None
    """The half of it for the inputs; None is half of it."""
    weight_ms: float | None = None
    """The half of it for the weights; None is half of it."""
    p2p_us: float = 10.0
    """Latency of a message between two stages."""
    p2p_bytes: int = 0
    """Size of that message."""
    p2p_gbps: float = 50.0
    """Bandwidth of that link, 10**9 bytes per second."""
    alpha_us: float = 65.0
    """Latency of one round of an all-reduce. The default is what NCCL takes between two H200s."""
    beta_gbps: float = 50.0
    """Bandwidth of an all-reduce, 10**9 bytes per second."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            positive = field.name.endswith("gbps")
            if value is None:
                continue
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                raise ValueError(f"expected {field.name} {'>' if positive else '>='} 0 but got {value}")

    @property
    def compute_ms(self) -> dict[Kind, float]:
        """Of each compute action."""
        half = self.backward_ms / 2
        return {
            Kind.F: self.forward_ms,
            Kind.B: self.backward_ms,
            Kind.I: half if self.input_ms is None else self.input_ms,
            Kind.W: half if self.weight_ms is None else self.weight_ms,
        }

    @property
    def message_ms(self) -> float:
        """From the end of a chunk to its input on the neighbour."""
        return self.p2p_us / 1e3 + self.p2p_bytes / (self.p2p_gbps * 1e6)

    def all_reduce_ms(self, ranks: int, n_bytes: int) -> float:
        """Of one all-reduce; nothing for one rank."""
        if ranks <= 1:
            return 0.0
        return self.alpha_us / 1e3 * (ranks - 1).bit_length() + n_bytes / (self.beta_gbps * 1e6)

    def with_constants(self, path: Path) -> Costs:
        """The same with `alpha_us` and `beta_gbps` from a JSON file; other entries of the file are left alone.

        Raises:
            ValueError: the file is no JSON object, or has neither constant or one that is no number.
            OSError: it cannot be read.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: expected a JSON object but got {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path}: expected a JSON object but got {type(found).__name__}")
        for name in ("alpha_us", "beta_gbps"):
            value = found.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{path}: expected a number {name!r} but got {value!r}")
        try:
            return replace(self, alpha_us=float(found["alpha_us"]), beta_gbps=float(found["beta_gbps"]))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
