"""The configuration: from a file, over it the command line, and back into a file."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from gpt.config import TrainConfig
from gpt.options import config_table, parse_arguments, read_config, to_toml

LAUNCH = Path(__file__).parents[2] / "launch"
EVERY = TrainConfig(
    schedule="zbv", pp=2, dp=2, chunks=2, microbatches=4, activation_checkpoint="mlp", precision="bf16", steps=7,
    batch=16, seq_len=9, layers=4, hidden=12, heads=3, lr=1e-5, warmup_steps=0, min_lr_fraction=0.0,
    weight_decay=0.5, clip=0.0, amax_history_len=3, eval_every=2, eval_fraction=0.25, eval_batches=3,
    sample='quote " slash \\ line\n ümlaut', sample_bytes=5, temperature=0.0, sample_every=4, checkpoint_every=6,
    checkpoint_dir=Path("c d"), resume="never", seed=9, device="cpu", threads=2, data=Path("text"),
    run_dir=Path("r"), plot=False,
)  # fmt: skip


OTHERS = [
    EVERY,
    TrainConfig(dp=2, dp_mode="fsdp"),
    TrainConfig(tp=2),
    TrainConfig(dp=2, ep=2, experts=4, moe_every=3, top_k=2),
]


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("config", [TrainConfig(), *OTHERS])
def test_a_configuration_survives_its_file(tmp_path: Path, config: TrainConfig) -> None:
    assert parse_arguments(["--config", written(tmp_path, to_toml(config))]) == config


def test_every_field_is_among_those_that_survive() -> None:
    default = [
        item.name
        for item in dataclasses.fields(TrainConfig)
        if all(getattr(config, item.name) == item.default for config in OTHERS)
    ]
    assert default == ["dry_run", "show_config"]  # what belongs to one call of the program is not kept


def test_flags_go_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "steps = 7\nlr = 1\nplot = false\nseq_len = 9\n")
    config = parse_arguments(["--steps", "8", "--config", file, "--plot"])
    assert (config.steps, config.lr, config.plot, config.seq_len, config.layers) == (8, 1.0, True, 9, 8)
    assert isinstance(config.lr, float)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stepps = 7", r"expected only names of flags in .*run.toml but got 'stepps'; see --help"),
        ("seq-len = 7", r"got 'seq-len'; write _ for -"),
        ("steps = 7.0", r"expected steps in .* to be of type int but got 7.0 \(float\)"),
        ("steps = true", r"expected steps in .* to be of type int but got True \(bool\)"),
        ("plot = 1", r"expected plot in .* to be of type bool but got 1 \(int\)"),
        ("lr = '1'", r"expected lr in .* to be of type float but got '1' \(str\)"),
        ("data = 1", r"expected data in .* to be of type Path but got 1"),
        ("steps = [1]", r"expected steps in .* to be of type int but got \[1\] \(list\)"),
        ("[model]\nlayers = 1", r"got 'model'"),
        ("steps = ", r"expected TOML in .*run.toml but got"),
        ("steps = 0", r"expected --steps to be a positive whole number but got 0"),
        ("hidden = 90", r"expected --hidden to be a multiple of --heads 4"),
    ],
)
def test_an_unfit_file_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_arguments(["--config", written(tmp_path, text)])


def test_only_what_differs_is_shown_unless_all_is_asked_for() -> None:
    def shown(config: TrainConfig) -> str:
        console = Console(file=io.StringIO(), width=200)
        table = config_table(config)
        assert table is not None
        console.print(table)
        return console.file.getvalue()

    assert config_table(TrainConfig()) is None
    some = shown(TrainConfig(steps=7, sample="[red]"))
    assert "--steps" in some and "7" in some and "100" in some and "[red]" in some
    assert "--layers" not in some
    everything = shown(TrainConfig(show_config=True))
    assert all("--" + item.name.replace("_", "-") in everything for item in dataclasses.fields(TrainConfig))


@pytest.mark.parametrize("file", sorted((LAUNCH / "configs").glob("*.toml")), ids=lambda file: file.name)
def test_files_that_come_with_the_program_are_fit(file: Path) -> None:
    assert read_config(file)
    parse_arguments(["--config", str(file)])
