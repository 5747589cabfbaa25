"""The device that a command computes on, and its threads."""

from __future__ import annotations

import os
import time
import warnings

import torch

from attacks.arithmetic import use_exact_arithmetic
from attacks.registry import UsageError

# How many times as long as with one thread a sum of 2^17 numbers may take with several. On free cores it is 0.6 to 1.5;
# where another program keeps one of two cores busy, 350 to 900, because every thread waits for the one that is not run.
LARGEST_SLOWDOWN = 10.0


def usable_device(name: str) -> torch.device:
    """The torch device called `name`; the process computes in full float32 from now on (`attacks.arithmetic`).

    On another device than the CPU it also takes deterministic algorithms where torch has them, and warns where not.

    Raises:
        UsageError: this machine has no such device, or it computes no numbers (meta).
    """
    use_exact_arithmetic()
    try:
        device = torch.device(name)
        float(torch.ones(1, device=device).sum())
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0][:80]}); try --device cpu"
        ) from error
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device


def use_threads(asked: int) -> None:
    """Compute with this many threads from now on.

    Args:
        asked: 0 for torch's own choice, or as many of them as find free cores: fewer, by halves, while other programs
            keep some busy. A warning then says how many are used. Sums of another number of threads differ by
            round-off.
    """
    if asked:
        torch.set_num_threads(asked)
        return
    chosen = torch.get_num_threads()
    while torch.get_num_threads() > 1 and slowdown() > LARGEST_SLOWDOWN:
        torch.set_num_threads(torch.get_num_threads() // 2)
    if torch.get_num_threads() < chosen:
        warnings.warn(
            f"other programs keep cores of this machine busy: computing with {torch.get_num_threads()} of {chosen} "
            "threads, because more would wait for each other (--threads sets their number; --threads 1 for programs "
            "that run beside each other)",
            stacklevel=2,
        )


def slowdown() -> float:
    """Time of twenty small sums with torch's threads, in units of that with one thread; about 1 ms on free cores."""
    numbers, threads = torch.zeros(2**17), torch.get_num_threads()
    several = _seconds(numbers)
    torch.set_num_threads(1)
    single = _seconds(numbers)
    torch.set_num_threads(threads)
    return several / single


def _seconds(numbers: torch.Tensor) -> float:
    """Wall-clock time of twenty sums, after one that starts the threads."""
    numbers.add_(1.0)
    start = time.perf_counter()
    for _ in range(20):
        numbers.add_(1.0)
    return time.perf_counter() - start
