"""Ranks of our own on this host, where no launcher has started any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

from ..bootstrap import serve_store
from ._group import GroupHealth

LIMIT = 120.0  # seconds


def measure_on_new_ranks(world: int, limit: float = LIMIT) -> GroupHealth:
    """Start `world` processes on this host, gloo on the loopback, and measure there.

    Raises:
        RuntimeError: a rank failed, or they did not finish within `limit` seconds; none is left behind.
    """
    store, address = serve_store("127.0.0.1", world, timedelta(seconds=limit))
    if store is None:
        raise RuntimeError(f"no port could be opened on the loopback: {address}")
    command = [sys.executable, "-m", "fp8dist.doctor._rank", str(store.port)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + limit
    try:
        outputs = [rank.communicate(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"{world} ranks on this host did not finish a few collectives in {limit:g} s"
        ) from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for index, rank in enumerate(ranks):
        if rank.returncode != 0:
            last = outputs[index][1].strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(f"rank {index} ended with exit code {rank.returncode}: {last[0]}")
    plain = json.loads(outputs[0][0].strip().splitlines()[-1])
    plain["reduce_us"] = {int(words): us for words, us in plain["reduce_us"].items()}
    return GroupHealth(**plain)
