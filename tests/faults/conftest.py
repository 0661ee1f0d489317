"""`--reliability DIR`: where the tests of the fault matrix leave what they saw, for `report.py`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fp8dist").addoption(
        "--reliability", metavar="DIR", help="record what each fault showed; see docs/reliability.md"
    )
