"""The linear layer on a GPU: near a float64 reference, recording like the CPU, without waiting for the device."""

from __future__ import annotations

import pytest
import torch
from forkpool import run_ranks, values
from torch import nn

import fp8dist as f8

pytestmark = pytest.mark.timeout(120)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [64, 7])
def test_values_are_near_float64_and_amaxes_equal_the_cpu(dtype: torch.dtype, tokens: int) -> None:
    def run(rank: int, world: int) -> tuple[list[float], list[float], list[float]]:
        amaxes, errors = [], []
        for device in ("cpu", "cuda"):
            coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(), name=device)
            torch.manual_seed(0)
            linear = nn.Linear(128, 64).to(dtype)
            x = torch.randn(tokens, 128).to(dtype)
            dy = torch.randn(tokens, 64).to(dtype)
            exact = nn.Linear(128, 64).double()
            exact.load_state_dict({k: v.double() for k, v in linear.state_dict().items()})
            x64 = x.double().requires_grad_()
            exact(x64).backward(dy.double())
            model = f8.convert(nn.Sequential(linear).to(device), coordinator)
            for _ in range(2):  # cold, then with the delayed scale
                xd = x.to(device, copy=True).requires_grad_()
                model.zero_grad()
                with coordinator.step():
                    y = model(xd)
                    y.backward(dy.to(device))
            grads = (y, xd.grad, model[0].weight.grad, model[0].bias.grad)
            wanted = (exact(x64), x64.grad, exact.weight.grad, exact.bias.grad)
            errors += [relative(a, b) for a, b in zip(grads, wanted, strict=True)]
            state = coordinator.state_dict()["slots"]
            amaxes.append([state[name]["history"][-1].item() for name in sorted(state)])
        return amaxes[0], amaxes[1], errors

    cpu, cuda, errors = values(run_ranks(run, world=1, init=None, timeout=90))[0]
    assert cpu == cuda
    assert max(errors) < 0.1, errors  # e4m3 keeps 4 bits, e5m2 keeps 3


def test_forward_and_backward_never_wait_for_the_device() -> None:
    def run(rank: int, world: int) -> bool:
        coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling())
        model = f8.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda(), coordinator)
        x = torch.randn(32, 64, device="cuda")
        for _ in range(3):
            with coordinator.step():
                torch.cuda.set_sync_debug_mode("error")
                model(x).sum().backward()
                torch.cuda.set_sync_debug_mode("default")
        return True

    assert values(run_ranks(run, world=1, init=None, timeout=90)) == [True]
