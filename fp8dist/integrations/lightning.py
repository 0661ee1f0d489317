"""Lightning: a callback that opens one scope per optimizer step, and whose state is the coordinator's."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from ..coordinator import ReductionGroupCoordinator
from ..schedules._window import Window


class StepScope(Callback):
    """One scope per optimizer step, over the batches of `accumulate_grad_batches`, closed before the optimizer.

    Whatever ends `fit` by an exception leaves the scope. Validation opens none. Lightning's checkpoints carry the
    coordinator's state as this callback's. The step's tag is `trainer.global_step`.

    Args:
        coordinator: of this process; the module is converted, at the latest in its `configure_model`.
        save_state: put the coordinator's state into Lightning's checkpoints, which keep that of rank 0. Where ranks
            hold different slots, pass False and use `fp8dist.checkpoints`.
    """

    def __init__(self, coordinator: ReductionGroupCoordinator, *, save_state: bool = True) -> None:
        self._coordinator = coordinator
        self._save_state = save_state
        self._window = Window(coordinator)

    @property
    def state_key(self) -> str:
        """Tells the callbacks of several coordinators apart in a checkpoint."""
        return self._generate_state_key(coordinator=self._coordinator.name)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what has no one place for a commit.

        Raises:
            ValueError: manual optimization.
        """
        if not pl_module.automatic_optimization:
            raise ValueError(
                "StepScope expects automatic optimization but got a module that steps its optimizers itself; there "
                "write `with coordinator.step():` around forward and backward, and leave this callback out"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open the scope at the first batch of a window."""
        self._window.open(trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Commit: all backwards of the step are done."""
        self._window.close()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit nothing for a window in whose middle training was stopped."""
        self._window.cancel()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks."""
        self._window.fail(exception)

    def state_dict(self) -> dict[str, Any]:
        """The coordinator's state, for Lightning's checkpoint.

        Raises:
            ValueError: ranks hold different slots, but Lightning writes the state of rank 0 only.
        """
        if not self._save_state:
            return {}
        if not self._coordinator.layout_is_uniform:
            raise ValueError(
                "a Lightning checkpoint expects all ranks to hold the same slots, since it keeps the callbacks of rank "
                "0, but they do not; pass StepScope(..., save_state=False) and save with fp8dist.checkpoints.save"
            )
        return self._coordinator.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the coordinator's state."""
        self._coordinator.load_state_dict(state_dict)
