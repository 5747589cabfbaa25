"""The device that a command computes on."""

from __future__ import annotations

import os

import torch

from attacks.arithmetic import use_exact_arithmetic
from attacks.registry import UsageError


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
