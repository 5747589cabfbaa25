"""Assign reconstructions to originals.

A gradient does not depend on the order of its batch, so reconstructions are assigned to originals with the least total
squared error (Hungarian algorithm).
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def match(reconstructions: Tensor, originals: Tensor) -> Tensor:
    """For each original the index of its reconstruction.

    Args:
        reconstructions: (B' >= B, C, H, W).
        originals: (B, C, H, W).

    Returns:
        (B,) int64: `reconstructions[result]` is in the order of `originals`. A permutation, or a selection if there are
        more reconstructions than originals (an update of several local steps, scored on the images of one step).
    """
    if len(reconstructions) == 1:
        return torch.zeros(1, dtype=torch.int64, device=reconstructions.device)
    cost = torch.cdist(originals.flatten(1).double(), reconstructions.flatten(1).double()).square()
    return torch.as_tensor(linear_sum_assignment(cost.cpu().numpy())[1], device=reconstructions.device)
