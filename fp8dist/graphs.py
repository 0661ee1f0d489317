"""CUDA graphs of a training step: forward and backward are replayed, the collective stays outside.

    call ─▶ scope opens ─▶ body, eagerly       the first `warmup` calls
                           capture and replay  the next one               ─▶ exit: one MAX, commit
                           replay              all others

A replay starts kernels and runs no Python. So what the modules tell the scope while they are captured is told again
at every replay, and what a graph cannot notice (buffers that moved, slots that lost their scale) is looked at before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ._header import Tag
from ._slots import Slot
from .coordinator import ReductionGroupCoordinator

logger = logging.getLogger("fp8dist")

T = TypeVar("T")


class _Recording(NamedTuple):
    """What a capture gives."""

    replay: Callable[[], None]
    pool: Any
    """Names the memory that the graph lives in, for a graph that shares it."""
    result: Any


class _Cuda:
    """All that graphs ask of torch.cuda, in one place.

    One stream serves eager runs and captures: what autograd and cuBLAS keep for each stream is then there before the
    capture, and belongs to no graph.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, body: Callable[[], T]) -> T:
        """Run `body` on the side stream, in order with what the current one has done and will do."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return body()
        finally:
            current.wait_stream(self._stream)

    def capture(self, body: Callable[[], Any], pool: Any) -> _Recording:
        """Capture what `body` would run. An error of it comes out as it is."""
        graph = torch.cuda.CUDAGraph()
        failure: BaseException | None = None
        # A capture that breaks does not give the stream back.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                # Other threads may use CUDA meanwhile: NCCL's watchdog, a loader that pins memory.
                with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                    try:
                        result = body()
                    except BaseException as error:
                        failure = error
                        raise
            except BaseException:
                _free_generator(self._device)
                if failure is None:
                    raise
        if failure is not None:  # ending a broken capture has raised too, and says less
            raise failure
        return _Recording(graph.replay, graph.pool(), result)


def _free_generator(device: torch.device) -> None:
    """A capture that the device breaks leaves the random generator as if it went on: any use of it raises."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


class _Captured(NamedTuple):
    """A graph, what its replays must do besides, and the circumstances that it has baked in."""

    recording: _Recording
    gradients: list[torch.Tensor | None]
    """Of the parameters; memory of the graph, which every replay writes anew."""
    recorded: bool
    requested: bool
    mode: tuple[bool, bool, bool]
    addresses: list[int]
    amax: torch.Tensor | None
    """The first slot's. While this is held nobody else gets its memory, whatever becomes of the slot."""


