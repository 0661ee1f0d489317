"""All checks in order, on ranks that a launcher started or on new ones."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from ..bootstrap import init_process_group_from_mpi, launched_by
from ._environment import look_around
from ._findings import Finding, Level
from ._group import GroupHealth, measure
from ._mpi import look_at_mpi
from ._new_ranks import measure_on_new_ranks


def examine(new_ranks: int) -> tuple[list[Finding], GroupHealth | None, int]:
    """Findings, the group's health if one was measured, and the rank of this process.

    Args:
        new_ranks: processes to start where no launcher has started any; 0 measures nothing.
    """
    launcher = launched_by()
    findings = list(look_around())
    if launcher == "mpi" or os.environ.get("LOCAL_RANK", "0") == "0":  # once per host is enough
        findings += look_at_mpi()
    if launcher is not None:
        return _examine_launched(findings, launcher)
    if new_ranks < 2:
        return findings, None, 0
    try:
        health = measure_on_new_ranks(new_ranks)
    except RuntimeError as error:
        mend = "no pipeline can start here either; look at firewalls of the loopback and at the message"
        return [*findings, Finding("process group", Level.BAD, str(error), mend)], None, 0
    return [*findings, *health.findings()], health, 0


def _examine_launched(
    findings: list[Finding], launcher: str
) -> tuple[list[Finding], GroupHealth | None, int]:
    if any(finding.level is Level.BAD and finding.subject == "mpirun" for finding in findings):
        return findings, None, 0  # each is a world of its own, so each has to say so
    if launcher == "mpi":
        init_process_group_from_mpi()
    else:
        own_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if own_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if own_gpu else "gloo")
    try:
        rank = dist.get_rank()
        if dist.get_world_size() == 1:
            return findings, None, rank
        health = measure()
        return [*of_all_ranks(findings), *health.findings()], health, rank
    finally:
        dist.destroy_process_group()


def of_all_ranks(own: list[Finding]) -> list[Finding]:
    """Own findings, and what troubles others that is not among them. A collective."""
    everyone: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    told = {(finding.subject, finding.seen) for finding in everyone[0]}
    result = list(everyone[0])
    for rank, findings in enumerate(everyone):
        for finding in findings:
            if finding.level >= Level.WARNING and (finding.subject, finding.seen) not in told:
                told.add((finding.subject, finding.seen))
                result.append(replace(finding, subject=f"rank {rank}: {finding.subject}"))
    return result
