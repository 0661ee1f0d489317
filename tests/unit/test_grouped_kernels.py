"""The experts' node for GPUs: its tables, products and bookkeeping, with casts by torch in place of its kernels.

`tests/kernels/test_grouped.py` has the kernels themselves.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from _fakes import E4M3, E5M2, FakeCoordinator, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8dist as f8
from fp8dist._amax import ABSENT
from fp8dist._scope import ScaleTape
from fp8dist.kernels import gemm
from fp8dist.kernels.gemm import RowGroups, scaled_mm
from fp8dist.modules import _grouped
from fp8dist.modules._grouped import SlotCells, supports

CPU = torch.device("cpu")
BF16 = torch.bfloat16


class GroupedCast(NamedTuple):
    data: Any
    data_t: Any
    scale_inv: Any
    row_scale_inv: Any
    sums: Any


class Kernels(ModuleType):
    """What the node launches, by plain torch; cells are read and written at their addresses."""

    def __init__(self) -> None:
        super().__init__("kernels")
        self.casts: list[torch.Size] = []
        self.made: list[tuple[bool, bool]] = []  # rows and columns of each cast

    def cast_groups(self, x, groups, scales, cells, amax, dtype, *, transpose, keep, sums_dtype=None):
        self.casts.append(x.shape)
        self.made.append((keep, transpose))
        data_t = torch.zeros(x.shape[1], groups.width).to(dtype) if transpose else None
        parts, inverses, sums = [], [], []
        for g, (rows, columns) in enumerate(zip(groups.rows, groups.columns, strict=True)):
            part, scale = x[rows].float(), ctypes.c_float.from_address(int(scales[g])).value
            inverses.append(1 / np.float32(scale))
            limit = torch.finfo(dtype).max
            parts.append((part * scale).clamp(-limit, limit).to(dtype))
            sums.append(part.double().sum(0))
            if transpose:
                data_t[:, columns.start : columns.start + len(part)] = parts[-1].t()
            if len(part):
                self.raise_to(part.abs().max().item(), cells, amax, g)
        scale_inv = torch.tensor(np.array(inverses))
        rows = scale_inv.repeat_interleave(torch.tensor(list(groups.counts)))
        total = None if sums_dtype is None else torch.stack(sums).to(sums_dtype)
        return GroupedCast(torch.cat(parts) if keep else None, data_t, scale_inv, rows, total)

    def record_groups(self, amax, cells, groups) -> None:
        for g, count in enumerate(groups.counts):
            if count:
                self.raise_to(amax[g].item(), cells, None, g)

    def add_bias(self, y, bias, groups) -> None:
        for g, rows in enumerate(groups.rows):
            y[rows] += bias[g]

    @staticmethod
    def raise_to(value, cells, amax, g) -> None:
        if amax is not None:
            amax[g] = max(amax[g].item(), value) if value == value else value
        if cells is not None:
            cell = ctypes.c_float.from_address(int(cells[g]))
            cell.value = (
                max(cell.value, value) if value == value and cell.value == cell.value else float("nan")
            )


def scaled_grouped_mm(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
    """What torch documents of its product, with its demands on layouts, and as a loop."""
    assert a.dtype == b.dtype == E4M3 and out_dtype == BF16 and offs.dtype == torch.int32
    assert a.stride(-1) == 1 and b.stride(-2) == 1
    assert all(m % 16 == 0 for m in (a.stride(-2), b.stride(-1), a.storage_offset(), b.storage_offset()))
    assert scale_a.is_contiguous() and scale_b.stride(-1) == 1
    outputs, start = [], 0
    for g, end in enumerate(offs.tolist()):
        if b.dim() == 3:
            assert (scale_a.shape, scale_b.shape) == (a.shape[:1], (len(offs), b.shape[2]))
            left, right, rows, columns = a[start:end], b[g], scale_a[start:end], scale_b[g]
        else:
            assert end % 16 == 0 and end > start
            left, right = a[:, start:end], b[start:end]
            rows, columns = (
                s.view(len(offs), n)[g] for s, n in ((scale_a, a.shape[0]), (scale_b, b.shape[1]))
            )
        outputs.append((left.double() @ right.double() * rows[:, None] * columns).to(out_dtype))
        start = end
    return torch.cat(outputs) if b.dim() == 3 else torch.stack(outputs)


@pytest.fixture
def kernels(monkeypatch) -> Kernels:
    """The node runs on the CPU from here on, whenever `supports` would say so on a GPU."""
    kernels = Kernels()
    monkeypatch.setitem(sys.modules, "fp8dist.kernels.triton", kernels)
    monkeypatch.setitem(sys.modules, "fp8dist.kernels.triton.grouped", kernels)
    monkeypatch.setattr(_grouped, "runs_kernels", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return kernels


@pytest.fixture
def grouped_products(monkeypatch) -> None:
    """Products of all experts are one launch where their dtypes allow it, on the CPU by a loop."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(
        _grouped, "grouped_supported", lambda a, b, out, device: a == b == E4M3 and out == BF16
    )


