"""The FP8 cast: bits, amax, cold slots, cast counts, and how it behaves under autograd and tracing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from _fakes import E4M3, E5M2, FP8_MAX, FakeCoordinator, round_to_fp8
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8dist._amax import ABSENT
from fp8dist._slots import Slot
from fp8dist.kernels.quantize import Layout, quantize, scale_from_amax

FORMATS = [E4M3, E5M2]
HIGH = [torch.float32, torch.bfloat16, torch.float16]
FP32_MAX = torch.finfo(torch.float32).max


def make_slot(dtype: torch.dtype = E4M3, *, scale: float | None = None) -> Slot:
    """A cold slot, or a warm one with this scale."""
    role = "grad_output" if dtype == E5M2 else "input"
    slot = FakeCoordinator(warm=scale is not None).declare(f"a.{role}", shape=None)
    if scale is not None:
        slot.scale.fill_(scale)
    return slot


def wide_values(dtype: torch.dtype, count: int = 4096) -> torch.Tensor:
    """Values over all magnitudes that a cast can meet: flushed, subnormal, normal and saturated."""
    generator = torch.Generator().manual_seed(7)
    exponents = torch.rand(count, generator=generator) * 40 - 22
    return (torch.randn(count, generator=generator) * torch.exp2(exponents)).to(dtype)


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("scale", [1.0, 0.3, 977.0])
def test_a_warm_cast_rounds_once_to_the_nearest_value_and_saturates(fp8, dtype, scale):
    x = wide_values(dtype)
    data, scale_inv, _ = quantize(x, make_slot(fp8, scale=scale), record=False)
    assert data.dtype == fp8
    np.testing.assert_array_equal(data.float().numpy(), round_to_fp8(x, scale, fp8))
    assert scale_inv.item() == np.float32(1) / np.float32(scale)


@pytest.mark.parametrize("fp8", FORMATS)
def test_ties_go_to_the_even_code_and_signs_and_nan_survive(fp8):
    x = torch.tensor([1.0625, 1.125, 1.1875, -1.0625, -0.0, math.nan, math.inf, -math.inf, 1e30, 61440.0])
    data, _, _ = quantize(x, make_slot(fp8, scale=1.0), record=False)
    expected = round_to_fp8(x, 1.0, fp8)
    np.testing.assert_array_equal(data.float().numpy(), expected)
    np.testing.assert_array_equal(np.signbit(data.float().numpy()[:5]), np.signbit(expected[:5]))


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("dtype", HIGH)
def test_a_cold_slot_scales_by_the_tensors_own_amax(fp8, dtype):
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        x = torch.randn(5, 7, generator=generator).to(dtype)
        data, scale_inv, _ = quantize(x, make_slot(fp8), record=False)
        scale = np.float32(FP8_MAX[fp8]) / np.float32(x.abs().max().item())
        np.testing.assert_array_equal(data.float().numpy(), round_to_fp8(x, scale, fp8))
        assert scale_inv.item() == np.float32(1) / scale


def test_a_warm_slot_ignores_the_tensors_own_amax():
    data, _, _ = quantize(torch.tensor([2.0, 4.0]), make_slot(scale=1.0), record=True)
    assert data.float().tolist() == [2.0, 4.0]


@pytest.mark.parametrize("amax", [0.0, math.nan, math.inf])
def test_without_a_usable_amax_the_cold_scale_is_one(amax):
    data, scale_inv, _ = quantize(torch.tensor([amax, 0.0]), make_slot(), record=False)
    assert scale_inv.item() == 1.0
    assert data.float()[1].item() == 0.0


def test_an_infinite_cold_scale_becomes_the_largest_float():
    assert scale_from_amax(torch.tensor([1e-44]), 448.0).item() == FP32_MAX
    data, _, _ = quantize(torch.tensor([1e-44]), make_slot(), record=False)
    assert torch.isfinite(data.float()).all()


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("warm", [True, False])
def test_the_amax_is_the_largest_magnitude_of_all_calls(dtype, warm):
    slot = make_slot(scale=1.0 if warm else None)
    batches = [torch.tensor([0.5, -2.75]), torch.tensor([[1.25], [0.0]]), torch.tensor([-3.5, 3.0])]
    for batch, expected in zip(batches, [2.75, 2.75, 3.5], strict=True):
        quantize(batch.to(dtype), slot, record=True)
        assert slot.amax.item() == expected


def test_a_nan_amax_wins_and_stays():
    slot = make_slot(scale=1.0)
    for value in (1.0, math.nan, 5.0):
        quantize(torch.tensor([value]), slot, record=True)
    assert math.isnan(slot.amax.item())


@pytest.mark.parametrize("scale", [1.0, None])
def test_nothing_is_recorded_unless_asked(scale):
    slot = make_slot(scale=scale)
    slot.casts = torch.zeros(3, dtype=torch.int64)
    quantize(torch.tensor([1.0, 1e9]), slot, record=False)
    assert slot.amax.item() == ABSENT
    assert slot.casts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [1.0, None])
@pytest.mark.parametrize("shape", [(0,), (0, 16), (3, 0)])
def test_an_empty_tensor_is_cast_and_records_nothing(scale, shape):
    slot = make_slot(scale=scale)
    slot.casts = torch.zeros(3, dtype=torch.int64)
    data, scale_inv, _ = quantize(torch.empty(shape), slot, record=True)
    assert (data.shape, data.dtype, scale_inv.item()) == (shape, E4M3, 1.0)
    assert slot.amax.item() == ABSENT
    assert slot.casts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("fp8", FORMATS)
def test_casts_count_values_saturated_and_flushed(fp8):
    top, smallest = FP8_MAX[fp8], {E4M3: 2.0**-9, E5M2: 2.0**-16}[fp8]
    half = smallest / 2  # ties to zero
    x = torch.tensor([top, -top * 1.01, 1e38, math.inf, math.nan, 0.0, -half, half, smallest, 1.0])
    slot = make_slot(fp8, scale=1.0)
    slot.casts = torch.zeros(3, dtype=torch.int64)
    for _ in range(2):
        quantize(x, slot, record=True)
    assert slot.casts.tolist() == [20, 4, 4]


def test_a_finite_value_that_overflows_while_it_is_scaled_counts_as_saturated():
    slot = make_slot(scale=1e30)
    slot.casts = torch.zeros(3, dtype=torch.int64)
    data, _, _ = quantize(torch.tensor([1e30]), slot, record=True)
    assert data.float().item() == 448.0
    assert slot.casts.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(6, 8),
        lambda x: x[0, 0].expand(4, 4),
        lambda x: x.flip(0).t()[1:],
    ],
)
def test_any_strides_give_a_contiguous_result_and_leave_the_input_alone(view):
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    before = base.clone()
    x = view(base)
    slot, other = make_slot(), make_slot()
    data, _, _ = quantize(x, slot, record=True)
    assert data.is_contiguous()
    assert data.shape == x.shape
    expected, _, _ = quantize(x.contiguous(), other, record=True)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(base, before)


@pytest.mark.parametrize("scale", [2.0, None])
def test_scale_inv_is_nobody_elses_tensor(scale):
    slot = make_slot(scale=scale)
    _, scale_inv, _ = quantize(torch.tensor([1.0]), slot, record=True)
    before = scale_inv.item()
    slot.scale.fill_(99.0)
    slot.scale_inv.fill_(99.0)
    slot.amax.fill_(99.0)
    assert (scale_inv.item(), scale_inv.dtype, scale_inv.shape) == (before, torch.float32, (1,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float64, E4M3])
def test_other_dtypes_are_refused_by_name(dtype):
    slot = make_slot()
    with pytest.raises(ValueError, match=f"expected a float32, bfloat16 or float16 tensor but got {dtype}"):
        quantize(torch.zeros(4).to(dtype), slot, record=True)
    assert slot.amax.item() == ABSENT


def test_a_tensor_on_another_device_is_refused():
    with pytest.raises(ValueError, match=r"expected slot 'a\.input' on meta"):
        quantize(torch.zeros(4, device="meta"), make_slot(), record=True)


@pytest.mark.parametrize("scale", [1.0, None])
def test_no_gradient_flows_and_no_graph_is_kept(scale):
    slot = make_slot(scale=scale)
    x = torch.randn(4, requires_grad=True) * 2
    with torch.enable_grad():
        data, scale_inv, _ = quantize(x, slot, record=True)
    assert not data.requires_grad
    assert not scale_inv.requires_grad
    assert not slot.amax.requires_grad
    (x * 3).sum().backward()


def test_the_op_keeps_the_contract_of_torch_library():
    slot = make_slot(scale=2.0)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).t()
    for casts in (None, torch.zeros(3, dtype=torch.int64)):
        arguments = (x, slot.scale, slot.warm, slot.amax, casts, True, 448.0, E4M3, Layout.BOTH)
        torch.library.opcheck(
            torch.ops.fp8dist.quantize.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("scale", [2.0, None])
@pytest.mark.parametrize("counted", [False, True])
def test_it_compiles_into_one_graph_with_the_same_bits(scale, counted):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    eager, traced = make_slot(scale=scale), make_slot(scale=scale)
    if counted:
        eager.casts, traced.casts = (torch.zeros(3, dtype=torch.int64) for _ in range(2))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def double_and_quantize(x):
        return quantize(x * 2, traced, True)[:2]

    data, scale_inv = double_and_quantize(x)
    expected, expected_scale_inv, _ = quantize(x * 2, eager, True)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale_inv, expected_scale_inv)
    assert torch.equal(traced.amax, eager.amax)
    if counted:
        assert traced.casts.tolist() == eager.casts.tolist() == [32, 0, 0]


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.COLUMNS, Layout.BOTH])
def test_it_traces_under_fake_tensors_of_a_gpu(layout):
    with FakeTensorMode():
        x = torch.empty(8, 4, device="cuda", dtype=torch.bfloat16).t()
        scale, amax = torch.ones(1, device="cuda"), torch.ones(1, device="cuda")
        data, transposed, scale_inv = torch.ops.fp8dist.quantize(
            x, scale, torch.tensor([False]), amax, None, True, 448.0, E4M3, layout
        )
    for result, wanted, shape in ((data, Layout.ROWS, (4, 8)), (transposed, Layout.COLUMNS, (8, 4))):
        assert (result.device.type, result.dtype) == ("cuda", E4M3)
        assert result.shape == (shape if layout & wanted else (0,))
        assert result.is_contiguous()
    assert (scale_inv.shape, scale_inv.dtype) == ((1,), torch.float32)


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.COLUMNS, Layout.BOTH])
def test_off_a_gpu_there_are_rows_only(layout):
    slot = make_slot(scale=2.0)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    quantized = quantize(x, slot, record=False, layout=layout)
    assert quantized.columns is None
    assert quantized.data.is_contiguous()
    assert quantized.for_gradients()[0] is quantized.data
