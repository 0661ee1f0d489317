"""What can go wrong between ranks. User mistakes on one rank are plain `ValueError`s.

Every error of this family says what was expected, what came, on which rank, and what to do.
"""

from __future__ import annotations


class Fp8DistError(RuntimeError):
    """Base of every error that the library raises about a run."""


class LayoutMismatch(Fp8DistError):
    """Ranks declare one slot name with different meanings; the message lists the differing entries.

    Raised on every rank of the group by `freeze()` (or by the step that grows the layout).
    """


class PeerAborted(Fp8DistError):
    """Another rank left the step by an exception, so no rank committed it.

    Attributes:
        rank: group rank that left first.
        step: its step tag, or None.
        place: where it was, as far as it could say.
    """

    def __init__(self, message: str, *, rank: int, step: object = None, place: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.place = place


class RanksDisagree(Fp8DistError):
    """The ranks entered one collective with different values of a header field.

    Attributes:
        field: the header field that differs (`tag`, `layout`, `recipe`, `scales`, `scopes`).
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class CollectiveTimeout(Fp8DistError):
    """A collective or negotiation did not finish in time.

    Attributes:
        missing: group ranks that had not entered when the deadline passed.
    """

    def __init__(self, message: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class TransportError(Fp8DistError):
    """The communicator or the store broke (a peer's process died, a connection was lost)."""


class NeedsRecovery(Fp8DistError):
    """An earlier step failed, so scopes are refused until every rank has called `recover()`."""


class MissingScope(Fp8DistError):
    """A module's backward asked for an update while no step scope was open."""


class ScopeError(Fp8DistError):
    """A scope was used out of order (left open, closed twice, used after `close()`)."""


class ScheduleMismatch(Fp8DistError):
    """A pipeline schedule ran other forwards than backwards on this rank."""
