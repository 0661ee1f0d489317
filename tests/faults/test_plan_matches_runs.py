"""What `fp8dist.plan` says of a schedule is what real ranks do: the order, the one collective, and the deadlocks.

Ranks are forks of this process on gloo (see forkpool). Stages hold one FP8 layer each.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkpool import RankHung, run_ranks, values
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class

import fp8dist as f8
from fp8dist.plan import NAMES, Model, Plan, plan
from fp8dist.plan._actions import COMPUTE, Kind
from fp8dist.plan._tables import TORCH_NAMES

WIDTH, ROWS = 16, 16
LIMIT = timedelta(seconds=30)
HANGS = 10.0  # seconds after which a run that has stood still since its first second is taken to hang
TRAFFIC = {
    "get_fwd_recv_ops": "RECV_F",
    "get_fwd_send_ops": "SEND_F",
    "get_bwd_recv_ops": "RECV_B",
    "get_bwd_send_ops": "SEND_B",
}


def stages_of(rank: int, planned: Plan) -> list[int]:
    return [stage for stage, where in enumerate(planned.placement) if where == rank]


def make_stages(rank: int, planned: Plan, group: Any = None) -> list[PipelineStage]:
    """The stages of a pipeline rank: one linear layer each, under a name of its own."""
    made = []
    for index in stages_of(rank, planned):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        made.append(PipelineStage(module, index, len(planned.placement), torch.device("cpu"), group=group))
    return made


def make_schedule(stages: list[PipelineStage], planned: Plan) -> Any:
    loss = nn.functional.mse_loss
    if planned.schedule not in NAMES:
        schedule = _PipelineScheduleRuntime(list(stages), planned.microbatches, loss_fn=loss)
        schedule._load_csv(planned.schedule)
        return schedule
    torch_name, fixed = TORCH_NAMES[planned.schedule]
    stage_or_stages = stages[0] if fixed == 1 else stages
    return get_schedule_class(torch_name)(stage_or_stages, planned.microbatches, loss_fn=loss)


def step(schedule: Any, rank: int, planned: Plan) -> None:
    """One training step of a pipeline rank; the values do not matter."""
    x = torch.ones(planned.microbatches * ROWS, WIDTH)
    indices = stages_of(rank, planned)
    last = len(planned.placement) - 1 in indices
    schedule.step(*((x,) if 0 in indices else ()), **({"target": x, "losses": []} if last else {}))


def record_traffic(stage: PipelineStage, coordinator: f8.ReductionGroupCoordinator) -> None:
    """Put the sends and receives of a stage among the flight recorder's events."""

    def recorded(method: Callable[[int], list[Any]], kind: str) -> Callable[[int], list[Any]]:
        def run(microbatch: int) -> list[Any]:
            operations = method(microbatch)
            if operations:  # a first stage asks for its receives, too, and gets none
                coordinator.flight.record("p2p", action=kind, stage=stage.stage_index, microbatch=microbatch)
            return operations

        return run

    for name, kind in TRAFFIC.items():
        setattr(stage, name, recorded(getattr(stage, name), kind))


def convert(stages: list[PipelineStage], coordinator: f8.ReductionGroupCoordinator) -> None:
    for stage in stages:
        stage.submod = f8.convert(stage.submod, coordinator, prefix=f"stage{stage.stage_index}")
        record_traffic(stage, coordinator)


def what_happened(coordinator: f8.ReductionGroupCoordinator) -> list[str]:
    """The events of the newest step, in the words of a plan."""
    events = coordinator.flight.events()
    start = max(i for i, event in enumerate(events) if event.kind == "open")
    told = []
    for event in events[start:]:
        if event.kind in ("chunk", "p2p"):
            told.append("{stage}{action}{microbatch}".format(**event.detail))
        elif event.kind in ("open", "enter"):
            told.append({"open": "open", "enter": "exit"}[event.kind])
    return told


def run_and_tell(rank: int, planned: Plan, name: str) -> tuple[list[str], int, int]:
    """What a rank did in its second step, its collectives of that step, and the bytes of one."""
    with f8.ReductionGroupCoordinator(f8.DelayedScaling(), timeout=20.0, name=name) as coordinator:
        stages = make_stages(rank, planned)
        convert(stages, coordinator)
        schedule = f8.schedules.attach(make_schedule(stages, planned), coordinator, stages=stages)
        coordinator.freeze()
        step(schedule, rank, planned)
        before = coordinator.stats.collectives
        step(schedule, rank, planned)
        return what_happened(coordinator), coordinator.stats.collectives - before, coordinator._payload.nbytes


