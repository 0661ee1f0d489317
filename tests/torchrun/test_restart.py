"""A training run whose ranks are killed: torchrun starts it again, and it ends as if nothing had happened."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from forkpool import run_ranks, values
from gpt.checkpoint import list_complete
from gpt.config import Ranks, TrainConfig
from gpt.corpus import Corpus
from gpt.options import parse_arguments
from gpt.training import train

LAUNCH = Path(__file__).parents[2] / "launch"
Torchrun = Callable[..., CompletedProcess[str]]
TEXT = b"the quick brown fox jumps over the lazy dog. " * 30
FLAGS = (
    "--pp 2 --layers 2 --hidden 16 --heads 2 --seq-len 16 --batch 8 --microbatches 4 --steps 12 --amax-history-len 3 "
    "--checkpoint-every 2 --eval-every 3 --sample-every 4 --device cpu --no-plot"
)
# One for each start of the processes: the rank that dies, in which step and where, and the step to go on from.
DEATHS = [
    (1, 3, "forward", 2),
    (1, 5, "backward", 4),
    (1, 6, "collective", 6),
    (1, 7, "write", 6),
    (1, 10, "optimizer", 10),
]
# Each place is wrapped once, in a process that knows which death is its own.
PROGRAM = """
    import os, signal, sys
    sys.path.insert(0, {launch!r})
    import torch, torch.distributed.checkpoint as dcp
    import train_gpt
    from gpt import model, training
    from fp8dist.transport.torch_dist import TorchTransport

    deaths, restarts = {deaths!r}, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, fatal_step, place, _ = deaths[restarts] if restarts < len(deaths) else (-1, -1, "", 0)
    now = -1

    def die():
        if now == fatal_step and int(os.environ["RANK"]) == rank:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def die_behind(owner, name, where):
        real = getattr(owner, name)
        def wrapped(*args, **kwargs):
            result = real(*args, **kwargs)
            if where == place:
                die()
            return result
        setattr(owner, name, wrapped)

    real_step, real_mlp = training.Trainer.step, model.MLP.forward

    def step(self, number):
        global now
        now = number
        return real_step(self, number)

    def mlp(self, x):
        y = real_mlp(self, x)
        if place == "backward" and y.requires_grad:
            y.register_hook(lambda gradient: die())
        return y

    training.Trainer.step, model.MLP.forward = step, mlp
    die_behind(model.Attention, "forward", "forward")
    die_behind(TorchTransport, "start_max", "collective")
    die_behind(torch.optim.AdamW, "step", "optimizer")
    die_behind(dcp.FileSystemWriter, "write_data", "write")
    train_gpt.main()
"""


def lines_that_must_be_equal(run_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key not in ("seconds", "collectives")} for line in lines]


@pytest.fixture
def whole(tmp_path: Path) -> list[tuple[float, float | None, float | None]]:
    """The curve of a run that nobody killed."""
    config: TrainConfig = parse_arguments([*FLAGS.split(), "--checkpoint-every=0"])

    def on_rank(rank: int, world: int) -> list[tuple[float, float | None, float | None]]:
        torch.set_num_threads(1)
        result = train(config, Ranks(rank, world, rank, world), corpus=Corpus(TEXT))
        return [(record.loss, record.gradient_norm, record.eval_loss) for record in result.steps]

    return values(run_ranks(on_rank, world=2, timeout=60.0))[0]


@pytest.mark.timeout(240)  # six starts of two processes; more than half a minute where nothing else runs
def test_killed_ranks_change_no_bit_and_lose_no_more_than_the_steps_since_the_last_checkpoint(
    torchrun: Torchrun, tmp_path: Path, whole: list[tuple[float, float | None, float | None]]
) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    run_dir = tmp_path / "run"
    done = torchrun(
        PROGRAM.format(launch=str(LAUNCH), deaths=DEATHS),
        options=[f"--max-restarts={len(DEATHS)}", "--monitor-interval=0.1"],
        arguments=[*FLAGS.split(), f"--data={tmp_path / 'text'}", f"--run-dir={run_dir}"],
        timeout=200.0,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("fp8 on cpu") == 1 + len(DEATHS), done.stdout
    resumed = [int(step) for step in re.findall(r"going on from step (\d+)", done.stdout)]
    assert resumed == [step for *_, step in DEATHS], done.stdout
    lines = lines_that_must_be_equal(run_dir)
    assert [line["step"] for line in lines] == list(range(12))
    assert [(line["loss"], line["gradient_norm"], line.get("eval_loss")) for line in lines] == whole
    # Nothing is left over, and what is there is whole.
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == [
        "step-00000010",
        "step-00000012",
    ]
    assert len(list_complete(run_dir / "checkpoints")) == 2
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["loss_first"] == whole[0][0]
    assert (summary["ranks_agree"], summary["collectives_per_step"]) == (True, 1)
