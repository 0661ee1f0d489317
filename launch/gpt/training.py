"""The training loop: the same for one process and for a pipeline, for every precision, new or resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from .checkpoint import Checkpoint, Checkpoints, RunState, load
from .config import Ranks, TrainConfig
from .corpus import Corpus, load_corpus
from .experts import Experts
from .loops import Pipeline, PlainLoop
from .model import GPTConfig, Stage, build_stage, parameter_names
from .optimizer import Clipper, learning_rate, make_optimizer
from .parallel import Grid, choose_device
from .replicas import average_gradients, replicate
from .sampling import gather_model, sample_text
from .tensor import split_layers

if TYPE_CHECKING:
    from .fp8 import Fp8Run, Outcome, Sample


@dataclass
class StepRecord:
    """What one optimizer step showed, equal on all ranks but for the time.

    Attributes:
        step: 0 <= step < config.steps.
        loss: nats per byte, mean over microbatches and replicas, before the update.
        seconds: wall time of forward, backward, reductions and update.
        collectives: amax reductions since this process started; 0 without FP8.
        gradient_norm: of the whole model, before clipping; None if gradients are not clipped.
        eval_loss: nats per byte of held-out text, after the update, in steps that evaluate.
        sample: scales and casts, in sampled steps of an FP8 run.
    """

    step: int
    loss: float
    seconds: float
    collectives: int = 0
    gradient_norm: float | None = None
    eval_loss: float | None = None
    sample: Sample | None = None


@dataclass
class TrainResult:
    """A finished run.

    Attributes:
        steps: one record for each step that this process ran.
        fp8: what the coordinator did; None without FP8.
        text: what the model wrote, on rank 0, if `--sample` asked for it.
    """

    steps: list[StepRecord] = field(default_factory=list)
    fp8: Outcome | None = None
    text: bytes | None = None

    @property
    def losses(self) -> list[float]:
        """Loss of each of these steps, in nats per byte."""
        return [record.loss for record in self.steps]


def train(
    config: TrainConfig,
    ranks: Ranks,
    *,
    corpus: Corpus | None = None,
    start: Checkpoint | None = None,
    observe: Callable[[StepRecord], None] | None = None,
) -> TrainResult:
    """Train one model on the ranks of the default process group, which the caller has initialised.

    Every rank calls it with the same configuration and text. It sets no thread count and no environment.

    Args:
        config: the run.
        ranks: this process's place.
        corpus: the text; None reads `config.data`.
        start: the checkpoint to go on from; None starts at step 0.
        observe: called on this rank after each step.

    Raises:
        ValueError: the configuration does not fit the ranks, the GPUs or the text. Nothing has started then.
        RuntimeError: the ranks go on from different steps.
    """
    config.check_world(ranks.world)
    device = choose_device(config, ranks)
    corpus = corpus or load_corpus(config.data, seq_len=config.seq_len)
    trainer = Trainer(config, ranks, Grid(config, ranks, device), corpus)
    first = trainer.prepare(start)
    result = TrainResult()
    for step in range(first, config.steps):
        record = trainer.step(step)
        result.steps.append(record)
        if observe:
            observe(record)
        trainer.save_if_due(step)
    trainer.finish(result)
    return result


class Trainer:
    """A rank's part of a run: its stages, and what moves them."""

    def __init__(self, config: TrainConfig, ranks: Ranks, grid: Grid, corpus: Corpus) -> None:
        self.config = config
        self.grid = grid
        self.text, self.held_out = corpus, corpus
        if config.eval_every:
            self.text, self.held_out = corpus.split(config.eval_fraction, seq_len=config.seq_len)
        self.shape = GPTConfig(
            config.layers,
            config.hidden,
            config.heads,
            config.seq_len,
            config.seed,
            # What is not in FP8 is in bfloat16 on a GPU: attention in float32 would take longer than FP8 saves.
            bf16=config.precision == "bf16" or (config.precision == "fp8" and grid.device.type == "cuda"),
            recomputed=config.activation_checkpoint,
            experts=config.experts,
            moe_every=config.moe_every,
            top_k=config.top_k,
            own_experts=grid.own_experts,
        )
        self.stages, self.fp8, self.worker = _build(config, grid, self.shape)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for stage in self.stages for name, parameter in stage.named_parameters()
        }
        self.optimizer = make_optimizer(config, self.parameters)
        self.clipper = Clipper(grid, self.parameters, parameter_names(self.shape)) if config.clip else None
        coordinator = self.fp8.coordinator if self.fp8 else None
        self.state = RunState(self.parameters, self.optimizer, coordinator, ranks, grid.own_experts.start)
        self.checkpoints = Checkpoints(config, ranks)

    def prepare(self, start: Checkpoint | None) -> int:
        """Take over a checkpoint if there is one, and return the first step to run. A collective.

        Raises:
            RuntimeError: the ranks have found different checkpoints.
        """
        first = start.step if start else 0
        if not self.grid.agree(first):
            raise RuntimeError(
                f"expected all ranks to go on from one step but this one found {first} in {self.config.checkpoints}; "
                "all hosts must see the same --checkpoint-dir"
            )
        if start:
            load(start, self.state)
        if self.fp8:
            self.fp8.start()
        return first

    def step(self, step: int) -> StepRecord:
        """One optimizer step, and what it showed."""
        config, start = self.config, time.perf_counter()
        # The monitor counts from 1, too; the first and the last step begin and end the curves.
        sampled = (step + 1) % config.sample_every == 0 or step in (0, config.steps - 1)
        if self.fp8:
            self.fp8.begin_step(step, sampled=sampled)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        batch = self.text.batch(step, batch=config.batch, seq_len=config.seq_len, seed=config.seed)
        losses = self.worker.run(self.grid.replica_share(batch))
        average_gradients(self.grid, self.stages)
        norm = self.clipper.clip() if self.clipper else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        record = StepRecord(
            step, self.grid.mean_loss(losses), time.perf_counter() - start, gradient_norm=norm
        )
        if self.fp8:
            record.collectives = self.fp8.collectives
            record.sample = self.fp8.sample() if sampled else None
            self.fp8.end_step(step, record.loss)
        if _due(config, step, config.eval_every):
            record.eval_loss = self.evaluate()
        return record

    def evaluate(self) -> float:
        """Mean loss on held-out text. Moves nothing: no scale, no history, no gradient."""
        config = self.config
        losses = []
        for index in range(config.eval_batches):
            batch = self.held_out.batch(index, batch=config.batch, seq_len=config.seq_len, seed=config.seed)
            losses += self.worker.evaluate(self.grid.replica_share(batch))
        return self.grid.mean_loss(losses)

    def save_if_due(self, step: int) -> None:
        """Write a checkpoint behind a step, where one is due. A collective."""
        if _due(self.config, step, self.config.checkpoint_every):
            self.checkpoints.save(step + 1, self.state)

    def finish(self, result: TrainResult) -> None:
        """Add to a result what the whole run showed. A collective."""
        config = self.config
        if self.fp8:
            result.fp8 = self.fp8.finish()
        if config.sample:
            model = gather_model(self.grid, self.shape, self.parameters)
            if model:
                result.text = sample_text(
                    model,
                    config.sample.encode(),
                    count=config.sample_bytes,
                    window=config.seq_len,
                    temperature=config.temperature,
                    seed=config.seed,
                )


