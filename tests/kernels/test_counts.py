"""On a GPU casts are counted by the kernels that make them: the CPU's numbers, and no other bit of the step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fp8dist as f8
from fp8dist._scope import ScopeState
from fp8dist._slots import Slot
from fp8dist.kernels.quantize import Layout, quantize
from fp8dist.modules._products import quantize_gradient_and_bias

DEVICE = "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 64), (130, 70), (1, 1), (3, 500), (500, 3), (257, 129)]
TOKENS, HIDDEN, FFN = 32, 64, 128


@pytest.fixture(autouse=True)
def _no_debug_mode_survives() -> Iterator[None]:
    yield
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def vanishing(dtype: torch.dtype) -> float:
    """Half of the least value."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def counter() -> torch.Tensor:
    """In the middle of a table, as a slot's counter is: at no multiple of 16 bytes."""
    return torch.zeros(9, dtype=torch.int64, device=DEVICE)[3:6]


def scale_of(value: float) -> torch.Tensor:
    return torch.tensor([value], device=DEVICE)


def by_the_cpu(x: torch.Tensor, scale: float, dtype: torch.dtype) -> list[int]:
    """What the casts of these values count there."""
    casts, amax = torch.zeros(3, dtype=torch.int64), torch.tensor([-1.0])
    arguments = (torch.tensor([scale]), torch.tensor([True]), amax, casts, True, 1.0, dtype, Layout.ROWS)
    torch.ops.fp8dist.quantize(x.detach().cpu(), *arguments)
    return casts.tolist()


def random(*shape: int, seed: int, exponents: tuple[int, int] = (-3, 3)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(*exponents, shape, generator=generator).float()
    return torch.randn(shape, generator=generator) * torch.exp2(powers)


def hard(*shape: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """float32 values over many exponents, and all around what saturates and what becomes 0."""
    x = random(*shape, seed=0, exponents=(-30, 20))
    ends = torch.tensor([largest(dtype), vanishing(dtype)]) / scale
    around = [ends, ends.nextafter(torch.tensor(1e38)), ends.nextafter(torch.tensor(0.0))]
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-45, 3e38])
    special = torch.cat((*around, *(-a for a in around), odd))
    flat = x.view(-1)
    where = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(1))[: len(special)]
    flat[where] = special[: len(where)]
    return x


def strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values on the GPU with other strides."""
    m, k = x.shape
    x = x.to(DEVICE)
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "padded":
        return torch.cat((x, x[:, :1].expand(m, 16)), 1)[:, :k]
    if layout == "every third":
        return x.unsqueeze(-1).expand(m, k, 3).contiguous()[..., 1]
    assert layout == "dense"
    return x


@pytest.mark.parametrize("scale", [4.0, 3.0, 2.0**-100, 2.0**120])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cast_counts_what_the_cpu_counts(
    shape: tuple[int, int], x_dtype: torch.dtype, dtype: torch.dtype, scale: float
) -> None:
    from fp8dist.kernels.triton import cast

    x = hard(*shape, scale=scale, dtype=dtype).to(x_dtype)
    casts = counter()
    cast(x.to(DEVICE), scale_of(scale), None, dtype, largest(dtype), True, casts=casts)
    assert casts.tolist() == by_the_cpu(x, scale, dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_bfloat16_is_counted_as_on_the_cpu(dtype: torch.dtype) -> None:
    from fp8dist.kernels.triton import cast

    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256)
    for scale in (0.7, 2.0**-100, 2.0**110):
        casts = counter()
        cast(x.to(DEVICE), scale_of(scale), None, dtype, largest(dtype), False, casts=casts)
        wanted = by_the_cpu(x, scale, dtype)
        assert casts.tolist() == wanted and min(wanted) > 0, scale


@pytest.mark.parametrize("copies", ["rows", "columns", "both"])
@pytest.mark.parametrize("layout", ["dense", "padded", "columns", "every third"])
@pytest.mark.parametrize("summed", [False, True])
def test_copies_strides_and_sums_change_no_count_and_counts_change_none_of_these(
    copies: str, layout: str, summed: bool
) -> None:
    from fp8dist.kernels.triton import cast_gradient

    values = hard(150, 90, scale=3.0, dtype=E5M2)
    if summed:  # what is not finite would be the sum of its column
        values = values.nan_to_num(0.0, 0.0, 0.0).clamp(-1e30, 1e30)
    x, scale, casts = strided(values.bfloat16(), layout), scale_of(3.0), counter()
    results = []
    for counted in (None, casts):
        amax = scale_of(-1.0)
        result, db = cast_gradient(
            x, scale, amax, E5M2, largest(E5M2), copies != "rows", copies != "columns",
            casts=counted, want_db=summed,
        )  # fmt: skip
        bits = [t if t is None else t.view(torch.uint8).cpu() for t in result[:2]]
        results.append([*bits, result.scale_inv.cpu(), amax.cpu(), None if db is None else db.cpu()])
    assert casts.tolist() == by_the_cpu(x, 3.0, E5M2) and min(casts.tolist()) > 0
    for plain, counted in zip(*results, strict=True):
        assert (plain is None and counted is None) or torch.equal(plain.nan_to_num(), counted.nan_to_num())


def test_counts_add_up_and_nothing_adds_nothing() -> None:
    from fp8dist.kernels import triton as kernels

    x, scale, casts = random(40, 40, seed=0).to(DEVICE), scale_of(300.0), counter()
    for _ in range(3):
        kernels.cast(x, scale, None, E4M3, 448.0, False, casts=casts)
    once = by_the_cpu(x, 300.0, E4M3)
    assert casts.tolist() == [3 * n for n in once] and once[1] > 0
    before = casts.clone()
    none = x[:0]
    weight = torch.ones(40, device=DEVICE)
    kernels.cast(none, scale, None, E4M3, 448.0, True, casts=casts)
    kernels.cast_gradient(none, scale, None, E5M2, 57344.0, True, casts=casts, want_db=True)
    kernels.activation_cast(none, "swiglu", scale, None, E4M3, 448.0, True, casts=casts)
    kernels.activation_backward_cast(
        none[:, :20], none, "swiglu", scale, None, E5M2, 57344.0, True, casts=casts
    )
    kernels.norm_cast(none, weight, None, 1e-5, "RMSNorm", scale, None, E4M3, 448.0, True, casts=casts)
    assert torch.equal(casts, before)


# -- activations and norms: the float32 values are the kernels' own, so none shall lie where an error would count ----


def activation64(kind: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 value and derivative."""
    x = x.double().requires_grad_()
    act = {
        "gelu": lambda t: nn.functional.gelu(t, approximate="tanh"),
        "relu": torch.relu,
        "silu": nn.functional.silu,
    }
    y = act[kind](x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def near_an_end(exact: torch.Tensor, error: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Whether an error could change what is counted."""
    scaled, margin = exact.abs() * scale, (error + 1e-6 * exact.abs()) * scale
    saturates, vanishes = ((scaled - end).abs() <= margin for end in (largest(dtype), vanishing(dtype)))
    return saturates | vanishes


def activation_parts(kind: str, h: torch.Tensor, dy: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the kernels cast, by columns of `dy`, and how far float32 may be off: the result, then the gradients."""
    g = dy.double()
    f = dy.shape[1]
    value, slope = activation64("silu" if kind == "swiglu" else kind, h[:, :f])
    if kind == "relu":
        return [(exact, torch.zeros_like(exact)) for exact in (value, g * slope)]
    if kind != "swiglu":
        return [(value, 1e-5 * value.abs()), (g * slope, 1e-5 * (g * slope).abs() + 1e-6 * g.abs())]
    other = h.double()[:, f:]
    pairs = [(value * other, 0.0), (g * other * slope, (g * other).abs()), (g * value, 0.0)]
    return [(exact, 1e-5 * exact.abs() + 1e-6 * size) for exact, size in pairs]


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gelu", "relu", "silu", "swiglu"])
@pytest.mark.parametrize("shape", [(70, 130), (64, 64)])
def test_activations_and_derivatives_count_their_own_values(
    shape: tuple[int, int], kind: str, dtype: torch.dtype, summed: bool
) -> None:
    from fp8dist.kernels.triton import activation_backward_cast, activation_cast

    (m, f), width = shape, 2 if kind == "swiglu" else 1
    h = random(m, width * f, seed=0, exponents=(-16, 3)).clamp(-6, 6).to(dtype)
    dy = random(m, f, seed=1, exponents=(-20, 12)).to(dtype)
    scale, scale_dy = 300.0, 64.0
    forward, *backward = activation_parts(kind, h, dy)
    near = near_an_end(*forward, scale, E4M3)
    for part in backward:
        near |= near_an_end(*part, scale_dy, E5M2)
    assert near.double().mean() < 0.05
    h[near.repeat(1, width)], dy[near] = 0.0, 0.0
    forward, *backward = activation_parts(kind, h, dy)

    casts, grad_casts = counter(), counter()
    h, dy = h.to(DEVICE), dy.to(DEVICE)
    activation_cast(h, kind, scale_of(scale), None, E4M3, 448.0, True, casts=casts)
    assert casts.tolist() == by_the_cpu(forward[0].float(), scale, E4M3) and min(casts.tolist()) > 0
    arguments = (dy, h, kind, scale_of(scale_dy), None, E5M2, 57344.0, True)
    counted = activation_backward_cast(*arguments, casts=grad_casts, want_db=summed)
    exact = torch.cat([part.float() for part, _ in backward], 1)
    assert grad_casts.tolist() == by_the_cpu(exact, scale_dy, E5M2) and min(grad_casts.tolist()) > 0
    plain = activation_backward_cast(*arguments, want_db=summed)
    assert torch.equal(counted[0].data_t.view(torch.uint8), plain[0].data_t.view(torch.uint8))
    assert not summed or torch.equal(counted[1], plain[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("shape", [(33, 100), (7, 1024), (1, 1), (3, 12288)])
def test_norms_count_their_own_values(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    from fp8dist.kernels.triton import norm_cast

    m, k = shape
    x = random(m, k, seed=0, exponents=(-20, 2)).to(dtype)
    weight = (random(k, seed=1) + 1).to(dtype)
    # Of the rows that fill up a tile only the bias is left, which would saturate.
    bias = torch.where(torch.arange(k) % 2 == 0, 0.0, 5.0).to(dtype) if kind == "LayerNorm" else None
    x[:, ::5] = x[:, :1].clone() if kind == "LayerNorm" else 0.0
    casts, scale = counter(), 300.0
    inputs = [t if t is None else t.to(DEVICE) for t in (x, weight, bias)]
    arguments = (*inputs, 1e-5, kind, scale_of(scale), None, E4M3, 448.0, True)
    got = norm_cast(*arguments, want_normal=True, casts=casts)
    plain = norm_cast(*arguments, want_normal=True)
    assert torch.equal(got.data.view(torch.uint8), plain.data.view(torch.uint8))
    assert torch.equal(got.normal, plain.normal) and torch.equal(got.rstd, plain.rstd)
    if dtype == torch.float32:
        assert casts.tolist() == by_the_cpu(got.normal, scale, E4M3)
        return
    x, weight = x.double(), weight.double()
    centred = x - x.mean(1, keepdim=True) if kind == "LayerNorm" else x
    exact = centred * (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
    exact = exact if bias is None else exact + bias.double()
    error = 1e-6 * (1 + exact.abs())
    near = int(near_an_end(exact, error, scale, E4M3).sum())
    values, saturated, flushed = by_the_cpu(exact.float(), scale, E4M3)
    assert casts[0] == values == m * k
    assert abs(casts[1].item() - saturated) <= near and abs(casts[2].item() - flushed) <= near
    assert near <= 0.05 * m * k or m * k == 1


# -- slots, and whole steps -------------------------------------------------------------------------------------


def slot_on(device: str, dtype: torch.dtype, scale: float | None) -> Slot:
    scope = ScopeState()
    slot = Slot("a.input", dtype=dtype, scaled_max=largest(dtype), scope=scope, warm=scale is not None)
    slot.amax, slot.scale, slot.scale_inv = (t.to(device) for t in (slot.amax, slot.scale, slot.scale_inv))
    slot.scale.fill_(1.0 if scale is None else scale)
    slot.casts = torch.zeros(3, dtype=torch.int64, device=device)
    return slot


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [3.0, None])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((70, 40), Layout.ROWS),
        ((70, 40), Layout.COLUMNS),
        ((70, 40), Layout.BOTH),
        ((2, 35, 40), Layout.ROWS),
    ],
)
def test_a_slot_of_the_gpu_counts_like_one_of_the_cpu(
    shape: tuple[int, ...], layout: int, scale: float | None, compiled: bool
) -> None:
    x = hard(*shape, scale=3.0, dtype=E4M3).nan_to_num(1.0, 2.0, 3.0)
    ours, theirs = slot_on(DEVICE, E4M3, scale), slot_on("cpu", E4M3, scale)

    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        recorded, other = (quantize(x, ours, record, layout=layout) for record in (True, False))
        return recorded.data, other.data

    run = torch.compile(twice, fullgraph=True, backend="aot_eager") if compiled else twice
    recorded, other = run(x.to(DEVICE))
    quantize(x, theirs, True)
    assert torch.equal(recorded.view(torch.uint8), other.view(torch.uint8))
    assert ours.casts.tolist() == theirs.casts.tolist() and theirs.casts[2] > 0
    assert torch.equal(ours.amax.cpu(), theirs.amax)


@pytest.mark.parametrize("scale", [3.0, None])
@pytest.mark.parametrize("db", [False, True])
def test_gradients_are_counted_once(db: bool, scale: float | None) -> None:
    slot = slot_on(DEVICE, E5M2, scale)
    other = slot_on("cpu", E5M2, scale)
    slot.scope.open()
    dy = hard(48, 70, scale=3.0, dtype=E5M2).nan_to_num(1.0, 2.0, 3.0).bfloat16()
    quantize_gradient_and_bias(dy.to(DEVICE), slot, True, rows_wanted=True, columns=True, db=db)
    quantize_gradient_and_bias(dy.to(DEVICE), slot, False, rows_wanted=True, columns=True, db=db)
    slot.scope.close()
    quantize(dy, other, True)
    assert slot.casts.tolist() == other.casts.tolist() and slot.casts[2] > 0


KINDS = {
    "Linear": (lambda **kw: f8.Linear(HIDDEN, FFN, **kw), [(HIDDEN, FFN)]),
    "LayerNormLinear": (lambda **kw: f8.LayerNormLinear(HIDDEN, FFN, **kw), [(HIDDEN, FFN)]),
    "RMSNorm": (
        lambda **kw: f8.LayerNormLinear(HIDDEN, FFN, normalization="RMSNorm", **kw), [(HIDDEN, FFN)],
    ),
    "gelu": (lambda **kw: f8.LayerNormMLP(HIDDEN, FFN, **kw), [(HIDDEN, FFN), (FFN, HIDDEN)]),
    "swiglu": (
        lambda **kw: f8.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **kw), [(HIDDEN, 2 * FFN), (FFN, HIDDEN)],
    ),
}  # fmt: skip
COUNTED_STEP, STEPS = 3, 5


class Run:
    """Some steps of one module, of which one may be counted."""

    def __init__(self, kind: str, bias: bool, count: bool, trained: str = "") -> None:
        self.coordinator = f8.ReductionGroupCoordinator(
            f8.DelayedScaling(amax_history_len=4), name=f"counts {count}"
        )
        torch.manual_seed(0)
        self.module = KINDS[kind][0](
            bias=bias, coordinator=self.coordinator, name="a", device=DEVICE, dtype=torch.bfloat16
        )
        for name, p in self.module.named_parameters():
            p.requires_grad_(trained in name)
        self.count = count
        self.bits: list[torch.Tensor] = []
        self.counts: dict[str, tuple[int, int, int]] = {}
        self.nodes: list[str] = []
        self.digests: list[int] = []

    def train(self, x_needs_grad: bool = True, may_wait: bool = False) -> Run:
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        for step in range(STEPS):
            counting = self.count and step == COUNTED_STEP
            x = random(TOKENS, HIDDEN, seed=step)
            if step == COUNTED_STEP:
                x[0, -1] = 1000.0  # more than its scale allows for, also behind a norm
                for p in self.module.parameters():
                    if p.dim() == 2:
                        p.data[0, :9] = 1e-9  # less than its scale can keep
            x = x.bfloat16().to(DEVICE).requires_grad_(x_needs_grad)
            if counting:
                self.coordinator.count_casts()
            self.step(step, x, may_wait=may_wait or not counting)
            if counting:
                self.counts = self.coordinator.cast_counts()
                self.coordinator.count_casts(False)
            optimizer.step()
            optimizer.zero_grad()
            self.digests.append(self.coordinator.digest())
        self.coordinator.close()
        return self

    def step(self, step: int, x: torch.Tensor, may_wait: bool) -> None:
        if not may_wait and DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        with self.coordinator.step(step):
            y = self.module(x)
            y.float().square().mean().backward()
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self.nodes.append(type(y.grad_fn).__name__)
        grads = [p.grad.clone() for p in self.module.parameters() if p.grad is not None]
        self.bits += [y.detach(), *grads, *([] if x.grad is None else [x.grad])]


def assert_same_bits(plain: Run, counted: Run) -> None:
    assert plain.nodes == counted.nodes and plain.digests == counted.digests
    assert len(plain.bits) == len(counted.bits) > STEPS
    for ours, theirs in zip(plain.bits, counted.bits, strict=True):
        assert torch.equal(ours, theirs)


def values_of(kind: str) -> dict[str, int]:
    """How many each slot casts in a step."""
    layers = KINDS[kind][1]
    names = ["a."] if len(layers) == 1 else ["a.fc1.", "a.fc2."]
    return {
        name + role: count
        for name, (k, n) in zip(names, layers, strict=True)
        for role, count in (("input", TOKENS * k), ("weight", n * k), ("grad_output", TOKENS * n))
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_counted_step_has_the_bits_of_an_uncounted_one_counts_each_tensor_once_and_never_waits(
    kind: str, bias: bool
) -> None:
    plain, counted = (Run(kind, bias, count).train() for count in (False, True))
    assert_same_bits(plain, counted)
    assert kind == "Linear" or counted.nodes[COUNTED_STEP] == "_FusedFunctionBackward"
    assert {name: n[0] for name, n in counted.counts.items()} == values_of(kind)
    assert any(n[1] for name, n in counted.counts.items() if name.endswith("input"))
    assert all(n[2] >= 9 for name, n in counted.counts.items() if name.endswith("weight"))


@pytest.mark.parametrize("trained", ["fc1_bias", "fc1_weight", "fc2_weight", "layer_norm"])
def test_what_is_frozen_changes_neither_bits_nor_counts(trained: str) -> None:
    # The exit of a step waits as long as a slot is cold, and one that never runs stays so.
    may_wait = trained == "fc2_weight"
    plain, counted = (
        Run("gelu", True, count, trained).train(x_needs_grad=False, may_wait=may_wait)
        for count in (False, True)
    )
    assert_same_bits(plain, counted)
    wanted = values_of("gelu")
    if trained == "fc2_weight":
        wanted["a.fc1.grad_output"] = 0
    assert {name: n[0] for name, n in counted.counts.items()} == wanted
