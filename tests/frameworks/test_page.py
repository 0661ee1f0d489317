"""The lines that docs/frameworks.md tells people to add are the lines that the tests here run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "frameworks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^(?:<!-- snippet: (\w+) -->\n)?```diff\n(.*?)^```$", PAGE, re.M | re.S)


def changed(block: str, sign: str) -> list[str]:
    return [line[1:].strip() for line in block.splitlines() if line.startswith(sign)]


def test_each_block_names_its_snippet_and_each_snippet_has_a_block() -> None:
    snippets = {path.stem for path in (HERE / "snippets").glob("*.py")} - {"__init__"}
    assert sorted(name for name, _ in BLOCKS) == sorted(snippets)


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_the_added_lines_of_a_block_are_in_a_snippet_that_a_test_runs(name: str, block: str) -> None:
    source = (HERE / "snippets" / f"{name}.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in source.splitlines()]
    added = changed(block, "+")
    assert 1 <= len(added) <= 3
    assert len(changed(block, "-")) <= len(added)
    positions = [lines.index(line) for line in added]  # a ValueError names the line that is missing
    assert positions == sorted(positions)
    assert not set(changed(block, "-")) & set(lines)
    tests = "\n".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    assert re.search(rf"\b{name}\.(train|convert)\(", tests)
