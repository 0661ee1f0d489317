"""Random graphs of layers, and what is done with them in a few steps, as values and as hypothesis strategies.

The repr of a `Case`, evaluated, is the case again. How one is run is said in `topology_machines`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from hypothesis import strategies as st
from torch import nn

TOKENS = 16
WIDTHS = (16, 32)

ActivationName = Literal["tanh", "gelu", "relu"]
AsideKind = Literal["unused", "detached input", "detached output", "no grad"]
FaultKind = Literal["forward", "recompute", "backward", "hook"]
Order = Literal["each", "after", "one"]


# -- the graph ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One linear layer; `tied_to` is an earlier layer whose weight it uses."""

    n_in: int
    n_out: int
    bias: bool = True
    frozen: bool = False
    tied_to: int | None = None


@dataclass(frozen=True)
class Use:
    """Apply a layer; a layer used by several of these is a shared module."""

    layer: int


@dataclass(frozen=True)
class Activation:
    """An elementwise function."""

    name: ActivationName


@dataclass(frozen=True)
class Site:
    """Passes its input on; a fault can go off here."""

    number: int


@dataclass(frozen=True)
class Chain:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Join:
    """Two parallel branches."""

    left: Node
    right: Node
    how: Literal["sum", "cat"]


@dataclass(frozen=True)
class Aside:
    """A branch beside the identity: its result is dropped, or added with some gradient missing."""

    body: Node
    how: AsideKind


@dataclass(frozen=True)
class Region:
    """A checkpointed part."""

    body: Node
    reentrant: bool


Node = Use | Activation | Site | Chain | Join | Aside | Region


def walk(node: Node) -> Iterator[Node]:
    """This node and all below it."""
    yield node
    children: tuple[Node, ...] = ()
    match node:
        case Chain(parts):
            children = parts
        case Join(left, right, _):
            children = (left, right)
        case Aside(body, _) | Region(body, _):
            children = (body,)
    for child in children:
        yield from walk(child)


@dataclass(frozen=True)
class Topology:
    """A graph of layers, with float32 inputs [16, n_in]."""

    n_in: int
    input_grad: bool
    layers: tuple[Layer, ...]
    body: Node

    def owner(self, layer: int) -> int:
        """The layer whose weight this layer uses."""
        tied_to = self.layers[layer].tied_to
        return layer if tied_to is None else tied_to

    def linears(self) -> nn.ModuleList:
        """The layers, with the same values at each call."""
        g = torch.Generator().manual_seed(5)
        linears = nn.ModuleList(nn.Linear(spec.n_in, spec.n_out, bias=spec.bias) for spec in self.layers)
        for i, (spec, linear) in enumerate(zip(self.layers, linears, strict=True)):
            if spec.tied_to is not None:
                linear.weight = linears[self.owner(i)].weight
            for p in linear.parameters():
                p.data = torch.randn(p.shape, generator=g) / math.sqrt(spec.n_in)
                p.requires_grad_(not spec.frozen)
        return linears

    def exact(self, step: Train) -> list[bool]:
        """By layer: whether the order in which its gradients are summed is the same with and without checkpoints.

        A reentrant checkpoint adds each gradient to `.grad` by itself, where autograd else adds their sum.
        """
        if not any(isinstance(node, Region) and node.reentrant for node in walk(self.body)):
            return [True] * len(self.layers)
        used = [self.owner(node.layer) for node in walk(self.body) if isinstance(node, Use)]
        in_step = len(step.batches) * (2 if step.twice and step.order != "one" else 1)
        in_backward = len(step.batches) if step.order == "one" else 1
        uses = [used.count(self.owner(i)) for i in range(len(self.layers))]
        return [n * in_backward <= 1 or n * in_step <= 2 for n in uses]


# -- what is done with it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """An exception at one site, in one microbatch; it may turn out never to go off."""

    site: int
    kind: FaultKind
    microbatch: int


@dataclass(frozen=True)
class Batch:
    """One microbatch: standard normal inputs times `2**power`, one of them infinite or not."""

    power: int
    infinite: bool = False


