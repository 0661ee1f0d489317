"""Lightning: a callback opens one scope per optimizer step; `on_exception` tells the peers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Boom, Freed, Trained, attempt, check_freed, data, make, net, on_ranks, plain_loop, trained
from snippets import with_lightning
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import fp8dist as f8
from fp8dist.integrations.lightning import StepScope


class Classifier(LightningModule):  # type: ignore[misc]
    """The net of `common`; it fails where it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.fails = ""
        self.validated = 0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.fails == "in training_step":
            raise Boom("no more")
        return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.inner(batch[0])
        self.validated += 1

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """In the middle of a step: behind the forward, before the backward."""
        if self.fails == "before the backward":
            raise Boom("no more")

    def on_after_backward(self) -> None:
        if self.fails == "after the backward":
            raise Boom("no more")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader(count: int, rank: int = 0, world: int = 1) -> DataLoader[Any]:
    """A loader over the microbatches of one rank."""
    rows = [(x[i], y[i]) for x, y in data(world * count)[rank::world] for i in range(len(x))]
    return DataLoader(rows, batch_size=16, shuffle=False)  # type: ignore[arg-type]


def options(world: int, **more: Any) -> dict[str, Any]:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    spread: dict[str, Any] = {"devices": world, "strategy": "ddp"} if world > 1 else {"devices": 1}
    # A sampler of Lightning's would shuffle.
    defaults = {
        "accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False, "use_distributed_sampler": False,
    }  # fmt: skip
    return {**quiet, **spread, **defaults, **more}


