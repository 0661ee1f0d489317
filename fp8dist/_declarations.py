"""What this rank declares: its slots' entries, and how to reach the weights behind some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Any

import torch

from ._layout import Entry, entries_to_plain
from ._slots import Slot
from ._weights import check_materialised, fingerprint, is_sharded, local_part
from .recipe import Recipe

WeightSource = Callable[[], torch.Tensor | None]


class Declarations:
    """The claims of one rank, as they go into the agreement on the layout.

    Attributes:
        relabelled: a stage was named after the ranks had agreed, so they have to agree again.
    """

    def __init__(self) -> None:
        self.relabelled = False
        self._entries: dict[str, Entry] = {}
        self._weights: dict[str, WeightSource] = {}
        self._sharded: set[str] = set()

    def add(
        self, name: str, shape: tuple[int, ...] | None, weight: WeightSource | None, sharded: bool
    ) -> None:
        """Claim a slot; see `ReductionGroupCoordinator.declare`."""
        if weight is not None:
            self._weights[name] = weight
            if sharded:
                self._sharded.add(name)
                # Only a DTensor knows its global shape; parts of a plain one may differ in size.
                now = weight()
                shape = shape if now is not None and is_sharded(now) else None
        self._entries[name] = Entry(name, tuple(shape) if shape is not None else None)

    def remove(self, name: str) -> None:
        """Forget a claim."""
        del self._entries[name]
        self._weights.pop(name, None)
        self._sharded.discard(name)

    @property
    def stages(self) -> list[int]:
        """Pipeline stages that are named so far."""
        return sorted({entry.stage for entry in self._entries.values() if entry.stage is not None})

    def label(self, slot: Slot, stage: int, *, agreed: bool) -> None:
        """Say which pipeline stage holds a slot.

        Raises:
            ValueError: another stage of this process holds it, too.
        """
        entry = self._entries[slot.name]
        if entry.stage not in (None, stage):
            raise ValueError(
                f"slot {slot.name!r} belongs to stage {entry.stage} already but stage {stage} holds it, too; give "
                "each stage's layers global names: convert(..., prefix=...) or names=..."
            )
        if entry.stage is None:
            self._entries[slot.name] = Entry(entry.name, entry.shape, stage)
            self.relabelled = self.relabelled or agreed

    def payload(self, recipe: Recipe, digest: int, known: Collection[str]) -> dict[str, Any]:
        """What this rank brings into the agreement.

        Args:
            recipe: compared by `digest`; its fields are for the message.
            digest: of the recipe.
            known: names agreed on before. Their weights are not compared again: replicas may part later
                (local SGD), and that is none of our business.
        """
        weights = self.weights()
        entries = []
        for name, entry in self._entries.items():
            weight = weights.get(name)
            compare = weight is not None and name not in known and name not in self._sharded
            mark = fingerprint(weight) if compare and weight is not None and not is_sharded(weight) else None
            entries.append(Entry(entry.name, entry.shape, entry.stage, mark))
        shown = {f.name: _shown(getattr(recipe, f.name)) for f in fields(recipe)}
        return {
            "recipe": digest,
            "recipe_fields": {"class": type(recipe).__name__, **shown},
            "entries": entries_to_plain(entries),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights as they are now, by slot name, without those whose module is gone."""
        now = {name: weight() for name, weight in self._weights.items()}
        return {name: weight for name, weight in now.items() if weight is not None}

    def device(self) -> torch.device:
        """Where the weights are; the CPU without any.

        Raises:
            ValueError: on several devices, or on the meta device.
        """
        weights = self.weights()
        for name, weight in weights.items():
            check_materialised(name, weight)
        devices = {local_part(weight).device for weight in weights.values()}
        if len(devices) > 1:
            listed = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"all FP8 weights of one process are expected on one device but lie on {listed}; give each device a "
                "coordinator of its own (name=), or move the model first"
            )
        return devices.pop() if devices else torch.device("cpu")


def slots_of(module: torch.nn.Module) -> Iterator[Slot]:
    """Slots that a module or its children hold as attributes, alone or in tuples, also of tuples."""
    for part in module.modules():
        yield from _slots_in(tuple(vars(part).values()))


def _slots_in(values: tuple[object, ...]) -> Iterator[Slot]:
    for value in values:
        if isinstance(value, Slot):
            yield value
        elif isinstance(value, tuple):
            yield from _slots_in(value)


def _shown(value: object) -> str:
    return str(getattr(value, "__qualname__", value))
