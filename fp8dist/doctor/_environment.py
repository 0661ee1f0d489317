"""Python, torch, devices and the resolver: what one process can see by itself."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from importlib import metadata

import torch

from ..kernels.gemm import scaled_mm
from ._findings import Finding, Level

OLDEST_TORCH = (2, 11)
FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)
HOPPER = (9, 0)
SLOW_RESOLVER = 1.0  # seconds
LOOKUPS = 5


def look_around(now: Callable[[], float] = time.monotonic) -> Iterator[Finding]:
    """Everything that needs no other process."""
    yield Finding(
        "Python", Level.OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield torch_release(torch.__version__)
    yield fp8_on(torch.device("cpu"))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield fp8_on(torch.device("cuda", index))
    if torch.cuda.is_available():
        yield triton_release()
    yield resolver(socket.gethostname(), now)
    yield cores(os.cpu_count() or 1, torch.get_num_threads())


def torch_release(version: str) -> Finding:
    """Whether this torch is new enough."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Finding("torch", Level.BAD, version, f"install torch {oldest} or newer")
    return Finding("torch", Level.OK, version)


def fp8_on(device: torch.device) -> Finding:
    """Whether FP8 products run on a device: one is computed and compared."""
    subject, name = f"FP8 on {device}", ""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, sm_{capability[0]}{capability[1]}"
        if capability < FP8_CAPABILITY:
            mend = "use a GPU of compute capability 8.9 or newer, or train in bf16 there"
            return Finding(subject, Level.BAD, f"{name} has no FP8 products", mend)
    try:
        right = _product_is_right(device)
    except (RuntimeError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        return Finding(
            subject, Level.BAD, f"{name} {first}".strip(), "install a torch build that has torch._scaled_mm"
        )
    if not right:
        mend = "do not train on it: products of small whole numbers must be exact"
        return Finding(subject, Level.BAD, f"{name} multiplies wrongly".strip(), mend)
    if device.type == "cpu":
        return Finding(subject, Level.OK, "products are right; for tests, since they are not fast")
    if torch.cuda.get_device_capability(device) < HOPPER:
        return Finding(
            subject, Level.NOTE, f"{name}: products are right", "speeds were measured on Hopper only"
        )
    return Finding(subject, Level.OK, f"{name}: products are right")


def _product_is_right(device: torch.device) -> bool:
    """Of whole numbers that FP8 and float32 hold exactly."""
    a = (torch.arange(32 * 64, device=device) % 13 - 6).view(32, 64).float()
    b = (torch.arange(64 * 48, device=device) % 7 - 3).view(64, 48).float()
    one = torch.ones(1, device=device)
    fp8 = torch.float8_e4m3fn
    product = scaled_mm(a.to(fp8), b.to(fp8), one, one, torch.float32)
    return torch.equal(product.double().cpu(), a.double().cpu() @ b.double().cpu())


def triton_release() -> Finding:
    """Whether the GPU kernels can be built."""
    try:
        return Finding("Triton", Level.OK, metadata.version("triton"))
    except metadata.PackageNotFoundError:
        mend = (
            "install the triton that your torch build names; without it GPUs take several passes per tensor"
        )
        return Finding("Triton", Level.WARNING, "not installed", mend)


def resolver(host: str, now: Callable[[], float] = time.monotonic) -> Finding:
    """How long this host's own name takes: torch's store asks for it whenever a rank connects."""
    longest, failure = 0.0, ""
    for _ in range(LOOKUPS):
        start = now()
        try:
            socket.getaddrinfo(host, 0)
        except OSError as error:
            failure = str(error)
        longest = max(longest, now() - start)
    if failure:
        mend = f"add {host} to the hosts file of every host"
        return Finding("resolver", Level.WARNING, f"does not know {host}: {failure}", mend)
    if longest > SLOW_RESOLVER:
        mend = f"add {host} to the hosts file: each rank that connects to the store waits for it, and others with it"
        return Finding("resolver", Level.WARNING, f"took {longest:.1f} s for {host}", mend)
    return Finding("resolver", Level.OK, f"{host} within {longest * 1e3:.0f} ms")


def cores(count: int, threads: int) -> Finding:
    """Threads per rank against cores."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    seen = f"{count} cores, {threads} threads in this process"
    if local > 1 and local * threads > count:
        fits = max(1, count // local)
        return Finding("cores", Level.WARNING, f"{seen}, {local} ranks here", f"set OMP_NUM_THREADS={fits}")
    return Finding("cores", Level.OK, seen)
