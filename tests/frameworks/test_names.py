"""Slots are named and stages are numbered over the whole pipeline, whatever a framework counts anew in each stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from common import Stack
from torch import nn

import fp8dist as f8


@pytest.mark.parametrize(("kind", "expected"), [("DualPipe", [1, 2]), ("DualPipeV", [1, 6])])
def test_the_stages_of_a_rank_are_labelled_by_its_place(kind: str, expected: list[int]) -> None:
    """Rank 1 of 4: DualPipe holds every stage twice; DualPipeV, which no package has, eight stages once."""
    labels: list[int] = []
    stub = type(kind, (), {"step": lambda self: None, "rank": 1, "num_ranks": 4})()
    stub.module = [nn.Identity(), nn.Identity()]
    coordinator: Any = SimpleNamespace(label_stage=lambda _, index: labels.append(index))
    f8.schedules.dualpipe.attach(stub, coordinator)
    assert labels == expected


def test_names_are_global_for_wrapped_stages_and_chunks() -> None:
    """A second chunk of a second stage: its first layer is the fourth of the model."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_number = 7
            self.out = nn.Linear(32, 32)

    stage = Stack([3, 4], head=True)
    stage.layers[1].attention = Attention()
    name = f8.schedules.megatron.global_names(Wrapper(Wrapper(stage)))
    assert name("layers.0.2") == "layers.3.2"
    assert name("layers.1.attention.out") == "layers.4.attention.out"
    assert name("head") == "head"
