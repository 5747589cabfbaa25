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
their size, in every update those of other patches, so that masked updates stay systems of their own beside R. Patches
and hidden factors multiply each other: the search starts from the zero image and from the solve of
`attacks.mjp.subspace`, whichever explains the last update better, and is repeated until the misfit has settled. No
patch is vouched for: the expected error knows nothing of other optima, and at gamma 0.5 it is up to ten times too low.

*Which updates show the image.* X of the last update alone, however rough, predicts what another update of the image
sends far better than X with its patches mirrored in themselves does, which has the same colours, contrasts and
smoothness. For another image both predict nothing. An update counts where

    misfit of X < `PREDICTS` times the least misfit of X with mirrored patches (columns, rows, or both reversed).

Measured with shipped vit_mini_32 and vit_mini_64, plain and MJP at gamma 0.1 and 0.5, eight photographs in all pairs,
noise of 1e-4 to 3e-1 of the update's rms entry: at least 0.80 for other images; at most 0.77 for the same image with
noise up to 1e-2, and up to 0.97 with more, where updates are left out. At gamma 0.9 and 32 pixels other images have
0.69, and with noise of 1e-4 the test fails.

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
from attacks.linear.completion import complete, render
from attacks.linear.errors_in_variables import Corrected, RoundedSystem, correct, marginal_misfit
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.least_squares import solve_rows
from attacks.linear.masked_update import solve_masked
from attacks.linear.noisy_update import BOUND, noise_of, noisy_system, read_noisy_update, whitened
from attacks.linear.null_space import settle_rows
from attacks.linear.position_rows import PositionRows, unmet_assumptions
from attacks.linear.views import mirror
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# Share of dL/db by which the rows miss it above which an update counts as noisy; float32 leaves 1e-7 to 1e-5.
NOISY = 3e-5
# See the module.
PREDICTS = 0.65
# Solves of masked updates, one from the other's answer, while the misfit falls to less than this share.
SOLVES, SETTLED = 4, 0.98
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
            update = read_noisy_update(observations[-1])
        except UsageError as error:
            return str(error)
        return _unreadable(update) or _noiseless(update)

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: one inverse of N x N a row of R and step; several solves where masked."""
        update = read_noisy_update(observations[-1])
        n, p = update.tokenizer.num_patches, update.tokenizer.patch_dim
        solves = len(observations) if update.masked.any() else 1
        return SECONDS_A_PRODUCT * (n + p) * n**2 * p * solves

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds updates used, sigma and the misfit of the equations."""
        target = observations[-1]
        last = read_noisy_update(target)
        if _unreadable(last):
            raise UsageError(_unreadable(last))
        reasons = unmet_assumptions(last.num_examples, last.local_steps)
        start, updates = self._start(last, target.std), [last]
        sure, misfit = torch.zeros(len(start), dtype=torch.bool, device=start.device), float("nan")
        if not reasons:
            alone = self._solve([last], start, target.std).patches
            updates = [*self._of_same_image(observations[:-1], last, alone), last]
            start = self._solve(updates, alone if last.masked.any() else start, target.std, SOLVES - 1).patches
            systems = joined(updates)
            start, sure, misfit = corrected(systems, start, last.tokenizer, target.std, self.prior, reasons)
            if any(update.masked.any() for update in updates):
                sure = torch.zeros_like(sure)  # see the module
        details = {"updates": len(updates), "masked": int(last.masked.sum()), "noise": noise_of(last), "misfit": misfit}
        return render(target, last.tokenizer, start, sure, "; ".join(reasons), details)

    def _start(self, last: PositionRows, std: tuple[float, ...]) -> Tensor:
        """The solve of the last update without errors of its rows, (N, P)."""
        if last.masked.any():
            return self._start_of_masked(last, std)
        products = last.products[None, :, : last.tokenizer.patch_dim]
        solution = solve_rows(last.rows[None], products, sent=last.dtype)[0]
        return settle_rows(solution, last.tokenizer, std, self.prior)

    def _start_of_masked(self, last: PositionRows, std: tuple[float, ...]) -> Tensor:
        """The zero image, or the solve that projects the hidden patches off: whichever leads to a lower misfit."""
        update = solve_masked(last)
        found = complete(self.prior, update.estimate(), last.tokenizer, std, ~update.masked, updates=1).patches
        starts = [found, torch.zeros_like(found)]
        return min((self._solve([last], start, std) for start in starts), key=lambda solved: solved.misfit).patches

    def _solve(
        self, updates: Sequence[PositionRows], start: Tensor, std: tuple[float, ...], solves: int = 1
    ) -> Corrected:
        """The most probable patches; of masked updates after several solves, each from the last one's answer."""
        systems, tokenizer = joined(updates), updates[-1].tokenizer
        best = correct(systems, start, tokenizer, std, self.prior)
        for _ in range(solves - 1 if any(update.masked.any() for update in updates) else 0):
            found = correct(systems, best.patches, tokenizer, std, self.prior)
            if not found.misfit < best.misfit:
                break
            settled, best = found.misfit > SETTLED * best.misfit, found
            if settled:
                break
        return best

    def _of_same_image(self, earlier: Sequence[Observation], last: PositionRows, patches: Tensor) -> list[PositionRows]:
        """The earlier updates of the same client that show the image of the last one, of which `patches` are known."""
        found = []
        for observation in earlier:
            try:
                update = read_noisy_update(observation)
            except UsageError:
                continue
            fits = update.tokenizer == last.tokenizer and not _unreadable(update)
            fits = fits and not unmet_assumptions(update.num_examples, update.local_steps)
            if fits and update.products.isfinite().all() and (self.one_image or predicts(patches, update)):
                found.append(update)
        return found


def _unreadable(update: PositionRows) -> str:
    """Why the equations do not hold of this update, or ""."""
    if update.masked.all():
        return "every position row is masked, or nothing but noise: there is nothing to solve with"
    if update.dropped and update.masked.any():
        return f"{update.mask_in_words()}, and the model may not have seen their patches"
    return ""


def _noiseless(update: PositionRows) -> str:
    """Why errors of the rows need no weighing, or ""."""
    if update.imbalance > NOISY:
        return ""
    named = "mjp_subspace" if update.masked.any() else "patch_embedding"
    return f"the update shows no noise: {named} gives the same answer"


def predicts(patches: Tensor, update: PositionRows) -> bool:
    """Whether patches (N, P) of one image explain an update so well that it shows the same; see the module."""
    system, tokenizer = noisy_system(update), update.tokenizer
    own, *turned = (marginal_misfit(system, seen)[0] for seen in (patches, *_mirrored(patches, tokenizer)))
    return 0 < own < PREDICTS * min(turned)


def _mirrored(patches: Tensor, tokenizer: Tokenizer) -> list[Tensor]:
    """Every patch (N, P) mirrored in itself: columns, rows, or both reversed."""
    upside_down = patches.unflatten(1, (tokenizer.channels, -1, tokenizer.patch_size)).flip(2).flatten(1)
    return [mirror(patches, tokenizer), upside_down, mirror(upside_down, tokenizer)]


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
