"""The training program: what it refuses, what it computes, what it writes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

import train_gpt
from gpt import report
from gpt.config import Ranks, TrainConfig
from gpt.corpus import Corpus
from gpt.fp8 import CastCounts, Outcome, Sample, agree
from gpt.loops import SCHEDULE_CLASSES, PlainLoop
from gpt.model import GPTConfig, build_stage, next_byte_loss
from gpt.optimizer import Clipper, learning_rate, make_optimizer
from gpt.options import parse_arguments
from gpt.parallel import Grid
from gpt.progress import metrics_line, read_metrics
from gpt.sampling import sample_text
from gpt.training import StepRecord, Trainer, TrainResult, train

LAUNCH = Path(__file__).parents[2] / "launch"
TEXT = b"the quick brown fox jumps over the lazy dog. " * 30
TINY = {
    "precision": "fp32", "layers": 2, "hidden": 16, "heads": 2, "seq_len": 16, "batch": 8, "microbatches": 4,
    "steps": 3, "device": "cpu",
}  # fmt: skip
BAD_FLAGS = [
    ("--layers 3 --pp 4", "--layers to be at least one per pipeline stage"),
    ("--layers 7 --pp 4 --chunks 2 --schedule loopedbfs", "--layers to be at least one per pipeline stage"),
    ("--batch 30", "--batch to be a multiple of --dp 1 x --microbatches 8"),
    ("--batch 24 --dp 2", "--batch to be a multiple of --dp 2 x --microbatches 8 = 16"),
    ("--pp 2 --chunks 2 --schedule 1f1b", "--chunks to be 1"),
    ("--chunks 2 --schedule interleaved1f1b", "--chunks to be 1"),
    ("--microbatches 2 --pp 4", "--microbatches to be at least --pp 4 for 1f1b"),
    ("--microbatches 7 --batch 7 --pp 2 --schedule interleaved1f1b", "--microbatches to be a multiple"),
    ("--hidden 90", "--hidden to be a multiple of --heads 4"),
    ("--hidden 40", "--hidden to be a multiple of 16"),
    ("--steps 0", "--steps to be a positive whole number but got 0"),
    ("--seed -1", "--seed to be"),
    ("--lr nan", "--lr to be a positive finite number"),
    ("--schedule zigzag", "zigzag"),
    ("--precision fp4", "fp4"),
    ("--steps many", "many"),
    ("--unknown 1", "--unknown"),
    ("--pp 2 --schedule zbv", "--chunks to be 2 for zbv"),
    ("--pp 2 --chunks 3 --schedule dualpipev", "--chunks to be 2 for dualpipev"),
    (
        "--microbatches 2 --pp 2 --chunks 2 --schedule dualpipev",
        "--microbatches to be at least 4 (two for each of --pp) for dualpipev",
    ),
    (
        "--microbatches 7 --batch 7 --pp 2 --schedule interleavedzerobubble",
        "--microbatches to be a multiple of --pp 2 for interleavedzerobubble",
    ),
    ("--activation-checkpoint some", "some"),
    ("--dp 2 --pp 2 --dp-mode ddp", "--dp-mode to be allreduce with --pp > 1 but got ddp"),
    ("--dp 2 --tp 2 --dp-mode fsdp", "--dp-mode to be allreduce with --tp > 1 but got fsdp"),
    ("--experts 3 --dp 2 --ep 2", "--experts to be a multiple of --ep 2"),
    ("--dp 2 --ep 2", "--experts to be a multiple of --ep 2 but got 0"),
    ("--experts 4 --dp 4 --ep 2", "--ep to be 1 or --dp 4"),
    ("--experts 2 --top-k 3", "--top-k to be at most --experts 2"),
    ("--experts 2 --tp 2", "--experts to be 0 with --tp > 1"),
    ("--experts 2 --dp 2 --dp-mode ddp", "--dp-mode to be allreduce with --experts"),
    ("--experts 2 --pp 2 --chunks 2 --schedule zbv", "--experts to be 0 with zbv"),
    ("--tp 3", "--heads to be a multiple of --tp 3"),
    ("--tp 4", "--hidden to be a multiple of 64, which FP8 GEMMs of --tp 4 need"),
    ("--tp 2", "--pp 1 x --dp 1 x --tp 2 = 2 processes but got 1"),
    ("--clip -1", "--clip to be a finite number >= 0 but got -1.0"),
    ("--clip inf", "--clip to be a finite number >= 0"),
    ("--warmup-steps 101", "--warmup-steps to be at most --steps 100"),
    ("--min-lr-fraction 2", "--min-lr-fraction to be between 0 and 1"),
    ("--lr 0", "--lr to be a positive finite number"),
    ("--eval-fraction 1", "--eval-fraction to be between 0 and 1"),
    (
        "--eval-every 1 --eval-fraction 0.01",
        "at least 65 bytes (--seq-len 64 and the last target) to train on",
    ),
    ("--resume nowhere", "expected a complete checkpoint of this program at nowhere"),
    ("--config nowhere.toml", "expected a readable file for --config but got nowhere.toml"),
    ("--pp 2 --dp 2", "--pp 2 x --dp 2 = 4 processes but got 1"),
    ("--data no-such-file", "but got no-such-file"),
    ("--seq-len 2000", "at least 2001 bytes"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_bytes(TEXT)
    return file


@pytest.mark.parametrize(("flags", "complaint"), BAD_FLAGS)
def test_bad_flags_give_one_line_and_code_2_before_any_process_group(
    flags: str,
    complaint: str,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["train_gpt.py", "--data", str(text_file), "--run-dir", str(text_file.parent), *flags.split()]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as exit_:
        train_gpt.main()
    said = capsys.readouterr()
    assert exit_.value.code == 2
    assert complaint in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not dist.is_initialized()


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_of_all_ranks_only_the_first_complains(rank: int, lines: int, text_file: Path) -> None:
    # No rendezvous exists: a process group would wait for it far beyond the time limit.
    launched = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command = [sys.executable, str(LAUNCH / "train_gpt.py"), "--data", str(text_file), "--pp", "2"]
    done = subprocess.run(command, env=os.environ | launched, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == lines, done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--pp 4 --schedule gpipe", "--pp 4 --schedule 1f1b",
        "--pp 2 --chunks 2 --dp 2 --schedule interleaved1f1b",
        "--pp 4 --chunks 2 --schedule loopedbfs --microbatches 2", "--dp 4", "--precision bf16 --hidden 40",
        "--pp 2 --chunks 2 --schedule zbv --microbatches 1", "--pp 4 --chunks 2 --schedule dualpipev",
        "--pp 2 --dp 2 --experts 4 --ep 2 --top-k 2", "--dp 2 --dp-mode fsdp", "--tp 2 --pp 2 --dp 2 --schedule gpipe",
        "--pp 4 --schedule interleavedzerobubble --clip 0 --warmup-steps 0",
    ],
)  # fmt: skip
def test_good_flags_are_accepted(flags: str) -> None:
    config = parse_arguments(flags.split())
    config.check_world(config.world)
    assert config.schedule in SCHEDULE_CLASSES


def test_launcher_is_read_from_the_environment() -> None:
    assert Ranks.from_environment({}) == Ranks(0, 1, 0, 1)
    launched = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Ranks.from_environment(launched) == Ranks(5, 8, 1, 4)


@pytest.mark.parametrize("schedule", ["1f1b", "loopedbfs"])
def test_one_process_trains_like_one_large_batch(schedule: str) -> None:
    config, corpus = TrainConfig(**TINY, schedule=schedule, clip=0.1, weight_decay=3.0), Corpus(TEXT)
    losses = train(config, Ranks(), corpus=corpus).losses

    shape = GPTConfig(config.layers, config.hidden, config.heads, config.seq_len)
    model = build_stage(shape, 0, 1)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    expected = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        inputs, targets = corpus.batch(step, batch=config.batch, seq_len=config.seq_len, seed=config.seed)
        loss = next_byte_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        assert norm > config.clip
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < expected[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)


def test_plain_loop_gives_the_gradients_and_losses_of_the_whole_batch() -> None:
    # Not seen in losses: AdamW takes the same steps whatever the gradients' common factor is.
    config, corpus = TrainConfig(**TINY), Corpus(TEXT)
    shape = GPTConfig(config.layers, config.hidden, config.heads, config.seq_len)
    accumulated, whole = build_stage(shape, 0, 1), build_stage(shape, 0, 1)
    batch = corpus.batch(0, batch=config.batch, seq_len=config.seq_len, seed=0)
    losses = PlainLoop(Grid(config, Ranks(), torch.device("cpu")), accumulated, nullcontext).run(batch)
    assert len(losses) == config.microbatches
    assert losses[0].item() == pytest.approx(
        next_byte_loss(whole(batch.inputs[:2]), batch.targets[:2]).item()
    )
    next_byte_loss(whole(batch.inputs), batch.targets).backward()
    for (name, parameter), expected in zip(accumulated.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=name)


def test_run_repeats_bit_for_bit_and_shows_every_step_once() -> None:
    config, seen = TrainConfig(**TINY), list[StepRecord]()
    first = train(config, Ranks(), corpus=Corpus(TEXT), observe=seen.append)
    assert first.losses == train(config, Ranks(), corpus=Corpus(TEXT)).losses
    assert seen == first.steps
    assert [record.step for record in seen] == [0, 1, 2]


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    config = TrainConfig(steps=200, lr=1.0)
    rates = [learning_rate(config, step) for step in range(config.steps)]
    top = rates.index(max(rates))
    assert max(rates) == 1.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[0] < 0.1
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(("warmup", "least"), [(0, 0.0), (1, 0.5), (7, 1.0)])
def test_warm_up_and_last_rate_are_as_asked_for(warmup: int, least: float) -> None:
    config = TrainConfig(steps=10_000, lr=2.0, warmup_steps=warmup, min_lr_fraction=least)
    rates = [learning_rate(config, step) for step in range(config.steps)]
    assert rates[:warmup] == [pytest.approx(2.0 * (step + 1) / warmup) for step in range(warmup)]
    assert rates[warmup] == 2.0
    assert rates[-1] == pytest.approx(2.0 * least, abs=1e-6)


def test_only_matrices_decay() -> None:
    config = TrainConfig(lr=0.5, weight_decay=0.25)
    model = build_stage(GPTConfig(layers=1, hidden=16, heads=2, seq_len=8), 0, 1)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(config, dict(model.named_parameters())).step()
    for name, parameter in model.named_parameters():
        expected = 1 - 0.5 * 0.25 if name.endswith("weight") and "norm" not in name else 1.0
        assert (parameter == expected).all(), name


def test_clipping_scales_all_gradients_by_one_factor_and_leaves_small_ones_alone() -> None:
    config = TrainConfig(clip=2.5)
    grid = Grid(config, Ranks(), torch.device("cpu"))
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"}
    clipper = Clipper(grid, parameters, ["a", "b", "somewhere else"])
    parameters["a"].grad, parameters["b"].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, -4.0])
    assert clipper.clip() == 5.0
    assert clipper.clip() == 2.5
    assert [parameter.grad.tolist() for parameter in parameters.values()] == [[1.5, 0.0], [0.0, -2.0]]


def test_evaluation_moves_nothing() -> None:
    config, corpus = TrainConfig(**TINY | {"precision": "fp8"}, eval_every=100, eval_batches=2), Corpus(TEXT)
    trainer = Trainer(config, Ranks(), Grid(config, Ranks(), torch.device("cpu")), corpus)
    trainer.prepare(None)
    trainer.step(0)
    coordinator = trainer.fp8.coordinator

    def everything() -> tuple[object, ...]:
        weights = [parameter.detach().clone() for parameter in trainer.parameters.values()]
        gradients = [parameter.grad is None for parameter in trainer.parameters.values()]
        return coordinator.digest(), coordinator.stats, [w.sum().item() for w in weights], gradients

    before = everything()
    first = trainer.evaluate()
    assert everything() == before
    assert trainer.evaluate() == first
    batch = corpus.batch(0, batch=config.batch, seq_len=config.seq_len, seed=0)
    assert not any(loss.requires_grad for loss in trainer.worker.evaluate(batch))
    assert all(module.training for stage in trainer.stages for module in stage.modules())
    trainer.step(1)
    assert coordinator.digest() != before[0]
    coordinator.close()


def test_held_out_text_is_never_trained_on_and_is_what_is_evaluated() -> None:
    text = b"a" * 900 + b"b" * 100
    config = TrainConfig(**TINY | {"steps": 30, "lr": 0.02}, eval_every=30)
    result = train(config, Ranks(), corpus=Corpus(text))
    assert result.losses[-1] < 0.1
    assert result.steps[-1].eval_loss > 2.0  # it never saw a b


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_trained_model_goes_on_with_a_text(temperature: float) -> None:
    config = TrainConfig(
        **TINY | {"steps": 60, "lr": 0.02, "precision": "bf16"},
        sample="ab" * 20,
        sample_bytes=30,
        temperature=temperature,
    )
    result = train(config, Ranks(), corpus=Corpus(b"ab" * 500))
    assert result.text == b"ab" * 15


def test_sampling_follows_the_temperature() -> None:
    model = build_stage(GPTConfig(layers=1, hidden=16, heads=2, seq_len=8), 0, 1)

    def drawn(temperature: float, seed: int) -> bytes:
        return sample_text(model, b"x", count=20, window=8, temperature=temperature, seed=seed)

    assert drawn(0.0, 1) == drawn(0.0, 2) == drawn(1e-4, 3)
    assert drawn(1.0, 1) == drawn(1.0, 1) != drawn(1.0, 2)
    assert len(set(drawn(50.0, 1))) > 10


def test_train_refuses_another_number_of_ranks() -> None:
    with pytest.raises(ValueError, match="= 2 processes but got 1"):
        train(TrainConfig(**TINY, pp=2), Ranks(), corpus=Corpus(TEXT))


def test_program_writes_metrics_and_summary(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    monkeypatch.setattr(sys, "argv", ["x", *flags, f"--data={text_file}", f"--run-dir={run_dir}"])
    train_gpt.main()
    metrics = read_metrics(run_dir / "metrics.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert summary["loss_first"] == metrics[0]["loss"]
    assert summary["loss_last20_mean"] == pytest.approx(sum(line["loss"] for line in metrics) / 3)
    assert (summary["precision"], summary["world"], summary["steps"]) == ("fp32", 1, 3)
    assert summary["commits"] is summary["collectives_per_step"] is summary["ranks_agree"] is None
    assert capsys.readouterr().out.count("loss") == 3
    again = parse_arguments(["--config", str(run_dir / "config.toml")])
    assert (again.steps, again.run_dir, again.data) == (3, run_dir, text_file)


def test_a_resumed_program_continues_its_metrics_and_summary(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (TINY | {"steps": 5}).items()]
    flags += [f"--data={text_file}", f"--run-dir={run_dir}", "--checkpoint-every=2", "--no-plot"]
    monkeypatch.setattr(sys, "argv", ["x", *flags])
    train_gpt.main()
    whole = read_metrics(run_dir / "metrics.jsonl")
    (run_dir / "checkpoints" / "step-00000005").rename(tmp_path / "lost")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a process died while it wrote
    train_gpt.main()
    assert "going on from step 4" in capsys.readouterr().out
    resumed = read_metrics(run_dir / "metrics.jsonl")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert resumed[:4] == whole[:4]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["loss_first"], summary["steps"]) == (whole[0]["loss"], 5)
    train_gpt.main()  # nothing is left to do
    assert read_metrics(run_dir / "metrics.jsonl") == resumed


@pytest.mark.parametrize(
    ("reports", "agreed"),
    [
        ([((5, 5), {"ranks 0-1": 1, "rank 0": 2}), ((5, 5), {"ranks 0-1": 1})], True),
        ([((5, 5), {"ranks 0-1": 1, "rank 0": 2}), ((5, 5), {"ranks 0-1": 3})], False),
        ([((5, 5), {"rank 0": 1}), ((5, 6), {"rank 1": 2})], False),
        ([((5, 5), {}), ((5, 5), {"rank 1": 2})], True),
    ],
)
def test_ranks_agree_where_counters_and_shared_digests_are_equal(
    reports: list[tuple[tuple[int, ...], dict[str, int]]], agreed: bool
) -> None:
    assert agree(reports) is agreed


def fake_fp8_result(losses: list[float]) -> TrainResult:
    scales = {f"layers.{i}.mlp.up.{role}": 2.0**i for i in range(5) for role in report.ROLES}
    casts = {"input": CastCounts(1000, 10, 20), "grad_output": CastCounts(3000, 0, 60)}
    records = [StepRecord(i, loss, 0.5, collectives=2 * (i + 1)) for i, loss in enumerate(losses)]
    records[0].sample = Sample(scales, casts)
    return TrainResult(records, Outcome(len(losses), 2 * len(losses), 0, True, {}))


def test_summary_measures_collectives_and_fractions() -> None:
    losses = [5.0] + [2.0] * 15 + [3.0] * 10
    config = TrainConfig(steps=len(losses), pp=2, dp=2)
    summary = report.summarize(config, fake_fp8_result(losses))
    assert summary["collectives_per_step"] == 2
    assert summary["saturated_fraction"] == 10 / 4000
    assert summary["flushed_fraction"] == 80 / 4000
    assert (summary["loss_first"], summary["loss_last20_mean"]) == (5.0, 2.5)
    assert (summary["commits"], summary["ranks_agree"]) == (len(losses), True)


@pytest.mark.parametrize(("ranks_agree", "code"), [(True, 0), (False, 1)])
def test_comparison_joins_both_runs_and_fails_where_ranks_disagree(
    ranks_agree: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(steps=3)
    result = fake_fp8_result([5.0, 4.0, 3.03])
    result.fp8.ranks_agree = ranks_agree
    plain = TrainResult([StepRecord(i, loss, 0.4) for i, loss in enumerate([5.0, 4.0, 2.97])])
    for name, run in (("fp8", result), ("fp32", plain)):
        (tmp_path / name).mkdir()
        lines = [json.dumps(metrics_line(record)) for record in run.steps]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
        (tmp_path / name / "summary.json").write_text(json.dumps(report.summarize(config, run)))

    assert report.main(tmp_path) == code
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["collectives_per_step"], summary["ranks_agree"]) == (2, ranks_agree)
    assert summary["loss_difference_percent"] == pytest.approx(100 * (12.03 / 11.97 - 1))
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["casts"]["input"] == {
        "saturated": 0.01,
        "flushed": 0.02,
    }
    assert len(read_metrics(tmp_path / "metrics-fp32.jsonl")) == 3
    assert not (tmp_path / "fp8").exists()
    assert ("NO" in capsys.readouterr().out) is not ranks_agree
    pytest.importorskip("matplotlib")
    assert (tmp_path / "losses-and-scales.png").read_bytes().startswith(b"\x89PNG")


def test_figure_shows_first_middle_and_last_layer_in_order_of_depth() -> None:
    scales = {f"layers.{i}.{part}.weight": 1.0 for i in range(12) for part in ("mlp.up", "attn.qkv")}
    assert report.plotted_modules(scales) == ["layers.0.mlp.up", "layers.6.mlp.up", "layers.11.mlp.up"]


@pytest.mark.parametrize("flags", ["--steps 0", "--steps x", "--data no-such-file", "--steps", "--bogus 1"])
def test_quickstart_refuses_bad_options_before_it_installs_anything(flags: str) -> None:
    command = ["bash", str(LAUNCH / "quickstart.sh"), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("quickstart: expected")