class GraphedStep(Generic[T]):
    """Runs forward and backward of one optimizer step as one CUDA graph, in a step scope of its own.

    Each call is a whole step: it commits once, whether it runs eagerly, captures or replays, so other ranks may call
    something else. The optimizer comes after it. The graph is captured anew, after as many eager calls as at first,
    when the slots' buffers have moved (`recover()`, a layout that grew), slots have lost their scale (weights loaded
    without the coordinator's state), parameters lie elsewhere, or FP8 or recording was switched on or off.

    Args:
        coordinator: whose scope a call opens; with `trigger="step"` and `update_every="step"`.
        body: runs forward and backward of all microbatches, without arguments. It reads its data from tensors that
            the caller writes in place, and waits for no GPU (no `.item()`, no printing of values).
        parameters: the tensors whose `.grad` it fills: `model.parameters()`, and inputs whose gradients are wanted.
            A call begins with no gradient on them, as after `optimizer.zero_grad()`, and ends with the step's.
        warmup: eager calls before a capture, at least 2: the first runs with cold slots, the last must run as
            the graph will.
        pool: another one that this one shares memory with: a step of the same model with other shapes, say. What one
            returned is void when the other is called.

    Attributes:
        captures: how many graphs were captured so far.

    Raises:
        ValueError: unfit arguments, or parameters that lie on no GPU.
    """

    def __init__(
        self,
        coordinator: ReductionGroupCoordinator,
        body: Callable[[], T],
        parameters: Iterable[torch.Tensor],
        *,
        warmup: int = 3,
        pool: GraphedStep[Any] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        _check(coordinator, body, self._parameters, warmup, pool)
        self.captures = 0
        self._coordinator = coordinator
        self._scope = coordinator.request_handle
        self._body = body
        self._warmup = self._eager_calls = warmup
        self._pool = pool
        self._cuda: _Cuda = _Cuda(self._parameters[0].device) if pool is None else pool._cuda
        self._captured: _Captured | None = None
        self._slots: list[Slot] = []
        self._recorded: list[Slot] = []  # by the last eager call
        self._ran_cold: list[str] = []  # in the last eager call
        self._warm_version = -1

    @property
    def captured(self) -> bool:
        """Whether there is a graph, which the next call replays unless it finds that something has changed."""
        return self._captured is not None

    def recapture(self) -> None:
        """Forget the graph: the next calls run eagerly, then one captures.

        For changes that are baked in and that nobody can see: `train()` and `eval()`, layers that were frozen, a number
        in `body`.
        """
        self._captured = None
        self._eager_calls = self._warmup

    def __call__(self, tag: Tag = None, *, overlap: bool = False) -> T:
        """Run one step. Inside a step scope that is open it is a part of that one.

        Args:
            tag: as for `coordinator.step`.
            overlap: as for `coordinator.step`.

        Returns:
            What `body` returned. From the capture on these are the same tensors in each call, with other values.

        Raises:
            ValueError: a slot is cold when the graph is to be captured, or the slots lie on no GPU.
            Fp8DistError: as from `coordinator.step`.
        """
        with self._coordinator.step(tag, overlap=overlap):
            # Of weights that no Python has used in a step the scope would not know that several microbatches do.
            reused = self._scope.reused
            self._notice_changes()
            captured = self._captured
            if captured is None and self._eager_calls:
                return self._run_eagerly()
            if captured is None:
                captured = self._captured = self._capture()
            self._replay(captured)
        self._scope.reused = reused
        result: T = captured.recording.result
        return result

    # -- the three ways to run -----------------------------------------------------------------------------

    def _run_eagerly(self) -> T:
        self._drop_gradients()
        with self._uncounted():
            result = self._cuda.run(self._body)
        self._look_at_slots()
        self._eager_calls -= 1
        return result

    def _capture(self) -> _Captured:
        self._refuse_cold_slots()
        self._drop_gradients()
        shared = None if self._pool is None else self._pool._captured
        try:
            with self._uncounted(), self._apart():
                recording = self._cuda.capture(self._body, None if shared is None else shared.recording.pool)
                recorded, requested = self._scope.recorded, self._scope.requested
        except BaseException:
            self._drop_gradients()  # no kernel has written them
            raise
        self.captures += 1
        logger.info("coordinator %r: a step was captured as a CUDA graph", self._coordinator.name)
        return _Captured(
            recording,
            [p.grad for p in self._parameters],
            recorded,
            requested,
            self._mode(),
            self._addresses(),
            self._slots[0].amax if self._slots else None,
        )

    def _replay(self, captured: _Captured) -> None:
        captured.recording.replay()
        if captured.recorded:
            self._scope.record()
        if captured.requested:
            self._scope.request()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            if parameter.grad is not gradient:  # an optimizer has dropped it
                parameter.grad = gradient

    def _drop_gradients(self) -> None:
        """Autograd then takes the gradients of a capture as they are, and each replay writes them anew."""
        for parameter in self._parameters:
            parameter.grad = None

    # -- what a capture must not see -------------------------------------------------------------------------

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """The scope as if nothing had run in it.

        A weight that was quantized outside the graph would be baked in and stale from the next step on, and one that is
        quantized inside it has no values but in a replay.
        """
        scope = self._scope
        cache, recorded, requested = dict(scope.weight_cache), scope.recorded, scope.requested
        scope.weight_cache.clear()
        scope.committed()
        try:
            yield
        finally:
            scope.weight_cache.clear()
            scope.weight_cache.update(cache)
            scope.recorded |= recorded
            scope.requested |= requested

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Casts without counters: these come and go with a monitor's samples, and need other kernels."""
        counters = [(slot, slot.casts) for slot in self._slots]
        for slot, _ in counters:
            slot.casts = None
        try:
            yield
        finally:
            for slot, casts in counters:
                slot.casts = casts

    # -- what a replay relies on -----------------------------------------------------------------------------

    def _look_at_slots(self) -> None:
        """Find the slots that this step has recorded, and those of them that had no scale. Waits for the GPU."""
        self._slots = [self._coordinator.slot(name) for name in self._coordinator.readings().names]
        if not self._slots:
            return
        if self._slots[0].amax.device.type != self._cuda.device_type:
            raise ValueError(
                f"GraphedStep expects the slots of coordinator {self._coordinator.name!r} on a GPU but got "
                f"{self._slots[0].amax.device}; move the model to the GPU before the first step"
            )
        amaxes = torch.cat([slot.amax for slot in self._slots]).tolist()
        self._recorded = [slot for slot, amax in zip(self._slots, amaxes, strict=True) if not amax < 0]
        self._ran_cold = self._cold()
        self._warm_version = -1

    def _cold(self) -> list[str]:
        return [slot.name for slot in self._recorded if not slot.warm]

    def _refuse_cold_slots(self) -> None:
        if not self._ran_cold:
            return
        names, more = self._ran_cold[:4], len(self._ran_cold) - 4
        self.recapture()
        raise ValueError(
            f"a step is captured when all its slots have a scale, but {', '.join(map(repr, names))}"
            f"{f' and {more} more' if more > 0 else ''} had none yet in the last of {self._warmup} warm-up calls; give "
            "a larger warmup= (a layer that starts at zero gives the ones before it no gradient at first), or leave "
            "layers that never get one in high precision: convert(..., skip=...)"
        )

    def _notice_changes(self) -> None:
        """Begin anew where something no longer is as the warm-up or the graph has found it."""
        change = self._change()
        if change:
            logger.info(
                "coordinator %r: %s, so a graphed step warms up again", self._coordinator.name, change
            )
            self.recapture()

    def _change(self) -> str:
        if self._lost_scales():
            return "slots have lost their scale"
        captured = self._captured
        if captured is None:
            return ""
        # All slots' cells are views of a few buffers, and move together.
        if self._slots and self._slots[0].amax is not captured.amax:
            return "the slots' buffers have moved"
        if self._mode() != captured.mode:
            return "FP8 or recording was switched"
        return "" if self._addresses() == captured.addresses else "parameters have moved"

    def _lost_scales(self) -> bool:
        """Whether slots that ran with a scale have none now. The version spares the look at each of them."""
        if not self._slots or self._slots[0].warm._version == self._warm_version:
            return False
        self._warm_version = self._slots[0].warm._version
        return not set(self._cold()) <= set(self._ran_cold)

    def _mode(self) -> tuple[bool, bool, bool]:
        return self._scope.enabled, self._scope.calibrating, self._scope.recording

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]


