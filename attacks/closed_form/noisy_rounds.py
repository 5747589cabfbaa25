"""Noisy updates of one image, solved together: what a client gains by noise, an adversary takes back over rounds.

A client adds Gaussian noise of one standard deviation sigma to every entry of its update (clipping and noise, or
DP-SGD). Then the equation G^T X = S of `attacks.closed_form.patch_embedding` has errors of one size on both sides,
which is the problem of total least squares (Golub and Van Loan 1980): with A = [G^T | S] / sigma, (D, N + P + 1),

    A = G_0^T [I | X, 1] / sigma + noise of unit variance,

so that an update of T that show the same image adds D rows to one matrix of rank N and leaves X as it is, whatever the
weights of the network were in between. Nothing is averaged but what is equal: gradients that have changed bring new
equations. A rotation of the rows leaves noise of unit variance what it is: the triangular factor R of the stacked
matrix, at most (N + P + 1)^2 numbers, says all, after any number of updates. `attacks.linear.errors_in_variables`
solves it with the image prior.

*Masked positions* (MJP, `attacks.linear.noisy_update`). The factors of masked patches are unknown but for their sum and
their size, in every update those of other patches, so that masked updates stay systems of their own beside R. How they
are solved, and which updates count as showing the image, masked or not, says `attacks.linear.inexact_updates`. No patch
is vouched for: the expected error knows nothing of other optima, and at gamma 0.5 whole images of 16 dB would be. Where
noise hides which rows are masked, the equations are tried with all of them visible first: if these hold, what masked
patches add is below the noise, too, and again no patch is vouched for.

*More patches than channels.* One update, noisy or not, has D equations for N rows; T updates of different weights have
T D. Four exact ones with 64 patches and 48 channels give 91 to 104 dB where one alone gives 26 to 31 (three
photographs).

Departs from averaging (the usual answer to noise): the weights may move. It assumes the same pixels in every update;
augmented views are left out. With one update it is `patch_embedding`, or `mjp_subspace`, with errors on both sides.
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
from attacks.linear.errors_in_variables import RoundedSystem, correct
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.inexact_updates import predicts, solve_as_exact, solve_inexact
from attacks.linear.least_squares import solve_rows
from attacks.linear.noisy_update import BOUND, noise_of, noisy_system, read_noisy_update, whitened
from attacks.linear.null_space import settle_rows
from attacks.linear.position_rows import PositionRows, unmet_assumptions
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError

# Misfit up to which equations without rows of noise taken for masked hold. On twenty series of updates that mask rows
# below the noise, such equations gave 0.8 to 2 dB more where their misfit was at most 1.04 (one exception: 3 dB less),
# and 1 to 9 dB less where it was 1.07 and more.
HOLDS = 1.05
# Seconds of one CPU core for a row of the systems times N (P + 1), all steps of all solves together (1e-7 to 5e-7
# measured).
SECONDS_A_PRODUCT = 2.5e-7


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
        """See `Attack.obstacle`: without noise and with equations for all patches others give nothing more."""
        try:
            update = read_noisy_update(observations[-1], explained=False)
        except UsageError as error:
            return str(error)
        return _unreadable(update) or _nothing_to_gain(update, len(observations))

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: products of each row of the systems with the patches, in all solves."""
        update = read_noisy_update(observations[-1])
        rows, columns = len(observations) * update.tokenizer.width, update.products.shape[1]
        n = update.tokenizer.num_patches
        rows = rows if update.masked.any() else min(rows, n + columns)
        return SECONDS_A_PRODUCT * rows * columns * n

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds updates used, rows taken for masked, sigma, and the misfit."""
        target, explained = observations[-1], read_noisy_update(observations[-1])
        found = self._joined(observations, explained=False)
        hidden = not _unreadable(explained) and not torch.equal(explained.masked, found.updates[-1].masked)
        if hidden and found.misfit >= HOLDS:
            found = self._joined(observations, explained=True)
        last = found.updates[-1]
        sure = found.sure & ~torch.full_like(found.sure, hidden)
        details = {"updates": len(found.updates), "masked": int(last.masked.sum())}
        details |= {"noise": noise_of(last), "misfit": found.misfit}
        return render(target, last.tokenizer, found.patches, sure, "; ".join(found.reasons), details)

    def _joined(self, observations: Sequence[Observation], *, explained: bool) -> _Joined:
        """The updates that show the last one's image, solved.

        Args:
            explained: see `read_noisy_update`.
        """
        std, last = observations[-1].std, read_noisy_update(observations[-1], explained=explained)
        if _unreadable(last):
            raise UsageError(_unreadable(last))
        reasons = unmet_assumptions(last.num_examples, last.local_steps)
        patches = self._start(last, std)
        nothing = torch.zeros(len(patches), dtype=torch.bool, device=patches.device)
        if reasons:
            return _Joined(patches, nothing, float("nan"), [last], reasons)
        alone = self._alone(last, patches, std)
        updates = [*self._of_same_image(observations[:-1], last, alone, explained), last]
        masked = any(bool(update.masked.any()) for update in updates)
        if masked:
            starts = [alone, solve_as_exact(updates, std, self.prior)]
            patches = solve_inexact(joined(updates), starts, last.tokenizer, std, self.prior).patches
        patches, sure, misfit = corrected(joined(updates), patches, last.tokenizer, std, self.prior, reasons)
        return _Joined(patches, nothing if masked else sure, misfit, updates, reasons)

    def _start(self, last: PositionRows, std: tuple[float, ...]) -> Tensor:
        """The solve of the last update as if its entries had no errors, (N, P)."""
        if last.masked.any():
            return solve_as_exact([last], std, self.prior)
        products = last.products[None, :, : last.tokenizer.patch_dim]
        solution = solve_rows(last.rows[None], products, sent=last.dtype)[0]
        return settle_rows(solution, last.tokenizer, std, self.prior)

    def _alone(self, last: PositionRows, start: Tensor, std: tuple[float, ...]) -> Tensor:
        """What the last update says without the others, (N, P)."""
        systems = joined([last])
        if last.masked.any():
            starts = [start, torch.zeros_like(start)]
            return solve_inexact(systems, starts, last.tokenizer, std, self.prior).patches
        return correct(systems, start, last.tokenizer, std, self.prior).patches

    def _of_same_image(
        self, earlier: Sequence[Observation], last: PositionRows, patches: Tensor, explained: bool
    ) -> list[PositionRows]:
        """The earlier updates of the same client that show the image of the last one, of which `patches` are known."""
        found = []
        for observation in earlier:
            try:
                update = read_noisy_update(observation, explained=explained)
            except UsageError:
                continue
            fits = update.tokenizer == last.tokenizer and not _unreadable(update)
            fits = fits and not unmet_assumptions(update.num_examples, update.local_steps)
            if (
                fits
                and update.products.isfinite().all()
                and (self.one_image or predicts(patches, noisy_system(update), last.tokenizer))
            ):
                found.append(update)
        return found


@dataclass(frozen=True)
class _Joined:
    """Updates of one image, solved: patches (N, P), those vouched for (N,), misfit, and why not to trust them."""

    patches: Tensor
    sure: Tensor
    misfit: float
    updates: list[PositionRows]
    reasons: list[str]


def _unreadable(update: PositionRows) -> str:
    """Why the equations do not hold of this update, or ""."""
    if update.masked.all():
        return f"{update.mask_in_words()}: there is nothing to solve with"
    values = update.products.shape[1]
    if update.hidden >= values:
        return f"{update.mask_in_words()}, and patches have {values} values: what is hidden may be anything"
    if update.dropped and update.masked.any():
        return f"{update.mask_in_words()}, and the model may not have seen their patches"
    return ""


def _nothing_to_gain(update: PositionRows, count: int) -> str:
    """Why `count` updates say no more than what an attack on exact ones makes of them, or ""."""
    if update.noisy:
        return ""
    if update.masked.any():
        named = "mjp_subspace" if count == 1 else "mjp_rounds"
        return f"the update shows no noise: {named} solves updates that mask positions without weighing errors"
    if unmet := unmet_assumptions(update.num_examples, update.local_steps):
        return "; ".join(unmet)
    if count == 1:
        return "the update shows no noise, and is the only one: patch_embedding gives the same answer"
    patches = len(update.rows)
    if patches >= update.tokenizer.width or solve_rows(update.rows[None], update.products[None])[0].rank < patches:
        return ""  # each update has equations for some combinations of patches, and another one for others
    return f"the update shows no noise and settles all {patches} patches: patch_embedding gives the same answer"


def joined(updates: Sequence[PositionRows]) -> list[RoundedSystem]:
    """The systems of all updates: one of those that hide nothing, and one of each other."""
    plain = [update for update in updates if not update.masked.any()]
    systems = [stacked(plain)] if plain else []
    return systems + [noisy_system(update) for update in updates if update.masked.any()]


def stacked(updates: Sequence[PositionRows]) -> RoundedSystem:
    """The system of all updates as the triangular factor of their rows, with errors of unit variance."""
    n = len(updates[0].rows)
    rows = torch.cat([whitened(update) for update in updates])  # (T D, N + Q)
    channels = len(rows)
    rows = torch.linalg.qr(rows, mode="r").R if channels > rows.shape[1] else rows
    factors, products = rows[:, :n].T.contiguous(), rows[:, n:].contiguous()
    bounds = (torch.full_like(part, BOUND) for part in (factors, products))
    return RoundedSystem(factors, next(bounds), products, next(bounds), channels=channels)
