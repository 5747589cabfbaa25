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
from attacks.linear.grids import ALMOST_ALL, SAMPLE, grid_of, sample, signs_of
from attacks.linear.intervals import (
    SPARSE,
    read_message,
    returns_weights,
    rounding_of_weights,
    sent_format,
    without_zero_rows,
)
from attacks.observation import Observation

# Entries of a parameter from which on a grid of 256 values is no chance.
LEAST_LARGE = 4096
# Updates of fewer entries have no statistics.
LEAST_ENTRIES = 1000
# The largest relative differences from the gradient that the digits explain: of half precision, in which small entries
# vanish, and of int8 with one scale for a whole gradient.
HALF, FEW_BITS = 5e-2, 0.3
MEANS = "the attacks reach what that precision leaves of the image, about 20 to 60 dB"
FEW = "the attacks reach what that leaves of the image, about 10 to 25 dB"
SIGNS = "closed forms need magnitudes"


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
            sentence = f"all {what} are {str(kind).removeprefix('torch.')} numbers: {MEANS}"
            return Finding("precision", sentence, changes=FEW_BITS if returns_weights(observation) else HALF)
    return _find_grids(observation, {n: g for n, g in values.items() if g.numel() >= LEAST_LARGE})


def _find_grids(observation: Observation, large: Mapping[str, Tensor]) -> Finding | None:
    """One magnitude, or a grid of 15 or 256 values, a parameter or a channel."""
    known = dict(observation.model.named_parameters())
    found: list[tuple[str, int]] = []  # kind, how many of them in a parameter
    for number, (name, gradient) in enumerate(large.items()):
        if number - len(found) >= (1 - ALMOST_ALL) * len(large):  # too many without one: as a rule, the first
            return None
        slack = rounding_of_weights(observation, name) if name in known else None
        gradient = gradient.double()
        magnitude = signs_of(gradient, slack)
        step = None if magnitude is not None else grid_of(gradient, slack)
        if magnitude is not None:
            found.append(("signs", magnitude.numel()))
        elif step is not None:
            largest = float((gradient / step.clamp(min=1e-300)).abs().max())
            found.append(("int4" if largest < 7.5 else "int8", step.numel()))
    if len(found) <= ALMOST_ALL * len(large):
        return None
    kinds = [kind for kind, _ in found]
    kind, shared = max(set(kinds), key=kinds.count), all(count == 1 for _, count in found)
    where = "each parameter's" if shared else "each channel's"
    if kind == "signs":
        return Finding("precision", f"{where} entries have one magnitude (signs, as in signSGD): {SIGNS}", hinders=True)
    if kind == "int4":
        sentence = f"{where} gradient lies on a grid of 15 values of its own (4 bits): {FEW}"
    elif shared:
        sentence = f"no parameter's gradient has more than 256 different values (int8): {MEANS}"
    else:
        sentence = f"each channel's gradient lies on a grid of 256 values of its own (int8): {MEANS}"
    return Finding("precision", sentence, changes=FEW_BITS)


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
    random = read_message(observation).chosen == "random"
    chosen = "a random choice was sent" if random else "only the largest were sent (top-k sparsification)"
    return Finding(
        "sparsification",
        f"{zeros / entries:.0%} of the entries are zero, scattered over rows and columns: {chosen}; closed forms need "
        "all entries of the first layers",
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
