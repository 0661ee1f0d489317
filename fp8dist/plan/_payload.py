"""How many slots lie where, and how many bytes their reductions move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._header import header_words

SLOTS_PER_LINEAR = 3  # input, weight, gradient of the output
LINEARS_PER_EXPERT = 2
WORD = 4  # bytes


@dataclass(frozen=True)
class Model:
    """What of a model decides the payload.

    Raises:
        ValueError: a number below its least value, or both ways to give the number of slots.
    """

    layers: int | None = None
    """Transformer layers, spread over the stages; None is one per stage."""
    linears_per_layer: int = 4
    """FP8 linears in one layer, without experts."""
    experts: int = 0
    """Routed experts in one layer, of two linears each."""
    slots: int | None = None
    """All slots of the model, instead of the three above; spread evenly over the stages."""

    def __post_init__(self) -> None:
        for name, least in (("layers", 1), ("linears_per_layer", 0), ("experts", 0), ("slots", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"expected {name} >= {least} but got {value}")
        if self.slots is not None and (self.layers is not None or self.experts):
            raise ValueError("expected either slots or layers and experts but got both")

    def slots_of_stages(self, n_stages: int) -> list[tuple[int, int]]:
        """Of each stage: slots that all its ranks hold, and slots of experts, which they share out."""
        if self.slots is not None:
            return [(n, 0) for n in _spread(self.slots, n_stages)]
        dense, routed = self.linears_per_layer, self.experts * LINEARS_PER_EXPERT
        layers = _spread(self.layers if self.layers is not None else n_stages, n_stages)
        return [(n * dense * SLOTS_PER_LINEAR, n * routed * SLOTS_PER_LINEAR) for n in layers]


def _spread(number: int, over: int) -> list[int]:
    """As evenly as whole numbers go, the larger parts first."""
    return [number // over + (i < number % over) for i in range(over)]


@dataclass(frozen=True)
class Holdings:
    """Slots by pipeline rank."""

    dense: tuple[int, ...]
    """Held by every rank that stands behind this pipeline rank."""
    routed: tuple[int, ...]
    """Shared out over `ep` of them."""
    ep: int

    @classmethod
    def of(cls, model: Model, placement: Sequence[int], pp: int, ep: int) -> Holdings:
        """Sum the stages of each rank."""
        dense, routed = [0] * pp, [0] * pp
        for rank, (own, shared) in zip(placement, model.slots_of_stages(len(placement)), strict=True):
            dense[rank] += own
            routed[rank] += shared
        return cls(tuple(dense), tuple(routed), ep)

    def own(self, rank: int) -> int:
        """Slots of one process."""
        return self.dense[rank] + self.routed[rank] // self.ep

    def row_bytes(self, ranks: Sequence[int]) -> int:
        """One step's only collective: the header, and a word for each name that anyone in the group holds.

        The header has a pair of words for each set of processes that hold the same slots.
        """
        sets = sum(
            bool(self.dense[r] or self.ep == 1) + (self.ep if self.ep > 1 and self.routed[r] else 0)
            for r in ranks
        )
        names = sum(self.dense[r] + self.routed[r] for r in ranks)
        return WORD * (header_words(sets) + names)

    def backward_bytes(self, ranks: Sequence[int]) -> int:
        """The gradients' amaxes of a process, which an update in a backward reduces; the most of any rank."""
        return WORD * max(self.own(r) // SLOTS_PER_LINEAR for r in ranks)

    def both_ways_bytes(self, rank: int) -> tuple[int, int]:
        """The amaxes of a process, as an update behind its forward and one behind its backward reduce them."""
        own = self.own(rank)
        backward = own // SLOTS_PER_LINEAR
        return WORD * (own - backward), WORD * backward
