"""Noisy updates of one image, stacked: what a client gains by noise, an adversary takes back over rounds.

A client adds Gaussian noise of one standard deviation sigma to every entry of its update (clipping and noise, or
DP-SGD). Then the equation G^T X = S of `attacks.closed_form.patch_embedding` has errors of one size on both sides,
which is the problem of total least squares (Golub and Van Loan 1980): with A = [G^T | S] / sigma, (D, N + P + 1),

    A = G_0^T [I | X, 1] / sigma + noise of unit variance,

so that an update of T that show the same image adds D rows to one matrix of rank N and leaves X as it is, whatever the
weights of the network were in between. Nothing is averaged but what is equal: gradients that have changed bring new
equations. A rotation of the rows leaves noise of unit variance what it is: the triangular factor R of the stacked
matrix, at most (N + P + 1)^2 numbers, says all, after any number of updates. `attacks.linear.errors_in_variables`
solves it with the image prior.

*Noise.* Every token's gradient is in one position row and in dL/db, so that (sum of rows - dL/db) is nothing but noise,
of variance (N + 1) sigma^2. Without a bias, sigma is read from the singular values of A beyond N.

*Which updates show the image.* Let rem(A) be the sum of the squared singular values beyond N. Updates of one image have
one row space, and rem of the two stacked exceeds the sum of both by no more than noise,

    growth = (rem([A; B]) - rem(A) - rem(B)) / (number of entries that are noise now and were fitted before) = 1,

a little more where combinations of patches are below the noise (measured 0.9 to 1.7). Two images have more, or, where
the noise is strong, about as much as an image and a mirrored one: so B has to fit better than B with every patch
mirrored.

Departs from averaging (the usual answer to noise): the weights may move. It assumes the same pixels in every update;
augmented views are left out, and so are masked positions (MJP). With one update it is `patch_embedding` with errors on
both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import Attack
from attacks.closed_form.patch_embedding import STRENGTH, corrected
from attacks.linear.completion import render
from attacks.linear.errors_in_variables import RoundedSystem
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.least_squares import solve_rows
from attacks.linear.null_space import settle_rows
from attacks.linear.position_rows import PositionRows, read_position_rows, unmet_assumptions
from attacks.linear.views import mirror
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# Share of dL/db by which the rows miss it above which an update counts as noisy; float32 leaves 1e-7 to 1e-5.
NOISY = 3e-5
# Largest growth of updates that show one image, and by how much it must be less than with mirrored patches. Measured on
# six photographs, trained vit_mini_32 and vit_mini_64, noise of 1e-3 to 1e-1 of the update's rms entry: one image 0.9
# to 1.7, and 0.04 to 1e3 less than mirrored; two images at most 0.06 less where their growth is below 1.8.
LARGEST_GROWTH, LEAST_GAIN = 1.8, 0.1
# Seconds of one CPU core for a row of R times N^2 P, all steps of the solve together.
SECONDS_A_PRODUCT = 2.5e-8


@dataclass(frozen=True, kw_only=True)
class NoisyRounds(Attack):
    """The last update's image, from all updates of the client that show it.

    Args:
        prior: of the image.
        one_image: take every update of the client to show the image, as a server knows of a client that reports one;
            else what the updates themselves say.
    """

    prior: VectorialVariation = field(default_factory=lambda: VectorialVariation(strength=STRENGTH))
    one_image: bool = False

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.SEVERAL_ROUNDS})
    updates_wanted: ClassVar[int] = 16  # four take 6 dB off the noise, sixteen 12

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: without noise there is nothing to weigh."""
        try:
            update = read_position_rows(observations[-1])
        except UsageError as error:
            return str(error)
        if update.masked.any():
            return f"{update.mask_in_words()}: mjp_subspace and mjp_rounds are for masked positions"
        if not update.imbalance > NOISY:
            return "the update shows no noise: patch_embedding gives the same answer"
        return ""

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: one inverse of N x N a row of R and step."""
        tokenizer = read_position_rows(observations[-1]).tokenizer
        n, p = tokenizer.num_patches, tokenizer.patch_dim
        return SECONDS_A_PRODUCT * (n + p) * n**2 * p

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds updates used, sigma and the misfit of the equations."""
        target = observations[-1]
        last = read_position_rows(target)
        if last.masked.any():
            raise UsageError(self.obstacle([target]))
        tokenizer, reasons = last.tokenizer, unmet_assumptions(last.num_examples, last.local_steps)
        updates = [last] if reasons else [*self._of_same_image(observations[:-1], last), last]
        solution = solve_rows(last.rows[None], last.products[None, :, : tokenizer.patch_dim], sent=last.dtype)[0]
        start = settle_rows(solution, tokenizer, target.std, self.prior)
        if not reasons:
            start, sure, misfit = corrected([stacked(updates)], start, tokenizer, target.std, self.prior, reasons)
        else:
            sure, misfit = torch.zeros(len(start), dtype=torch.bool, device=start.device), float("nan")
        details = {"updates": len(updates), "noise": noise_of(last), "misfit": misfit}
        return render(target, tokenizer, start, sure, "; ".join(reasons), details)

    def _of_same_image(self, earlier: Sequence[Observation], last: PositionRows) -> list[PositionRows]:
        """The earlier updates of the same client that show the image of the last one."""
        found = []
        for observation in earlier:
            try:
                update = read_position_rows(observation)
            except UsageError:
                continue
            fits = update.tokenizer == last.tokenizer and not update.masked.any()
            fits = fits and not unmet_assumptions(update.num_examples, update.local_steps)
            if fits and update.products.isfinite().all() and (self.one_image or same_image(last, update)):
                found.append(update)
        return found


