"""An update to which a client added Gaussian noise of one standard deviation sigma on every entry, read with its noise.

*Noise.* Every token's gradient is in one position row, or in the row that masked positions share, and in dL/db, so that
(sum of rows + shared row - dL/db) is nothing but noise, of variance (number of rows in it + 1) sigma^2. Without a bias,
sigma is read from the singular values of [G^T | S] beyond N.

*Masked positions* (MJP) have rows of noise alone. Where these are much shorter than every other row they show at once
(`attacks.linear.position_rows.masked_rows`). Under more noise every row counts as masked whose length noise of that
size explains. Visible patches whose gradient is below the noise are among them: nothing is assumed of a masked row but
the size of its gradient, while a masked row that is taken for a visible one denies its patch's whole part in S.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks.linear.errors_in_variables import RoundedSystem
from attacks.linear.position_rows import PositionRows, position_gradient, read_position_rows, remove_localisation
from attacks.linear.rounded_updates import rounded_system
from attacks.observation import Observation

# Deviations by which the mean square of a row of noise alone exceeds its expectation at most.
LONGEST = 5.0
# The same by which that of the shortest of such rows falls below it, at most.
SHORTEST = 3.0
# Largest error of a uniform error of variance 1.
BOUND = 3**0.5


def read_noisy_update(observation: Observation, *, explained: bool = True) -> PositionRows:
    """The update's rows and mask, with the bounds that uniform errors of its noise's variance have.

    Args:
        explained: rows count as masked that noise explains, and not only those that are far shorter than every other.

    Raises:
        UsageError: see `read_position_rows`.
    """
    return observation.once(_read_noisy_update, explained)


def _read_noisy_update(observation: Observation, explained: bool) -> PositionRows:
    found = read_position_rows(observation)
    tokenizer, noise = found.tokenizer, _measured(found)
    may_hide = tokenizer.hides_positions and not observation.drops_patches
    if explained and may_hide and not found.masked.any():
        sent = position_gradient(observation, tokenizer)[tokenizer.prefix :]
        masked = rows_of_noise(sent.double(), noise)
        if masked.any():
            rows, _, weight, _ = remove_localisation(observation, tokenizer, sent, masked)
            found = replace(found, rows=rows, masked=masked, dal_weight=weight, hidden=int(masked.sum()))
    bounds = torch.full_like(found.rows, BOUND * noise), torch.full_like(found.products, BOUND * noise)
    return replace(found, bounds=bounds)


def rows_of_noise(rows: Tensor, noise: float) -> Tensor:
    """(N,) bool, which of the position rows (N, D) as sent noise of this standard deviation explains.

    A term in the rows that is not known of (a localisation loss) is in the estimate of the noise, too. No row is
    shorter than its noise, which bounds it.
    """
    power = rows.square().mean(dim=1)
    deviation = (2 / rows.shape[1]) ** 0.5
    most = float(power.min()) / max(1 - SHORTEST * deviation, deviation)
    return power < min(noise**2, most) * (1 + LONGEST * deviation)


def _measured(update: PositionRows) -> float:
    """sigma as the update shows it; at least round-off."""
    n, width = int((~update.masked).sum()), update.rows.shape[1]
    least = torch.finfo(update.dtype).eps * float(update.products.square().mean().sqrt())
    if update.imbalance == update.imbalance:  # dL/db was sent
        added = n + 1 + update.tokenizer.hides_positions
        return max(update.imbalance * float(update.products[:, -1].norm()) / (width * added) ** 0.5, least)
    matrix = torch.cat([update.rows.T, update.products], dim=1)
    spare = (width - len(update.rows)) * update.products.shape[1]
    beyond = torch.linalg.svdvals(matrix)[len(update.rows) :].square().sum()
    return max(float(beyond / spare) ** 0.5, least) if spare > 0 else least


def noise_of(update: PositionRows) -> float:
    """sigma, the standard deviation of the noise on every entry.

    Args:
        update: as `read_noisy_update` gives it.
    """
    return float(update.bounds[1].max()) / BOUND


def noisy_system(update: PositionRows) -> RoundedSystem:
    """The system of one update, with one covariance for all its channels.

    Args:
        update: as `read_noisy_update` gives it.
    """
    system = rounded_system(update)
    if not update.masked.any():
        return system
    # Their size by channel says no more (measured), and takes a factorisation for each.
    size = system.factor_bounds[update.masked].square().mean().sqrt()
    return replace(system, factor_bounds=torch.where(update.masked[:, None], size, system.factor_bounds))


def whitened(update: PositionRows) -> Tensor:
    """[G^T | S] with noise of unit variance, (D, N + Q).

    Args:
        update: as `read_noisy_update` gives it.
    """
    return torch.cat([update.rows.T, update.products], dim=1) / noise_of(update)
