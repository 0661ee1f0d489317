"""What is read of the slots: followed on their device at every commit, copied to the host in a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .._amax import ABSENT
from .._committed import Readings
from .._header import Part
from .._layout import is_backward

NEVER = -(2**30)  # from here the staleness of a slot counts that has not contributed yet


class Sightings:
    """The newest amax of every slot and how many commits ago it came, kept where the slots are.

    Attributes:
        names: own slots.
        newest: float32 [n], -1 before the first amax.
        stale: int32 [n], commits since then; counts up from `NEVER` before the first amax.
        wait: seconds waited in the collectives of these commits.
        commits: how many were seen.
    """

    def __init__(self) -> None:
        self.names: Sequence[str] = []
        self.wait, self.commits = 0.0, 0
        self._lay_out([], torch.device("cpu"))

    def _lay_out(self, names: Sequence[str], device: torch.device) -> None:
        self.newest = torch.full((len(names),), ABSENT, device=device)
        self.stale = torch.full((len(names),), NEVER, dtype=torch.int32, device=device)
        n_forward = sum(not is_backward(name) for name in names)
        # Views made once, since they cost as much as what is done with them.
        ranges = {
            Part.BOTH: slice(None), Part.FORWARD: slice(n_forward), Part.BACKWARD: slice(n_forward, None)
        }  # fmt: skip
        self._parts = {part: (of, self.newest[of], self.stale[of]) for part, of in ranges.items()}

    def see(self, names: Sequence[str], amaxes: torch.Tensor, part: Part, waited: float) -> None:
        """One commit.

        Args:
            names: own slots, the same list until the layout changes.
            amaxes: float32 [n], reduced; -1 where nobody ran the tensor.
            part: the slots that were committed; the other amaxes mean nothing.
            waited: seconds in its collective.
        """
        self.wait += waited
        self.commits += 1
        if names is not self.names:
            self._move_to(names, amaxes.device)
        of, newest, stale = self._parts[part]
        amaxes = amaxes if part is Part.BOTH else amaxes[of]
        ran = torch.ne(amaxes, ABSENT)
        torch.where(ran, amaxes, newest, out=newest)
        stale.add_(1).masked_fill_(ran, 0)

    def _move_to(self, names: Sequence[str], device: torch.device) -> None:
        before = {name: i for i, name in enumerate(self.names)}
        newest, stale = self.newest, self.stale
        self._lay_out(names, device)
        pairs = [(i, before[name]) for i, name in enumerate(names) if name in before]
        if pairs:
            # Not made on the device, which would wait for it.
            to, source = torch.tensor(pairs).to(device, non_blocking=True).unbind(1)
            self.newest[to] = newest[source]
            self.stale[to] = stale[source]
        self.names = names


class Columns(NamedTuple):
    """One sample on the host, [n] each."""

    scale: np.ndarray
    """float32, what the casts of the sampled step multiplied by; NaN where they used their own amax."""
    amax: np.ndarray
    """float32, the newest one, -1 if there is none yet."""
    stale: np.ndarray
    """int64, commits since it came; counted from `NEVER` if there is none yet."""
    nonfinite: np.ndarray
    """int64, infinite and NaN amaxes since the layout changed."""
    saturated: np.ndarray | None
    """float64, part of the values that were clamped; NaN where no value was cast; None if not counted."""
    flushed: np.ndarray | None
    """float64, part of the values that became 0 and were not; likewise."""

    def headroom(self, fp8_max: np.ndarray) -> np.ndarray:
        """float64 [n], powers of two from the largest cast value to the format's largest; below 0 it saturated.

        NaN where the tensor did not run in the sampled step, where its casts used their own amax, and for amaxes
        of 0, inf or NaN.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            powers = np.log2(fp8_max) - np.log2(self.amax.astype(np.float64))
            powers -= np.log2(self.scale.astype(np.float64))
        return np.where((self.stale == 0) & np.isfinite(powers), powers, np.nan)


def flatten(
    before: Readings, after: Readings, seen: Sightings, scalars: Sequence[torch.Tensor]
) -> torch.Tensor:
    """All that a sample needs as one float64 vector; see `Transfer.start`. Waits for no GPU.

    It lies on the device of the scalars, if there are any, and of the slots otherwise.
    """
    n, device = len(after.names), before.scale.device
    newest, stale = seen.newest, seen.stale
    if seen.names is not after.names:  # no commit yet
        newest, stale = torch.full((n,), ABSENT, device=device), torch.full((n,), NEVER, device=device)
    columns = [before.scale, newest, stale, after.nonfinite]
    if after.casts is not None:
        columns.extend(after.casts.unbind(1))
    # A rank without slots keeps its empty columns on the CPU, and its loss may be on a GPU all the same.
    target = scalars[0].device if scalars else device
    # Exact: float32, and integers below 2**53.
    parts = [c.to(target, torch.float64, non_blocking=True) for c in columns]
    parts.extend(s.detach().reshape(1).to(target, torch.float64) for s in scalars)
    return torch.cat(parts)


class Landing:
    """The place on the host where samples land, one after the other. The next one overwrites the one before."""

    def __init__(self) -> None:
        # Kept from sample to sample: to pin memory, and to give it back, can wait for the GPU.
        self._pinned = torch.empty(0, dtype=torch.float64)

    def receive(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Begin to copy a vector to the host.

        Args:
            flat: float64 [k].

        Returns:
            Where it lands, and what tells that it has; None: it is there already.
        """
        if flat.device.type != "cuda":
            return flat.cpu(), None
        if len(self._pinned) < len(flat):
            self._pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host = self._pinned[: len(flat)]
        host.copy_(flat, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(flat.device))
        return host, done


@dataclass
class Transfer:
    """A sample on its way to the host: one copy, which a GPU does when it comes to it."""

    host: torch.Tensor
    """float64, the columns one after the other, then the scalars."""
    done: torch.cuda.Event | None
    """None: it is there already."""
    warm: torch.Tensor
    n: int
    counted: bool

    @classmethod
    def start(
        cls,
        before: Readings,
        after: Readings,
        seen: Sightings,
        scalars: Sequence[torch.Tensor],
        landing: Landing,
    ) -> Transfer:
        """Begin to copy.

        Args:
            before: of the moment before the sampled step.
            after: of now; the same slots.
            seen: the commits until now.
            scalars: one element each, on GPUs.
            landing: no other sample is on its way there.
        """
        host, done = landing.receive(flatten(before, after, seen, scalars))
        return cls(host, done, before.warm, len(after.names), after.casts is not None)

    def ready(self) -> bool:
        """Whether it has arrived. Does not wait."""
        return self.done is None or self.done.query()

    def wait(self) -> None:
        """Until it has arrived."""
        if self.done is not None:
            self.done.synchronize()

    def result(self) -> tuple[Columns, list[float]]:
        """Columns and scalars of what has arrived."""
        flat = self.host.numpy()
        rows = 7 if self.counted else 4
        table = flat[: rows * self.n].reshape(rows, self.n)
        scale, amax, stale, nonfinite = table[:4]
        saturated = flushed = None
        if self.counted:
            values = np.where(table[4] > 0, table[4], np.nan)
            saturated, flushed = table[5] / values, table[6] / values
        columns = Columns(
            np.where(self.warm.numpy(), scale, np.nan).astype(np.float32),
            amax.astype(np.float32),
            stale.astype(np.int64),
            nonfinite.astype(np.int64),
            saturated,
            flushed,
        )
        return columns, flat[rows * self.n :].tolist()