@dataclass(frozen=True)
class Train:
    """One step. Each microbatch forward and backward, all backwards after all forwards, or one backward of the sum.

    `twice` divides each loss into two, so that one graph is asked twice; `save` looks at the state behind the step.
    """

    batches: tuple[Batch, ...]
    order: Order = "each"
    twice: bool = False
    fault: Fault | None = None
    abort: bool = False
    save: bool = True


@dataclass(frozen=True)
class Evaluate:
    """Runs a batch in eval mode and without gradients."""

    batch: Batch


@dataclass(frozen=True)
class Case:
    """A graph, and the steps of one training run."""

    topology: Topology
    steps: tuple[Train | Evaluate, ...]


def inputs(topology: Topology, batches: tuple[Batch, ...], seed: int) -> list[torch.Tensor]:
    """One leaf [16, n_in] for each microbatch."""
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(TOKENS, topology.n_in, generator=g) * 2.0**batch.power for batch in batches]
    for x, batch in zip(xs, batches, strict=True):
        if batch.infinite:
            x[3, 5] = math.inf
    return [x.requires_grad_(topology.input_grad) for x in xs]


def drift(linears: nn.ModuleList, step: int) -> None:
    """Move the weights between steps, by something else than gradients, whose last bits may differ."""
    with torch.no_grad():
        for p in linears.parameters():
            p.mul_((0.5, 1.25, 3.0)[step % 3])


def features(case: Case) -> Counter[str]:
    """What a case has that can make a difference."""
    nodes, layers = list(walk(case.topology.body)), case.topology.layers
    found: Counter[str] = Counter(
        node.how for node in nodes if not isinstance(node, Use) and hasattr(node, "how")
    )
    used = [node.layer for node in nodes if isinstance(node, Use)]
    found["shared"] = len(used) > len(set(used))
    found["tied"] = any(layer.tied_to is not None for layer in layers)
    found["frozen"] = any(layer.frozen for layer in layers)
    for outer in nodes:
        if isinstance(outer, Region):
            found[f"reentrant={outer.reentrant}"] += 1
            for inner in walk(outer.body):
                if isinstance(inner, Region):
                    found[f"{inner.reentrant} in {outer.reentrant}"] += 1
                if isinstance(inner, Aside):
                    found[f"{inner.how} in a region"] += 1
    for step in case.steps:
        if isinstance(step, Train):
            found[step.order] += 1
            found["abort"] += step.abort
            found["infinite"] += any(batch.infinite for batch in step.batches)
        else:
            found["evaluate"] += 1
    return found


# -- strategies ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What the cases of one property may contain."""

    orders: tuple[Order, ...] = get_args(Order)
    faults: tuple[FaultKind, ...] = get_args(FaultKind)
    twice: bool = True
    abort: bool = False
    late_faults: bool = False
    """No fault where a checkpoint region holds the last layer, so that every backward reaches a layer before it."""


