"""Seconds and memory of one call, whatever the device."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attacks import UsageError


def timed(work: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call on `clock`, by default wall-clock; the device's queue is emptied before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def peak_memory(make: Callable[..., Any], arguments: tuple, method: str) -> float:
    """MiB that one pass needs above what model and images take, in a process of its own.

    Args:
        make: from `arguments` to a bench with an attribute `device`; what it holds once made is not counted.
        method: of the bench, called once.

    Raises:
        UsageError: that process failed.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peak, args=(make, arguments, method, sender))
    process.start()
    process.join()
    if process.exitcode:
        raise UsageError(f"the process that measures the memory of {method!r} ended with code {process.exitcode}")
    return receiver.recv()


def _peak(make: Callable[..., Any], arguments: tuple, method: str, sender) -> None:
    bench = make(*arguments)
    cuda = bench.device.type == "cuda"
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # forget the peak of the set-up
    held = torch.cuda.memory_allocated() / 2**20 if cuda else _resident("VmRSS")
    getattr(bench, method)()
    sender.send((torch.cuda.max_memory_allocated() / 2**20 if cuda else _resident("VmHWM")) - held)


def _resident(field: str) -> float:
    """Memory that this process holds (VmRSS), or the most that it has held (VmHWM), MiB; NaN outside Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    line = next(text for text in status.read_text().splitlines() if text.startswith(field))
    return int(line.split()[1]) / 2**10
