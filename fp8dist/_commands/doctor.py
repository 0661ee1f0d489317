"""`fp8dist doctor` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..doctor._findings import Finding
    from ..doctor._group import GroupHealth

COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "bad": "bold red"}


def doctor_command(
    ranks: Annotated[
        int,
        typer.Option(min=0, help="Processes to start for measuring, if no launcher has; 0 measures nothing."),
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and no table.")] = False,
    constants: Annotated[
        Path | None, typer.Option(help="Write the collective's constants for `fp8dist plan --constants`.")
    ] = None,
) -> None:
    """Look at this machine, start or join a process group, measure one collective, and say what to change.

    Under torchrun or mpirun it runs on the launched ranks; rank 0 prints. Exit code 0: a run can start. Exit code 1:
    something would stop it or make it wrong. Exit code 2: the options cannot be used.
    """
    if (constants is not None and ranks == 1) or (constants is not None and not constants.parent.is_dir()):
        typer.echo(
            f"fp8dist doctor: --constants expects --ranks of 2 or more and a file in an existing folder but got "
            f"--ranks {ranks} and {constants}",
            err=True,
        )
        raise typer.Exit(2)
    from ..doctor._findings import Level, worst
    from ..doctor._run import examine

    findings, health, rank = examine(ranks)
    if rank == 0:
        if constants is not None and health is not None:
            _write(constants, health)
        _print(findings, health, as_json=as_json)
    if worst(findings) is Level.BAD:
        raise typer.Exit(1)


def _write(path: Path, health: GroupHealth) -> None:
    import json

    path.write_text(json.dumps(health.constants.as_plain()) + "\n", encoding="ascii")


def _print(findings: list[Finding], health: GroupHealth | None, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if as_json:
        group = None if health is None else {**asdict(health), "constants": health.constants.as_plain()}
        typer.echo(json.dumps({"findings": [f.as_plain() for f in findings], "group": group}, indent=2))
        return
    table = Table(title="fp8dist doctor", show_lines=False)
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("seen")
    table.add_column("what to do")
    for finding in findings:
        level = finding.level.name.lower()
        cells = (finding.subject, f"[{COLOURS[level]}]{level}[/]", escape(finding.seen), escape(finding.mend))
        table.add_row(escape(cells[0]), *cells[1:])
    console = Console()
    console.print(table)
    if health is not None:
        found = health.constants
        console.print(
            f"one all-reduce takes about {found.alpha_us:g} us x ceil(log2(ranks)) + bytes / {found.beta_gbps:g} GB/s",
            soft_wrap=True,
        )
