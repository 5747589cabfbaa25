"""Tensors whose entries are multiples of a step, or all of one magnitude, found from the values themselves.

A message of few bits holds whole multiples of a step: one a tensor, or one a *channel*, which is a row of a matrix, of
a table or of filters, or a column of them. Symmetric grids put the largest magnitude at 127 or 7 steps; any other grid
of at most 255 steps is found as well where a channel shows enough of its values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Steps between the smallest and the largest of 256 values; distance from a whole number of steps, in steps.
STEPS, ON_GRID = 255, 0.01
# Largest multiples of symmetric grids of 4 and 8 bits, coarse ones first.
SYMMETRIC = (7, 127)
# Fewest entries that are neither zero nor the largest from which a grid is no chance; fewest entries of one magnitude.
LEAST_EVIDENCE, LEAST_SIGNS = 16, 16
# Fewest different values that show a grid, least entries of a channel with one of its own, and how many entries and
# rows are looked at first.
LEAST_DIFFERENT, LEAST_IN_A_ROW, SOME, FEW_ROWS = 4, 16, 1024, 4
# Where entries have an error of their own: the share of them that must lie on the grid, and the largest error in steps
# with which that is no chance; the share of a few of them below which the others are not looked at.
ALMOST_ALL, LARGEST_SLACK, MANY = 0.98, 0.4, 0.9
# Most entries looked at; equal magnitudes, relative.
SAMPLE, EQUAL = 65536, 1e-6


def sample(tensor: Tensor) -> Tensor:
    """At most `SAMPLE` entries, spread evenly, flat."""
    flat = tensor.flatten()
    return flat[:: -(-len(flat) // SAMPLE)]


def grid_of(values: Tensor, slack: Tensor | None = None) -> Tensor | None:
    """The step of the grid on which all values lie: (), or a step a channel, broadcastable; None where they do not.

    Args:
        slack: error of each entry beside the grid's, of the shape of the values; None for none.
    """
    for kind in SYMMETRIC:
        for rows, shape in _channels(values):
            step = _symmetric_step(rows, kind, None if slack is None else _like(slack, values, shape))
            if step is not None:
                return step.reshape(shape)
    if slack is not None:
        return None
    step = _step_of(values.flatten())
    if step is not None:
        return torch.tensor(step).to(values)
    for rows, shape in list(_channels(values))[1:]:
        if rows.shape[1] < LEAST_IN_A_ROW:
            continue
        steps = []
        for number in range(len(rows)):  # one after the other: the first of most tensors shows that there is no grid
            row = rows[number]
            found = _step_of(row) if row.any() else 0.0
            if found is None:
                break
            steps.append(found)
        else:
            return torch.tensor(steps).to(values).reshape(shape)
    return None


def signs_of(values: Tensor, slack: Tensor | None = None) -> Tensor | None:
    """The magnitude that all values have: (), or one a channel, broadcastable; None where they have several.

    Args:
        slack: see `grid_of`.
    """
    if values.numel() < LEAST_SIGNS:
        return None
    for rows, shape in _channels(values):
        if rows.shape[1] == 1 or (slack is None and _magnitudes_differ(_few(rows))):  # as in most tensors
            continue
        errors = None if slack is None else _like(slack, values, shape)
        if errors is not None and _share_of_one_size(_few(rows), _few(errors)) < MANY:
            continue
        if _share_of_one_size(rows, errors) >= (1.0 if slack is None else ALMOST_ALL):
            return rows.abs().median(dim=1, keepdim=True).values.reshape(shape)
    return None


def _share_of_one_size(rows: Tensor, errors: Tensor | None) -> float:
    """Share of the entries that have the median magnitude of their row; nan where most may be off by about as much.

    Args:
        errors: what an entry may be off beside the round-off of `EQUAL`.
    """
    sizes = rows.abs()
    middle = sizes.median(dim=1, keepdim=True).values
    allowed = EQUAL * middle
    if errors is not None:  # the middle one may have any entry's error
        allowed = allowed + 2 * errors.amax(dim=1, keepdim=True)
    shown = allowed < LARGEST_SLACK * middle
    if shown.double().mean() < (1.0 if errors is None else 0.5):
        return float("nan")
    return float(((sizes - middle).abs() <= allowed).double().mean(dim=1)[shown[:, 0]].mean())


def _few(rows: Tensor) -> Tensor:
    """Some entries of the first rows."""
    return rows[:FEW_ROWS, :SOME]


def _magnitudes_differ(rows: Tensor) -> bool:
    """Whether the entries of a row are too far apart to lie within `EQUAL` of any one magnitude, in some row."""
    sizes = rows.abs()
    largest, smallest = sizes.amax(dim=1), sizes.amin(dim=1)
    return bool((largest - smallest > 3 * EQUAL * largest).any())


def _channels(values: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The entries as one row, and as (channels, n) in each way that there is, with the shape of a number a channel."""
    yield values.reshape(1, -1), (1,) * values.dim()
    if values.dim() < 2:
        return
    ones = [1] * (values.dim() - 1)
    for rows, shape in (
        (values.flatten(1), (-1, *ones)),
        (values.reshape(-1, values.shape[-1]), (*values.shape[:-1], 1)),
        (values.flatten(1).mT, (1, *values.shape[1:])),
    ):
        if len(rows) > 1:
            yield rows, shape


def _like(slack: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The slack in the rows of `_channels` that have this shape."""
    return next(rows for rows, own in _channels(slack.expand(values.shape)) if own == shape)


def _symmetric_step(rows: Tensor, largest: int, slack: Tensor | None) -> Tensor | None:
    """(rows, 1): the steps of which the largest magnitude of each row is that many; None where others are no multiples.

    Rows of zeros have the step 0.
    """
    for own in (_few(rows), rows):  # most tensors lie on no grid, which a few entries show
        top = rows[: len(own)].abs().amax(dim=1, keepdim=True)
        step = (top / largest).clamp(min=torch.finfo(torch.float64).tiny)
        multiples = own / step
        whole = multiples.round()
        error = None if slack is None else 2 * slack[: len(own), : own.shape[1]] / step
        if not _on_grid(multiples - whole, error, (own != 0) & (own.abs() < top)):
            return None
    evidence = (whole != 0) & (whole.abs() < largest)
    return top / largest if int(evidence.sum()) >= LEAST_EVIDENCE else None


def _on_grid(off: Tensor, error: Tensor | None, shown: Tensor) -> bool:
    """Whether entries that are `off` whole steps by so much lie on a grid, given errors of their own in steps.

    Args:
        shown: entries that are neither zero nor the largest of their row.
    """
    if error is None:
        return float(off.abs().max()) < ON_GRID
    if not shown.any():
        return True
    allowed = error[shown]
    return (
        float(allowed.median()) <= LARGEST_SLACK
        and float((off[shown].abs() <= ON_GRID + allowed).double().mean()) >= ALMOST_ALL
    )


def _step_of(values: Tensor) -> float | None:
    """The step whose whole multiples, at most `STEPS`, the differences of all values are; None where there is none."""
    if any(len(some.unique()) > STEPS + 1 for some in (values[:SOME], sample(values))):
        return None
    different = values.unique().double()
    if not LEAST_DIFFERENT <= len(different) <= STEPS + 1:
        return None
    offsets = different - different[0]
    extent, largest = float(offsets[-1]), float(different.abs().max())
    for step in (largest / 127, extent / 255, float(offsets.diff().min())):
        multiples = offsets / step
        if extent / step < STEPS + 1 and float((multiples - multiples.round()).abs().max()) < ON_GRID:
            return step
    return None
