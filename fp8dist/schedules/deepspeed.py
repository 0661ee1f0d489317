"""DeepSpeed's pipeline engine: `train_batch` holds the optimizer step, so the commit has to come inside it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..coordinator import ReductionGroupCoordinator
from ._window import Window


def attach(engine: Any, coordinator: ReductionGroupCoordinator) -> None:
    """Let one `train_batch` be one step, committed before the optimizer. `eval_batch` stays as it is.

    Only this engine is changed, not its class. Layers that `convert` replaced at the root of the pipeline are put
    into the list that the engine runs. The step's tag is `engine.global_steps`.

    Args:
        engine: a `PipelineEngine`, as `deepspeed.initialize` gave it for a `PipelineModule`.
        coordinator: of this process.

    Raises:
        ValueError: not a pipeline engine, or one that is attached already, or a tied layer that `convert` replaced.
    """
    instructions = getattr(engine, "_INSTRUCTION_MAP", None)
    if instructions is None:
        raise ValueError(
            f"deepspeed.attach() expects a PipelineEngine but got {type(engine).__name__}; around any other engine's "
            "forward() and backward() write `with coordinator.step():`, and call engine.step() behind it"
        )
    if "train_batch" in vars(engine):
        raise ValueError("this engine is attached to a coordinator already; attach it once")
    _run_what_was_converted(engine.module)
    window = Window(coordinator)
    (optimizer_step,) = (kind for kind in instructions if kind.__name__ == "OptimizerStep")

    def commit_and_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        window.close()
        return instructions[optimizer_step](engine, *args, **kwargs)

    train_batch = window.guarded(engine.train_batch)

    def run(*args: Any, **kwargs: Any) -> Any:
        window.open(engine.global_steps)
        return train_batch(*args, **kwargs)

    engine._INSTRUCTION_MAP = {**instructions, optimizer_step: commit_and_step}
    engine.train_batch = run


def _run_what_was_converted(pipeline: Any) -> None:
    """The pipeline runs a list of its own, in which `convert` has replaced nothing."""
    for name, index in pipeline.fwd_map.items():
        pipeline.forward_funcs[index] = pipeline.get_submodule(name)
    held = set(pipeline.modules())
    for layer in pipeline.forward_funcs:
        if isinstance(layer, nn.Module) and layer not in held:
            raise ValueError(
                f"a tied {type(layer).__name__} expects to stay what it is, but convert() replaced it in its pipeline; "
                "leave it out with convert(..., skip=...)"
            )
