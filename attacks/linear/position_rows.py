"""Removing the localisation loss from the position rows.

MJP clients add lambda * DAL to their loss (dense absolute localisation, its equation 4). That term depends on the
position embedding, the mask and the map g, all of which the server sent or reads off the update; it reaches no other
gradient that the closed forms use. So its gradient d (N, D) can be computed from the sent model and subtracted.

lambda need not be known. Every token's gradient flows into exactly one position row and into the bias of the patch
projection, so without DAL the rows' sum plus the shared unknown row equals dL/db. With it

    sum_p rows_p + unknown - dL/db = lambda sum_p d_p

is D equations for one number, and their misfit tells whether anything else feeds the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.observation import Observation
from attacks.tokenizer import Tokenizer

# A share of the rows' sum that round-off explains; below it there is no DAL term to remove.
ROUND_OFF = 2e-6
# Lengths of rows of pure noise differ by less than ALIKE deviations (of relative size D^-1/2); other rows are longer
# by at least APART.
ALIKE, APART = 5.0, 1.2


@dataclass(frozen=True)
class CleanRows:
    """Position rows without the localisation loss.

    Attributes:
        rows: (N, D) float64, dL/dz of the visible patches and exact zeros at masked ones.
        masked: (N,) bool, rows that hold no gradient (`masked_rows`).
        dal_weight: lambda as found; 0.0 where no term was found.
        imbalance: |sum of rows + unknown row - dL/db| / |dL/db|, near 0 where the rows are what the closed forms take
            them for; NaN where the update lacks what it takes to tell.
    """

    rows: Tensor
    masked: Tensor
    dal_weight: float
    imbalance: float


def clean_rows(observation: Observation, tokenizer: Tokenizer, rows: Tensor) -> CleanRows:
    """Find the mask and take the localisation loss out of the patches' position rows (N, D)."""
    masked = masked_rows(rows)
    rows = torch.where(masked[:, None], 0.0, rows.to(torch.float64))
    excess = _excess(observation.gradients, tokenizer, rows, masked)
    if excess is None:
        return CleanRows(rows, masked, 0.0, float("nan"))
    scale = observation.gradients[tokenizer.bias].double().norm()
    weight = 0.0
    if excess.norm() > ROUND_OFF * scale and getattr(observation.model, "dal", None) is not None:
        term = dal_gradient(observation, tokenizer, masked)  # (N, D)
        total = term.sum(dim=0)
        if total.norm() > 0:
            weight = float(excess @ total / total.square().sum())
            rows, excess = rows - weight * term, excess - weight * total
    return CleanRows(rows, masked, weight, float(excess.norm() / scale))


def masked_rows(rows: Tensor) -> Tensor:
    """(N,) bool, which of the position rows (N, D) hold no gradient: exact zeros, or nothing but noise.

    Rows of pure noise are all of one length, for D numbers leave no room for chance, and shorter than every other.
    """
    lengths = rows.to(torch.float64).norm(dim=1)
    ordered = lengths.sort().values
    if not ordered[0] > 0:
        return lengths == 0
    alike = lengths < (1 + ALIKE * rows.shape[1] ** -0.5) * ordered[0]
    count = int(alike.sum())
    apart = count < len(rows) and bool(ordered[count] > APART * ordered[count - 1])
    return alike & (count > 1 and apart)


def dal_gradient(observation: Observation, tokenizer: Tokenizer, masked: Tensor) -> Tensor:
    """d, (N, D) float64: gradient of the sent model's localisation loss with respect to the patches' positions."""
    parameter = dict(observation.model.named_parameters())[tokenizer.positions]
    with torch.enable_grad():
        positions = parameter.detach().reshape(-1, tokenizer.width)[tokenizer.prefix :].clone().requires_grad_(True)
        loss = observation.model.dal(positions, tokenizer.grid, masked[None])
        return torch.autograd.grad(loss, positions)[0].to(torch.float64)


def _excess(gradients: Mapping[str, Tensor], tokenizer: Tokenizer, rows: Tensor, masked: Tensor) -> Tensor | None:
    """sum of rows + unknown row - dL/db, (D,), or None where the update lacks one of them."""
    if tokenizer.bias is None or tokenizer.bias not in gradients:
        return None
    unknown = [g for name, g in gradients.items() if "unk" in name.lower() and g.numel() == tokenizer.width]
    if masked.any() and len(unknown) != 1:
        return None
    shared = unknown[0].flatten().double() if masked.any() else 0.0
    return rows.sum(dim=0) + shared - gradients[tokenizer.bias].double()
