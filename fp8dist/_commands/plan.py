"""`fp8dist plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from ..plan._costs import Costs
    from ..plan._plan import Members, Plan, Updates

SCHEDULES = "gpipe, 1f1b, interleaved1f1b, loopedbfs, interleavedzerobubble, zbv, dualpipev"


def plan_command(
    schedule: Annotated[
        str, typer.Option(help=f"{SCHEDULES}; or a CSV file in the format of torch's schedules.")
    ],
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks; a file says it itself.")] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Stages per rank; default: what the schedule needs, or 2.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Per step; default: twice the pipeline ranks.")
    ] = None,
    dp: Annotated[int, typer.Option(help="Replicas of the pipeline.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that split one layer.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks, among the replicas, that share out the experts.")] = 1,
    updates: Annotated[
        str, typer.Option(help="per-step, or per-microbatch: blocking, in each backward.")
    ] = "per-step",
    group: Annotated[str, typer.Option(help="Whom a collective joins: all, stage (dp x tp) or dp.")] = "all",
    layers: Annotated[int | None, typer.Option(help="Of the model; default: one per stage.")] = None,
    linears_per_layer: Annotated[int, typer.Option(help="FP8 linears, without experts; 3 slots each.")] = 4,
    experts: Annotated[int, typer.Option(help="Routed experts per layer, of two linears each.")] = 0,
    slots: Annotated[int | None, typer.Option(help="All slots, instead of layers and experts.")] = None,
    forward_ms: Annotated[float, typer.Option(help="One forward of a stage.")] = 1.0,
    backward_ms: Annotated[float, typer.Option(help="One full backward.")] = 2.0,
    input_ms: Annotated[
        float | None, typer.Option(help="Its half for the inputs; default: half of it.")
    ] = None,
    weight_ms: Annotated[
        float | None, typer.Option(help="Its half for the weights; default: half of it.")
    ] = None,
    p2p_us: Annotated[float, typer.Option(help="Latency of a message between stages.")] = 10.0,
    p2p_bytes: Annotated[int, typer.Option(help="Size of that message.")] = 0,
    p2p_gbps: Annotated[float, typer.Option(help="Bandwidth of that link, 10**9 bytes per second.")] = 50.0,
    alpha_us: Annotated[
        float | None, typer.Option(help="All-reduce: latency of one round. Default 65.")
    ] = None,
    beta_gbps: Annotated[
        float | None, typer.Option(help="All-reduce: 10**9 bytes per second. Default 50.")
    ] = None,
    constants: Annotated[
        Path | None, typer.Option(help="Both from a JSON file, as fp8dist doctor writes it.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Draw the timeline: FILE.png or FILE.svg.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the timeline for ui.perfetto.dev.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not cut large tables.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and no table.")] = False,
) -> None:
    """Plan one training step without devices: who does what in which order, whether it ends, what it costs.

    Exit code 0: the step ends, and all members of each reduction group enter the same collectives. Exit code 1: it
    does not, or they do not. Exit code 2: numbers that do not fit each other, or a file that cannot be used.
    """
    from ..plan import Costs, Model, plan

    try:
        costs = Costs(
            forward_ms=forward_ms, backward_ms=backward_ms, input_ms=input_ms, weight_ms=weight_ms, p2p_us=p2p_us,
            p2p_bytes=p2p_bytes, p2p_gbps=p2p_gbps,
        )  # fmt: skip
        found = plan(
            schedule, pp=pp, chunks=chunks, microbatches=microbatches, dp=dp, tp=tp, ep=ep,
            model=Model(layers, linears_per_layer, experts, slots),
            updates=cast("Updates", updates), group=cast("Members", group),
            costs=_with_constants(costs, constants, alpha_us, beta_gbps),
        )  # fmt: skip
        _write(found, draw, perfetto)
    except (OSError, ValueError) as error:
        typer.echo(f"fp8dist plan: {error}", err=True)
        raise typer.Exit(2) from None
    _print(found, full, as_json)
    if not found.good:
        raise typer.Exit(1)


def _with_constants(
    costs: Costs, path: Path | None, alpha_us: float | None, beta_gbps: float | None
) -> Costs:
    """A flag wins over the file."""
    from dataclasses import replace

    if path is not None:
        costs = costs.with_constants(path)
    alpha_us = costs.alpha_us if alpha_us is None else alpha_us
    return replace(costs, alpha_us=alpha_us, beta_gbps=costs.beta_gbps if beta_gbps is None else beta_gbps)


def _write(found: Plan, picture: Path | None, perfetto: Path | None) -> None:
    import json

    from ..plan._draw import draw, trace_events

    if picture is not None:
        draw(found, picture)
    if perfetto is not None:
        perfetto.write_text(json.dumps(trace_events(found)), encoding="ascii")


def _print(found: Plan, full: bool, as_json: bool) -> None:
    import json

    from rich.console import Console

    from ..plan._report import as_plain, lines, tables

    if as_json:
        typer.echo(json.dumps(as_plain(found)))
        return
    typer.echo("\n".join(lines(found)))
    console = Console()
    for table in tables(found, full=full):
        console.print(table)
