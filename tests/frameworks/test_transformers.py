"""The Trainer of transformers: one scope per optimizer step, state beside its checkpoints, exceptions told to peers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Boom, Freed, Trained, attempt, check_freed, data, make, net, on_ranks, plain_loop, trained
from snippets import with_trainer
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import fp8dist as f8
from fp8dist.integrations.transformers import attach


class Classifier(nn.Module):
    """The net of `common` in the form that a Trainer wants; it fails where it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner(x), labels)}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": x[i], "labels": y[i]} for x, y in data(count) for i in range(len(x))]


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    """A Trainer that does what the plain loop does: no clipping, no shuffling, SGD."""
    return TrainingArguments(
        output_dir=str(directory), use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        optim="sgd", learning_rate=0.05, lr_scheduler_type="constant", max_grad_norm=0.0, num_train_epochs=1,
        train_sampling_strategy="sequential",
        **{"save_strategy": "no", "per_device_train_batch_size": 16, **options},
    )  # fmt: skip


@pytest.mark.parametrize(("accumulate", "microbatches"), [(1, 2), (2, 5)])
def test_an_optimizer_step_is_one_scope_with_the_scales_of_the_plain_loop(
    tmp_path: Path, accumulate: int, microbatches: int
) -> None:
    def run(rank: int, world: int) -> tuple[Trained, Trained]:
        coordinator = make()
        model = net(coordinator)
        options = arguments(tmp_path, gradient_accumulation_steps=accumulate)
        with_trainer.train(Classifier(model), coordinator, options, rows(world * microbatches))
        mine = data(world * microbatches)[rank::world]
        windows = [mine[i : i + accumulate] for i in range(0, len(mine), accumulate)]
        # The Trainer divides by the length of the window, also of a shorter one.
        return trained(coordinator, model), plain_loop(windows, ddp=True, scale=lambda length: 1 / length)

    for ours, reference in on_ranks(run):
        assert ours == reference
        assert ours.collectives == ours.commits == -(-microbatches // accumulate)


def test_resuming_equals_never_having_stopped(tmp_path: Path) -> None:
    def run(rank: int, world: int) -> tuple[Trained, Trained]:
        options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
        results = []
        for resume in (None, str(tmp_path / "checkpoint-2")):
            coordinator = make()
            # Other weights than the checkpoint's, which the resumed run must take over.
            model = net(coordinator, seed=0 if resume is None else 1)
            with_trainer.train(
                Classifier(model), coordinator, arguments(tmp_path, **options), rows(world * 6), resume
            )
            results.append(trained(coordinator, model))
            coordinator.close()
        whole, resumed = results
        assert (whole.commits, resumed.commits) == (3, 1)
        return whole, replace(resumed, commits=whole.commits, collectives=whole.collectives)

    for whole, resumed in on_ranks(run):
        assert whole == resumed


@pytest.mark.parametrize("how", ["path", "the newest"])
def test_a_checkpoint_without_fp8_state_starts_cold_with_a_warning(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A run in high precision may go on in FP8."""

    def run(rank: int, world: int) -> tuple[int, str]:
        options = {"save_strategy": "steps", "save_steps": 1}
        Trainer(
            model=Classifier(net(None)), args=arguments(tmp_path, **options), train_dataset=rows(2)
        ).train()
        coordinator = make()
        resume = str(tmp_path / "checkpoint-1") if how == "path" else True
        model = Classifier(net(coordinator))
        with_trainer.train(model, coordinator, arguments(tmp_path, **options), rows(3), resume)
        return coordinator.stats.commits, caplog.text

    ((commits, said),) = on_ranks(run, world=1)
    assert commits == (2 if how == "path" else 1)
    assert "has no FP8 state" in said


def test_a_recipe_without_state_saves_none_and_resumes_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rank: int, world: int) -> tuple[bool, str]:
        for resume in (None, True):
            coordinator = f8.ReductionGroupCoordinator(f8.CurrentScaling())
            options = arguments(tmp_path, save_strategy="steps", save_steps=1)
            with_trainer.train(Classifier(net(coordinator)), coordinator, options, rows(2), resume)
            coordinator.close()
        return (tmp_path / "checkpoint-2" / "fp8").exists(), caplog.text

    ((exists, said),) = on_ranks(run, world=1)
    assert not exists
    assert "FP8 state" not in said


@pytest.mark.parametrize("where", ["in training_step", "before the optimizer"])
def test_a_failing_rank_frees_its_peer(tmp_path: Path, where: str) -> None:
    """Behind its backward, so that its peer does not wait for gradients."""

    def run(rank: int, world: int) -> Freed:
        failing = [False]

        class Failing(Trainer):  # type: ignore[misc]
            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss: torch.Tensor = super().training_step(*args, **kwargs)
                if failing[0] and where == "in training_step":
                    raise Boom("no more")
                return loss

            def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
                if failing[0] and where == "before the optimizer":
                    raise Boom("no more")
                return super()._get_grad_norm(*args, **kwargs)

        coordinator = make()
        trainer = Failing(
            model=Classifier(net(coordinator)), args=arguments(tmp_path), train_dataset=rows(world)
        )
        attach(trainer, coordinator)
        trainer.train()
        failing[0] = rank == 1
        ended = attempt(coordinator, trainer.train)
        coordinator.recover()
        failing[0] = False
        trainer.train()
        assert coordinator.stats.commits == 2
        return ended

    check_freed(on_ranks(run), failing=1)


def test_a_training_that_stops_inside_a_window_commits_nothing_for_it(tmp_path: Path) -> None:
    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 1

    def run(rank: int, world: int) -> list[Any]:
        coordinator = make()
        trainer = Trainer(
            model=Classifier(net(coordinator)),
            args=arguments(tmp_path, gradient_accumulation_steps=2),
            train_dataset=rows(world * 4),
            callbacks=[Stop()],
        )
        attach(trainer, coordinator)
        trainer.train()
        with coordinator.step():  # nothing is left open, and no rank has to recover
            pass
        stats = coordinator.stats
        return [stats.commits, stats.aborts]

    assert on_ranks(run) == [[2, 1], [2, 1]]


def test_a_language_model_trains_with_one_collective_a_step_and_none_for_evaluation(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    tokens = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(3))
    texts = [{"input_ids": row, "labels": row} for row in tokens]

    def run(rank: int, world: int) -> tuple[list[int], list[str]]:
        coordinator = make()
        torch.manual_seed(0)
        model = f8.convert(LlamaForCausalLM(config), coordinator, skip=("lm_head",))
        options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
        trainer = Trainer(
            model=model,
            args=arguments(tmp_path, eval_strategy="steps", eval_steps=1, **options),
            train_dataset=texts,
            eval_dataset=texts[:4],
        )
        attach(trainer, coordinator)
        trainer.train()
        stats = coordinator.stats
        return [stats.commits, stats.collectives - 1], sorted(coordinator.state_dict()["slots"])

    for counts, names in on_ranks(run):
        assert counts == [2, 2]
        assert "model.layers.1.mlp.down_proj.grad_output" in names
        assert len(names) == 2 * 7 * 3


def test_a_trainer_that_retries_by_itself_or_is_attached_twice_is_refused(tmp_path: Path) -> None:
    def run(rank: int, world: int) -> list[str]:
        coordinator = make()
        model = Classifier(net(coordinator))
        said = []
        for retries in (True, False):
            trainer = Trainer(model=model, args=arguments(tmp_path, auto_find_batch_size=retries))
            with pytest.raises(ValueError) as error:
                attach(trainer, coordinator)
                attach(trainer, coordinator)
            said.append(str(error.value))
        return said

    ((retrying, twice),) = on_ranks(run, world=1)
    assert "expects auto_find_batch_size=False" in retrying
    assert "attached to a coordinator already" in twice
