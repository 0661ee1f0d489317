"""Two ways to run a `topologies.Case`: with FP8 layers and checkpoints, and in plain torch without either.

`Machine` walks the graph for both; what a layer, a checkpoint region and a fault mean is theirs::

    Topology ──▶ Network    nn.Linear layers for `convert`, real checkpoints, faults that go off
            └──▶ Reference  its own casts, products and update rule; no checkpoint, no fault

Bits can be compared because no sum has more than two terms whose order a checkpoint could change: every tensor
that is used twice is cloned first. Parameters are the exception, see `Topology.exact`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from topologies import (
    Activation,
    Aside,
    Chain,
    Fault,
    FaultKind,
    Join,
    Node,
    Region,
    Site,
    Topology,
    Train,
    Use,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
}
FORMATS = {
    "input": (torch.float8_e4m3fn, 448.0),
    "weight": (torch.float8_e4m3fn, 448.0),
    "grad_output": (torch.float8_e5m2, 57344.0),
}
FORWARD, BACKWARD = ("input", "weight"), ("grad_output",)

Wrap = Callable[..., torch.Tensor]


class Boom(Exception):
    """The exception of every fault."""


class Fuse:
    """Lets the fault of a step go off."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.microbatch = 0
        self.fired = False

    def pass_by(self, site: int, kind: FaultKind) -> None:
        """Raise `Boom` if the fault sits here."""
        if self.fault == Fault(site, kind, self.microbatch):
            self.fired = True
            raise Boom(str(self.fault))


@dataclass(frozen=True)
class Event:
    """One forward, or one backward of a part of its loss; `microbatch=None` is the backward of them all."""

    kind: Literal["forward", "backward"]
    microbatch: int | None
    part: int = 0
    last: bool = True


def events(step: Train) -> list[Event]:
    """What a step does, in order."""
    n = len(step.batches)
    forwards = [Event("forward", i) for i in range(n)]
    if step.order == "one":
        return [*forwards, Event("backward", None)]
    parts = ((0, False), (1, True)) if step.twice else ((0, True),)
    backwards = [[Event("backward", i, part, last) for part, last in parts] for i in range(n)]
    if step.order == "each":
        return [event for i in range(n) for event in (forwards[i], *backwards[i])]
    return [*forwards, *(event for of_one in backwards for event in of_one)]


