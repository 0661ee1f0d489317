"""What the documentation shows runs, what it links to is there, and what it claims has a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp8dist as f8

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A fence, and the comment above it that may say why the block is not run.
FENCE = re.compile(r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
# Code that a page needs and does not show.
HIDDEN = re.compile(r"^<!-- run first\n(?P<text>.*?)^-->$", re.M | re.S)
NOT_RUN = "shown, not run: "
SECONDS = 180


def blocks(page: Path, kind: str) -> list[str]:
    """The blocks of a page that run, in order."""
    text = page.read_text(encoding="utf-8")
    hidden = [(match.start(), match["text"]) for match in HIDDEN.finditer(text)] if kind == "python" else []
    shown = [
        (match.start(), match["text"])
        for match in FENCE.finditer(text)
        if match["kind"] == kind and not (match["note"] or "").startswith(NOT_RUN)
    ]
    return [block for _, block in sorted(hidden + shown)]


def with_blocks(kind: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, kind)]


def run(command: list[str], cwd: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("page", with_blocks("python"), ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("import torch\n\ntorch.set_num_threads(1)\n" + "\n".join(blocks(page, "python")))
    run([sys.executable, str(script)], tmp_path)


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("page", with_blocks("bash"), ids=lambda page: page.name)
def test_the_commands_of_a_page_run_from_the_root_of_the_repository(page: Path, tmp_path: Path) -> None:
    for entry in ROOT.iterdir():  # so that what they write is not left there
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    script = tmp_path / "page.sh"
    lines = "\n".join(blocks(page, "bash"))
    expected = re.sub(
        r"^(.*?)\s+# exit code (\d+)$", r"code=0; \1 || code=$?; [ $code = \2 ]", lines, flags=re.M
    )
    script.write_text(f"set -euo pipefail\n{expected}\n")
    run(["bash", str(script)], tmp_path)


def test_every_block_is_of_a_kind_that_is_checked_or_is_output() -> None:
    kinds = {match["kind"] for page in PAGES for match in FENCE.finditer(page.read_text(encoding="utf-8"))}
    assert kinds <= {"python", "bash", "diff", "json", "toml", "text", "console", "yaml", "mermaid"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


# -- the table of names for people from Transformer Engine -------------------------------------------------------


def rows(page: Path) -> list[list[str]]:
    """Cells of the tables whose last column names a test."""
    found: list[list[str]] = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[-1] == "test":
            inside = True
        elif not cells:
            inside = False
        elif inside and set(cells[-1]) != {"-"}:
            found.append(cells)
    return found


ROWS = rows(ROOT / "docs" / "migrating.md")


def test_each_row_names_a_test_that_exists() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    tests = set(re.findall(r"^def (test_\w+)\(", "\n".join(sources), re.M))
    assert len(ROWS) > 25
    assert [row[0] for row in ROWS if row[-1].strip("`") not in tests] == []


def test_each_name_of_ours_exists_and_is_public() -> None:
    names = [match for row in ROWS for match in re.findall(r"`f8\.(\w+)`", row[1])]
    assert len(names) > 15
    assert [name for name in names if name not in f8.__all__] == []


def test_every_name_of_the_compatibility_layer_has_a_row() -> None:
    shown = {match for row in ROWS for cell in row for match in re.findall(r"f8\.(\w+)", cell)}
    assert set(f8.compat.__all__) - shown == set()
