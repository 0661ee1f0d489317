"""The FP8 product: values, strides, the shape rule, and the layouts that a GPU insists on."""

from __future__ import annotations

import pytest
import torch
from _fakes import E4M3, E5M2
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8dist.kernels.gemm import dequantize, scaled_mm, supported

HIGH = [torch.float32, torch.bfloat16, torch.float16]


def integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers that both formats hold exactly, so that a product of them has no rounding at all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float().to(dtype)


@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("out_dtype", HIGH)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 16, 16), (5, 32, 48), (16, 16, 32)])
def test_the_product_of_exact_values_is_exact(a_dtype, b_dtype, out_dtype, m, k, n):
    a, b = integers(m, k, dtype=a_dtype, seed=1), integers(k, n, dtype=b_dtype, seed=2)
    out = scaled_mm(a, b, torch.tensor([0.25]), torch.tensor([2.0]), out_dtype)
    expected = (a.double() @ b.double() * 0.5).to(out_dtype)
    assert out.dtype == out_dtype
    assert torch.equal(out, expected)


def test_a_product_is_close_to_the_one_in_double_precision():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(E4M3) for shape in ((24, 64), (64, 32)))
    out = scaled_mm(a, b, torch.tensor([0.3]), torch.tensor([1.7]), torch.float32)
    torch.testing.assert_close(out.double(), a.double() @ b.double() * 0.3 * 1.7, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out_dtype", HIGH)
def test_autocast_does_not_change_a_bit(out_dtype):
    """It would round the operands, of more bits than FP8 has once they are unscaled, to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(E4M3) for shape in ((24, 64), (64, 32)))
    args = (a, b, torch.tensor([0.3]), torch.tensor([1.7]), out_dtype)
    expected = scaled_mm(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scaled_mm(*args), expected)


def test_strides_do_not_change_a_bit():
    a, b = integers(32, 16, dtype=E4M3, seed=1), integers(16, 48, dtype=E4M3, seed=2)
    one = torch.ones(1)
    plain = scaled_mm(a, b, one, one, torch.float32)
    turned = scaled_mm(a.t().contiguous().t(), b.t().contiguous().t(), one, one, torch.float32)
    assert torch.equal(plain, turned)
    assert torch.equal(plain, a.float() @ b.float())


@pytest.mark.parametrize(
    ("m", "k", "n", "expected"),
    [(1, 16, 16, True), (7, 32, 48, True), (0, 16, 16, True), (16, 8, 16, False), (16, 16, 24, False)],
)
def test_the_shape_rule_is_k_and_n_in_sixteens(m, k, n, expected):
    assert supported(m, k, n) is expected


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((16, 8), (8, 16)), ((16, 16), (16, 8)), ((4, 16), (32, 16))]
)
def test_other_shapes_are_refused_on_every_device(a_shape, b_shape):
    a, b = torch.zeros(a_shape).to(E4M3), torch.zeros(b_shape).to(E4M3)
    with pytest.raises(ValueError, match="K and N multiples of 16"):
        scaled_mm(a, b, torch.ones(1), torch.ones(1), torch.float32)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 32), (16, 0, 32), (16, 32, 0)])
def test_an_empty_product_is_zero(m, k, n):
    one = torch.ones(1)
    out = scaled_mm(torch.zeros(m, k).to(E4M3), torch.zeros(k, n).to(E4M3), one, one, torch.bfloat16)
    assert torch.equal(out, torch.zeros(m, n, dtype=torch.bfloat16))


def test_the_three_products_of_a_layer_pass_the_checks_of_a_gpu():
    tokens, in_features, out_features = 32, 48, 64
    with FakeTensorMode():
        x, w, g = (
            torch.empty(shape, device="cuda", dtype=dtype)
            for shape, dtype in (
                ((tokens, in_features), E4M3),
                ((out_features, in_features), E4M3),
                ((tokens, out_features), E5M2),
            )
        )
        one = torch.ones(1, device="cuda")
        # The checks are alive: a row-major second operand is refused.
        with pytest.raises(RuntimeError, match="col_major"):
            torch._scaled_mm(g, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        y = scaled_mm(x, w.t(), one, one, torch.bfloat16)
        dx = scaled_mm(g, w, one, one, torch.bfloat16)
        dw = scaled_mm(g.t(), x, one, one, torch.bfloat16)
    assert y.shape == (tokens, out_features)
    assert dx.shape == x.shape
    assert dw.shape == w.shape


@pytest.mark.parametrize("dtype", HIGH)
def test_dequantize_rounds_once(dtype):
    q = torch.tensor([[1.75, -448.0], [0.0, 2.0**-9]]).to(E4M3)
    scale_inv = torch.tensor([1 / 3])
    expected = (q.double() * scale_inv.double()).float().to(dtype)
    assert torch.equal(dequantize(q, scale_inv, dtype), expected)
