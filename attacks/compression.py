"""What compression leaves in the numbers of an update: half precision, grids of 256 values, zeros of top-k.

An honest float32 gradient has all of float32's digits, no two of its entries are equal, and it is zero in whole rows or
columns only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from attacks.findings import Finding
from attacks.observation import Observation

# Entries of a parameter, and of one of its rows, from which on a grid of 256 values is no chance.
LEAST_LARGE, LEAST_IN_A_ROW = 4096, 16
# Rows that are looked at for a grid of each row's own.
SOME_ROWS = 32
# Updates of fewer entries have no statistics, and of each parameter at most SAMPLE entries are looked at.
LEAST_ENTRIES, SAMPLE = 1000, 65536
# Share of the entries that must show a mark.
ALMOST_ALL = 0.98
# Distance from a whole number, in steps of the grid.
ON_GRID = 0.01
# Share of scattered zeros from which an update is sparsified.
SPARSE = 0.2
MEANS = "the attacks reach what that precision leaves of the image, about 20 to 45 dB"


def sample(tensor: Tensor) -> Tensor:
    """At most `SAMPLE` entries, spread evenly, flat."""
    flat = tensor.flatten()
    return flat[:: -(-len(flat) // SAMPLE)]


def find_precision(observation: Observation, values: Mapping[str, Tensor]) -> Finding | None:
    """Fewer digits than float32's: half precision of gradients or returned weights, int8 a tensor or a channel.

    Args:
        values: the gradients that are not zero, by parameter name.
    """
    if observation.kind == "weights" and observation.learning_rate:
        sent = dict(observation.model.named_parameters())
        rate, slack = observation.learning_rate, 4 * torch.finfo(torch.float32).eps
        returned = [(sent[n].detach() - rate * g)[g != 0] for n, g in values.items() if n in sent]
        sampled, what = torch.cat([sample(r).float() for r in returned]), "returned weights"
    else:
        sampled, what, slack = torch.cat([sample(g).float() for g in values.values()]), "entries", 0.0
    sampled = sampled[sampled != 0]
    for kind in (torch.bfloat16, torch.float16):  # in this order: nearly all bfloat16 numbers are float16 numbers too
        share = float(((sampled.to(kind).float() - sampled).abs() <= slack * sampled.abs()).float().mean())
        if share > ALMOST_ALL:
            name = str(kind).removeprefix("torch.")
            return Finding("precision", f"all {what} are {name} numbers: {MEANS}")
    large = [g for g in values.values() if g.numel() >= LEAST_LARGE]
    coarse = (len(s.unique()) <= min(256, s.count_nonzero() // 4) for s in map(sample, large))
    if _almost_all(coarse, len(large)):
        return Finding("precision", f"no parameter's gradient has more than 256 different values (int8): {MEANS}")
    tables = [g.flatten(1) for g in large if g.dim() > 1]
    if _almost_all((any(_on_a_grid(rows[:SOME_ROWS]) for rows in (table, table.mT)) for table in tables), len(tables)):
        return Finding("precision", f"each channel's gradient lies on a grid of 256 values of its own (int8): {MEANS}")
    return None


def _almost_all(checks: Iterable[bool], count: int) -> bool:
    """Whether more than `ALMOST_ALL` of `count` checks hold; none is made once too many have failed."""
    failed = 0
    for holds in checks:
        failed += not holds
        if count - failed <= ALMOST_ALL * count:
            return False
    return count > 0


def _on_a_grid(rows: Tensor) -> bool:
    """Whether each row (M, n) has the 255 values of symmetric int8 or the 256 of affine int8, by its own largest."""
    rows = rows[(rows != 0).any(dim=1)].double()
    if rows.shape[1] < LEAST_IN_A_ROW or not len(rows):
        return False
    low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
    symmetric = 127 * rows / torch.maximum(high, -low)
    affine = 255 * (rows - low) / (high - low).clamp(min=torch.finfo(torch.float64).tiny)
    distances = ((grid - grid.round()).abs() for grid in (symmetric, affine))
    return any(float((distance < ON_GRID).double().mean()) > ALMOST_ALL for distance in distances)


def find_sparsification(observation: Observation, values: Mapping[str, Tensor]) -> Finding | None:
    """Zeros within rows and columns that are not zero: a layer's honest gradient is zero in whole rows or columns."""
    tables = {n for n, module in observation.model.named_modules() if isinstance(module, nn.Embedding)}
    zeros = entries = 0
    for name, gradient in values.items():
        if gradient.dim() not in (2, 4) or name.rpartition(".")[0] in tables:
            continue
        rows = gradient.flatten(1)
        if rows.all():
            entries += rows.numel()
            continue
        rows = rows[(rows != 0).any(dim=1)][:, (rows != 0).any(dim=0)]
        zeros, entries = zeros + int((rows == 0).sum()), entries + rows.numel()
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
    if observation.kind != "weights" or not observation.learning_rate:
        return False
    sent = dict(observation.model.named_parameters())
    steps = torch.cat([sample(g).float() for n, g in values.items() if n in sent]) * observation.learning_rate
    weights = torch.cat([sample(sent[n].detach()).float() for n in values if n in sent])
    kept = weights != 0
    return bool((steps[kept].abs() / weights[kept].abs()).median() < 100 * torch.finfo(torch.float32).eps)
