"""The command `fp8dist report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; RUN/report.html if left out.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Make one page that tells which layers saturate, which rank was slow and who failed.

    Exit code 0: nothing is wrong. Exit code 1: the page names a problem. Exit code 2: no run there, or the page
    cannot be written.
    """
    from ..report import build_report

    path = run / "report.html" if output is None else output
    try:
        report = build_report(run)
        path.write_text(report.html, encoding="utf-8")
    except (OSError, ValueError) as error:
        typer.echo(f"fp8dist report: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo("\n".join([*report.headlines, f"report: {path}"]))
    if open_page:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    if report.problems:
        raise typer.Exit(1)
