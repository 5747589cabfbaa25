"""Seconds of one call, whatever the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, the device's queue emptied before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
