"""Updates of low precision as systems with the error of every entry (`attacks.linear.errors_in_variables`)."""

from __future__ import annotations

import torch

from attacks.linear.errors_in_variables import RoundedSystem
from attacks.linear.position_rows import PositionRows


def rounded_system(update: PositionRows) -> RoundedSystem:
    """The system of an update whose `bounds` are known.

    The factors of masked patches add up to what dL/db holds beside the visible rows. Each is taken for an equal share
    of that (0 without dL/db), with the visible rows' mean square in its channel for a variance.
    """
    (bounds, products), masked, factors = update.bounds, update.masked, update.rows
    if masked.any():
        visible = factors[~masked]
        shared = torch.zeros_like(factors[0])
        if update.products.shape[1] > update.tokenizer.patch_dim:
            shared = update.products[:, -1] - visible.sum(dim=0)
        wide = (3 * visible.square().mean(dim=0)).sqrt()
        factors = torch.where(masked[:, None], shared / masked.sum(), factors)
        bounds = torch.where(masked[:, None], wide, bounds)
    return RoundedSystem(factors, bounds, update.products, products, masked)
