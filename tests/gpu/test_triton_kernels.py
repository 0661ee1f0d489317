"""The Triton kernels against torch on the CPU: bits where bits are equal, else bounds around float64.

The checks run in a process of their own, since the other tests of this folder fork a parent without CUDA.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from fp8dist._amax import record_amax, tensor_amax
from fp8dist.recipe import DelayedScaling

pytestmark = pytest.mark.timeout(300)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 64), (256, 384), (1, 1), (3, 5), (130, 70), (257, 129), (1, 1000), (1000, 1), (48, 16)]
EPS = 2.0**-23
Check = Callable[..., None]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Check]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:

        def run(check: Check, *arguments: Any) -> None:
            pool.submit(check, *arguments).result(timeout=200)

        yield run


def fp8_max(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def cells(scale: float = 3.0, amax: float = -1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale and an amax, neither of them aligned, as in a slot table."""
    return torch.tensor([0.0, scale], device="cuda")[1:], torch.tensor([0.0, amax], device="cuda")[1:]


def values(*shape: int, seed: int = 0, hard: bool = True) -> torch.Tensor:
    """float32 values over many exponents, with zeros of both signs, midpoints, denormals, inf, and no NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if hard:
        x *= torch.exp2(torch.randint(-18, 10, shape, generator=generator).float())
        odd = torch.tensor([0.0, -0.0, 1e-40, -6e-8, 17 / 3, 447 / 3, 470 / 3, float("inf"), -float("inf")])
        flat = x.view(-1)
        where = torch.randperm(flat.numel(), generator=generator)[: len(odd)]
        flat[where] = odd[: len(where)]
    return x


def reference(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Data, scale_inv and amax by plain operations on the CPU."""
    x, scale = x.cpu(), scale.cpu()
    amax = torch.tensor([-1.0])
    record_amax(amax, tensor_amax(x))
    scaled = (x.float() * scale).clamp(-fp8_max(dtype), fp8_max(dtype))
    return scaled.to(dtype).contiguous(), scale.reciprocal(), amax


def assert_same_fp8(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.is_contiguous() and actual.shape == wanted.shape, (actual.shape, wanted.shape)
    assert actual.dtype == wanted.dtype, (actual.dtype, wanted.dtype)
    a, b = actual.cpu(), wanted.contiguous().cpu()
    nan = a.float().isnan() & b.float().isnan()  # whose bits are free
    wrong = (a.view(torch.uint8) != b.view(torch.uint8)) & ~nan
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}: {a[wrong][:4]} instead of {b[wrong][:4]}"


def assert_cast(
    cast: Any, x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype
) -> None:
    data, scale_inv, wanted_amax = reference(x, scale, dtype)
    assert_same_fp8(cast.data, data)
    assert_same_fp8(cast.data_t, data.t())
    torch.testing.assert_close(cast.scale_inv.cpu(), scale_inv, rtol=0, atol=0)
    torch.testing.assert_close(amax.cpu(), wanted_amax, rtol=0, atol=0, equal_nan=True)


def strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values on the GPU with other strides."""
    m, k = x.shape
    x = x.cuda()
    if layout == "padded":
        return torch.cat((x, x[:, :1].expand(m, 16)), 1)[:, :k]
    if layout == "unaligned":
        return torch.cat((x.new_zeros(1), x.reshape(-1)))[1:].view(m, k)
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "every third":
        return x.unsqueeze(-1).expand(m, k, 3).contiguous()[..., 1]
    if layout == "one row":
        return x[:1].expand(m, k)
    assert layout == "dense"
    return x


def check_cast(shape: tuple[int, int], x_dtype: torch.dtype, dtype: torch.dtype, layout: str) -> None:
    from fp8dist.kernels.triton import cast

    scale, amax = cells()
    x = strided(values(*shape).to(x_dtype), layout)
    both = cast(x, scale, amax, dtype, fp8_max(dtype), True)
    assert_cast(both, x, scale, amax, dtype)
    # Fewer outputs are other binaries.
    without_amax = cast(x, scale, None, dtype, fp8_max(dtype), True)
    assert_same_fp8(without_amax.data, both.data)
    assert_same_fp8(without_amax.data_t, both.data_t)
    for transpose, keep in ((True, False), (False, True)):
        one = cast(x, scale, amax, dtype, fp8_max(dtype), transpose, keep)
        assert (one.data is not None, one.data_t is not None) == (keep, transpose)
        assert_same_fp8(one.data if keep else one.data_t, both.data if keep else both.data_t)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_casts_and_amax_equal_the_reference_bit_for_bit(
    gpu: Check, shape: tuple[int, int], x_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    gpu(check_cast, shape, x_dtype, dtype, "dense")


@pytest.mark.parametrize("layout", ["padded", "unaligned", "columns", "every third", "one row"])
@pytest.mark.parametrize("shape", [(128, 64), (33, 50)])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_strides_change_no_bit(gpu: Check, shape: tuple[int, int], x_dtype: torch.dtype, layout: str) -> None:
    gpu(check_cast, shape, x_dtype, E4M3, layout)


def check_all_bfloat16(dtype: torch.dtype) -> None:
    from fp8dist.kernels.triton import cast

    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256).cuda()
    for power in (0.7, 2.0**-120, 2.0**120):
        scale, amax = cells(power)
        assert_cast(cast(x, scale, amax, dtype, fp8_max(dtype), True), x, scale, amax, dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_bfloat16_is_cast_like_the_reference(gpu: Check, dtype: torch.dtype) -> None:
    gpu(check_all_bfloat16, dtype)


def check_empty(shape: tuple[int, int]) -> None:
    from fp8dist.kernels import triton as kernels

    scale, amax = cells()
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    result, db = kernels.cast_gradient(x, scale, amax, E4M3, 448.0, True, want_db=True)
    activated = kernels.activation_cast(x, "gelu", scale, amax, E4M3, 448.0, True)
    for got in (result, activated):
        assert got.data.shape == shape and got.data_t.shape == shape[::-1]
        assert got.scale_inv.item() == torch.tensor(3.0).reciprocal().item()
    assert amax.item() == -1.0, "an empty tensor records nothing"
    assert db.tolist() == [0.0] * shape[1]
    assert kernels.fp8_transpose(result.data).shape == shape[::-1]


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
def test_empty_matrices_give_empty_casts_and_record_nothing(gpu: Check, shape: tuple[int, int]) -> None:
    gpu(check_empty, shape)


def check_cells() -> None:
    from fp8dist.kernels.triton import cast

    x = values(100, 60, hard=False).cuda()
    top = x.abs().max().item()
    with_nan = x.clone()
    with_nan[70, 50] = -float("nan")
    for start, operand in ((-1.0, x), (top / 2, x), (top * 2, x), (float("nan"), x), (1.0, with_nan)):
        scale, amax = cells(amax=start)
        cast(operand, scale, amax, E4M3, 448.0, False)
        wanted = torch.tensor([start])
        record_amax(wanted, operand.abs().max().cpu())
        torch.testing.assert_close(amax.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
        assert amax.view(torch.int32).item() >= 0, "a negative NaN loses an integer MAX"
    generator = torch.Generator().manual_seed(5)
    for exponent in torch.empty(200).uniform_(-126, 127, generator=generator).tolist():
        scale, amax = cells(2.0**exponent)
        inverse = cast(x[:1, :1], scale, None, E4M3, 448.0, False).scale_inv
        assert inverse.item() == scale.cpu().reciprocal().item(), scale.item()


def test_amax_is_raised_nan_wins_and_scales_are_inverted_exactly(gpu: Check) -> None:
    gpu(check_cells)


def check_bias_gradient(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from fp8dist.kernels.triton import cast_gradient

    scale, amax = cells()
    dy = values(*shape, hard=False).to(dtype).cuda()
    result, db = cast_gradient(dy, scale, amax, E5M2, 57344.0, True, want_db=True)
    assert_cast(result, dy, scale, amax, E5M2)
    error = (db.double() - dy.double().sum(0)).abs()
    assert (error <= EPS * dy.double().abs().sum(0)).all(), error.max()
    again = cast_gradient(dy, scale, amax, E5M2, 57344.0, True, want_db=True, db_dtype=torch.bfloat16)[1]
    assert torch.equal(again, db.bfloat16()), "rounded once, from the same float32 sums"
    assert cast_gradient(dy, scale, amax, E5M2, 57344.0, True)[1] is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (1, 3), (1000, 257), (5000, 48)])
def test_bias_gradients_are_float32_sums_and_repeatable(
    gpu: Check, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gpu(check_bias_gradient, shape, dtype)


def check_transpose(shape: tuple[int, int]) -> None:
    from fp8dist.kernels.triton import fp8_transpose

    q = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8).cuda()
    for dtype in (E4M3, E5M2):
        t = fp8_transpose(q.view(dtype))
        assert t.dtype == dtype and t.is_contiguous() and torch.equal(t.view(torch.uint8), q.t().contiguous())


@pytest.mark.parametrize("shape", [*SHAPES, (512, 1024)])
def test_transposing_moves_bytes(gpu: Check, shape: tuple[int, int]) -> None:
    gpu(check_transpose, shape)


def assert_rounds(q: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, scale: float) -> None:
    """Every byte is what some value within `bound` of the float64 value rounds to; few differ from its own."""
    top = fp8_max(q.dtype)

    def rounded(v: torch.Tensor) -> torch.Tensor:
        return (v * scale).clamp(-top, top).float().to(q.dtype).double()

    got = q.double()
    low, high = rounded(exact - bound), rounded(exact + bound)
    wrong = (got < low) | (got > high)
    assert not wrong.any(), (exact[wrong][:4], got[wrong][:4] / scale, bound[wrong][:4], int(wrong.sum()))
    assert (got != rounded(exact)).double().mean() < 1e-3


def assert_amax(amax: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    size = exact.abs()
    assert (size - bound).max() <= amax.double().item() <= (size + bound).max(), (amax.item(), size.max())


def activation64(kind: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float64 value and derivative of an activation, and bounds of what float32 may make of them."""
    if kind == "relu":
        return x.clamp(min=0), (x > 0).double(), torch.zeros_like(x), torch.zeros_like(x)
    c = 2 * (2 / torch.pi) ** 0.5
    u, w = (
        (x, torch.ones_like(x)) if kind == "silu" else (c * (x + 0.044715 * x**3), c * (1 + 0.134145 * x**2))
    )
    s, rest = torch.sigmoid(u), torch.sigmoid(-u)
    value, slope = x * s, x * w * s * rest
    # Relative errors of a few units in the last place, in the result and in the exponent u.
    value_bound = 3 * EPS * (value.abs() * (1 + rest * u.abs()))
    derivative_bound = 4 * EPS * (s * (1 + rest * u.abs()) + slope.abs() * (2 + u.abs()))
    return value, s + slope, value_bound, derivative_bound


