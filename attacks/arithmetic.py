"""Arithmetic in full float32: no TF32, no bfloat16 products, no sums in half precision.

On recent GPUs, and on CPUs with bfloat16 instructions, torch may multiply float32 matrices with fewer digits. An attack
that solves with such products under-reports what leaks (emulated TF32 takes `patch_embedding` on a random DeiT-S from
80 to 102 dB to 38 to 60 dB), so attacks, certificates and the project's own commands all compute under these settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def _settings() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, exact value) of what can be switched beside the precision of matrix products."""
    import torch

    matmul = torch.backends.cuda.matmul
    return [
        (torch.backends.cudnn, "allow_tf32", False),
        (torch.backends.cudnn, "benchmark", False),
        (torch.backends.cudnn, "deterministic", True),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
    ]


def is_exact() -> bool:
    """Whether float32 matrices are multiplied and convolved with all of their digits."""
    import torch

    return torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32


def use_exact_arithmetic() -> None:
    """Switch to full float32 for the rest of the process."""
    import torch

    torch.set_float32_matmul_precision("highest")
    for owner, name, value in _settings():
        setattr(owner, name, value)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Full float32 inside the block; afterwards the settings are as before, whoever's process it is."""
    import torch

    precision, before = torch.get_float32_matmul_precision(), [getattr(o, n) for o, n, _ in _settings()]
    use_exact_arithmetic()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for (owner, name, _), value in zip(_settings(), before, strict=True):
            setattr(owner, name, value)