def check_order(planned: list[Plan], world: int) -> None:
    def run(rank: int, world: int) -> list[tuple[list[str], int, int]]:
        return [run_and_tell(rank, each, f"plan{i}") for i, each in enumerate(planned)]

    told = values(run_ranks(run, world=world, timeout=90.0))
    for i, each in enumerate(planned):
        assert each.good
        for rank in range(world):
            done, collectives, n_bytes = told[rank][i]
            assert done == list(map(str, each.programs[rank])), (each.schedule, each.microbatches, rank)
            assert collectives == each.per_step.collectives
            assert n_bytes == each.per_step.n_bytes == each.groups[0].n_bytes


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_action_of_every_rank_happens_in_the_planned_order(name: str, world: int) -> None:
    sizes = (2 * world, 3 * world) if name == "dualpipev" else (world, 2 * world, 2 * world + world // 2)
    if name == "gpipe":
        sizes = (1, *sizes)
    planned = [
        plan(name, pp=world, microbatches=size, model=Model(linears_per_layer=1))
        for size in sizes
        if not (name.startswith("interleaved") and size % (size // world))
    ]
    if name in ("interleaved1f1b", "loopedbfs", "interleavedzerobubble"):
        planned.append(
            plan(name, pp=world, chunks=3, microbatches=2 * world, model=Model(linears_per_layer=1))
        )
    assert len(planned) >= 2
    check_order(planned, world)


def test_a_schedule_from_a_file_happens_in_the_planned_order(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    rows = [[f"{rank}{kind}{i}" for kind in "FIW" for i in range(4)] for rank in range(2)]
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    check_order([plan(path, model=Model(linears_per_layer=1))], world=2)


# -- a blocking collective in each backward ---------------------------------------------------------------


def run_with_updates(rank: int, planned: Plan, log: Path) -> None:
    """One step without a scope: an all-reduce at the end of each backward. Writes down what it begins."""
    layout = planned.layout
    # Ranks of one replica follow each other, as in the plan of the world that the test makes.
    replica, place = divmod(rank, layout.pp)
    pipelines = [
        dist.new_group(range(i * layout.pp, (i + 1) * layout.pp), timeout=LIMIT) for i in range(layout.dp)
    ]
    by_stage = [dist.new_group(range(i, layout.world, layout.pp), timeout=LIMIT) for i in range(layout.pp)]
    group = None if planned.members == "all" else by_stage[place]
    stages = make_stages(place, planned, pipelines[replica])
    with log.open("a", buffering=1) as file:
        for stage in stages:
            note_actions(stage, group, lambda text: file.write(text + "\n"))
        step(make_schedule(stages, planned), place, planned)
        file.write("end\n")


def note_actions(stage: PipelineStage, group: Any, write: Callable[[str], Any]) -> None:
    forward, backward, weight = (
        stage.forward_one_chunk,
        stage.backward_one_chunk,
        stage.backward_weight_one_chunk,
    )

    def noted_forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        write(f"{stage.stage_index}F{microbatch}")
        return forward(microbatch, *args, **kwargs)

    def noted_backward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        write(f"{stage.stage_index}{'B' if kwargs.get('full_backward', True) else 'I'}{microbatch}")
        result = backward(microbatch, *args, **kwargs)
        write(f"{stage.stage_index}UPDATE{microbatch}")
        dist.all_reduce(torch.zeros(4, dtype=torch.int32), dist.ReduceOp.MAX, group=group)
        return result

    def noted_weight(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        write(f"{stage.stage_index}W{microbatch}")
        return weight(microbatch, *args, **kwargs)

    stage.forward_one_chunk = noted_forward  # type: ignore[method-assign]
    stage.backward_one_chunk = noted_backward  # type: ignore[method-assign]
    stage.backward_weight_one_chunk = noted_weight  # type: ignore[method-assign]


def begun(planned: Plan, rank: int) -> list[str]:
    """What the plan says a pipeline rank begins: all but what it waits for a message to begin with."""
    done = [span.action for span in planned.run.spans if span.rank == rank]
    entered = [w.action for w in planned.run.waits if w.rank == rank and w.action.kind is Kind.UPDATE]
    shown = [action for action in (*done, *entered) if action.kind in COMPUTE or action.kind is Kind.UPDATE]
    end = [] if any(wait.rank == rank for wait in planned.run.waits) else ["end"]
    return [*map(str, shown), *end]


CASES = [
    pytest.param("1f1b", 2, 1, "all", True, id="1f1b over stages"),
    pytest.param("gpipe", 4, 1, "all", True, id="gpipe over stages"),
    pytest.param("interleaved1f1b", 2, 2, "all", True, id="interleaved over all ranks"),
    pytest.param("zbv", 2, 1, "all", True, id="zbv over stages"),
    pytest.param("1f1b", 2, 2, "stage", False, id="1f1b within stages"),
    pytest.param("interleavedzerobubble", 2, 2, "dp", False, id="zero bubble within stages"),
    pytest.param("dualpipev", 2, 2, "stage", False, id="dualpipev within stages"),
    pytest.param("gpipe", 1, 4, "all", False, id="one stage, all ranks"),
]


@pytest.mark.parametrize(("name", "pp", "dp", "group", "hangs"), CASES)
def test_a_collective_in_each_backward_hangs_where_the_plan_says_so_and_only_there(
    tmp_path: Path, name: str, pp: int, dp: int, group: Any, hangs: bool
) -> None:
    planned = plan(name, pp=pp, dp=dp, microbatches=4, updates="per-microbatch", group=group)
    assert (planned.deadlock is not None) is hangs

    def run(rank: int, world: int) -> None:
        run_with_updates(rank, planned, tmp_path / f"rank{rank}")

    outcomes = run_ranks(run, world=pp * dp, timeout=HANGS if hangs else 60.0, group_timeout=60.0)
    if hangs:
        assert all(isinstance(outcome.error, RankHung) for outcome in outcomes)
    else:
        outcomes.raise_first()
    for rank in range(pp * dp):
        did = (tmp_path / f"rank{rank}").read_text().split()
        assert did == begun(planned, rank % pp), f"rank {rank}"