class Player:
    """Runs the events of one step on one machine.

    Attributes:
        done: what ran to its end.
        losses: of the forwards, in order.
    """

    def __init__(
        self,
        net: Callable[[torch.Tensor], torch.Tensor],
        step: Train,
        xs: list[torch.Tensor],
        *,
        fuse: Fuse | None = None,
        around_forward: Callable[[], AbstractContextManager[None]] = nullcontext,
        after: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """See `events`; `after` is called behind each of them, but not behind a backward that no loss asks for."""
        self.net, self.step, self.xs = net, step, xs
        self.fuse, self.around_forward, self.after = fuse, around_forward, after
        self.parts: list[list[torch.Tensor]] = []
        self.done: list[Event] = []

    def play(self, what: list[Event]) -> None:
        """Run these events."""
        for event in what:
            if self.fuse is not None:
                self.fuse.microbatch = event.microbatch or 0
            if self.forward(event) if event.kind == "forward" else self.backward(event):
                self.after(event)
            self.done.append(event)

    def forward(self, event: Event) -> bool:
        """One microbatch."""
        assert event.microbatch == len(self.parts)
        with self.around_forward():
            y = self.net(self.xs[event.microbatch])
        half = y.shape[1] // 2
        pieces = (y[:, :half], y[:, half:]) if self.step.twice else (y,)
        self.parts.append([piece.square().mean() for piece in pieces])
        return True

    def backward(self, event: Event) -> bool:
        """False if no layer learns from this loss."""
        if event.microbatch is None:
            loss = torch.stack([loss for losses in self.parts for loss in losses]).sum()
        else:
            loss = self.parts[event.microbatch][event.part]
        if loss.requires_grad:
            loss.backward(retain_graph=not event.last)
        return loss.requires_grad

    @property
    def losses(self) -> torch.Tensor:
        """float32, of the forwards that ran, in order."""
        return torch.tensor([loss.item() for losses in self.parts for loss in losses])


# -- the two machines ---------------------------------------------------------------------------------------


class Machine(nn.Module):
    """Walks the graph."""

    topology: Topology
    layers: nn.ModuleList

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[16, n_in] to [16, n_out]."""
        return self.evaluate(self.topology.body, x)

    def evaluate(self, node: Node, x: torch.Tensor) -> torch.Tensor:
        """The output of one node."""
        match node:
            case Use(layer):
                return self.apply_layer(layer, x)
            case Activation(name):
                return ACTIVATIONS[name](x)
            case Site(number):
                return self.pass_site(number, x)
            case Chain(parts):
                for part in parts:
                    x = self.evaluate(part, x)
                return x
            case Join(left, right, how):
                x = x.clone()
                a, b = self.evaluate(left, x), self.evaluate(right, x)
                return a + b if how == "sum" else torch.cat((a, b), -1)
            case Aside(body, how):
                return self.evaluate_aside(body, how, x.clone())
            case Region(body, reentrant):
                return self.run_region(body, x, reentrant)

    def evaluate_aside(self, body: Node, how: str, x: torch.Tensor) -> torch.Tensor:
        """`x`, or the sum of it and the branch."""
        if how == "no grad":
            with torch.no_grad():
                y = self.evaluate(body, x)
            return x + y
        y = self.evaluate(body, x.detach() if how == "detached input" else x)
        if how == "unused":
            return x
        return x + (y.detach() if how == "detached output" else y)

    def apply_layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        raise NotImplementedError

    def pass_site(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x`, or an exception."""
        raise NotImplementedError

    def run_region(self, body: Node, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        """The body's output."""
        raise NotImplementedError


class Network(Machine):
    """The graph as a user writes it, to be converted. Its layers are named `layers.<i>`."""

    def __init__(self, topology: Topology, wrap: Wrap = checkpoint) -> None:
        """Take `wrap` as the checkpoint function."""
        super().__init__()
        self.topology, self.layers, self.wrap = topology, topology.linears(), wrap
        self.fuse = Fuse()

    def apply_layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Call the module."""
        return self.layers[layer](x)

    def pass_site(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Look at the fuse now, in the backward node and in a hook."""
        inside_backward = torch._C._current_graph_task_id() != -1
        self.fuse.pass_by(number, "recompute" if inside_backward else "forward")
        y = _Watched.apply(x, self.fuse, number)
        if y.requires_grad:
            y.register_hook(lambda g: self.fuse.pass_by(number, "hook"))
        return y

    def run_region(self, body: Node, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        """Checkpoint the body."""
        return self.wrap(partial(self.evaluate, body), x, use_reentrant=reentrant)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fuse: Fuse, number: int) -> torch.Tensor:
        ctx.fuse, ctx.number = fuse, number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.fuse.pass_by(ctx.number, "backward")
        return grads[0], None, None


# -- the reference ------------------------------------------------------------------------------------------


class Place:
    """One quantized tensor's amaxes, window and scale.

    Attributes:
        seen: amaxes since the last commit.
        window: of the last commits, oldest first, -1 where there was none.
        scale: float32 [1]; None before the first usable amax.
    """

    def __init__(self, role: str, length: int) -> None:
        self.dtype, self.limit = FORMATS[role]
        self.seen: list[float] = []
        self.window = [-1.0] * length
        self.scale: torch.Tensor | None = None

    def cast(self, x: torch.Tensor, record: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` in FP8, and the factor that undoes its scale."""
        amax = x.detach().abs().max().item()
        if record:
            self.seen.append(amax)
        scale = self.scale if self.scale is not None else self.scale_of(amax)
        return (x * scale).clamp(-self.limit, self.limit).to(self.dtype), 1.0 / scale

    def scale_of(self, amax: float) -> torch.Tensor:
        """What maps `amax` to the limit, or 1."""
        if not (amax > 0 and math.isfinite(amax)):
            return torch.ones(1)
        info = torch.finfo(torch.float32)
        return (torch.tensor([self.limit]) / torch.tensor([amax])).clamp(info.tiny, info.max)

    def commit(self) -> None:
        """Enter the largest amax; where one was infinite or NaN enter none, and keep the scale."""
        finite = all(math.isfinite(amax) for amax in self.seen)
        self.window = [*self.window[1:], max(self.seen) if self.seen and finite else -1.0]
        self.seen = []
        if finite and max(self.window) > 0:
            self.scale = self.scale_of(max(self.window))


class Reference(Machine):
    """The graph in plain torch; FP8 by hand."""

    def __init__(self, topology: Topology, length: int) -> None:
        """Start with cold places and windows of `length`."""
        super().__init__()
        self.topology, self.layers = topology, topology.linears()
        self.seeded = False
        self.places = {
            name: Place(name.rpartition(".")[2], length)
            for i in range(len(self.layers))
            for name in self.names(i)
        }

    def names(self, layer: int) -> tuple[str, str, str]:
        """The places of one layer; tied weights have one."""
        weight = f"layers.{self.topology.owner(layer)}.weight"
        return f"layers.{layer}.input", weight, f"layers.{layer}.grad_output"

    def seed(self) -> None:
        """Give weights their first scale."""
        if not self.seeded:
            self.seeded = True
            for i, linear in enumerate(self.layers):
                assert isinstance(linear, nn.Linear)
                place = self.places[self.names(i)[1]]
                place.scale = place.scale_of(linear.weight.detach().abs().max().item())

    def commit(self, roles: tuple[str, ...] = (*FORWARD, *BACKWARD)) -> None:
        """End the collecting of these roles."""
        self.seed()
        for name, place in self.places.items():
            if name.rpartition(".")[2] in roles:
                place.commit()

    def forget(self) -> None:
        """Drop what was seen since the last commit."""
        for place in self.places.values():
            place.seen = []

    def state(self) -> dict[str, tuple[list[float], float, bool]]:
        """Window, scale, and whether there is one, by name."""
        return {
            name: (place.window, 1.0 if place.scale is None else place.scale.item(), place.scale is not None)
            for name, place in self.places.items()
        }

    def apply_layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """One product in forward, two in backward."""
        linear = self.layers[layer]
        return _Product.apply(x, linear.weight, linear.bias, self, layer)

    def pass_site(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Nothing happens here."""
        return x.clone()

    def run_region(self, body: Node, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        """Just run it; but a reentrant checkpoint of an input without a gradient has none."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and (x.requires_grad or not reentrant)):
            return self.evaluate(body, x)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        reference: Reference,
        layer: int,
    ) -> torch.Tensor:
        x_place, w_place, ctx.g_place = (reference.places[name] for name in reference.names(layer))
        ctx.record = reference.training
        ctx.x, ctx.w = x_place.cast(x, ctx.record), w_place.cast(weight, ctx.record)
        y = _multiply(ctx.x[0], ctx.w[0].t(), ctx.x[1], ctx.w[1])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g, g_inv = ctx.g_place.cast(grads[0], ctx.record)
        dx = _multiply(g, ctx.w[0], g_inv, ctx.w[1]) if ctx.needs_input_grad[0] else None
        dw = _multiply(g.t(), ctx.x[0], g_inv, ctx.x[1]) if ctx.needs_input_grad[1] else None
        return dx, dw, grads[0].sum(0) if ctx.needs_input_grad[2] else None, None, None


def _multiply(a: torch.Tensor, b: torch.Tensor, a_inv: torch.Tensor, b_inv: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(
        a.contiguous(), b.t().contiguous().t(), scale_a=a_inv, scale_b=b_inv, out_dtype=torch.float32
    )
