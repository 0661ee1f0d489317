"""Call a Triton kernel with little host time.

`kernel[grid](...)` binds, specializes and hashes all arguments anew at each call. Here one short key finds the
binary of an earlier call, which then gets raw addresses. The key covers all that the binary depends on: dtypes and
presence of tensors, alignment, constants. For that, kernels must not be specialized on integers: they take
sizes in units (`unit_of`), so that the compiler knows what these are multiples of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime import driver

VECTOR = 16
"""Bytes of one memory access, and the multiple that makes an FP8 row a whole number of them."""


FP8_MAX = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
"""Where the hardware's cast saturates."""


def unit_of(*sizes: int) -> int:
    """`VECTOR` if it divides all sizes, else 1."""
    bits = 0
    for size in sizes:
        bits |= size
    return 1 if bits % VECTOR else VECTOR


class Launcher:
    """One Triton kernel and its binaries, by device and key.

    Args:
        kernel: decorated with `triton.jit`. Its parameters are, in this order: tensors, of which only the fast ones
            are specialized on alignment; integers, not specialized; constants.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._binaries: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        integers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launch on the current stream of the device of the first tensor. Does not wait.

        Args:
            grid: number of programs; none of them 0.
            tensors: None where the kernel shall do without.
            integers: below 2**31.
            constants: compiled into the binary.
            num_warps: of each program.
        """
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = (
            device,
            num_warps,
            constants,
            *[None if tensor is None else tensor.dtype for tensor in tensors],
            *[address is not None and address % VECTOR == 0 for address in addresses],
        )
        launch = self._binaries.get(key)
        if launch is None:
            self._binaries[key] = self._compiled(device, grid, (*tensors, *integers, *constants), num_warps)
        elif device == torch.accelerator.current_device_index():
            launch(grid, device, (*addresses, *integers, *constants))
        else:
            with torch.cuda.device(device):
                launch(grid, device, (*addresses, *integers, *constants))

    def _compiled(self, device: int, grid: tuple[int, int, int], arguments: Any, num_warps: int) -> Any:
        """Launch, compiling first; return what launches it again."""
        if device < 0:  # Triton's interpreter runs on the CPU, and has no binaries
            return self._kernel[grid](*arguments)
        with torch.cuda.device(device):
            return _launch_of(self._kernel[grid](*arguments, num_warps=num_warps))


def _launch_of(binary: Any) -> Callable[[tuple[int, int, int], int, tuple[Any, ...]], None]:
    run, function = binary.run, binary.function  # found once; the attributes are computed
    stream_of = driver.active.get_current_stream

    def launch(grid: tuple[int, int, int], device: int, arguments: tuple[Any, ...]) -> None:
        # As `JITFunction.run` ends, without its launch hooks (only profilers set them).
        run(*grid, stream_of(device), function, binary.packed_metadata, None, None, None, *arguments)

    return launch


def blocks(size: int, block: int) -> int:
    """How many blocks cover `size`."""
    return -(-size // block)  # `triton.cdiv` is made for kernels, and slow here
