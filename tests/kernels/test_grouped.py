"""On a GPU the experts' node records and casts what their own layers do, bit for bit, and multiplies it as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8dist as f8
from fp8dist._amax import record_amax, tensor_amax
from fp8dist.kernels import gemm
from fp8dist.kernels.gemm import RowGroups
from fp8dist.modules._grouped import supports

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
IN, OUT = 128, 320
COUNTS = [[64, 128, 16, 48], [0, 1, 16, 239], [37, 0, 130, 5], [300, 0, 0, 0]]
PRODUCTS = {"one by one": 0.0, "in one launch": float("inf")}


def random(*shape: int, seed: int, dtype: torch.dtype = BF16, spread: bool = False) -> torch.Tensor:
    """Normal values; with `spread` over many exponents, with zeros of both signs and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if spread:
        x *= torch.exp2(torch.randint(-18, 10, shape, generator=generator).float())
        odd = torch.tensor([0.0, -0.0, 1e-40, 17 / 3, 447 / 3, 470 / 3, float("inf"), -float("inf")])
        x.view(-1)[torch.randperm(x.numel(), generator=generator)[: len(odd)]] = odd[: x.numel()]
    return x.to("cuda", dtype)


def addresses(cells: torch.Tensor) -> torch.Tensor:
    return torch.tensor([cell.data_ptr() for cell in cells.split(1)], device="cuda")


def cpu_bytes(q: torch.Tensor) -> torch.Tensor:
    """Bytes on the CPU, those of any NaN as 127."""
    q = q.cpu().contiguous()
    return torch.where(q.float().isnan(), 127, q.view(torch.uint8))


