"""Which schedule makes which rank do what: torch's own tables, read from schedules on stand-ins for stages.

GPipe and 1F1B run from code in torch and not from a table, so their order is derived here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ._actions import COMPUTE, Action, Kind, Program, check_messages, with_messages

# Our name: torch's name, and the stages per rank that it takes (None: any).
TORCH_NAMES: dict[str, tuple[str, int | None]] = {
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved1f1b": ("Interleaved1F1B", None),
    "loopedbfs": ("LoopedBFS", None),
    "interleavedzerobubble": ("InterleavedZeroBubble", None),
    "zbv": ("ZBVZeroBubble", 2),
    "dualpipev": ("DualPipeV", 2),
}
NAMES = tuple(TORCH_NAMES)
DEFAULT_CHUNKS = 2  # where the schedule takes any number


@dataclass(frozen=True)
class Table:
    """A schedule for a number of ranks and microbatches, without scopes and collectives."""

    schedule: str
    """Its name, or the path of its file."""
    programs: tuple[Program, ...]
    """What each pipeline rank does: compute, sends and receives."""
    placement: tuple[int, ...]
    """The pipeline rank of each stage."""
    microbatches: int


def table(schedule: str, pp: int, chunks: int | None, microbatches: int) -> Table:
    """The table of one of `NAMES`.

    Args:
        schedule: the name, in any case.
        pp: pipeline ranks.
        chunks: stages per rank; None takes what the schedule needs, or two.
        microbatches: per step.

    Raises:
        ValueError: the schedule does not exist, or not for these numbers.
    """
    name = schedule.lower()
    if name not in TORCH_NAMES:
        raise ValueError(f"expected a schedule out of {', '.join(NAMES)} or a CSV file but got {schedule!r}")
    torch_name, fixed = TORCH_NAMES[name]
    chunks = chunks if chunks is not None else fixed or DEFAULT_CHUNKS
    if fixed is not None and chunks != fixed:
        raise ValueError(f"expected --chunks {fixed} for {name} but got {chunks}")
    if fixed == 1:
        return _of_single_stages(name, pp, microbatches)
    from torch.distributed.pipelining.schedules import get_schedule_class

    try:
        made: Any = get_schedule_class(torch_name)(_stand_ins(pp, chunks), microbatches, loss_fn=_no_loss)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"torch refuses {name} with {_first_line(error)}") from None
    return _table(name, made.pipeline_order_with_comms, made.stage_index_to_group_rank, microbatches)


def _of_single_stages(name: str, pp: int, microbatches: int) -> Table:
    if name == "1f1b" and microbatches < pp:
        raise ValueError(f"1f1b expects at least as many microbatches as ranks, {pp}, but got {microbatches}")
    order = gpipe if name == "gpipe" else one_forward_one_backward
    compute = [tuple(order(rank, pp, microbatches)) for rank in range(pp)]
    placement = tuple(range(pp))
    return Table(name, with_messages(compute, placement), placement, microbatches)


def gpipe(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards."""
    for kind in (Kind.F, Kind.B):
        yield from (Action(kind, rank, i) for i in range(microbatches))


