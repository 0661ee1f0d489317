"""The `fp8dist` command. Each command imports what it needs, so that `--help` waits for nothing but torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._commands.doctor import doctor_command
from ._commands.plan import plan_command
from ._commands.report import report_command

if TYPE_CHECKING:
    from rich.table import Table

    from .blame import Judgement
    from .conformance import Report

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
)
app.command("plan")(plan_command)
app.command("report")(report_command)
app.command("doctor")(doctor_command)


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


@app.command()
def blame(
    directory: Annotated[Path, typer.Argument(help="Directory with the flight recorder dumps of all ranks.")],
    coordinator: Annotated[str | None, typer.Option(help="Judge only this coordinator.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Also write a trace for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and no table.")] = False,
) -> None:
    """Name the rank that was the first to differ from the others, and what to do.

    Exit code 0: nothing is wrong. Exit code 1: the ranks disagree, or one failed or is missing. Exit code 2: no
    dumps, one that is damaged, no such coordinator, or the trace cannot be written.
    """
    import json

    from .blame import judge, read_directory, trace

    try:
        runs = read_directory(directory)
        if coordinator is not None:
            if coordinator not in runs:
                known = ", ".join(map(repr, runs))
                raise ValueError(f"{directory}: expected a coordinator {coordinator!r} but got {known}")
            runs = {coordinator: runs[coordinator]}
        if perfetto is not None:
            perfetto.write_text(json.dumps(trace(runs)), encoding="ascii")
    except (OSError, ValueError) as error:
        typer.echo(f"fp8dist blame: {error}", err=True)
        raise typer.Exit(2) from None
    judgements = [judge(dumps) for dumps in runs.values()]
    if as_json:
        typer.echo(json.dumps([j.as_plain() for j in judgements], indent=2))
    else:
        _print_judgements(judgements)
    if any(j.finding is not None for j in judgements):
        raise typer.Exit(1)


def _print_judgements(judgements: list[Judgement]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    for judgement in judgements:
        if len(judgements) > 1:
            typer.echo(f"coordinator {judgement.coordinator!r}:")
        typer.echo("\n".join(judgement.lines))
        title = escape(f"coordinator {judgement.coordinator!r}, {judgement.world} ranks")
        table = Table(title=title, caption=judgement.caption or None)
        table.add_column("rank", justify="right")
        for heading in ("host", "last commit", "now", "last event"):
            table.add_column(heading)
        table.add_column("age", justify="right")
        table.add_column("dump")
        for row in judgement.rows:
            age = "" if row.age is None else f"{row.age:.1f} s"
            cells = (row.host, row.committed, row.where, row.last, age, row.dump)
            guilty = judgement.finding is not None and row.rank in judgement.finding.ranks
            table.add_row(str(row.rank), *map(escape, cells), style="bold red" if guilty else None)
        Console().print(table)


def main() -> None:
    """Entry point of the `fp8dist` script."""
    app()


if __name__ == "__main__":
    main()