def _due(config: TrainConfig, step: int, every: int) -> bool:
    """Whether something that comes every so many steps, and at the end, comes behind this one."""
    return every > 0 and ((step + 1) % every == 0 or step == config.steps - 1)


def _build(
    config: TrainConfig, grid: Grid, shape: GPTConfig
) -> tuple[list[Stage], Fp8Run | None, PlainLoop | Pipeline]:
    """This rank's stages, converted where the run is in FP8, and what runs forward and backward on them."""
    stages = [build_stage(shape, index, config.stages).to(grid.device) for index in grid.stage_indices()]
    if config.ep > 1:
        for module in (module for stage in stages for module in stage.modules()):
            if isinstance(module, Experts):
                module.group = grid.dp_group
    fp8 = None
    if config.precision == "fp8":
        from .fp8 import Fp8Run  # the high-precision runs need nothing of the library

        fp8 = Fp8Run(config, stages)
    for stage in stages:
        split_layers(grid, stage)
    replicas = [replicate(grid, stage) for stage in stages]
    if config.pp == 1:
        return stages, fp8, PlainLoop(grid, replicas[0], fp8.scope if fp8 else nullcontext)
    return stages, fp8, Pipeline(grid, replicas, fp8.attach if fp8 else _unchanged)


def _unchanged(schedule: Any, stages: list[Any]) -> Any:
    return schedule