def one_forward_one_backward(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """As many forwards ahead as there are ranks from here to the last; then a backward before each further forward."""
    ahead = min(microbatches, pp - rank)
    yield from (Action(Kind.F, rank, i) for i in range(ahead))
    for i in range(microbatches):
        yield Action(Kind.B, rank, i)
        if ahead + i < microbatches:
            yield Action(Kind.F, rank, ahead + i)


def table_from_csv(path: Path) -> Table:
    """A table in the format of torch's `_load_csv`, with or without sends and receives; a row per rank.

    Numbers of ranks, stages and microbatches are the file's own. Compute actions in an order that torch cannot
    complete with sends and receives get them right before and behind, so that one sees where they wait.

    Raises:
        ValueError: the file is no such table; says where.
        OSError: it cannot be read.
    """
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rows = _rows(path)
    actions = [action for row in rows for action in row]
    stages = {action.stage for action in actions if action.kind in COMPUTE}
    if not stages:
        raise ValueError(f"{path}: expected a row of actions like 0F0 for each rank but got none")
    n_stages, microbatches = max(stages) + 1, max(a.microbatch for a in actions if a.kind in COMPUTE) + 1
    if len(rows) > n_stages or len(stages) < n_stages:
        raise ValueError(
            f"{path}: expected actions for each of the stages 0 to {n_stages - 1}, and for each of {len(rows)} ranks, "
            f"but got the stages {', '.join(map(str, sorted(stages)))}"
        )
    with_comms = any(action.kind not in COMPUTE for action in actions)
    loaded: Any = None
    try:
        stand_ins = _stand_ins(len(rows), 1, n_stages=n_stages)
        loaded = _PipelineScheduleRuntime(stand_ins, microbatches, loss_fn=_no_loss)
        loaded._load_csv(str(path), format="compute_comms" if with_comms else "compute_only")
        order = loaded.pipeline_order_with_comms
    except (ValueError, AssertionError, KeyError, RuntimeError) as error:
        if with_comms or loaded is None or not _only_unordered(loaded):
            raise ValueError(f"{path}: torch refuses it with {_first_line(error)}") from None
        placement = tuple(rank for _, rank in sorted(loaded.stage_index_to_group_rank.items()))
        return Table(str(path), with_messages(rows, placement), placement, microbatches)
    made = _table(str(path), order, loaded.stage_index_to_group_rank, microbatches)
    try:
        check_messages(made.programs, made.placement)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return made


def _only_unordered(loaded: Any) -> bool:
    """Whether nothing but their order keeps torch from adding sends and receives to compute actions."""
    try:
        loaded._validate_and_set_stage_mapping(loaded.pipeline_order)
    except (AssertionError, KeyError):
        return False
    return all(a is None or a.is_compute_op for actions in loaded.pipeline_order.values() for a in actions)


def _rows(path: Path) -> tuple[Program, ...]:
    from torch.distributed.pipelining.schedules import _Action

    rows = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                try:
                    rows.append(tuple(_ours(_Action.from_str(cell) for cell in row)))
                except (RuntimeError, ValueError):
                    raise ValueError(
                        f"row {number}: expected actions like 0F0 but got {_shorten(row)}"
                    ) from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(rows)


def _shorten(row: list[str]) -> str:
    text = ",".join(row)
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _table(
    name: str, order: Mapping[int, Iterable[Any]], mapping: Mapping[int, int], microbatches: int
) -> Table:
    programs = tuple(tuple(_ours(order[rank])) for rank in sorted(order))
    return Table(name, programs, tuple(rank for _, rank in sorted(mapping.items())), microbatches)


def _ours(actions: Iterable[Any]) -> Iterator[Action]:
    """torch's actions in ours: bubbles and work of FSDP left out, overlapped pairs one behind the other."""
    known = {kind.value: kind for kind in Kind}
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _ours(action.sub_actions)
        elif action.computation_type.value in known and action.microbatch_index is not None:
            yield Action(known[action.computation_type.value], action.stage_index, action.microbatch_index)


def _stand_ins(pp: int, chunks: int, *, n_stages: int | None = None) -> list[Any]:
    """What a schedule asks its stages for before it runs. Rank 0 knows the tables of all ranks."""
    number = pp * chunks if n_stages is None else n_stages
    return [
        SimpleNamespace(
            stage_index=chunk * pp, num_stages=number, group_size=pp, group_rank=0, submod=None,
            is_first=chunk == 0, is_last=False, has_backward=True,
        )
        for chunk in range(chunks)
    ]  # fmt: skip


def _no_loss(*_: Any) -> Any:
    raise AssertionError("a plan runs nothing")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].strip() if text else 'no message'}"
