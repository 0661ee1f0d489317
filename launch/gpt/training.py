"""The training loop: the same for one process and for a pipeline, for every precision."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .config import Ranks, TrainConfig
from .corpus import Corpus, load_corpus
from .model import GPTConfig, Stage, build_stage
from .parallel import Grid, Pipeline, PlainLoop, choose_device

if TYPE_CHECKING:
    from .fp8 import Fp8Run, Outcome, Sample

WARMUP_STEPS = 20
FINAL_LR_FRACTION = 0.1


@dataclass
class StepRecord:
    """What one optimizer step showed, equal on all ranks but for the time.

    Attributes:
        step: 0 <= step < config.steps.
        loss: nats per byte, mean over microbatches and replicas, before the update.
        seconds: wall time of forward, backward, reductions and update.
        collectives: amax reductions since the start; 0 without FP8.
        sample: scales and casts, in sampled steps of an FP8 run.
    """

    step: int
    loss: float
    seconds: float
    collectives: int = 0
    sample: Sample | None = None


@dataclass
class TrainResult:
    """A finished run.

    Attributes:
        steps: one record a step.
        fp8: what the coordinator did; None without FP8.
    """

    steps: list[StepRecord] = field(default_factory=list)
    fp8: Outcome | None = None

    @property
    def losses(self) -> list[float]:
        """Loss of each step, in nats per byte."""
        return [record.loss for record in self.steps]


def train(
    config: TrainConfig,
    ranks: Ranks,
    *,
    corpus: Corpus | None = None,
    observe: Callable[[StepRecord], None] | None = None,
) -> TrainResult:
    """Train one model on the ranks of the default process group, which the caller has initialised.

    Every rank calls it with the same configuration and text. It sets no thread count and no environment.

    Args:
        config: the run.
        ranks: this process's place.
        corpus: the text; None reads `config.data`.
        observe: called on this rank after each step.

    Raises:
        ValueError: the configuration does not fit the ranks, the GPUs or the text. Nothing has started then.
    """
    config.check_world(ranks.world)
    device = choose_device(config, ranks)
    corpus = corpus or load_corpus(config.data, seq_len=config.seq_len)
    grid = Grid(config, ranks, device)
    stages, fp8, worker = _build(config, grid)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)

    result = TrainResult()
    if fp8:
        fp8.start()
    for step in range(config.steps):
        start = time.perf_counter()
        sampled = step % config.sample_every == 0 or step == config.steps - 1
        if fp8:
            fp8.begin_step(step, sampled=sampled)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        batch = corpus.batch(step, batch=config.batch, seq_len=config.seq_len, seed=config.seed)
        losses = worker.run(grid.replica_share(batch))
        grid.average_gradients(stages)
        optimizer.step()
        optimizer.zero_grad()
        record = StepRecord(step, grid.mean_loss(losses), time.perf_counter() - start)
        if fp8:
            record.collectives = fp8.collectives
            record.sample = fp8.sample() if sampled else None
        result.steps.append(record)
        if observe:
            observe(record)
    if fp8:
        result.fp8 = fp8.finish()
    return result


def _build(config: TrainConfig, grid: Grid) -> tuple[list[Stage], Fp8Run | None, PlainLoop | Pipeline]:
    """This rank's stages, converted where the run is in FP8, and what runs forward and backward on them."""
    shape = GPTConfig(
        config.layers,
        config.hidden,
        config.heads,
        config.seq_len,
        config.seed,
        bf16=config.precision == "bf16",
    )
    stages = [build_stage(shape, index, config.stages).to(grid.device) for index in grid.stage_indices()]
    fp8 = None
    if config.precision == "fp8":
        from .fp8 import Fp8Run  # the high-precision runs need nothing of the library

        fp8 = Fp8Run(config, stages)
    if config.pp == 1:
        return stages, fp8, PlainLoop(grid, stages[0], fp8.scope if fp8 else nullcontext)
    return stages, fp8, Pipeline(grid, stages, fp8.attach if fp8 else _unchanged)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    warmup = min(WARMUP_STEPS, max(1, config.steps // 5))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * cosine)


def _unchanged(schedule: Any, stages: list[Any]) -> Any:
    return schedule