def _check(coordinator: object, body: object, parameters: list[Any], warmup: object, pool: object) -> None:
    """Raise ValueError for arguments that do not fit."""
    if not isinstance(coordinator, ReductionGroupCoordinator):
        raise ValueError(
            f"coordinator expects a ReductionGroupCoordinator but got {type(coordinator).__name__}"
        )
    if coordinator.trigger != "step" or coordinator.update_every != "step":
        raise ValueError(
            f"GraphedStep expects a coordinator with trigger='step' and update_every='step' but got "
            f"{coordinator.trigger!r} and {coordinator.update_every!r}; a replay runs no Python to start an update"
        )
    if not callable(body):
        raise ValueError(f"body expects a function without arguments but got {type(body).__name__}")
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 2:
        raise ValueError(f"warmup expects an int of at least 2 but got {warmup!r}")
    if pool is not None and not isinstance(pool, GraphedStep):
        raise ValueError(f"pool expects another GraphedStep or None but got {type(pool).__name__}")
    if not parameters or not all(isinstance(parameter, torch.Tensor) for parameter in parameters):
        raise ValueError(
            "parameters expects tensors, those whose gradients the step fills; pass model.parameters()"
        )
    for parameter in parameters:
        if parameter.device.type != _Cuda.device_type:
            raise ValueError(
                f"GraphedStep expects parameters on a GPU but got one on {parameter.device}; without a GPU call body() "
                "in `with coordinator.step():`"
            )