@pytest.mark.parametrize(("accumulate", "microbatches"), [(1, 2), (2, 5)])
def test_an_optimizer_step_is_one_scope_with_the_scales_of_the_plain_loop(
    accumulate: int, microbatches: int
) -> None:
    def run(rank: int, world: int) -> tuple[Trained, Trained]:
        coordinator = make()
        model = net(coordinator)
        with_lightning.train(
            Classifier(model),
            coordinator,
            loader(microbatches, rank, world),
            **options(world, accumulate_grad_batches=accumulate),
        )
        mine = data(world * microbatches)[rank::world]
        windows = [mine[i : i + accumulate] for i in range(0, len(mine), accumulate)]
        # Lightning divides by the full length also in a window that is shorter.
        return trained(coordinator, model), plain_loop(windows, ddp=True, scale=lambda _: 1 / accumulate)

    for ours, reference in on_ranks(run):
        assert ours == reference
        assert ours.collectives == ours.commits == -(-microbatches // accumulate)


def test_the_commit_comes_before_the_optimizer_moves_the_weights() -> None:
    def run(rank: int, world: int) -> list[int]:
        coordinator = make()
        seen = []

        class Watched(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure()  # Lightning's: forward and backward
                seen.append(coordinator.stats.commits)
                super().step()
                return loss

        module = Classifier(net(coordinator))
        module.configure_optimizers = lambda: Watched(module.parameters(), lr=0.05)
        with_lightning.train(module, coordinator, loader(4), **options(world, accumulate_grad_batches=2))
        return seen

    assert on_ranks(run, world=1) == [[1, 2]]


def test_validation_inside_a_window_records_nothing() -> None:
    def run(rank: int, world: int) -> list[Trained]:
        results = []
        for more in ({"limit_val_batches": 0}, {"val_check_interval": 1}):
            coordinator = make()
            module = Classifier(net(coordinator))
            trainer = Trainer(
                callbacks=[StepScope(coordinator)], **options(world, accumulate_grad_batches=2, **more)
            )
            trainer.fit(module, loader(4), loader(1))
            results.append(trained(coordinator, module))
            coordinator.close()
            assert module.validated == (5 if "val_check_interval" in more else 0)
        return results

    ((without, validated),) = on_ranks(run, world=1)
    assert without == validated
    assert validated.commits == validated.collectives == 2


def test_resuming_equals_never_having_stopped(tmp_path: Path) -> None:
    def run(rank: int, world: int) -> tuple[Trained, Trained]:
        results = []
        for ckpt_path in (None, str(tmp_path / "epoch=0.ckpt")):
            coordinator = make()
            module = Classifier(net(coordinator, seed=0 if ckpt_path is None else 1))
            keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
            trainer = Trainer(
                callbacks=[StepScope(coordinator), keep],
                **options(world, max_epochs=2, enable_checkpointing=True),
            )
            trainer.fit(module, loader(2, rank, world), ckpt_path=ckpt_path, weights_only=True)
            results.append(trained(coordinator, module))
            coordinator.close()
        whole, resumed = results
        assert (whole.commits, resumed.commits) == (4, 2)
        return whole, replace(resumed, commits=whole.commits, collectives=whole.collectives)

    for whole, resumed in on_ranks(run):
        assert whole == resumed


def test_a_failing_rank_frees_its_peer() -> None:
    """Behind its backward, so that its peer does not wait for gradients."""

    def run(rank: int, world: int) -> Freed:
        coordinator = make()
        module = Classifier(net(coordinator))

        def fit() -> None:
            with_lightning.train(module, coordinator, loader(1, rank, world), **options(world))

        fit()
        module.fails = "after the backward" if rank == 1 else ""
        ended = attempt(coordinator, fit)
        coordinator.recover()
        module.fails = ""
        fit()
        assert coordinator.stats.commits == 2
        return ended

    check_freed(on_ranks(run), failing=1)


@pytest.mark.parametrize("where", ["in training_step", "before the backward", "after the backward"])
def test_an_exception_anywhere_leaves_the_scope(where: str) -> None:
    def run(rank: int, world: int) -> int:
        coordinator = make()
        module = Classifier(net(coordinator))
        module.fails = where
        with pytest.raises(Boom):
            with_lightning.train(module, coordinator, loader(2), **options(world))
        coordinator.recover()  # refused where a scope is open
        module.fails = ""
        with_lightning.train(module, coordinator, loader(2), **options(world))
        return coordinator.stats.commits

    assert on_ranks(run, world=1) == [2]


def test_a_training_that_stops_inside_a_window_commits_nothing_for_it() -> None:
    class Stop(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            trainer.should_stop = index == 2

    def run(rank: int, world: int) -> list[int]:
        coordinator = make()
        trainer = Trainer(
            callbacks=[StepScope(coordinator), Stop()], **options(world, accumulate_grad_batches=2)
        )
        trainer.fit(Classifier(net(coordinator)), loader(4, rank, world))
        with coordinator.step():  # nothing is left open, and no rank has to recover
            pass
        return [coordinator.stats.commits, coordinator.stats.aborts]

    assert on_ranks(run) == [[2, 1], [2, 1]]


def test_manual_optimization_is_refused() -> None:
    def run(rank: int, world: int) -> str:
        coordinator = make()
        module = Classifier(net(coordinator))
        module.automatic_optimization = False
        with pytest.raises(ValueError) as error:
            with_lightning.train(module, coordinator, loader(1), **options(world))
        return str(error.value)

    assert "expects automatic optimization" in on_ranks(run, world=1)[0]


def test_a_checkpoint_of_ranks_with_different_slots_is_refused() -> None:
    """Lightning writes the callbacks of rank 0; the slots of the others would be lost without a word."""

    def run(rank: int, world: int) -> str:
        coordinator = make()
        f8.convert(nn.Sequential(nn.Linear(32, 32)), coordinator, prefix=f"stage{rank}")
        coordinator.freeze()
        with pytest.raises(ValueError) as error:
            StepScope(coordinator).state_dict()
        assert StepScope(coordinator, save_state=False).state_dict() == {}
        return str(error.value)

    assert all("expects all ranks to hold the same slots" in said for said in on_ranks(run))
