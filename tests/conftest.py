"""Lies here so that pytest puts this folder on `sys.path`: tests of every part import `forkpool`."""

import pytest
import torch

# Two cores and up to four ranks: a thread pool per rank would only make them wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How far the random searches of `test_topologies.py` and `test_trouble.py` go."""
    group = parser.getgroup("fp8dist")
    group.addoption(
        "--topologies", type=int, default=0, help="random topologies for each property (0: a few)"
    )
    group.addoption("--topologies-seed", type=int, default=0, help="first seed of that search")
    group.addoption("--troubles", type=int, default=150, help="random schedules of trouble on four ranks")
    group.addoption("--troubles-seed", type=int, default=0, help="seed of the first of them")
