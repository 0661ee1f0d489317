"""A step on a GPU: nothing of it waits for the device, and casts may use the slots' own inverse scales."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fp8dist as f8
from fp8dist.kernels.quantize import Layout, quantize
from fp8dist.modules._products import quantize_gradient_and_bias


@pytest.fixture(autouse=True)
def _no_debug_mode_survives() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def build(name: str, *kinds: str) -> tuple[nn.Module, f8.ReductionGroupCoordinator]:
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4), name=name)
    torch.manual_seed(0)
    kw = {"coordinator": coordinator, "device": "cuda", "dtype": torch.bfloat16}
    make = {
        "linear": lambda i: f8.Linear(64, 64, name=f"{i}.linear", **kw),
        "mlp": lambda i: f8.LayerNormMLP(64, 128, name=f"{i}.mlp", **kw),
        "norm linear": lambda i: f8.LayerNormLinear(64, 64, name=f"{i}.norm", **kw),
    }
    return nn.Sequential(*(make[kind](i) for i, kind in enumerate(kinds))), coordinator


def inputs() -> torch.Tensor:
    return torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["linear", "mlp", "norm linear"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_warm_step_of_one_rank_never_waits_for_the_device(
    kind: str, microbatches: int, overlap: bool
) -> None:
    model, coordinator = build("waits", kind, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = inputs()
    for step in range(6):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        with coordinator.step(step, overlap=overlap):
            for _ in range(microbatches):
                model(x).float().square().mean().backward()
        optimizer.step()
        coordinator.settle()
    torch.cuda.set_sync_debug_mode("default")
    assert coordinator.stats.commits == 6
    coordinator.close()


@pytest.mark.parametrize("kind", ["linear", "mlp", "norm linear"])
def test_an_update_between_a_forward_and_its_backward_is_an_error(kind: str) -> None:
    model, coordinator = build("between", kind)
    x = inputs().requires_grad_()
    for _ in range(2):
        with coordinator.step():
            model(x).sum().backward()
    with coordinator.step():
        y = model(x)
    with coordinator.step(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.COLUMNS, Layout.BOTH])
def test_a_shared_inverse_has_the_bits_of_one_of_its_own(dtype: torch.dtype, layout: int) -> None:
    model, coordinator = build("shared", "linear")
    for _ in range(3):
        with coordinator.step():
            model(inputs()).sum().backward()
    slot = model[0].slots.input
    x = torch.randn(48, 64, device="cuda").to(dtype)
    with coordinator.step():
        own, shared = (quantize(x, slot, True, layout=layout, share=share) for share in (False, True))
        assert shared.scale_inv.data_ptr() == slot.scale_inv.data_ptr() != own.scale_inv.data_ptr()
        assert torch.equal(own.scale_inv, shared.scale_inv)
        assert torch.equal(own.data.view(torch.uint8), shared.data.view(torch.uint8))
        gradient = model[0].slots.grad_output
        for share in (False, True):
            q, db = quantize_gradient_and_bias(
                x, gradient, True, rows_wanted=True, columns=True, db=True, share=share
            )
            assert torch.equal(q.scale_inv, gradient.scale_inv), share
            torch.testing.assert_close(db.float(), x.float().sum(0), rtol=2e-2, atol=2e-2)
    coordinator.close()


def test_outside_a_guarded_scope_an_inverse_is_never_shared() -> None:
    coordinator = f8.ReductionGroupCoordinator(
        f8.DelayedScaling(amax_history_len=4), name="unguarded", update_every="microbatch",
        trigger="backward_end",
    )  # fmt: skip
    layer = f8.Linear(64, 64, coordinator=coordinator, name="l", device="cuda", dtype=torch.bfloat16)
    coordinator.freeze()
    x = inputs().requires_grad_()
    for _ in range(3):
        layer(x).sum().backward()
    q = quantize(x.detach(), layer.slots.input, True, share=True)
    assert q.scale_inv.data_ptr() != layer.slots.input.scale_inv.data_ptr()
    coordinator.close()
