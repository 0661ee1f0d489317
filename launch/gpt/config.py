"""What a run is: one frozen dataclass, from which the command line is made."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs")
CHUNKED_SCHEDULES = ("interleaved1f1b", "loopedbfs")  # a rank can hold several stages
PRECISIONS = ("fp8", "bf16", "fp32")
DEVICES = ("auto", "cpu", "cuda")
FP8_MULTIPLE = 16  # FP8 GEMMs take features in multiples of it


def about(text: str, choices: Sequence[str] | None = None) -> dict[str, Any]:
    """What the command line says about a field."""
    return {"help": text, "choices": choices}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run, equal on all ranks.

    Raises:
        ValueError: a value is out of range, or two of them do not fit together.
    """

    schedule: str = field(default="1f1b", metadata=about("pipeline schedule", SCHEDULES))
    pp: int = field(default=1, metadata=about("pipeline ranks"))
    dp: int = field(default=1, metadata=about("data-parallel replicas of the pipeline"))
    chunks: int = field(default=1, metadata=about("stages per pipeline rank (interleaved1f1b and loopedbfs)"))
    microbatches: int = field(default=8, metadata=about("microbatches per optimizer step and replica"))
    precision: str = field(
        default="fp8", metadata=about("precision of the blocks' linear layers", PRECISIONS)
    )
    steps: int = field(default=100, metadata=about("optimizer steps"))
    batch: int = field(default=32, metadata=about("sequences per optimizer step, over all replicas"))
    seq_len: int = field(default=64, metadata=about("bytes per sequence"))
    layers: int = field(default=8, metadata=about("transformer blocks"))
    hidden: int = field(default=96, metadata=about("width of the residual stream"))
    heads: int = field(default=4, metadata=about("attention heads"))
    lr: float = field(default=2e-3, metadata=about("peak learning rate of AdamW"))
    amax_history_len: int = field(default=16, metadata=about("steps in the window of FP8's delayed scaling"))
    sample_every: int = field(
        default=10, metadata=about("steps between two samples of scales and of saturated and flushed values")
    )
    seed: int = field(default=0, metadata=about("seed of the weights and of the batches"))
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
        default=Path("runs/manual"), metadata=about("folder for metrics.jsonl, summary.json and the plot")
    )
    no_plot: bool = field(default=False, metadata=about("do not draw losses and scales at the end"))
    dry_run: bool = field(
        default=False, metadata=about("check flags and corpus, say what would run, and stop")
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, choices = getattr(self, item.name), item.metadata["choices"]
            if choices and value not in choices:
                _refuse(item.name, f"one of {', '.join(choices)}", value)
            if type(item.default) is int and value < (0 if item.name == "seed" else 1):
                _refuse(item.name, "a positive whole number", value)
        if not 0 < self.lr < float("inf"):
            _refuse("lr", "a positive finite number", self.lr)
        if self.seed >= 2**31:
            _refuse("seed", "a number below 2**31", self.seed)
        self._check_model()
        self._check_pipeline()

    def _check_model(self) -> None:
        if self.hidden % self.heads:
            _refuse("hidden", f"a multiple of --heads {self.heads}", self.hidden)
        if self.precision == "fp8" and self.hidden % FP8_MULTIPLE:
            _refuse("hidden", f"a multiple of {FP8_MULTIPLE}, which FP8 GEMMs need", self.hidden)

    def _check_pipeline(self) -> None:
        if self.chunks > 1 and (self.pp == 1 or self.schedule not in CHUNKED_SCHEDULES):
            _refuse(
                "chunks",
                f"1, since only {' and '.join(CHUNKED_SCHEDULES)} with --pp > 1 split a rank",
                self.chunks,
            )
        if self.stages > self.layers:
            _refuse(
                "layers",
                f"at least one per pipeline stage (--pp {self.pp} x --chunks {self.chunks})",
                self.layers,
            )
        if self.batch % (self.dp * self.microbatches):
            parts = f"--dp {self.dp} x --microbatches {self.microbatches} = {self.dp * self.microbatches}"
            _refuse("batch", f"a multiple of {parts}", self.batch)
        if self.schedule == "1f1b" and self.microbatches < self.pp:
            _refuse("microbatches", f"at least --pp {self.pp} for 1f1b", self.microbatches)
        rounds = max(1, self.microbatches // self.pp)
        if self.schedule == "interleaved1f1b" and self.microbatches % rounds:
            _refuse("microbatches", f"a multiple of --pp {self.pp} for interleaved1f1b", self.microbatches)

    @property
    def stages(self) -> int:
        """Pipeline stages of one replica."""
        return self.pp * self.chunks

    @property
    def world(self) -> int:
        """Processes of the run."""
        return self.pp * self.dp

    def check_world(self, world: int) -> None:
        """Compare with the number of processes that the launcher started.

        Raises:
            ValueError: it started another number.
        """
        if world != self.world:
            raise ValueError(
                f"expected --pp {self.pp} x --dp {self.dp} = {self.world} processes but got {world}; "
                f"start with `torchrun --nproc-per-node {self.world} launch/train_gpt.py ...`"
            )


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    flag = "--" + name.replace("_", "-")
    raise ValueError(f"expected {flag} to be {expected} but got {got}")


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


def parse_arguments(arguments: Sequence[str]) -> TrainConfig:
    """Make the configuration from command-line arguments.

    Raises:
        ValueError: an argument is unknown, has the wrong type, or does not fit the others. One line.
    """
    parser = _OneLineParser(
        prog="train_gpt.py",
        description="Train a byte-level GPT on --pp x --dp ranks, started by torchrun if there are several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for item in dataclasses.fields(TrainConfig):
        flag = "--" + item.name.replace("_", "-")
        settings: dict[str, Any] = {"default": item.default, "help": item.metadata["help"]}
        if item.default is False:
            settings["action"] = "store_true"
        else:
            settings["type"] = Path if item.name == "data" else type(item.default)
            settings["choices"] = item.metadata["choices"]
        parser.add_argument(flag, **settings)
    return TrainConfig(**vars(parser.parse_args(arguments)))


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that the launcher started.

    Attributes:
        rank: number of this process, 0 <= rank < world.
        world: number of processes.
        local_rank: number among the processes of this host.
        local_world: number of processes of this host.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Ranks:
        """Read what torchrun exports; a plain process is rank 0 of 1."""
        rank, world = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        return cls(
            rank, world, int(environ.get("LOCAL_RANK", rank)), int(environ.get("LOCAL_WORLD_SIZE", world))
        )


def fail(message: str, ranks: Ranks) -> NoReturn:
    """End with exit code 2; the message, which is the same everywhere, is written by rank 0 alone."""
    if ranks.rank == 0:
        print(f"train_gpt.py: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)