def noise_of(update: PositionRows) -> float:
    """sigma, the standard deviation of an entry's noise, as the update shows it; at least round-off."""
    n, width = update.rows.shape
    least = torch.finfo(update.dtype).eps * float(update.products.square().mean().sqrt())
    if update.imbalance == update.imbalance:  # dL/db was sent
        shared = update.tokenizer.shared_position is not None
        return max(update.imbalance * float(update.products[:, -1].norm()) / (width * (n + 1 + shared)) ** 0.5, least)
    matrix = torch.cat([update.rows.T, update.products], dim=1)
    spare = (width - n) * update.products.shape[1]
    return max((remainder(matrix, n) / spare) ** 0.5, least) if spare > 0 else least


def whitened(update: PositionRows) -> Tensor:
    """A, (D, N + Q) with noise of unit variance."""
    return torch.cat([update.rows.T, update.products], dim=1) / noise_of(update)


def remainder(matrix: Tensor, rank: int) -> float:
    """Sum of the squared singular values beyond the first `rank`."""
    return float(torch.linalg.svdvals(matrix)[rank:].square().sum())


def growth(first: Tensor, second: Tensor, rows: int) -> float:
    """How much worse one image with `rows` patches explains two whitened updates than two images do, in units of noise.

    NaN where two updates do not show it: fewer rows together than patches.
    """
    columns = first.shape[1] - rows
    spare = [max(count - rows, 0) for count in (len(first) + len(second), len(first), len(second))]
    entries = (spare[0] - spare[1] - spare[2]) * columns
    if entries <= 0:
        return float("nan")
    both = remainder(torch.cat([first, second]), rows)
    return (both - remainder(first, rows) - remainder(second, rows)) / entries


def same_image(last: PositionRows, other: PositionRows) -> bool:
    """Whether two noisy updates show the same image; see the module."""
    n, tokenizer = len(last.rows), last.tokenizer
    first, second = whitened(last), whitened(other)
    found = growth(first, second, n)
    if not found <= LARGEST_GROWTH:
        return False
    return growth(first, _mirrored(second, tokenizer), n) > found + LEAST_GAIN


def _mirrored(matrix: Tensor, tokenizer: Tokenizer) -> Tensor:
    """A with every patch mirrored in itself."""
    n, p = tokenizer.num_patches, tokenizer.patch_dim
    return torch.cat([matrix[:, :n], mirror(matrix[:, n : n + p], tokenizer), matrix[:, n + p :]], dim=1)


def stacked(updates: Sequence[PositionRows]) -> RoundedSystem:
    """The system of all updates as the triangular factor of their rows, with errors of unit variance."""
    n = len(updates[0].rows)
    rows = torch.cat([whitened(update) for update in updates])  # (T D, N + Q)
    channels = len(rows)
    rows = torch.linalg.qr(rows, mode="r").R if channels > rows.shape[1] else rows
    factors, products = rows[:, :n].T.contiguous(), rows[:, n:].contiguous()
    bounds = (torch.full_like(part, 3**0.5) for part in (factors, products))  # of a uniform error of variance 1
    return RoundedSystem(factors, next(bounds), products, next(bounds), channels=channels)
