"""Runs code that names the device "cuda" on the CPU: what it allocates there lands here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _Redirected(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Within it `device="cuda"` is the CPU, which is also the current CUDA device."""
    with (
        _Redirected(),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        yield
