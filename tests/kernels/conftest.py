"""These tests use the GPU in the test process itself, so they have a pytest run of their own.

A process that has done so must not fork ranks, as the tests in `tests/gpu` do. All skip without a GPU.
"""

from __future__ import annotations

import glob
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if glob.glob("/dev/nvidia[0-9]*"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, this machine has none"))
