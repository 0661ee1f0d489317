"""These tests need GPUs and skip without. The parent must not touch CUDA: it does not survive a fork."""

from __future__ import annotations

import glob
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))

GPUS = len(glob.glob("/dev/nvidia[0-9]*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            marker = item.get_closest_marker("gpus")
            needed = marker.args[0] if marker else 1
            if needed > GPUS:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {GPUS}"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(n): skip on machines with fewer GPUs")
