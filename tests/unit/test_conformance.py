"""The replay accepts the recordings, notices every kind of deviation, and refuses other files in one line."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fp8dist import _te_rules, conformance, recipe
from fp8dist.cli import app

VECTORS = Path(__file__).parents[1] / "data" / "te_updates.pt"


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    return conformance.load_updates(VECTORS)


def command(*files: Path | str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["conformance", *map(str, files)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def save(path: Path, settings: list[dict[str, Any]]) -> Path:
    torch.save({"source": "test", "updates": settings}, path)
    return path


def test_all_recorded_settings_conform(recorded: list[dict[str, Any]]) -> None:
    fused, unfused = conformance.replay(recorded)
    assert (fused.settings, fused.steps, fused.histories_exact) == (64, 1536, 1536)
    assert (fused.scales_exact, fused.largest_ulp) == (1536, 0)
    assert (unfused.settings, unfused.steps, unfused.histories_exact) == (64, 1536, 1536)
    assert unfused.largest_ulp <= 2
    assert fused.conforms
    assert unfused.conforms


def test_the_command_prints_both_rule_sets_and_exits_with_zero() -> None:
    code, output, _ = command(VECTORS)
    assert code == 0
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:7]
        for line in output.splitlines()
        if "te_" in line and "│" in line
    }
    assert [cell.strip() for cell in rows["te_fused"]] == ["64", "1536", "1536", "1536", "0"]
    assert [cell.strip() for cell in rows["te_unfused"]][:3] == ["64", "1536", "1536"]


def _add_ulps(values: torch.Tensor, ulps: int) -> None:
    values.view(torch.int32)[0, 0] += ulps


@pytest.mark.parametrize(
    ("key", "ulps", "exit_code"),
    [
        ("fused_scale", 1, 1),
        ("fused_scale", -1, 1),
        ("unfused_scale", 6, 1),
        ("unfused_scale", -6, 1),
        ("fused_history", 1, 1),
        ("unfused_history", 1, 1),
        ("fused_scale", 0, 0),
    ],
)
def test_a_single_value_that_differs_fails_the_file(
    recorded: list[dict[str, Any]], tmp_path: Path, key: str, ulps: int, exit_code: int
) -> None:
    setting = copy.deepcopy(recorded[5])
    if key.endswith("history"):
        setting[key].view(torch.int32)[-1, -1, 0] += ulps
    else:
        _add_ulps(setting[key], ulps)
    assert command(save(tmp_path / "v.pt", [recorded[0], setting]))[0] == exit_code


def test_one_file_that_differs_fails_the_command_whatever_its_place(
    recorded: list[dict[str, Any]], tmp_path: Path
) -> None:
    good, bad = copy.deepcopy(recorded[0]), copy.deepcopy(recorded[0])
    _add_ulps(bad["fused_scale"], 1)
    files = [save(tmp_path / "good.pt", [good]), save(tmp_path / "bad.pt", [bad])]
    assert command(*files)[0] == command(*reversed(files))[0] == 1


@pytest.mark.parametrize(("ulps", "conforms"), [(2, True), (-2, True), (3, False), (-3, False)])
def test_the_unfused_rule_may_be_two_ulp_off_and_not_three(
    recorded: list[dict[str, Any]], ulps: int, conforms: bool
) -> None:
    setting = copy.deepcopy(recorded[0])
    state = conformance._recipe(setting, "te_unfused").make_state(10, backward=not setting["forward"])
    for step, row in enumerate(setting["amax"]):
        state.update(row)
        setting["unfused_scale"][step] = state.scale
    _add_ulps(setting["unfused_scale"], ulps)
    _, unfused = conformance.replay([setting])
    assert unfused.conforms is conforms
    assert unfused.largest_ulp == abs(ulps)
    assert unfused.scales_exact == unfused.steps - 1


def test_a_nan_in_another_place_is_a_difference(recorded: list[dict[str, Any]]) -> None:
    setting = copy.deepcopy(recorded[-1])
    setting["fused_history"][-1, 0, 0] = torch.nan  # a 0 was recorded
    fused, unfused = conformance.replay([setting])
    assert fused.histories_exact == fused.steps - 1
    assert not fused.conforms
    assert unfused.conforms


def test_the_two_rules_cannot_be_exchanged(
    recorded: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "TEFusedState", _te_rules.TEUnfusedState)
    monkeypatch.setattr(recipe, "TEUnfusedState", _te_rules.TEFusedState)
    assert [report.conforms for report in conformance.replay(recorded)] == [False, False]
    assert command(VECTORS)[0] == 1


def _foreign(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "f.pt"
    good = {
        "fp8_format": "HYBRID", "forward": True, "amax_history_len": 1, "amax_compute_algo": "max",
        "margin": 0, "amax": torch.ones(1, 1),
        "fused_scale": torch.ones(1, 1), "unfused_scale": torch.ones(1, 1),
        "fused_history": torch.zeros(1, 1, 1), "unfused_history": torch.zeros(1, 1, 1),
    }  # fmt: skip
    contents: dict[str, Any] = {
        "modules": {"source": "x", "linear": [], "layernorm_mlp": []},
        "other keys": {"weights": torch.ones(1)},
        "a list": [1],
        "no settings": {"updates": []},
        "no dict": {"updates": [1]},
        "lacks a key": {"updates": [{k: v for k, v in good.items() if k != "unfused_scale"}]},
        "unknown format": {"updates": [good | {"fp8_format": "E5M2"}]},
        "bad margin": {"updates": [good | {"margin": 1000}]},
        "no steps": {"updates": [good | {"amax": torch.ones(0, 1)}]},
        "bad shape": {"updates": [good | {"fused_history": torch.zeros(1, 2, 1)}]},
        "bad dtype": {"updates": [good | {"unfused_scale": torch.ones(1, 1).double()}]},
    }
    if kind == "text":
        path.write_text("no tensors here")
    elif kind == "truncated":
        path.write_bytes(VECTORS.read_bytes()[:5000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "code":
        torch.save({"updates": [torch.nn.Linear(1, 1)]}, path)
    elif kind in contents:
        torch.save(contents[kind], path)
    return path  # "missing": nothing was written


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "cannot be read"),
        ("text", "written by torch.save"),
        ("truncated", "written by torch.save"),
        ("empty", "written by torch.save"),
        ("code", "written by torch.save"),
        ("modules", "recordings of modules"),
        ("other keys", "expected the key 'updates' but got weights"),
        ("a list", "expected the key 'updates' but got list"),
        ("no settings", "non-empty"),
        ("no dict", "updates[0]: expected a setting"),
        ("lacks a key", "updates[0]: lacks unfused_scale"),
        ("unknown format", "updates[0]: names no recipe that exists"),
        ("bad margin", "margin: expected"),
        ("no steps", "not empty"),
        ("bad shape", "expected fused_history to be torch.float32 [1, 1, 1]"),
        ("bad dtype", "expected unfused_scale to be torch.float32 [1, 1]"),
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path, kind: str, says: str) -> None:
    path = _foreign(tmp_path, kind)
    code, output, error = command(VECTORS, path)
    assert code == 2
    assert output == ""
    assert len(error.splitlines()) == 1
    assert str(path) in error
    assert says in error


def test_the_command_line_module_itself_does_not_load_torch() -> None:
    package = str(Path(recipe.__file__).parent)
    code = (
        "import sys, types\n"
        "parent = sys.modules['fp8dist'] = types.ModuleType('fp8dist')\n"
        f"parent.__path__ = [{package!r}]\n"
        "sys.modules['torch'] = None\n"
        "import fp8dist.cli\n"
        "assert fp8dist.cli.app"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