class _Graph:
    """Draws nodes; grows the list of layers on the way, so that a node can use an earlier one again."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.layers: list[Layer] = []
        self.sites = 0
        self.uses = 0

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred draws. It shrinks to False."""
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def use(self, n_in: int, n_out: int) -> Use:
        """A layer that was used before, or another one, possibly with its weight."""
        self.uses += 1
        fits = [i for i, spec in enumerate(self.layers) if (spec.n_in, spec.n_out) == (n_in, n_out)]
        if fits and self.chance(25):
            return Use(self.draw(st.sampled_from(fits)))
        owners = [i for i in fits if self.layers[i].tied_to is None]
        tied_to = self.draw(st.sampled_from(owners)) if owners and self.chance(20) else None
        frozen = self.layers[tied_to].frozen if tied_to is not None else self.chance(20)
        return self.add(Layer(n_in, n_out, self.draw(st.booleans()), frozen, tied_to))

    def add(self, layer: Layer) -> Use:
        """A new layer."""
        self.layers.append(layer)
        return Use(len(self.layers) - 1)

    def node(self, n_in: int, n_out: int, depth: int) -> Node:
        """Any node of these widths."""
        if depth == 0 or self.uses >= 8:
            return self.use(n_in, n_out)
        kinds = ["use", "region", "region", "chain", "sum"]
        kinds += ["cat"] * (n_out == 2 * WIDTHS[0])
        kinds += ["aside", "aside", "aside", "activation", "site", "site"] * (n_in == n_out)
        kind = self.draw(st.sampled_from(kinds))
        match kind:
            case "region":
                return Region(self.with_site(self.chain(n_in, n_out, depth - 1)), self.draw(st.booleans()))
            case "chain":
                return self.chain(n_in, n_out, depth - 1)
            case "sum":
                return Join(self.chain(n_in, n_out, depth - 1), self.chain(n_in, n_out, depth - 1), "sum")
            case "cat":
                left, right = (self.chain(n_in, WIDTHS[0], depth - 1) for _ in range(2))
                return Join(left, right, "cat")
            case "aside":
                return Aside(
                    self.chain(n_in, n_out, depth - 1), self.draw(st.sampled_from(get_args(AsideKind)))
                )
            case "activation":
                return Activation(self.draw(st.sampled_from(get_args(ActivationName))))
            case "site":
                return self.site()
        return self.use(n_in, n_out)

    def site(self) -> Site:
        """A new site."""
        self.sites += 1
        return Site(self.sites - 1)

    def with_site(self, node: Node) -> Node:
        """Often with a site before or behind it."""
        if not self.chance(50):
            return node
        return Chain((self.site(), node) if self.draw(st.booleans()) else (node, self.site()))

    def chain(self, n_in: int, n_out: int, depth: int) -> Node:
        """One to three nodes in a row."""
        inner = [self.draw(st.sampled_from(WIDTHS)) for _ in range(self.draw(st.integers(0, 2)))]
        widths = [n_in, *inner, n_out]
        parts = tuple(self.node(a, b, depth) for a, b in pairwise(widths))
        return parts[0] if len(parts) == 1 else Chain(parts)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Graphs that end in a layer of their own that learns, sometimes in a region around all."""
    graph = _Graph(draw)
    n_in, width, n_out = draw(st.tuples(*[st.sampled_from(WIDTHS)] * 3))
    body = graph.chain(n_in, width, depth=3)
    node: Node = Chain((graph.with_site(body), graph.add(Layer(width, n_out))))
    if graph.chance(30):
        node = Region(node, draw(st.booleans()))
    return Topology(n_in, draw(st.booleans()), tuple(graph.layers), node)


@st.composite
def trainings(draw: st.DrawFn, topology: Topology, limits: Limits) -> Train:
    """One step of this graph."""
    powers = st.integers(-6, 6)
    infinite = st.integers(0, 19).map(lambda n: n == 19)
    batch: st.SearchStrategy[Batch] = st.builds(Batch, powers, infinite)
    batches = tuple(draw(st.lists(batch, min_size=1, max_size=4)))
    sites = [node.number for node in walk(topology.body) if isinstance(node, Site)]
    fault = None
    may_fail = bool(sites) and not (limits.late_faults and isinstance(topology.body, Region))
    if may_fail and draw(st.booleans()):
        site, kind = draw(st.sampled_from(sites)), draw(st.sampled_from(limits.faults))
        fault = Fault(site, kind, draw(st.integers(0, len(batches) - 1)))
    return Train(
        batches,
        draw(st.sampled_from(limits.orders)),
        twice=limits.twice and draw(st.booleans()),
        fault=fault,
        abort=limits.abort and draw(st.integers(0, 9)) == 9,
        save=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, limits: Limits) -> Case:
    """Two to four steps of a random graph, some of them evaluations."""
    topology = draw(topologies())
    train = trainings(topology, limits)
    evaluate = st.builds(Evaluate, st.builds(Batch, st.integers(-6, 6)))
    step = st.one_of(train, train, train, evaluate)
    return Case(topology, tuple(draw(st.lists(step, min_size=2, max_size=4))))
