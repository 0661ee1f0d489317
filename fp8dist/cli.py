"""The `fp8dist` command. Each command imports what it needs, so that `--help` does not wait for torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from .conformance import Report

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
)


@app.callback()
def _commands() -> None:
    """FP8 training with delayed scaling on many ranks."""


@app.command()
def conformance(
    files: Annotated[list[Path], typer.Argument(help="Vector files of recorded scale updates.")],
) -> None:
    """Replay recorded scale updates and compare histories and scales bit for bit.

    Exit code 1: a history differs, or a scale differs by more than its rule set allows (te_fused 0 ulp,
    te_unfused 2 ulp). Exit code 2: a file is missing, unreadable or of another kind; nothing is replayed.
    """
    from rich.console import Console

    from .conformance import load_updates, replay

    try:
        loaded = [(path, load_updates(path)) for path in files]
    except ValueError as error:
        typer.echo(f"fp8dist conformance: {error}", err=True)
        raise typer.Exit(2) from None
    console = Console()
    conforms = True
    for path, updates in loaded:
        reports = replay(updates)
        console.print(_table(path.name, reports))
        conforms = conforms and all(report.conforms for report in reports)
    if not conforms:
        raise typer.Exit(1)


def _table(title: str, reports: list[Report]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("rule set", no_wrap=True)
    for heading in ("settings", "steps", "histories exact", "scales exact", "largest ulp"):
        table.add_column(heading, justify="right")
    table.add_column("conforms")
    for r in reports:
        verdict = "[green]yes[/]" if r.conforms else "[bold red]NO[/]"
        numbers = (r.settings, r.steps, r.histories_exact, r.scales_exact, r.largest_ulp)
        table.add_row(r.rule_set, *map(str, numbers), verdict)
    return table


def main() -> None:
    """Entry point of the `fp8dist` script."""
    app()


if __name__ == "__main__":
    main()
