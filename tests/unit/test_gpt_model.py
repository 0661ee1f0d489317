"""The model: the same weights and outputs however it is cut into stages."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from gpt.config import TrainConfig
from gpt.model import GPTConfig, build_stage, next_byte_loss, parameter_names, stage_layers

SMALL = GPTConfig(layers=5, hidden=16, heads=2, seq_len=12)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def some_bytes(batch: int = 2) -> torch.Tensor:
    return torch.randint(256, (batch, SMALL.seq_len), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("layers", "n_stages"), [(8, 4), (8, 1), (7, 4), (5, 5)])
def test_stages_hold_every_layer_once_and_evenly(layers: int, n_stages: int) -> None:
    parts = [list(stage_layers(layers, index, n_stages)) for index in range(n_stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("n_stages", [2, 3, 5])
def test_partition_changes_no_name_no_weight_and_no_output(n_stages: int) -> None:
    whole = build_stage(SMALL, 0, 1)
    stages = [build_stage(SMALL, index, n_stages) for index in reversed(range(n_stages))][::-1]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.equal(whole.get_parameter(name)), name
    x = some_bytes()
    for stage in stages:
        x = stage(x)
    assert x.equal(whole(some_bytes()))


def test_weights_depend_on_seed_and_name() -> None:
    first, other = build_stage(SMALL, 0, 1), build_stage(dataclasses.replace(SMALL, seed=1), 0, 1)
    assert not first.get_parameter("lm_head.weight").equal(other.get_parameter("lm_head.weight"))
    matrices = [parameter for parameter in first.parameters() if parameter.dim() == 2]
    assert len({parameter.flatten()[0].item() for parameter in matrices}) == len(matrices)


def test_no_byte_sees_a_later_one() -> None:
    model, x = build_stage(SMALL, 0, 1), some_bytes()
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(x), model(changed)
    assert before[:, :7].equal(after[:, :7])
    assert not before[:, 7].equal(after[:, 7])


def test_order_of_bytes_matters() -> None:
    model = build_stage(SMALL, 0, 1)
    x = torch.full((1, SMALL.seq_len), 65)
    logits = model(x)
    # The bytes before are equal, so only the position tells them apart.
    assert not logits[:, 1].allclose(logits[:, 2], atol=1e-3)


@pytest.mark.parametrize("bf16", [False, True])
def test_stages_pass_float32_between_them(bf16: bool) -> None:
    config = dataclasses.replace(SMALL, bf16=bf16)
    first, last = build_stage(config, 0, 2), build_stage(config, 1, 2)
    hidden = first(some_bytes())
    assert hidden.dtype == torch.float32
    assert last(hidden).dtype == (torch.bfloat16 if bf16 else torch.float32)


@pytest.mark.parametrize(
    ("part", "attention", "mlp"), [("none", 5, 5), ("full", 10, 10), ("attention", 10, 5), ("mlp", 5, 10)]
)
def test_recomputed_parts_run_twice_and_give_the_same_gradients(part: str, attention: int, mlp: int) -> None:
    plain, again = (build_stage(dataclasses.replace(SMALL, recomputed=how), 0, 1) for how in ("none", part))
    runs = {"attn": 0, "mlp": 0}
    for name, module in again.named_modules():
        kind = name.rpartition(".")[2]
        if kind in runs:
            module.register_forward_pre_hook(lambda *_, kind=kind: runs.update({kind: runs[kind] + 1}))
    for model in (plain, again):
        model(some_bytes()).square().sum().backward()
    assert runs == {"attn": attention, "mlp": mlp}
    for name, parameter in plain.named_parameters():
        assert parameter.grad.equal(again.get_parameter(name).grad), name


def test_names_of_the_whole_model_need_no_weights() -> None:
    assert parameter_names(SMALL) == [name for name, _ in build_stage(SMALL, 0, 1).named_parameters()]


def test_default_linears_fit_fp8_gemms() -> None:
    run = TrainConfig()
    model = build_stage(GPTConfig(run.layers, run.hidden, run.heads, run.seq_len), 0, 1)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 4 * run.layers + 1
    assert all(linear.in_features % 16 == 0 == linear.out_features % 16 for linear in linears)


def test_loss_is_mean_negative_log_probability() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 256, generator=generator)
    targets = torch.randint(256, (2, 3), generator=generator)
    probabilities = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
    wanted = -sum(
        probabilities[i, j, targets[i, j]].log().item() for i in range(2) for j in range(3)
    ) / targets.numel()  # fmt: skip
    assert next_byte_loss(logits, targets).item() == pytest.approx(wanted, rel=1e-6)
    assert next_byte_loss(logits.bfloat16(), targets).dtype == torch.float32


@pytest.mark.parametrize(("index", "n_stages"), [(0, 6), (2, 2), (-1, 2)])
def test_stage_that_cannot_be_is_refused(index: int, n_stages: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= stage_index < n_stages <= 5 layers but got"):
        build_stage(SMALL, index, n_stages)
