"""Which reconstruction belongs to which original.

A gradient says nothing of the order of a batch, so a batch is matched by the assignment (Hungarian algorithm) of least
total squared error.
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
        (B,) int64: `reconstructions[result]` lines up with `originals`. A permutation, or a choice where there are more
        reconstructions than originals (an update of several local steps, of which one step's images are asked for).
    """
    if len(reconstructions) == 1:
        return torch.zeros(1, dtype=torch.int64, device=reconstructions.device)
    cost = torch.cdist(originals.flatten(1).double(), reconstructions.flatten(1).double()).square()
    return torch.as_tensor(linear_sum_assignment(cost.cpu().numpy())[1], device=reconstructions.device)
