"""Train a byte-level GPT: `torchrun --nproc-per-node N launch/train_gpt.py --pp P --dp D ...`.

Without a launcher it is one process that accumulates the microbatches in a plain loop.
Bad flags end with one line and exit code 2 before any process group starts.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist
from gpt.config import Ranks, TrainConfig, fail, parse_arguments
from gpt.corpus import Corpus, load_corpus
from gpt.parallel import choose_device
from gpt.progress import ProgressDisplay, read_metrics, write_json
from gpt.report import plot, summarize
from gpt.training import train


def main() -> None:
    """Check the flags, join the process group, train, and report on rank 0."""
    ranks = Ranks.from_environment(os.environ)
    try:
        config = parse_arguments(sys.argv[1:])
        if not config.dry_run:
            config.check_world(ranks.world)
        device = choose_device(config, ranks)
        corpus = load_corpus(config.data, seq_len=config.seq_len)
    except ValueError as error:
        fail(str(error), ranks)
    if config.dry_run:
        print(f"{describe(config, device)}; {len(corpus)} bytes of text")
        return
    torch.set_num_threads(config.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        run(config, ranks, corpus, device)
    finally:
        if ranks.world > 1:
            dist.destroy_process_group()


def describe(config: TrainConfig, device: torch.device) -> str:
    """One line on what runs where."""
    how = "one process" if config.world == 1 else f"{config.world} ranks: {config.pp} pp x {config.dp} dp"
    if config.pp > 1:
        how += f", {config.schedule} with {config.chunks} stage(s) a rank"
    work = f"{config.microbatches} microbatches, {config.steps} steps"
    return f"{config.precision} on {device.type}, {how}, {work}"


def run(config: TrainConfig, ranks: Ranks, corpus: Corpus, device: torch.device) -> None:
    """Train, and on rank 0 show progress and write the run's files."""
    with ExitStack() as stack:
        observe = None
        if ranks.rank == 0:
            print(describe(config, device), flush=True)
            observe = stack.enter_context(ProgressDisplay(config)).observe
        result = train(config, ranks, corpus=corpus, observe=observe)
    if ranks.rank == 0:
        summary = summarize(config, result)
        write_json(config.run_dir / "summary.json", summary)
        if config.no_plot:
            return
        metrics = {config.precision.upper(): read_metrics(config.run_dir / "metrics.jsonl")}
        plot(metrics, config.run_dir / "losses-and-scales.png")


if __name__ == "__main__":
    main()
