"""What the tests of the framework adapters share: a small net, its data, and the loop that all are compared with."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from forkpool import run_ranks, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8dist as f8

WIDTH = 32
ROWS = 16  # of a microbatch
SOON = (
    10.0  # seconds in which a failure must have freed the peers; a busy machine's resolver alone may take 5
)

Batch = tuple[torch.Tensor, torch.Tensor]


class Boom(Exception):
    """What a failing rank raises."""


def make(name: str = "main", **options: Any) -> f8.ReductionGroupCoordinator:
    """A coordinator whose patience fits a test."""
    options = {"timeout": 20.0, "stall_warning": 10.0, **options}
    return f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4), name=name, **options)


def net(coordinator: f8.ReductionGroupCoordinator | None, seed: int = 0) -> nn.Module:
    """Three layers, of which FP8 takes two."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 3))
    if coordinator is not None:
        f8.convert(model, coordinator)
    return model


def data(count: int, seed: int = 7) -> list[Batch]:
    """Microbatches whose magnitudes grow and shrink, so that scales move at every step."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [2.0 ** ((3 * i) % 7 - 3) for i in range(count)]
    return [
        (
            size * torch.randn(ROWS, WIDTH, generator=generator),
            torch.randint(3, (ROWS,), generator=generator),
        )
        for size in sizes
    ]


def bits(tensor: torch.Tensor) -> bytes:
    """The exact bits of a tensor."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def slots(coordinator: f8.ReductionGroupCoordinator) -> dict[str, bytes]:
    """History, scale and warmth of every slot of this rank, as their exact bits."""
    state = coordinator.state_dict()["slots"]
    assert state
    return {name: b"".join(bits(tensor) for tensor in fields.values()) for name, fields in state.items()}


def frozen(coordinator: f8.ReductionGroupCoordinator) -> str:
    """Generation, histories and scales as a hash of the exact bits."""
    digest = hashlib.sha256(str(coordinator.stats.generation).encode())
    for name, content in sorted(slots(coordinator).items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()


def weights(model: nn.Module) -> list[bytes]:
    """The exact bits of all parameters."""
    return [bits(parameter) for parameter in model.parameters()]


@dataclass
class Trained:
    """What a rank holds after training. The collective by which `freeze()` seeds the weights is not counted."""

    state: str
    weights: list[bytes] = field(repr=False)
    commits: int
    collectives: int
    slots: dict[str, bytes] = field(repr=False)


def trained(coordinator: f8.ReductionGroupCoordinator, model: nn.Module) -> Trained:
    """Look at it."""
    stats = coordinator.stats
    return Trained(
        frozen(coordinator), weights(model), stats.commits, stats.collectives - 1, slots(coordinator)
    )


class Stack(nn.Module):
    """Blocks with a head, or a part of them: a stage of a pipeline, whose FQNs start at 0 again."""

    def __init__(self, blocks: Sequence[int], head: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(index) for index in blocks)
        torch.manual_seed(99)
        self.head = nn.Linear(WIDTH, 3) if head else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: torch.Tensor = self.head(x)
        return y


class Block(nn.Sequential):
    """One layer of a stack. `layer_number` counts from 1 over the whole model, as in Megatron."""

    def __init__(self, index: int) -> None:
        torch.manual_seed(index)
        super().__init__(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.layer_number = index + 1


def plain_loop(
    windows: Sequence[Sequence[Batch]],
    *,
    ddp: bool = False,
    scale: Callable[[int], float] = lambda _: 1.0,
    build: Callable[[f8.ReductionGroupCoordinator], nn.Module] = net,
    learning_rate: float = 0.05,
) -> Trained:
    """The reference: `with coordinator.step()` around the microbatches, written out.

    Args:
        windows: the microbatches of this rank, one sequence for each optimizer step.
        ddp: average gradients over the ranks.
        scale: factor of a loss, from the length of its window.
        build: the model, converted.
        learning_rate: of SGD.
    """
    coordinator = make("plain")
    inner = build(coordinator)
    model: nn.Module = DistributedDataParallel(inner) if ddp else inner
    optimizer = torch.optim.SGD(inner.parameters(), lr=learning_rate)
    for window in windows:
        with coordinator.step():
            for index, (x, y) in enumerate(window):
                last = index == len(window) - 1
                with nullcontext() if last or not ddp else model.no_sync():
                    (nn.functional.cross_entropy(model(x), y) * scale(len(window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = trained(coordinator, inner)
    coordinator.close()
    return result


def on_ranks(fn: Callable[[int, int], Any], world: int = 2, timeout: float = 60.0) -> list[Any]:
    """Run `fn` on forked gloo ranks that look as if torchrun had started them; its values by rank."""

    def run(rank: int, world: int) -> Any:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test",
        )  # fmt: skip
        return fn(rank, world)

    return values(run_ranks(run, world=world, timeout=timeout))


@dataclass
class Freed:
    """How a step ended on one rank when another one failed."""

    error: str
    named: int | None
    at: float
    unchanged: bool


def attempt(coordinator: f8.ReductionGroupCoordinator, step: Callable[[], Any]) -> Freed:
    """Run a step that fails on this rank or on another."""
    before = frozen(coordinator)
    error: BaseException | None = None
    try:
        step()
    except Exception as caught:
        error = caught
    at = time.monotonic()
    return Freed(type(error).__name__, getattr(error, "rank", None), at, frozen(coordinator) == before)


def check_freed(ended: Sequence[Freed], failing: int) -> None:
    """Its own error on the failing rank, `PeerAborted` that names it on the others, soon; no scale has moved."""
    for rank, end in enumerate(ended):
        assert end.error == ("Boom" if rank == failing else "PeerAborted"), (rank, end)
        assert rank == failing or end.named == failing, (rank, end)
        assert end.unchanged, (rank, end)
    assert max(end.at for end in ended) - min(end.at for end in ended) < SOON, ended
