"""What compression leaves in the numbers of an update: half precision, grids of 256 values, zeros of top-k.

An honest float32 gradient has all of float32's digits, no two of its entries are equal, and it is zero in whole rows or
columns only. How single tensors are read: `attacks.linear.intervals`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attacks.findings import Finding
from attacks.linear.intervals import (
    ALMOST_ALL,
    SAMPLE,
    SPARSE,
    grid_of,
    returns_weights,
    sample,
    sent_format,
    without_zero_rows,
)
from attacks.observation import Observation

# Entries of a parameter from which on a grid of 256 values is no chance.
LEAST_LARGE = 4096
# Updates of fewer entries have no statistics.
LEAST_ENTRIES = 1000
MEANS = "the attacks reach what that precision leaves of the image, about 20 to 45 dB"


def find_precision(observation: Observation, values: Mapping[str, Tensor]) -> Finding | None:
    """Fewer digits than float32's: half precision of gradients or returned weights, int8 a tensor or a channel.

    Args:
        values: the gradients that are not zero, by parameter name.
    """
    formats = Counter[torch.dtype]()
    for name, gradient in values.items():
        formats[sent_format(observation, name)] += min(gradient.numel(), SAMPLE)
    fitting = 0
    for kind in (torch.bfloat16, torch.float16):  # in this order: few bfloat16 numbers are no float16 numbers
        fitting += formats[kind]
        if fitting > ALMOST_ALL * formats.total():
            what = "returned weights" if returns_weights(observation) else "entries"
            return Finding("precision", f"all {what} are {str(kind).removeprefix('torch.')} numbers: {MEANS}")
    steps = [grid_of(gradient) for gradient in values.values() if gradient.numel() >= LEAST_LARGE]
    if sum(step is not None and step.numel() == 1 for step in steps) > ALMOST_ALL * len(steps):
        return Finding("precision", f"no parameter's gradient has more than 256 different values (int8): {MEANS}")
    if sum(step is not None for step in steps) > ALMOST_ALL * len(steps):
        return Finding("precision", f"each channel's gradient lies on a grid of 256 values of its own (int8): {MEANS}")
    return None


def find_sparsification(observation: Observation, values: Mapping[str, Tensor]) -> Finding | None:
    """Zeros within rows and columns that are not zero: a layer's honest gradient is zero in whole rows or columns."""
    tables = {n for n, module in observation.model.named_modules() if isinstance(module, nn.Embedding)}
    zeros = entries = 0
    for name, gradient in values.items():
        if gradient.dim() not in (2, 4) or name.rpartition(".")[0] in tables:
            continue
        rows = gradient if gradient.all() else without_zero_rows(gradient)
        zeros, entries = zeros + rows.numel() - int(rows.count_nonzero()), entries + rows.numel()
    if entries < LEAST_ENTRIES or zeros < SPARSE * entries or _is_rounded(observation, values):
        return None
    return Finding(
        "sparsification",
        f"{zeros / entries:.0%} of the entries are zero, scattered over rows and columns: only the largest were sent "
        "(top-k sparsification); closed forms need all entries of the first layers",
        hinders=True,
    )


def _is_rounded(observation: Observation, values: Mapping[str, Tensor]) -> bool:
    """Whether the weights moved by no more than a few units of their round-off, so that many did not move at all."""
    if not returns_weights(observation):
        return False
    sent = dict(observation.model.named_parameters())
    steps = torch.cat([sample(g).float() for n, g in values.items() if n in sent]) * observation.learning_rate
    weights = torch.cat([sample(sent[n].detach()).float() for n in values if n in sent])
    kept = weights != 0
    return bool((steps[kept].abs() / weights[kept].abs()).median() < 100 * torch.finfo(torch.float32).eps)
