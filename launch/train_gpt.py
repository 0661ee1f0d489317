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
from gpt.checkpoint import Checkpoint, find_start
from gpt.config import Ranks, TrainConfig, fail
from gpt.corpus import Corpus, load_corpus
from gpt.options import config_table, parse_arguments, plain, to_toml
from gpt.parallel import choose_device
from gpt.progress import ProgressDisplay, read_metrics, write_json
from gpt.report import plot, summarize
from gpt.training import TrainResult, train
from rich.console import Console
from torch.distributed.rendezvous import rendezvous

from fp8dist.bootstrap import init_process_group_from_mpi, launched_by


def main() -> None:
    """Check the flags, join the process group, train, and report on rank 0."""
    ranks = Ranks.from_environment(os.environ)
    try:
        config = parse_arguments(sys.argv[1:])
        if not config.dry_run:
            config.check_world(ranks.world)
        device = choose_device(config, ranks)
        corpus = load_corpus(config.data, seq_len=config.seq_len)
        if config.eval_every:
            corpus.split(config.eval_fraction, seq_len=config.seq_len)
        start = find_start(config, ranks)
    except ValueError as error:
        fail(str(error), ranks)
    if ranks.rank == 0:
        show_start(config, device, start)
    if config.dry_run:
        print(f"{len(corpus)} bytes of text")
        return
    torch.set_num_threads(config.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world > 1:
        join(ranks, device)
    try:
        run(config, ranks, corpus, start)
    finally:
        if ranks.world > 1:
            dist.destroy_process_group()


def join(ranks: Ranks, device: torch.device) -> None:
    """Make the process group.

    The store of torchrun's agent outlives a restart, and with it the addresses of ranks that are dead (seen with
    torch 2.13). So every start of the processes has keys of its own.
    """
    if launched_by() == "mpi":
        init_process_group_from_mpi()
        return
    store, _, _ = next(rendezvous("env://"))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"start-{ranks.restarts}", store),
        rank=ranks.rank,
        world_size=ranks.world,
    )


def describe(config: TrainConfig, device: torch.device) -> str:
    """One line on what runs where."""
    how = (
        "one process"
        if config.world == 1
        else f"{config.world} ranks: {config.pp} pp x {config.dp} dp x {config.tp} tp"
    )
    if config.pp > 1:
        how += f", {config.schedule} with {config.chunks} stage(s) a rank"
    if config.experts:
        how += f", {config.experts} experts on {config.ep} replica(s)"
    work = f"{config.microbatches} microbatches, {config.steps} steps"
    return f"{config.precision} on {device.type}, {how}, {work}"


def show_start(config: TrainConfig, device: torch.device, start: Checkpoint | None) -> None:
    """Show what runs, and where it goes on from."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if (table := config_table(config)) is not None:
        console.print(table)
    console.print(describe(config, device))
    if start:
        own = plain(config)
        other = [key for key in sorted({*own, *start.config}) if own.get(key) != start.config.get(key)]
        changes = f", with other values of {', '.join(other)}" if other else ""
        console.print(f"going on from step {start.step}: {start.path}{changes}")


def run(config: TrainConfig, ranks: Ranks, corpus: Corpus, start: Checkpoint | None) -> None:
    """Train, and on rank 0 show progress and write the run's files."""
    with ExitStack() as stack:
        observe = None
        if ranks.rank == 0:
            display = ProgressDisplay(config, first_step=start.step if start else 0)
            observe = stack.enter_context(display).observe
            (config.run_dir / "config.toml").write_text(to_toml(config), encoding="utf-8")
        result = train(config, ranks, corpus=corpus, start=start, observe=observe)
    if ranks.rank == 0:
        write_results(config, result)


def write_results(config: TrainConfig, result: TrainResult) -> None:
    """Write the summary, the sampled text and the figure."""
    if result.text is not None:
        text = result.text.decode(errors="replace")
        print(f"--- sampled ---\n{config.sample}{text}\n---", flush=True)
        (config.run_dir / "sample.txt").write_text(config.sample + text, encoding="utf-8")
    metrics = read_metrics(config.run_dir / "metrics.jsonl")
    if not metrics:
        print("nothing to do: the checkpoint is of the last step, and its metrics.jsonl is gone")
        return
    write_json(config.run_dir / "summary.json", summarize(config, result, metrics))
    if config.plot:
        plot({config.precision.upper(): metrics}, config.run_dir / "losses-and-scales.png")


if __name__ == "__main__":
    main()