def make(path="grouped", *, experts=4, dtype=BF16, bias=True, gradient=E5M2, warm=True) -> Any:
    coordinator = FakeCoordinator(warm=warm)
    module = f8.GroupedLinear(
        experts, 32, 48, bias, coordinator=coordinator, name="a", path=path, dtype=dtype
    )
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed))
    for i, slot in enumerate(coordinator.slots.values()):
        slot.scale.fill_(4.0 + i)
        if slot.backward:
            slot.dtype = gradient
    return module, coordinator


def train(module, coordinator, counts, *, x=None) -> dict[str, Any]:
    x = randn(sum(counts), 32, dtype=BF16) if x is None else x
    x = x.clone().requires_grad_()
    with coordinator.step():
        y = module(x, counts)
        y.backward(randn(*y.shape, seed=9, dtype=BF16))
        assert coordinator.scope.requested
    results = {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in module.named_parameters()}}
    return {**results, "node": type(y.grad_fn).__name__, "amaxes": coordinator.amaxes()}


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_every_row_is_in_one_block_of_its_group_and_every_group_in_columns_of_its_own(counts):
    groups = RowGroups.of(counts, CPU)
    of_row = np.repeat(np.arange(len(counts)), counts)
    seen = []
    for group, row, left, unit in groups.blocks.tolist():
        covered = range(row, row + min(left, gemm.BLOCK_ROWS))
        assert all(of_row[r] == group for r in covered)
        assert unit * 16 == groups.columns[group].start + row - groups.rows[group].start
        assert left == groups.rows[group].stop - row
        seen += covered
    assert seen == list(range(sum(counts)))
    assert groups.ends.tolist() == [rows.stop for rows in groups.rows] == np.cumsum(counts).tolist()
    assert groups.column_ends.tolist() == [columns.stop for columns in groups.columns]
    at = 0
    for count, columns in zip(counts, groups.columns, strict=True):
        width = columns.stop - columns.start
        assert columns.start == at and width % 16 == 0 and count <= width < max(count, 1) + 16
        at = columns.stop
    assert at == groups.width
    blocks_of = groups.blocks[:, 0].tolist()
    assert [blocks_of.index(g) for g in range(len(counts))] == groups.first_blocks[:-1].tolist()
    assert groups.first_blocks[-1] == len(blocks_of)


def test_addresses_are_those_of_the_slots_cells_and_follow_them_into_a_new_layout():
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling())
    slots = [coordinator.declare(f"e{i}.input", shape=None) for i in range(3)]
    cells = SlotCells(slots)
    coordinator.freeze()
    first = cells.addresses()
    assert cells.addresses()[0].data_ptr() == first[0].data_ptr()  # not copied again
    coordinator.declare("late.input", shape=None)
    with coordinator.step():
        pass
    scales, amaxes = cells.addresses()
    assert scales.tolist() != first[0].tolist()
    for i, slot in enumerate(slots):
        slot.scale.fill_(i + 2.0)
        slot.amax.fill_(i + 5.0)
        read = [ctypes.c_float.from_address(int(table[i])).value for table in (scales, amaxes)]
        assert read == [i + 2.0, i + 5.0]
    coordinator.close()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gradient", [E4M3, E5M2])
@pytest.mark.parametrize("counts", [[16, 32, 48, 16], [16, 0, 160, 0], [1, 0, 37, 13]])
def test_the_node_gives_what_the_layers_give(kernels, counts, gradient, bias):
    """Bit for bit, but for bias gradients and odd weight gradients, which add up in another order."""
    ours, theirs = (
        train(*make(path, gradient=gradient, bias=bias), counts) for path in ("grouped", "looped")
    )
    assert ours.pop("node") == "_GroupedKernelsBackward" != theirs.pop("node")
    assert ours.pop("amaxes") == theirs.pop("amaxes")
    assert len(kernels.casts) == 3
    for name, wanted in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (wanted.dtype, wanted.shape)
        exact = name in ("y", "dx") or (name == "weight" and not any(n % 16 for n in counts))
        assert torch.equal(ours[name], wanted) if exact else relative(ours[name], wanted) < 2**-8, name
        if name in ("weight", "bias"):
            assert all((ours[name][e] == 0).all() for e, n in enumerate(counts) if n == 0)


