"""The header's way between a host and the device where its words are reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostWords:
    """Writes and reads the header on the host. A GPU's queue of work is never waited for: it may be a step long.

    Args:
        device: where the words are.
        n_plain: of the words that are written.
        n_header: of those that are read.
    """

    def __init__(self, device: torch.device, n_plain: int, n_header: int) -> None:
        gpu = device.type == "cuda"
        self._written = torch.zeros(n_plain, dtype=torch.int32, pin_memory=gpu)
        self._array = self._written.numpy()
        self._read = torch.zeros(n_header, dtype=torch.int32, pin_memory=gpu)
        self._stream = torch.cuda.Stream(device) if gpu else None

    def write(self, words: Sequence[int], to: torch.Tensor) -> None:
        """Write words, in the order of the current stream's work.

        The words written before must have arrived, that is, their reduction must have ended; but for a rank without
        peers, whose words nobody reads.

        Args:
            words: int32 values.
            to: int32, as many.
        """
        self._array[:] = words
        to.copy_(self._written, non_blocking=True)

    def read(self, header: torch.Tensor) -> list[int]:
        """Read words that are there already, whatever else the device still has to do.

        Args:
            header: int32, of a reduction that has ended.
        """
        if self._stream is None:
            words: list[int] = header.tolist()
            return words
        with torch.cuda.stream(self._stream):  # behind the current one the optimizer may wait
            self._read.copy_(header, non_blocking=True)
        self._stream.synchronize()
        words = self._read.tolist()
        return words