def check_cast(
    x: torch.Tensor, counts: list[int], dtype: torch.dtype, keep: bool, turn: bool, sums: bool
) -> None:
    """Against torch on the CPU, group by group."""
    from fp8dist.kernels.triton.grouped import cast_groups

    n = len(counts)
    scale = torch.rand(n, generator=torch.Generator().manual_seed(1)) * 5 + 0.5
    on_gpu, cells, own = (
        scale.cuda(),
        torch.full((n + 1,), -1.0, device="cuda")[1:],
        torch.full((n,), -1.0).cuda(),
    )
    groups = RowGroups.of(counts, x.device)
    result = cast_groups(
        x, groups, addresses(on_gpu), addresses(cells), own, dtype, transpose=turn, keep=keep,
        sums_dtype=torch.float32 if sums else None,
    )  # fmt: skip
    assert (result.data is not None, result.data_t is not None, result.sums is not None) == (keep, turn, sums)
    x, limit = x.cpu(), torch.finfo(dtype).max
    turned = torch.zeros(x.shape[1], groups.width, dtype=torch.uint8)
    for g, (rows, columns) in enumerate(zip(groups.rows, groups.columns, strict=True)):
        q = (x[rows].float() * scale[g]).clamp(-limit, limit).to(dtype)
        if keep:
            assert torch.equal(cpu_bytes(result.data[rows]), cpu_bytes(q)), g
        turned[:, columns.start : columns.start + len(q)] = cpu_bytes(q).t()
        amax = torch.tensor([-1.0])
        if len(q):
            record_amax(amax, tensor_amax(x[rows]))
        for cell in (cells[g : g + 1], own[g : g + 1]):
            torch.testing.assert_close(cell.cpu(), amax, rtol=0, atol=0, equal_nan=True)
        assert result.scale_inv[g].data_ptr() % 16 == 0  # or cuBLASLt refuses it
        inverse = scale[g : g + 1].reciprocal()
        assert torch.equal(result.scale_inv[g : g + 1].cpu(), inverse)
        assert (result.row_scale_inv[rows].cpu() == inverse).all()
        if sums:
            wanted, size = x[rows].double().sum(0), x[rows].double().abs().sum(0)
            error = (result.sums[g].cpu().double() - wanted).abs()
            assert (error <= size * 2.0**-20).logical_or(~size.isfinite()).all(), g
    if turn:
        assert torch.equal(cpu_bytes(result.data_t), turned)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("x_dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("keep", "turn", "sums"), [(1, 1, 0), (1, 1, 1), (1, 0, 0), (0, 1, 1), (0, 0, 1)])
def test_bytes_and_amaxes_of_every_group_are_those_of_torch(counts, dtype, x_dtype, keep, turn, sums):
    x = random(sum(counts), 208, seed=3, dtype=x_dtype, spread=True)
    check_cast(x, counts, dtype, bool(keep), bool(turn), bool(sums))


@pytest.mark.parametrize("features", [16, 50, 64, 1040])
@pytest.mark.parametrize("layout", ["dense", "padded", "transposed", "one row"])
def test_shapes_and_strides_change_no_bit(features, layout):
    counts = [37, 0, 130, 5]
    x = random(sum(counts), features, seed=4, spread=True)
    if layout == "padded":
        x = torch.cat((x, x[:, :3]), 1)[:, :features]
    elif layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "one row":
        x = x[:1].expand(sum(counts), features)
    check_cast(x, counts, E4M3, True, True, True)


def test_more_blocks_than_one_wave_and_thousands_of_rows():
    counts = [4096, 0, 3001, 1, 2000, 33]
    check_cast(random(sum(counts), 512, seed=5, spread=True), counts, E4M3, True, True, True)


def test_nan_of_any_sign_wins_in_its_own_cell_only():
    from fp8dist.kernels.triton.grouped import cast_groups, record_groups

    counts = [20, 20, 0, 20]
    x = random(60, 64, seed=6)
    x[25, 7] = -torch.tensor(float("nan"), device="cuda")
    x[45, 7] = float("inf")
    scale, cells = torch.ones(4, device="cuda"), torch.full((4,), -1.0, device="cuda")
    own, groups = cells.clone(), RowGroups.of(counts, x.device)
    cast_groups(x, groups, addresses(scale), None, own, E4M3, transpose=False, keep=True)
    record_groups(own, addresses(cells), groups)
    for amaxes in (own, cells):
        first, poisoned, empty, last = amaxes.tolist()
        assert first == x[:20].abs().max().item() and poisoned != poisoned
        assert (empty, last) == (-1.0, float("inf"))
    assert cells.view(torch.int32)[1] > 0  # so that it wins every MAX to come


def test_recorded_amaxes_raise_the_cells_of_groups_with_rows_only():
    from fp8dist.kernels.triton.grouped import record_groups

    counts = [3, 0, 5, 1] * 60  # more than one program
    amax, cells = (random(240, seed=s, dtype=torch.float32).abs() for s in (1, 2))
    wanted = torch.where(torch.tensor(counts, device="cuda") > 0, torch.maximum(amax, cells), cells)
    record_groups(amax, addresses(cells), RowGroups.of(counts, amax.device))
    assert torch.equal(cells, wanted)


@pytest.mark.parametrize("features", [16, 320])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_each_group_gets_its_own_bias(features, dtype):
    from fp8dist.kernels.triton.grouped import add_bias

    counts = [37, 0, 130, 5]
    y, bias = random(sum(counts), features, seed=1, dtype=dtype), random(4, features, seed=2, dtype=dtype)
    wanted = y + bias.repeat_interleave(torch.tensor(counts, device="cuda"), 0)
    add_bias(y, bias, RowGroups.of(counts, y.device))
    assert torch.equal(y, wanted)


class Run:
    """One grouped layer with a coordinator."""

    def __init__(self, path: str, *, format: f8.Format = f8.Format.HYBRID, dtype: torch.dtype = BF16) -> None:
        recipe = f8.DelayedScaling(fp8_format=format, amax_history_len=4)
        self.coordinator = f8.ReductionGroupCoordinator(recipe, name=path)
        self.module = f8.GroupedLinear(
            4, IN, OUT, coordinator=self.coordinator, name="a", path=path, device="cuda", dtype=dtype
        )
        with torch.no_grad():
            for seed, p in enumerate(self.module.parameters()):
                p.copy_(random(*p.shape, seed=1000 + seed, dtype=dtype) * 0.1)
        self.dtype = dtype
        self.steps = 0
        self.warm()

    def warm(self) -> None:
        self.step([16, 16, 16, 16])

    def step(self, *microbatches: list[int], x: torch.Tensor | None = None) -> dict[str, Any]:
        """One step; the results of its last microbatch, and the gradients of all."""
        self.module.zero_grad()
        with self.coordinator.step(self.steps):
            for m, counts in enumerate(microbatches):
                leaf = (
                    random(sum(counts), IN, seed=10 * self.steps + m, dtype=self.dtype)
                    if x is None
                    else x.clone()
                )
                y = self.module(leaf.requires_grad_(), counts)
                dy = random(*y.shape, seed=500 + 10 * self.steps + m, dtype=self.dtype)
                y.backward(dy)
        self.steps += 1
        grads = {f"d{n}": p.grad for n, p in self.module.named_parameters()}
        return {
            "y": y.detach(),
            "dx": leaf.grad,
            **grads,
            "node": type(y.grad_fn).__name__,
            "x": leaf,
            "dy": dy,
        }

    def float64(self, result: dict[str, Any], counts: list[int]) -> dict[str, torch.Tensor]:
        """What one microbatch should have given."""
        x, dy, w, b = (
            t.detach().double() for t in (result["x"], result["dy"], self.module.weight, self.module.bias)
        )
        parts = list(zip(x.split(counts), dy.split(counts), w, b, strict=True))
        return {
            "y": torch.cat([xe @ we.t() + be for xe, _, we, be in parts]),
            "dx": torch.cat([de @ we for _, de, we, _ in parts]),
            "dweight": torch.stack([de.t() @ xe for xe, de, _, _ in parts]),
            "dbias": torch.stack([de.sum(0) for _, de, _, _ in parts]),
        }


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def compare(counts: list[int], format: f8.Format, dtype: torch.dtype = BF16) -> None:
    """Two steps of both paths, the second of two microbatches."""
    ours, theirs = Run("grouped", format=format, dtype=dtype), Run("looped", format=format, dtype=dtype)
    for microbatches in ([counts], [[16, 32, 48, 64], counts]):
        mine, wanted = ours.step(*microbatches), theirs.step(*microbatches)
        assert mine["node"] == "_GroupedKernelsBackward" != wanted["node"]
        assert ours.coordinator.scales() == theirs.coordinator.scales()  # so all amaxes were equal
        for name in ("y", "dx", "dweight", "dbias"):
            assert mine[name].dtype == dtype and mine[name].shape == wanted[name].shape
            assert relative(mine[name], wanted[name]) < 2**-7, (name, len(microbatches))
        if len(microbatches) == 1:
            for name, exact in ours.float64(mine, counts).items():
                bound = 0.005 if name == "dbias" else 0.08  # e4m3 keeps 4 bits, e5m2 3
                assert relative(mine[name], exact) < bound, name
            empty = [e for e, n in enumerate(counts) if not n]
            assert not mine["dweight"][empty].any() and not mine["dbias"][empty].any()
    mine, wanted = (r.coordinator.state_dict()["slots"] for r in (ours, theirs))
    assert all(torch.equal(mine[name]["history"], wanted[name]["history"]) for name in wanted)
    ours.coordinator.close()
    theirs.coordinator.close()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("format", [f8.Format.HYBRID, f8.Format.E4M3])
def test_products_one_by_one_are_those_of_the_layers(monkeypatch, counts, dtype, format):
    monkeypatch.setattr(gemm, "GROUPED_WORK", PRODUCTS["one by one"])
    compare(counts, format, dtype)


@pytest.mark.parametrize("format", [f8.Format.HYBRID, f8.Format.E4M3])
def test_products_in_one_launch_are_those_of_the_layers(monkeypatch, format):
    monkeypatch.setattr(gemm, "GROUPED_WORK", PRODUCTS["in one launch"])
    compare(COUNTS[0], format)


@pytest.mark.parametrize("products", PRODUCTS)
def test_the_host_waits_for_nothing(monkeypatch, products):
    monkeypatch.setattr(gemm, "GROUPED_WORK", PRODUCTS[products])
    run, counts = Run("grouped", format=f8.Format.E4M3), [16, 16, 16, 16]
    x, dy = random(64, IN, seed=1).requires_grad_(), random(64, OUT, seed=2)
    run.step(counts)  # compiles
    with run.coordinator.step(9):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchronizing"):
                x.sum().item()  # the check is alive
            y = run.module(x, counts)
            y.backward(dy)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    assert type(y.grad_fn).__name__ == "_GroupedKernelsBackward"
    run.coordinator.close()


def test_weights_are_cast_once_per_scope():
    run = Run("grouped")
    x, counts = random(64, IN, seed=1), [16, 16, 16, 16]
    with run.coordinator.step(9):
        first = run.module(x, counts)
        run.module.weight.data.mul_(2)  # passes the version counter by
        assert torch.equal(run.module(x, counts), first)
        first.sum().backward()
    with run.coordinator.step(10):
        second = run.module(x, counts)
        assert not torch.equal(second, first)
        second.sum().backward()
    run.coordinator.close()


def test_nan_of_one_expert_reaches_its_own_slot_only():
    run, counts = Run("grouped"), [16, 16, 0, 32]
    x = random(64, IN, seed=1)
    x[20, 3] = float("nan")
    amaxes: dict[str, float] = {}
    with run.coordinator.step(9):
        y = run.module(x.requires_grad_(), counts)
        y.backward(random(64, OUT, seed=2))
        for layer in run.module.slots:
            amaxes |= {slot.name: slot.amax.item() for slot in layer}
    assert {name for name, amax in amaxes.items() if amax != amax} == {"a.expert.1.input"}
    assert {name for name, amax in amaxes.items() if amax == -1} == {
        f"a.expert.2.{role}" for role in ("input", "weight", "grad_output")
    }
    assert y.isnan().any(1).nonzero().flatten().tolist() == [20]
    assert x.grad.isfinite().all()
    run.coordinator.close()


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_only_needed_gradients_are_computed(needs):
    results = []
    for wanted in (needs, (1, 1, 1)):
        run, x, counts = Run("grouped"), random(64, IN, seed=1), [16, 0, 31, 17]
        for tensor, flag in zip((x, run.module.weight, run.module.bias), wanted, strict=True):
            tensor.requires_grad_(bool(flag))
        run.module.zero_grad()
        with run.coordinator.step(9):
            run.module(x, counts).backward(random(64, OUT, seed=2))
        results.append((run.coordinator.scales(), x.grad, run.module.weight.grad, run.module.bias.grad))
        run.coordinator.close()
    (scales, *ours), (all_scales, *full) = results
    assert scales == all_scales
    for grad, other, wanted in zip(ours, full, needs, strict=True):
        assert torch.equal(grad, other) if wanted else grad is None


def test_a_new_layout_moves_the_cells_and_the_node_follows():
    ours, theirs = Run("grouped"), Run("looped")
    for run in (ours, theirs):
        run.late = [
            f8.Linear(IN, IN, coordinator=run.coordinator, name=f"late{i}", device="cuda") for i in range(8)
        ]
    for _ in range(3):
        ours.step(COUNTS[1])
        theirs.step(COUNTS[1])
    grouped = {n: s for n, s in ours.coordinator.scales().items() if n.startswith("a.")}
    assert grouped == {n: s for n, s in theirs.coordinator.scales().items() if n.startswith("a.")}
    ours.coordinator.close()
    theirs.coordinator.close()


def test_a_side_stream_has_its_own_tables():
    run, counts = Run("grouped"), [16, 0, 31, 17]
    x = random(64, IN, seed=1)
    run.module.eval()
    torch.cuda.synchronize()
    first = run.module(x, counts)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = run.module(x, counts)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(first, second)
    run.coordinator.close()


def test_a_graph_is_captured_without_the_node():
    run, counts = Run("grouped"), [16, 0, 32, 16]
    x = random(64, IN, seed=1)
    assert supports(x, run.module.weight, run.module.slots, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not supports(x, run.module.weight, run.module.slots, counts)
        x.clone()  # an empty graph is an error on some drivers
    run.coordinator.close()


# The last tests: should some release of torch refuse such groups, it does so on the device, which ends all tests after.
@pytest.mark.parametrize("counts", COUNTS[1:])
@pytest.mark.parametrize("format", [f8.Format.HYBRID, f8.Format.E4M3])
def test_odd_and_empty_groups_in_one_launch_are_those_of_the_layers(monkeypatch, counts, format):
    monkeypatch.setattr(gemm, "GROUPED_WORK", PRODUCTS["in one launch"])
    compare(counts, format)
