"""The header's way between a host and the device where its words are reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostWords:
    """Writes and reads the header on the host. A GPU's queue of work is never waited for: it may be a step long.

    Args:
        header: int32, the words that are read.
        plain: a view of those that are written.
    """

    def __init__(self, header: torch.Tensor, plain: torch.Tensor) -> None:
        self._header, self._plain = header, plain
        self._written, self._stream = plain, None
        if header.device.type == "cuda":
            self._written = torch.zeros(plain.numel(), dtype=torch.int32, pin_memory=True)
            self._read = torch.zeros(header.numel(), dtype=torch.int32, pin_memory=True)
            self._stream = torch.cuda.Stream(header.device)
        self._array = self._written.numpy()

    def write(self, words: Sequence[int]) -> None:
        """Write words, in the order of the current stream's work.

        The words written before must have arrived, that is, their reduction must have ended; but for a rank without
        peers, whose words nobody reads.

        Args:
            words: int32 values, as many as `plain` has.
        """
        self._array[:] = words
        if self._stream is not None:
            self._plain.copy_(self._written, non_blocking=True)

    def read(self) -> list[int]:
        """The words after a reduction that has ended, whatever else the device still has to do."""
        if self._stream is None:
            words: list[int] = self._header.tolist()
            return words
        with torch.cuda.stream(self._stream):  # behind the current one the optimizer may wait
            self._read.copy_(self._header, non_blocking=True)
        self._stream.synchronize()
        words = self._read.tolist()
        return words
