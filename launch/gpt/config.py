"""What a run is: one frozen dataclass, from which command line and configuration file are made."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

V_SCHEDULES = ("zbv", "dualpipev")  # a rank holds one stage on the way there and one on the way back
CHUNKED_SCHEDULES = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble", *V_SCHEDULES)
SCHEDULES = ("gpipe", "1f1b", *CHUNKED_SCHEDULES)
PRECISIONS = ("fp8", "bf16", "fp32")
DEVICES = ("auto", "cpu", "cuda")
DP_MODES = ("allreduce", "ddp", "fsdp")
RECOMPUTED = ("none", "full", "attention", "mlp")
FP8_MULTIPLE = 16  # FP8 GEMMs take features in multiples of it


def about(text: str, choices: Sequence[str] | None = None, *, least: float | None = None) -> dict[str, Any]:
    """What the command line says about a field; a number without `least` is at least 1."""
    return {"help": text, "choices": choices, "least": least}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run, equal on all ranks.

    Raises:
        ValueError: a value is out of range, or two of them do not fit together.
    """

    schedule: str = field(default="1f1b", metadata=about("pipeline schedule", SCHEDULES))
    pp: int = field(default=1, metadata=about("pipeline ranks"))
    dp: int = field(default=1, metadata=about("data-parallel replicas of the pipeline"))
    dp_mode: str = field(
        default="allreduce",
        metadata=about(
            "how replicas share gradients: one all-reduce, DDP, or FSDP2 (weights, too)", DP_MODES
        ),
    )
    tp: int = field(default=1, metadata=about("ranks that share each linear layer (tensor parallel)"))
    chunks: int = field(
        default=1,
        metadata=about("stages per pipeline rank, for schedules that split a rank (V schedules: 2)"),
    )
    microbatches: int = field(default=8, metadata=about("microbatches per optimizer step and replica"))
    activation_checkpoint: str = field(
        default="none", metadata=about("parts of a block computed again in the backward", RECOMPUTED)
    )
    precision: str = field(
        default="fp8", metadata=about("precision of the blocks' linear layers", PRECISIONS)
    )
    steps: int = field(default=100, metadata=about("optimizer steps"))
    batch: int = field(default=32, metadata=about("sequences per optimizer step, over all replicas"))
    seq_len: int = field(default=64, metadata=about("bytes per sequence"))
    layers: int = field(default=8, metadata=about("transformer blocks"))
    hidden: int = field(default=96, metadata=about("width of the residual stream"))
    heads: int = field(default=4, metadata=about("attention heads"))
    experts: int = field(
        default=0, metadata=about("experts in place of the MLP in some blocks; 0: none", least=0)
    )
    moe_every: int = field(default=2, metadata=about("every how manyth block has experts"))
    top_k: int = field(default=1, metadata=about("experts that each byte goes to"))
    ep: int = field(default=1, metadata=about("replicas that share the experts: 1 or all --dp"))
    lr: float = field(default=2e-3, metadata=about("peak learning rate of AdamW", least=0))
    warmup_steps: int | None = field(
        default=None,
        metadata=about("steps of linear warm-up; a fifth of the run, at most 20, if left out", least=0),
    )
    min_lr_fraction: float = field(
        default=0.1, metadata=about("part of the peak at which the cosine ends", least=0)
    )
    weight_decay: float = field(default=0.01, metadata=about("AdamW's, on matrices only", least=0))
    clip: float = field(
        default=1.0, metadata=about("largest norm of the whole model's gradient; 0: any", least=0)
    )
    amax_history_len: int = field(default=16, metadata=about("steps in the window of FP8's delayed scaling"))
    eval_every: int = field(
        default=0, metadata=about("steps between evaluations on held-out text; 0: none", least=0)
    )
    eval_fraction: float = field(
        default=0.1, metadata=about("part of the text, at its end, held out for evaluation", least=0)
    )
    eval_batches: int = field(default=1, metadata=about("batches per evaluation, always the same ones"))
    sample: str = field(default="", metadata=about("text that the trained model goes on with at the end"))
    sample_bytes: int = field(default=200, metadata=about("bytes to sample"))
    temperature: float = field(
        default=0.8, metadata=about("of sampling; 0 takes the likeliest byte", least=0)
    )
    sample_every: int = field(
        default=10, metadata=about("steps between two samples of scales and of saturated and flushed values")
    )
    checkpoint_every: int = field(default=0, metadata=about("steps between checkpoints; 0: none", least=0))
    checkpoint_dir: Path | None = field(
        default=None, metadata=about("folder of the checkpoints; RUN_DIR/checkpoints if left out")
    )
    resume: str = field(
        default="auto",
        metadata=about("auto: from the newest complete checkpoint; never; or a checkpoint's path"),
    )
    seed: int = field(default=0, metadata=about("seed of the weights and of the batches", least=0))
    device: str = field(
        default="auto", metadata=about("auto takes CUDA where each rank can have a GPU", DEVICES)
    )
    threads: int = field(
        default=1, metadata=about("CPU threads per rank; bits are equal only between runs with equal numbers")
    )
    data: Path | None = field(
        default=None, metadata=about("training text; the standard library's documentation if left out")
    )
    run_dir: Path = field(
        default=Path("runs/manual"),
        metadata=about("folder for config.toml, metrics.jsonl, summary.json, plot"),
    )
    plot: bool = field(default=True, metadata=about("draw losses and scales at the end"))
    dry_run: bool = field(
        default=False, metadata=about("check flags and corpus, say what would run, and stop")
    )
    show_config: bool = field(
        default=False, metadata=about("show every value at the start, not only those that differ")
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_value(item, getattr(self, item.name))
        if self.lr == 0:
            _refuse("lr", "a positive finite number", self.lr)
        for name in ("seed", "sample_bytes"):
            if getattr(self, name) >= 2**31:
                _refuse(name, "a number below 2**31", getattr(self, name))
        self._check_model()
        self._check_training()
        self._check_pipeline()

    def _check_model(self) -> None:
        if self.hidden % self.heads:
            _refuse("hidden", f"a multiple of --heads {self.heads}", self.hidden)
        if self.precision == "fp8" and self.hidden % FP8_MULTIPLE:
            _refuse("hidden", f"a multiple of {FP8_MULTIPLE}, which FP8 GEMMs need", self.hidden)

    def _check_training(self) -> None:
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            _refuse("warmup-steps", f"at most --steps {self.steps}", self.warmup_steps)
        if self.min_lr_fraction > 1:
            _refuse("min-lr-fraction", "between 0 and 1", self.min_lr_fraction)
        if not 0 < self.eval_fraction < 1:
            _refuse("eval-fraction", "between 0 and 1, without both", self.eval_fraction)

    def _check_pipeline(self) -> None:
        if self.chunks > 1 and (self.pp == 1 or self.schedule not in CHUNKED_SCHEDULES):
            _refuse(
                "chunks",
                f"1, since only {', '.join(CHUNKED_SCHEDULES)} with --pp > 1 split a rank",
                self.chunks,
            )
        if self.pp > 1 and self.schedule in V_SCHEDULES and self.chunks != 2:
            _refuse("chunks", f"2 for {self.schedule}, which lays two stages a rank out as a V", self.chunks)
        if self.stages > self.layers:
            _refuse(
                "layers",
                f"at least one per pipeline stage (--pp {self.pp} x --chunks {self.chunks})",
                self.layers,
            )
        if self.batch % (self.dp * self.microbatches):
            parts = f"--dp {self.dp} x --microbatches {self.microbatches} = {self.dp * self.microbatches}"
            _refuse("batch", f"a multiple of {parts}", self.batch)
        if self.pp > 1:
            self._check_microbatches()
        if self.tp > 1:
            self._check_tensor_parallel()
        if self.dp > 1 and self.dp_mode != "allreduce":
            self._check_wrapped_replicas()
        self._check_experts()

    def _check_experts(self) -> None:
        if self.ep not in (1, self.dp):
            _refuse("ep", f"1 or --dp {self.dp}", self.ep)
        if self.experts % self.ep or (self.ep > 1 and not self.experts):
            _refuse("experts", f"a multiple of --ep {self.ep}", self.experts)
        if not self.experts:
            return
        if self.top_k > self.experts:
            _refuse("top-k", f"at most --experts {self.experts}", self.top_k)
        if self.tp > 1:
            _refuse("experts", "0 with --tp > 1", self.experts)
        if self.dp > 1 and self.dp_mode != "allreduce":
            _refuse("dp-mode", "allreduce with --experts", self.dp_mode)
        # These run a backward in two halves, and would send its tokens twice.
        if self.pp > 1 and self.schedule in (*V_SCHEDULES, "interleavedzerobubble"):
            _refuse("experts", f"0 with {self.schedule}", self.experts)

    def _check_tensor_parallel(self) -> None:
        if self.heads % self.tp:
            _refuse("heads", f"a multiple of --tp {self.tp}", self.heads)
        if self.precision == "fp8" and self.hidden % (FP8_MULTIPLE * self.tp):
            least = FP8_MULTIPLE * self.tp
            _refuse("hidden", f"a multiple of {least}, which FP8 GEMMs of --tp {self.tp} need", self.hidden)

    def _check_wrapped_replicas(self) -> None:
        # torch 2.13's pipeline schedules run a hidden backward first, which DDP takes for a real one and fails.
        for name in ("pp", "tp"):
            if getattr(self, name) > 1:
                _refuse("dp-mode", f"allreduce with --{name} > 1", self.dp_mode)

    def _check_microbatches(self) -> None:
        """What torch's schedules ask for, before any of them is made."""
        if self.schedule == "1f1b" and self.microbatches < self.pp:
            _refuse("microbatches", f"at least --pp {self.pp} for 1f1b", self.microbatches)
        if self.schedule == "dualpipev" and self.microbatches < self.stages:
            _refuse(
                "microbatches",
                f"at least {self.stages} (two for each of --pp) for dualpipev",
                self.microbatches,
            )
        # They run in rounds of about --pp microbatches, all of one size.
        rounds = max(1, self.microbatches // self.pp)
        in_rounds = self.schedule in ("interleaved1f1b", "interleavedzerobubble")
        if in_rounds and self.microbatches % rounds:
            _refuse("microbatches", f"a multiple of --pp {self.pp} for {self.schedule}", self.microbatches)

    @property
    def stages(self) -> int:
        """Pipeline stages of one replica."""
        return self.pp * self.chunks

    @property
    def world(self) -> int:
        """Processes of the run."""
        return self.dp * self.pp * self.tp

    @property
    def grid(self) -> str:
        """The flags whose product is the number of processes."""
        return f"--pp {self.pp} x --dp {self.dp}" + (f" x --tp {self.tp}" if self.tp > 1 else "")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.checkpoint_dir or self.run_dir / "checkpoints"

    def check_world(self, world: int) -> None:
        """Compare with the number of processes that the launcher started.

        Raises:
            ValueError: it started another number.
        """
        if world != self.world:
            raise ValueError(
                f"expected {self.grid} = {self.world} processes but got {world}; "
                f"start with `torchrun --nproc-per-node {self.world} launch/train_gpt.py ...`"
            )


def _check_value(item: dataclasses.Field[Any], value: Any) -> None:
    choices, least = item.metadata["choices"], item.metadata["least"]
    if choices and value not in choices:
        _refuse(item.name, f"one of {', '.join(choices)}", value)
    if isinstance(value, bool | str | Path) or value is None:
        return
    least = 1 if least is None else least
    if not least <= value < math.inf:
        if isinstance(value, float):
            expected = "a positive finite number" if item.name == "lr" else f"a finite number >= {least}"
        else:
            expected = "a positive whole number" if least else "a whole number >= 0"
        _refuse(item.name, expected, value)


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    flag = "--" + name.replace("_", "-")
    raise ValueError(f"expected {flag} to be {expected} but got {got}")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that the launcher started.

    Attributes:
        rank: number of this process, 0 <= rank < world.
        world: number of processes.
        local_rank: number among the processes of this host.
        local_world: number of processes of this host.
        restarts: how often the launcher has started all processes anew after a failure.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    restarts: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Ranks:
        """Read what torchrun, Open MPI or MPICH export; a plain process is rank 0 of 1."""

        def read(default: int, *names: str) -> int:
            return int(next((environ[name] for name in names if name in environ), default))

        rank = read(0, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
        world = read(1, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        return cls(
            rank,
            world,
            read(rank, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
            read(world, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
            read(0, "TORCHELASTIC_RESTART_COUNT"),
        )


def fail(message: str, ranks: Ranks) -> NoReturn:
    """End with exit code 2; the message, which is the same everywhere, is written by rank 0 alone."""
    if ranks.rank == 0:
        print(f"train_gpt.py: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)