@pytest.mark.parametrize("counts", [[16, 32, 48, 16], [16, 0, 160, 0], [1, 0, 37, 13]])
@pytest.mark.parametrize(("gradient", "launches"), [(E4M3, 3), (E5M2, 1)])
def test_products_in_one_launch_are_the_same_but_for_the_bias_rounding(
    kernels, grouped_products, monkeypatch, counts, gradient, launches
):
    calls = []
    monkeypatch.setattr(
        torch, "_scaled_grouped_mm", lambda *a, **k: calls.append(0) or scaled_grouped_mm(*a, **k)
    )
    ours, theirs = (train(*make(path, gradient=gradient), counts) for path in ("grouped", "looped"))
    assert len(calls) == launches
    assert ours["amaxes"] == theirs["amaxes"]
    for name in ("y", "dx", "weight", "bias"):
        assert ours[name].shape == theirs[name].shape
        assert relative(ours[name], theirs[name]) < 2**-7, name


def test_large_products_are_not_one_launch(kernels, grouped_products, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("one launch")

    monkeypatch.setattr(torch, "_scaled_grouped_mm", refuse)
    monkeypatch.setattr(gemm, "GROUPED_WORK", 16 * 32 * 48)  # of an average expert
    train(*make(gradient=E4M3), [0, 32, 16, 16])
    with pytest.raises(AssertionError, match="one launch"):
        train(*make(gradient=E4M3), [0, 32, 16, 15])


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_only_needed_gradients_are_computed_and_amaxes_recorded_all_the_same(kernels, needs):
    results = []
    dx, dw, _ = map(bool, needs)
    for wanted in (needs, (1, 1, 1)):
        module, coordinator = make()
        x = randn(48, 32, dtype=BF16).requires_grad_(bool(wanted[0]))
        module.weight.requires_grad_(bool(wanted[1]))
        module.bias.requires_grad_(bool(wanted[2]))
        with coordinator.step():
            module(x, [16, 0, 32, 0]).square().sum().backward()
        results.append((coordinator.amaxes(), x.grad, module.weight.grad, module.bias.grad))
    assert kernels.made == [(True, dw), (True, dx), (dx, dw)] + [(True, True)] * 3
    (amaxes, *ours), (all_amaxes, *full) = results
    assert amaxes == all_amaxes
    for grad, other, wanted in zip(ours, full, needs, strict=True):
        assert torch.equal(grad, other) if wanted else grad is None


def test_weights_are_cast_once_per_scope_and_recorded_at_every_use(kernels):
    module, coordinator = make()
    whole = torch.Size((4 * 48, 32))

    def run(counts):
        return module(randn(sum(counts), 32, dtype=BF16), counts)

    with coordinator.step():
        first = run([8, 0, 8, 0])
        assert {name for name in coordinator.amaxes() if "weight" in name} == {
            "a.expert.0.weight", "a.expert.2.weight",
        }  # fmt: skip
        coordinator.forget()
        module.weight.data.mul_(2)  # passes the version counter by, so it shows whether the cast was kept
        assert torch.equal(run([8, 0, 8, 0]), first)
        run([0, 16, 0, 0])
        assert kernels.casts.count(whole) == 1
        amaxes = coordinator.amaxes()
        for i in range(3):
            assert amaxes[f"a.expert.{i}.weight"] == module.weight[i].abs().max().item() / 2
        with torch.no_grad():
            module.weight.mul_(1.0)
        assert not torch.equal(run([8, 0, 8, 0]), first)
        with torch.inference_mode():
            run([16, 0, 0, 0])
    assert kernels.casts.count(whole) == 3
    assert coordinator.scope.weight_cache == {}


def test_a_later_use_that_needs_more_of_the_weights_gets_it(kernels):
    module, coordinator = make()
    x = randn(32, 32, dtype=BF16)
    with coordinator.step():
        module(x, [16, 0, 16, 0])
        module(x.requires_grad_(), [16, 0, 16, 0]).sum().backward()
    other, theirs = make("looped")
    again = x.detach().requires_grad_()
    with theirs.step():
        other(again, [16, 0, 16, 0]).sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_without_an_open_scope_weights_are_recorded_but_not_kept(kernels):
    """As under a trigger that commits by itself, after which scales are others."""
    module, coordinator = make()
    coordinator.scope.implicit = True
    module(randn(16, 32, dtype=BF16), [16, 0, 0, 0])
    assert coordinator.scope.weight_cache == {}
    assert coordinator.amaxes()["a.expert.0.weight"] == module.weight[0].abs().max().item()


def test_recording_is_noted_and_a_pending_update_finished_before_a_scale_is_used(kernels):
    module, coordinator = make()
    finished = []
    coordinator.scope.settle = lambda: finished.append(len(kernels.casts))
    with coordinator.step():
        assert not coordinator.scope.recorded
        y = module(randn(16, 32, dtype=BF16), [16, 0, 0, 0])
        assert coordinator.scope.recorded
        y.sum().backward()
    assert finished == [0, 2]


def test_nan_reaches_its_own_slots_and_rows_only(kernels):
    module, coordinator = make()
    x = randn(48, 32, dtype=BF16)
    x[20, 3] = float("nan")
    result = train(module, coordinator, [16, 16, 0, 16], x=x)
    poisoned = {name for name, amax in result["amaxes"].items() if amax != amax}
    assert poisoned == {"a.expert.1.input"}
    assert result["y"].isnan().any(1).nonzero().flatten().tolist() == [20]
    assert [bool(g.isnan().any()) for g in result["weight"]] == [False, True, False, False]


def test_in_eval_mode_nothing_is_recorded_or_kept(kernels):
    module, coordinator = make()
    module.eval()
    with coordinator.step():
        module(randn(16, 32, dtype=BF16, grad=True), [8, 0, 8, 0]).sum().backward()
        assert coordinator.scope.weight_cache == {}
        assert not coordinator.scope.requested
    assert coordinator.amaxes() == {}
    assert len(kernels.casts) == 3


def test_an_update_between_forward_and_backward_is_an_error(kernels):
    module, coordinator = make()
    coordinator.scope.open()
    y = module(randn(16, 32, dtype=BF16), [8, 0, 8, 0])
    coordinator.slots["a.expert.2.grad_output"].scale.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_it_starts_with_the_second_step_and_a_copy_of_the_module_works_alike(kernels):
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling())
    module = f8.GroupedLinear(2, 32, 48, coordinator=coordinator, name="a", dtype=BF16)
    nodes = []
    for step, counts in enumerate(([16, 0], [16, 0], [16, 16], [16, 16])):
        with coordinator.step(step):
            y = module(randn(sum(counts), 32, dtype=BF16), counts)
            nodes.append(type(y.grad_fn).__name__)
            y.sum().backward()
    cold, warm = "_GroupedFunctionBackward", "_GroupedKernelsBackward"
    assert nodes == [cold, warm, cold, warm]  # the second expert's first tokens come in the third step

    twin, x = copy.deepcopy(module).eval(), randn(32, 32, dtype=BF16)
    assert torch.equal(twin(x, [16, 16]), module.eval()(x, [16, 16]))
    coordinator.close()


