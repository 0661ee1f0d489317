"""torchtitan's trainer, with and without pipeline parallelism."""

from __future__ import annotations

from typing import Any

from ..coordinator import ReductionGroupCoordinator
from ._window import Window
from .torch_pipelining import attach as attach_schedule


def attach(trainer: Any, coordinator: ReductionGroupCoordinator) -> None:
    """Let one `train_step` be one step, committed before the optimizers, whatever it accumulates.

    The scope opens at the first forward and not with `train_step`, which ends a run by an exception when its data
    are used up. A pipeline schedule is replaced by its attached proxy, also in the validator.

    Args:
        trainer: a `torchtitan.trainer.Trainer`. The layers were converted before the model was parallelized, since
            FSDP remembers the modules it wraps.
        coordinator: of this process.

    Raises:
        ValueError: what `schedules.attach` refuses, or a trainer that is attached already.
    """
    if "train_step" in vars(trainer):
        raise ValueError("this trainer is attached to a coordinator already; attach it once")
    schedule = getattr(trainer, "pp_schedule", None)
    if schedule is not None:
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        trainer.pp_schedule = attach_schedule(schedule, coordinator, stages=stages)
        validator: Any = getattr(trainer, "validator", None)
        if getattr(validator, "pp_schedule", None) is schedule:
            validator.pp_schedule = trainer.pp_schedule
    window = Window(coordinator)
    forward_backward = trainer.forward_backward_step

    def run(*args: Any, **kwargs: Any) -> Any:
        window.open(trainer.step)
        return forward_backward(*args, **kwargs)

    trainer.forward_backward_step = run
    trainer.train_step = window.guarded(trainer.train_step)
    trainer.optimizers.register_step_pre_hook(lambda *_: window.close())
