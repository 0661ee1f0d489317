"""Stands in for CUDA graphs where there is no GPU: a tape of operations; and a small training run to put on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8dist as f8
from fp8dist import graphs
from fp8dist.graphs import GraphedStep

TOKENS, WIDTH = 32, 32


class Tape(TorchDispatchMode):
    """Operations as a CUDA graph keeps them: on the very tensors of the capture, without the Python around them.

    A capture here computes, which one on a GPU does not; what it writes to tensors from outside is put back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.inside: list[torch.Tensor] = []
        self.outside: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(op._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(value, torch.Tensor) and not self.made(value):
                self.outside.append((value, value.clone()))
        out = op(*args, **kwargs)
        self.operations.append((op, args, kwargs, out))
        self.inside += [t for t in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(t)]
        return out

    def made(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(address == t.untyped_storage().data_ptr() for t in self.inside)

    def put_back(self) -> None:
        for tensor, value in reversed(self.outside):
            tensor.detach().copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        for op, args, kwargs, out in self.operations:
            again = op(*args, **kwargs)
            if isinstance(out, torch.Tensor) and again.data_ptr() != out.data_ptr():
                out.copy_(again)
            elif isinstance(out, tuple | list):
                for old, new in zip(out, again, strict=True):
                    if torch.is_tensor(old) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


class FakeCuda:
    """Stands in for `graphs._Cuda`; counts what is asked of it."""

    device_type = "cpu"

    def __init__(self, device: torch.device) -> None:
        self.runs, self.replays, self.pools = 0, 0, []

    def run(self, body: Callable[[], Any]) -> Any:
        self.runs += 1
        return body()

    def capture(self, body: Callable[[], Any], pool: Any) -> graphs._Recording:
        self.pools.append(pool)
        tape = Tape()
        try:
            with tape:
                result = body()
        finally:
            tape.put_back()

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return graphs._Recording(replay, f"pool {len(self.pools)}", result)


class Run:
    """A model, its data, and one step of it."""

    def __init__(self, name: str, kind: str = "mlp", microbatches: int = 1, **recipe: Any) -> None:
        torch.manual_seed(0)
        self.coordinator = f8.ReductionGroupCoordinator(
            f8.DelayedScaling(amax_history_len=3, **recipe), name=name
        )
        common: dict[str, Any] = {"coordinator": self.coordinator}
        if kind == "mlp":
            self.model: nn.Module = f8.LayerNormMLP(WIDTH, 2 * WIDTH, name="a", **common)
        else:
            layers = [f8.Linear(WIDTH, WIDTH, name=str(i), **common) for i in range(2)]
            self.model = nn.Sequential(layers[0], nn.GELU(), layers[1])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.x = torch.zeros(microbatches, TOKENS, WIDTH)

    def load(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.x.copy_(torch.randn(self.x.shape, generator=generator) * (1 + step))

    def body(self) -> torch.Tensor:
        losses = []
        for x in self.x:
            loss = self.model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def graphed(self, **kwargs: Any) -> GraphedStep[torch.Tensor]:
        return GraphedStep(self.coordinator, self.body, self.model.parameters(), **kwargs)

    def eagerly(self, tag: int | None = None, overlap: bool = False) -> torch.Tensor:
        with self.coordinator.step(tag, overlap=overlap):
            return self.body()

    def train(self, step_fn: Callable[[int], torch.Tensor], steps: range) -> list[list[float]]:
        losses = []
        for step in steps:
            self.load(step)
            self.optimizer.zero_grad()
            losses.append(step_fn(step).tolist())
            self.optimizer.step()
        return losses

    def state(self) -> dict[str, Any]:
        slots = self.coordinator.state_dict()["slots"]
        found = {f"{n}.{k}": v.tolist() for n, slot in slots.items() for k, v in slot.items()}
        found |= {n: p.tolist() for n, p in self.model.named_parameters()}
        return found | {f"{n}.grad": p.grad.tolist() for n, p in self.model.named_parameters()}
