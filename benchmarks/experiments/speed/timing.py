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


def peak_memory(make: Callable[..., Any], arguments: tuple, method: str, device: torch.device) -> float:
    """MiB of the device's memory that one pass needs above what model and images take.

    A GPU's allocator counts what is held, so that it is read in this process; on a CPU the pass is run in a process of
    its own, whose whole memory is read.

    Args:
        make: from `arguments` to a bench; what it holds once made is not counted.
        method: of the bench, called once.
        device: of the bench.

    Raises:
        UsageError: that process failed.
    """
    if device.type == "cuda":
        return _cuda_peak(make, arguments, method, device)
    return alone(_peak, make, arguments, method)


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` of the arguments returns, computed in a process of its own; both are pickled.

    Raises:
        UsageError: that process failed.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, work, arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise UsageError(f"the process that measures {work.__name__}{arguments} ended with code {process.exitcode}")
    return receiver.recv()


def _answer(sender, work: Callable[..., Any], arguments: tuple) -> None:
    sender.send(work(*arguments))


def _cuda_peak(make: Callable[..., Any], arguments: tuple, method: str, device: torch.device) -> float:
    bench = make(*arguments)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    getattr(bench, method)()
    return (torch.cuda.max_memory_allocated(device) - held) / 2**20


def _peak(make: Callable[..., Any], arguments: tuple, method: str) -> float:
    bench = make(*arguments)
    forget_peak()
    held = resident("VmRSS")
    getattr(bench, method)()
    return resident("VmHWM") - held


def forget_peak() -> None:
    """Have VmHWM begin at what the process holds now; no effect outside Linux."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def resident(field: str) -> float:
    """Memory that this process holds (VmRSS), or the most that it has held (VmHWM), MiB; NaN outside Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    line = next(text for text in status.read_text().splitlines() if text.startswith(field))
    return int(line.split()[1]) / 2**10