def check_activation(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from fp8dist.kernels.triton import activation_backward_cast, activation_cast

    m, f = shape
    width = 2 if kind == "swiglu" else 1
    h = (values(m, width * f, hard=False) * 3).to(dtype).cuda()
    dy = values(m, f, seed=1, hard=False).to(dtype).cuda()
    scale, amax = cells()
    got = activation_cast(h, kind, scale, amax, E4M3, 448.0, True)
    gate = h.double()[:, :f]
    value, derivative, value_bound, derivative_bound = activation64("silu" if width == 2 else kind, gate)
    g = dy.double()
    if width == 2:
        other = h.double()[:, f:]
        exact, bound = value * other, (value_bound + 2 * EPS * value.abs()) * other.abs()
        dh = torch.cat((g * other * derivative, g * value), 1)
        dh_bound = torch.cat(((g * other).abs() * (derivative_bound + 2 * EPS * derivative.abs()),
                              g.abs() * (value_bound + 2 * EPS * value.abs())), 1)  # fmt: skip
    else:
        exact, bound = value, value_bound
        dh, dh_bound = g * derivative, g.abs() * (derivative_bound + EPS * derivative.abs())
    assert_rounds(got.data, exact, bound + EPS * exact.abs(), 3.0)
    assert_amax(amax, exact, bound)
    assert_same_fp8(got.data_t, got.data.t())

    scale, amax = cells()
    got, db = activation_backward_cast(dy, h, kind, scale, amax, E5M2, 57344.0, True, want_db=True)
    assert_rounds(got.data, dh, dh_bound + EPS * dh.abs(), 3.0)
    assert_amax(amax, dh, dh_bound)
    assert_same_fp8(got.data_t, got.data.t())
    error = (db.double() - dh.sum(0)).abs()
    assert (error <= dh_bound.sum(0) + EPS * dh.abs().sum(0)).all(), error.max()


@pytest.mark.parametrize("kind", ["gelu", "relu", "silu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 512), (37, 75)])
def test_activations_and_derivatives_are_those_of_float64_up_to_rounding(
    gpu: Check, kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gpu(check_activation, kind, shape, dtype)


def check_activation_extremes(kind: str) -> None:
    from fp8dist.kernels.triton import activation_backward_cast, activation_cast

    ends = torch.tensor(
        [[-float("inf"), -1e30, -300.0, -20.0, -0.0, 0.0, 20.0, 300.0, 1e18, float("nan")]]
    ).cuda()
    h = ends if kind != "swiglu" else torch.cat((ends, torch.ones_like(ends)), 1)
    scale, amax = cells(1.0)
    got = activation_cast(h, kind, scale, amax, E4M3, 448.0, True).data.float().flatten().tolist()
    rounded = torch.tensor([20.0, 300.0, 448.0]).to(E4M3).float().tolist()
    assert [abs(v) < 1e-3 for v in got[1:6]] == [True] * 5 and got[6:9] == rounded, got
    assert got[9] != got[9] and amax.isnan().item()
    dh = activation_backward_cast(torch.ones_like(ends), h, kind, scale, None, E4M3, 448.0, True)[0].data
    slopes = dh.float().flatten().tolist()
    half = 0.0 if kind == "relu" else 0.5
    assert slopes[1:9] == [0.0, 0.0, 0.0, half, half, 1.0, 1.0, 1.0], slopes


@pytest.mark.parametrize("kind", ["gelu", "relu", "silu", "swiglu"])
def test_activations_saturate_and_pass_nan(gpu: Check, kind: str) -> None:
    gpu(check_activation_extremes, kind)


def norm_inputs(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> tuple[torch.Tensor | None, ...]:
    m, k = shape
    x = (values(m, k, hard=False) * 2 + 1).to(dtype).cuda()
    weight = (values(k, seed=2, hard=False) + 1).to(dtype).cuda()
    bias = values(k, seed=3, hard=False).to(dtype).cuda() if kind == "LayerNorm" else None
    return x, weight, bias


def norm64(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = x.mean(1, keepdim=True) if bias is not None else torch.zeros_like(x[:, :1])
    rstd = ((x - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    y = (x - mean) * rstd * weight
    return (y if bias is None else y + bias), mean, rstd


def check_norm_cast(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from fp8dist.kernels.triton import norm_cast

    x, weight, bias = norm_inputs(shape, dtype, kind)
    scale, amax = cells()
    got = norm_cast(x, weight, bias, 1e-5, kind, scale, amax, E4M3, 448.0, True, want_normal=True)
    x, weight = x.double(), weight.double()
    exact, mean, rstd = norm64(x, weight, None if bias is None else bias.double(), 1e-5)
    bound = 4 * EPS * (exact.abs() + (x.abs() + x.abs().mean(1, keepdim=True)) * rstd * weight.abs())
    if bias is not None:
        bound += 4 * EPS * bias.double().abs()
        assert ((got.mean.double() - mean[:, 0]).abs() <= 4 * EPS * x.abs().mean(1)).all()
    assert ((got.rstd.double() / rstd[:, 0] - 1).abs() <= 8 * EPS).all()
    assert_rounds(got.data, exact, bound, 3.0)
    assert_amax(amax, exact, bound)
    assert_same_fp8(got.data_t, got.data.t())
    assert got.scale_inv.item() == torch.tensor(3.0).reciprocal().item()
    assert got.normal.dtype == dtype
    half_unit = torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((got.normal.double() - exact).abs() <= bound + half_unit + 1e-7).all()
    plain = norm_cast(x.to(dtype), weight.to(dtype), bias, 1e-5, kind, scale, None, E4M3, 448.0, False)
    assert plain.data_t is None and plain.normal is None
    assert_same_fp8(plain.data, got.data)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256), (7, 100), (33, 4096), (1, 1), (5, 12288)])
def test_norms_are_those_of_float64_up_to_rounding(
    gpu: Check, kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gpu(check_norm_cast, kind, shape, dtype)


def check_norm_backward(kind: str, shape: tuple[int, int], dtype: torch.dtype, with_residual: bool) -> None:
    from fp8dist.kernels.triton import norm_backward, norm_cast

    x, weight, bias = norm_inputs(shape, dtype, kind)
    dy = values(*shape, seed=4, hard=False).to(dtype).cuda()
    residual = values(*shape, seed=5, hard=False).to(dtype).cuda() if with_residual else None
    scale, _ = cells()
    saved = norm_cast(x, weight, bias, 1e-5, kind, scale, None, E4M3, 448.0, False)
    results = [norm_backward(dy, x, weight, saved.mean, saved.rstd, kind, residual) for _ in range(2)]
    leaves = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    x64, weight64, bias64 = (*leaves, None)[:3]
    norm64(x64, weight64, bias64, 1e-5)[0].backward(dy.double())
    wanted = [leaf.grad for leaf in leaves]
    if residual is not None:
        wanted[0] = wanted[0] + residual.double()
    for got, again, exact, leaf in zip(*results, [*wanted, None][:3], (x, weight, bias), strict=False):
        if exact is None:
            assert got is None
            continue
        assert torch.equal(got, again), "the same order every time"
        assert got.dtype == leaf.dtype and got.shape == leaf.shape
        rows = 1 if got.dim() == 2 else shape[0]
        limit = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * (1 + exact.abs().max()) * max(
            1, rows**0.5 / 8
        )
        error = (got.double() - exact).abs()
        assert (error <= limit).all(), (error.max(), exact.abs().max())


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256), (7, 100), (700, 1024), (300, 12288)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_gradients_are_near_float64_and_repeatable(
    gpu: Check, kind: str, shape: tuple[int, int], dtype: torch.dtype, with_residual: bool
) -> None:
    gpu(check_norm_backward, kind, shape, dtype, with_residual)


def amax_rows(steps: int, n: int, seed: int) -> torch.Tensor:
    """Rows of amaxes with everything that may turn up in one."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(steps, n, generator=generator) * torch.exp2(
        torch.randint(-140, 128, (steps, n), generator=generator).float()
    )
    special = torch.tensor([-1.0, -1.0, 0.0, float("inf"), float("nan"), 1e-40, 3e38, 448.0])
    chosen = special[torch.randint(0, len(special), (steps, n), generator=generator)]
    return torch.where(torch.rand(steps, n, generator=generator) < 0.4, chosen, rows)


def check_update(n: int, length: int, algo: str, non_finite: str) -> None:
    from fp8dist.kernels.triton import update

    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algo, non_finite=non_finite)
    state = recipe.make_state(n, backward=False)
    history, scale, scale_inv = (t.cuda() for t in (state.history, state.scale, state.scale_inv))
    warm, nonfinite = state.warm.cuda(), state.nonfinite.cuda()
    steps = 2 * length + 3
    for step, row in enumerate(amax_rows(min(steps, 40), n, seed=length)):
        device_row = row.cuda()
        update(
            device_row, history, step % length, scale, scale_inv, warm, nonfinite, recipe.scaled_max(False),
            freeze=non_finite == "freeze", most_recent=algo == "most_recent",
        )  # fmt: skip
        state.update(row)
        pairs = {"history": (history, state.history), "scale": (scale, state.scale),
                 "scale_inv": (scale_inv, state.scale_inv), "warm": (warm, state.warm),
                 "nonfinite": (nonfinite, state.nonfinite)}  # fmt: skip
        for name, (got, wanted) in pairs.items():
            torch.testing.assert_close(
                got.cpu(), wanted, rtol=0, atol=0, equal_nan=True, msg=f"{name} {step}"
            )
        assert (device_row == -1).all(), "the row is empty for the next step"


@pytest.mark.parametrize("non_finite", ["absent", "freeze"])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("n", "length"), [(1, 1), (7, 2), (1000, 16), (300, 1024), (9000, 5)])
def test_updates_equal_the_aging_rule_bit_for_bit(
    gpu: Check, n: int, length: int, algo: str, non_finite: str
) -> None:
    gpu(check_update, n, length, algo, non_finite)


def check_no_waiting_and_capture() -> None:
    from fp8dist.kernels import triton as kernels

    scale, amax = cells()
    x = values(64, 128, hard=False).bfloat16().cuda()
    weight = torch.ones(128, device="cuda")
    row, ring = torch.ones(9, device="cuda"), torch.ones(4, 9, device="cuda")

    def everything() -> list[Any]:
        got = [kernels.cast(x, scale, amax, E4M3, 448.0, True)]
        got.append(kernels.cast_gradient(x, scale, amax, E5M2, 57344.0, True, want_db=True)[0])
        got.append(kernels.activation_cast(x, "gelu", scale, amax, E4M3, 448.0, True))
        got.append(
            kernels.activation_backward_cast(x, x, "gelu", scale, amax, E5M2, 57344.0, True, want_db=True)[0]
        )
        got.append(kernels.norm_cast(x, weight, weight, 1e-5, "LayerNorm", scale, amax, E4M3, 448.0, True))
        kernels.norm_backward(x, x, weight, got[-1].mean, got[-1].rstd, "LayerNorm", x)
        kernels.update(row, ring, 1, row.clone(), row.clone(), None, None, 448.0)
        return got

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    x.copy_(values(64, 128, seed=9, hard=False))
    scale.fill_(5.0)
    graph.replay()
    for got, wanted in zip(captured, everything(), strict=True):
        assert_same_fp8(got.data, wanted.data)
        assert_same_fp8(got.data_t, wanted.data_t)
        assert torch.equal(got.scale_inv, wanted.scale_inv)


def test_no_kernel_waits_for_the_device_and_all_can_be_captured(gpu: Check) -> None:
    gpu(check_no_waiting_and_capture)


def check_large() -> None:
    from fp8dist.kernels.triton import cast

    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        return
    m, k = 65536 + 64, 32768 + 16  # more than 2**31 values
    x = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda")
    corner = values(100, 100, hard=False).bfloat16().cuda()
    x[-100:, -100:] = corner
    scale, amax = cells()
    got = cast(x, scale, amax, E4M3, 448.0, True)
    wanted = reference(corner, scale, E4M3)[0]
    assert_same_fp8(got.data[-100:, -100:].contiguous(), wanted)
    assert_same_fp8(got.data_t[-100:, -100:].contiguous(), wanted.t())
    assert amax.item() == corner.abs().max().item()


def test_offsets_beyond_32_bits_reach_the_last_value(gpu: Check) -> None:
    gpu(check_large)