def test_what_needs_the_other_path_takes_it(kernels, monkeypatch):
    def taken(module, x=None, counts=(8, 0, 8, 0)):
        x = randn(sum(counts), 32, dtype=BF16) if x is None else x
        return supports(x, module.weight, module.slots, list(counts))

    module, coordinator = make()
    assert taken(module)
    assert not taken(module, torch.zeros(0, 32, dtype=BF16), (0, 0, 0, 0))
    assert not taken(make(dtype=torch.float32)[0], randn(16, 32))
    assert not taken(make(dtype=torch.float16)[0])
    with monkeypatch.context() as patch:  # a build without CUDA would switch autocast off again
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert not taken(module)
    coordinator.scope.tape = ScaleTape()
    assert not taken(module)
    coordinator.scope.tape = None
    for name, needed in (
        ("a.expert.0.input", True), ("a.expert.2.grad_output", True), ("a.expert.1.input", False),
        ("a.expert.1.weight", True),
    ):  # fmt: skip
        slot = coordinator.slots[name]
        slot.warm.fill_(False)
        assert taken(module) is not needed, name
        slot.warm.fill_(True)
        slot.casts = torch.zeros(3, dtype=torch.int64)
        assert not taken(module), name
        slot.casts = None
        scale, slot.scale = slot.scale, torch.ones(1, device="meta")
        assert not taken(module), name
        slot.scale = scale
    assert taken(module)


