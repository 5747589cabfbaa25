"""Assign reconstructions to originals.

A gradient does not depend on the order of its batch, so reconstructions are assigned to originals with the highest
total PSNR (Hungarian algorithm): by squared errors an exact answer may go to a wrong original, where that spares a bad
answer a still larger error.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

NONE = -1  # stands for no reconstruction
EXACT = 1e-12  # squared error of a pixel below which answers are equally exact (120 dB)


def match(reconstructions: Tensor, originals: Tensor) -> Tensor:
    """For each original the index of its reconstruction.

    Args:
        reconstructions: (B', C, H, W).
        originals: (B, C, H, W).

    Returns:
        (B,) int64: `reconstructions[result]` is in the order of `originals`. A permutation, or a selection if there are
        more reconstructions than originals (an update of several local steps, scored on the images of one step). Where
        there are fewer, -1 for originals without one.
    """
    found = torch.full((len(originals),), NONE, dtype=torch.int64, device=reconstructions.device)
    if len(reconstructions) == len(originals) == 1:
        return torch.zeros_like(found)
    errors = torch.cdist(originals.flatten(1).double(), reconstructions.flatten(1).double()).square()
    cost = (errors / originals[0].numel() + EXACT).log()
    places, chosen = (torch.as_tensor(i, device=found.device) for i in linear_sum_assignment(cost.cpu().numpy()))
    found[places] = chosen
    return found
