"""`torch.compile` on a GPU: one graph, cold and warm, that trains as the eager layers do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8dist as f8


def train(compiled: bool, name: str) -> tuple[list[float], dict[str, float], int]:
    """Losses, scales and the number of graphs of a few steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    coordinator = f8.ReductionGroupCoordinator(f8.DelayedScaling(amax_history_len=4), name=name)
    plain = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    model = f8.convert(plain.to("cuda", torch.bfloat16), coordinator)
    counter = CompileCounterWithBackend("inductor")
    run = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for step in range(5):
        x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        optimizer.zero_grad()
        with coordinator.step(step):
            loss = run(x).float().square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scales = coordinator.scales()
    assert coordinator.stats.commits == 5
    coordinator.close()
    return losses, scales, counter.frame_count


def test_a_compiled_model_is_one_graph_and_trains_like_the_eager_one() -> None:
    losses, scales, _ = train(False, "eager")
    compiled_losses, compiled_scales, graphs = train(True, "compiled")
    assert graphs == 1
    assert compiled_losses == pytest.approx(losses, rel=0.01)
    assert compiled_scales.keys() == scales.keys()
    for name, scale in scales.items():
        # The compiler fuses norm and GELU and rounds otherwise, by a unit of bfloat16 here and there.
        assert compiled_scales[name] == pytest.approx(scale, rel=0.05), name