@pytest.mark.parametrize("condition", ["cpu", "capture", "compiler"])
def test_no_kernel_runs_off_a_gpu_in_a_graph_or_under_a_compiler(kernels, monkeypatch, condition):
    module, coordinator = make()
    if condition == "capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        monkeypatch.undo()
    if condition == "compiler":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with coordinator.step():
        y = module(randn(16, 32, dtype=BF16), [8, 0, 8, 0])
    assert type(y.grad_fn).__name__ == "_GroupedFunctionBackward"


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_can_be_written_where_it_is_wanted(bias):
    a, b = randn(5, 32, seed=1).to(E4M3), randn(48, 32, seed=2).to(E4M3).t()
    more = randn(48, dtype=BF16) if bias else None
    one, whole = torch.full((1,), 0.3), torch.zeros(9, 48, dtype=BF16)
    result = scaled_mm(a, b, one, one, BF16, more, out=whole[2:7])
    wanted = scaled_mm(a, b, one, one, BF16, more)
    assert torch.equal(whole[2:7], wanted) and torch.equal(result, wanted)
    assert (whole[:2] == 0).all() and (whole[7:] == 0).all()
    assert scaled_mm(a[:0], b, one, one, BF16, more, out=whole[:0]).shape == (0, 48)
    scaled_mm(a[:, :0], b[:0], one, one, BF16, more, out=whole[2:7])
    assert torch.equal(whole[2:7], torch.zeros(5, 48, dtype=BF16) + (0 if more is None else more))


@pytest.mark.parametrize(
    ("strides", "start", "in_place"),
    [((64, 1), 16, True), ((128, 1), 0, True), ((64, 1), 8, False), ((72, 1), 0, False), ((1, 64), 0, False)],
)
def test_an_aligned_part_of_a_matrix_is_multiplied_where_it_is(strides, start, in_place):
    with FakeTensorMode():
        whole = torch.empty(64, 64, dtype=E4M3, device="cuda")
        part = whole.as_strided((16, 32), strides, start)
        assert (gemm._row_major(part) is part) is in_place
        one = torch.empty(1, dtype=torch.float32, device="cuda")
        assert scaled_mm(part, part.t(), one, one, BF16).shape == (16, 16)


def test_a_gpu_takes_the_layouts_of_grouped_products(monkeypatch):
    """By the rules that torch's own fake product checks."""
    monkeypatch.setattr(_grouped, "grouped_supported", lambda *a: True)
    counts, shape = [16, 0, 37], torch.Size((3, 48, 32))
    groups = RowGroups.of(counts, CPU)
    with FakeTensorMode():
        table = torch.empty(3, dtype=torch.int32, device="cuda")
        groups = RowGroups(counts, groups.rows, groups.columns, groups.width, table, table, table, table)

        def cast(rows: int, features: int, width: int, groups: int) -> GroupedCast:
            def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype, device="cuda")

            return GroupedCast(
                empty(rows, features, dtype=E4M3), empty(features, width, dtype=E4M3), empty(groups),
                empty(rows), None,
            )  # fmt: skip

        xq, wq, gq = cast(53, 32, groups.width, 3), cast(144, 32, 144, 3), cast(53, 48, groups.width, 3)
        y = _grouped._products(xq, wq, None, groups, shape, BF16)
        dx = _grouped._dgrad(gq, wq.data_t, wq.scale_inv, groups, shape, BF16)
        dw = _grouped._wgrad(gq, xq.data_t, xq.scale_inv, groups, BF16)
        assert (y.shape, dx.shape, dw.shape) == ((53, 48), (53, 32), shape)
        assert {t.dtype for t in (y, dx, dw)} == {BF16} and all(t.is_contiguous() for t in (y, dx, dw))


@pytest.mark.parametrize(
    ("a", "b", "out", "device", "capability", "expected"),
    [
        (E4M3, E4M3, BF16, "cuda", (9, 0), True),
        (E5M2, E4M3, BF16, "cuda", (9, 0), False),
        (E4M3, E4M3, torch.float16, "cuda", (9, 0), False),
        (E4M3, E4M3, BF16, "cuda", (8, 9), False),
        (E4M3, E4M3, BF16, "cpu", (9, 0), False),
    ],
)
def test_grouped_products_are_for_e4m3_into_bfloat16_on_hopper(
    monkeypatch, a, b, out, device, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert gemm.grouped_supported(a, b, out, torch.device(device)) is expected


def test_a_weight_without_tokens_stays_absent_and_keeps_its_cell(kernels):
    module, coordinator = make()
    with coordinator.step():
        module(randn(16, 32, dtype=BF16), [16, 0, 0, 0]).sum().backward()
    assert coordinator.slots["a.expert.3.weight"].amax.item() == ABSENT
    assert sorted(coordinator.amaxes()) == sorted(
        f"a.expert.0.{r}" for r in ("input", "weight", "grad_output")
    )
