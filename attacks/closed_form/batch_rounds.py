"""Several updates of a client, each from a small batch: images that reappear in batches with different images.

It assumes that an image reappears with the same pixels, or with those mirrored or shifted by whole patches. Crops,
resizing, shifts by other numbers of pixels and all changes of colour leave a step out.

With images a, b in one step the position rows are S = G_a + G_b, and the projection's gradient is

    dL/dE = G_a^T X_a + G_b^T X_b = S^T X_a + G_b^T (X_b - X_a).

Outside span(S), dL/dE has row space span(X_b - X_a) =: span(B), so that lstsq(S^T, dL/dE) (I - B^T B) = X_a (I - B^T B)
= X_b (I - B^T B): every image of the batch fulfils the equations of `attacks.linear.normal_equations`, and with k
images B has N (k - 1) rows. Several local steps of SGD on different images are such a batch, however the weights move
in between: in dL/dE the products of rows and patches add up. Both D - N and P must exceed N (k - 1); then steps in
which an image meets different partners intersect in that image alone.

*Without the position gradient* the conditions of the first attention's and the projection's gradients take the place of
these equations (`attacks.closed_form.batch_step`), and the weights that were sent are used.

*Masks.* Rows that are zero in all images of a step, Z of them, give "zero outside span(B)", as in
`attacks.linear.masked_update`. Where p is visible in some images, S_p is theirs; with masked patches counted, B has N
(k - 1) + Z rows, however the masks of the images differ. But an image that is masked at p while another is not has x_p
in span(B) and not l_p: if the client uses the shared embedding, rows that do not fit are tried as masked in one step,
in two, and so on, and the last few of them as masked in all. Patches that a step hides are not vouched for: they lie in
a span whose weakest directions may be below the noise.

The server does not know which steps share an image. Any m steps with more equations than unknowns, sum_t (P - rank B_t)
> P, do not fit one image by chance: their relative misfit is that of the message's noise for steps that share one
(1e-8 to 5e-5 in float32 on trained vit_mini_64 and random ViT-B), and that of two different photographs otherwise
(2e-2 on ViT-B, but 2e-3 for the most similar of 150 pairs of small photographs). What the noise explains is known
beforehand (`Step.errors`), so the largest misfit follows from it. From every seed of m steps that fit, further steps
are added as long as they fit.

*Augmentation.* An image may be mirrored or shifted by whole patches in one step and not in another: each step is tried
as it is and mirrored, at the shift at which it fits the last one best (`attacks.linear.views`). The other images of the
step do not matter. Changes of colour are not found here: with k images the rows of dL/dE of two steps span more than
P directions together, and say nothing of a mixture of channels. Every other augmentation makes other patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import Attack
from attacks.closed_form.batch_step import Step, describe, images_in, read_step
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.normal_equations import Estimate, NormalEquations, Part
from attacks.linear.position_rows import LARGEST_IMBALANCE, position_gradient, read_position_rows, unbalanced
from attacks.linear.views import View, all_shifts, places
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Ridges, as a share of the number of steps, under which a misfit is measured: the small one decides, the large one
# ranks pairs of steps that have too few equations to decide.
DECIDING_RIDGE, RANKING_RIDGE = 1e-9, 1e-6
# Largest misfit of steps that share an image, in units of what the noise of the messages explains, and the least such
# limit. Measured in float32 on trained vit_mini_64 and random ViT-B, batches of two and three: at most 7e2 units, as
# the noise is not the same in all channels; steps of different images have 9e4 units and more.
NOISE_UNITS, LEAST_MISFIT = 3e3, 1e-5
# A row whose squared misfit exceeds the median row's by this factor is taken for masked in some step.
OUTLIER = 100
# Share of the rows that may be taken for masked in every step, which explains anything.
MOST_UNSEEN = 0.1
# Of single images that hide patches, steps of other images match by chance: of 54 answers of the trade-off planes that
# were vouched for in part, 46 claimed a tenth of the patches more than were right (MJP, vit_mini_32_mjp, 60 rounds).
HIDDEN = (
    "the batch holds one image, and position rows are exactly zero (patches behind MJP's shared position embedding): "
    "whether the steps that were joined show the same image is not sure; mjp_rounds decides it with what they show"
)
# Patches by which an image may be shifted between steps, in each direction; the least share of the two steps' rows, by
# squared size, that a shift must leave inside; and of the unshifted misfit, what it must bring it down to.
FARTHEST, LEAST_COMPARED, SHIFTED = 4, 0.1, 1e-2


@dataclass(frozen=True)
class Fit:
    """One image fitted to several steps.

    Attributes:
        sums: the equations, with rows of zeros where the image is taken to be masked.
        misfit: sum_t |P_t (x - l_t)|^2 + ridge T |x|^2 at its minimum over x, relative to sum_t |P_t l_t|^2.
        explained: what the noise of the messages leaves of it, by expectation.
        shown: (N,) bool, rows that no step hides.
    """

    sums: NormalEquations
    misfit: float
    explained: float
    shown: Tensor

    def shares_image(self, tolerance: float) -> bool:
        """Whether the steps share the image; see `largest_misfit`."""
        return self.misfit <= largest_misfit(self.explained, tolerance)


def largest_misfit(explained: float, tolerance: float) -> float:
    """The misfit up to which steps are taken to share an image.

    Args:
        explained: see `Fit`.
        tolerance: above which steps do not share an image, whatever the noise.
    """
    return min(tolerance, max(NOISE_UNITS * explained, LEAST_MISFIT))


def fit(steps: Sequence[Step], ridge: float = DECIDING_RIDGE, tolerance: float = 0.0) -> Fit:
    """Fit one image to several steps.

    Args:
        tolerance: where a step has masks of its own for each image, a row that misses by more than this share of the
            mean row, or by far more than most, is fitted again as masked in one step, in two, and so on.
    """
    sums = _accumulate(steps)
    targets = torch.stack([step.sums.targets for step in steps])  # (T, N, P)
    squares = torch.stack([step.sums.squares for step in steps])  # (T, N)
    factors = [_factor(part, ridge) for part in sums.parts]

    def misses(which: Tensor, targets: Tensor, squares: Tensor) -> Tensor:
        """(n,) squared misfit of the patches `which` (n,) with these sums (T, n, P) and (T, n)."""
        found = squares.sum(dim=0)
        for part, factor in zip(sums.parts, factors, strict=True):
            own = part.members[which]
            target = targets[:, own].sum(dim=0)  # (m, P)
            found[own] -= (target.T * torch.cholesky_solve(target.T, factor)).sum(dim=0)
        return found.clamp(min=0)

    total, miss = squares.sum(), misses(torch.arange(targets.shape[1]), targets, squares)
    explained = float(sum(step.errors.sum() for step in steps) / total)
    if any(step.own_masks for step in steps):
        limit = torch.minimum(largest_misfit(explained, tolerance) * total / len(miss), OUTLIER * miss.median())
        for count in range(1, len(steps) + 1):
            for hidden in combinations(range(len(steps)), count):
                bad = (miss > limit).nonzero()[:, 0]
                if count == len(steps) and len(bad) > MOST_UNSEEN * len(miss):
                    continue
                trial = targets[:, bad], squares[:, bad]
                for sent in trial:
                    sent[list(hidden)] = 0
                trial_miss = misses(bad, *trial)
                fits = trial_miss <= limit
                targets[:, bad[fits]], squares[:, bad[fits]] = (sent[:, fits] for sent in trial)
                miss[bad[fits]] = trial_miss[fits]
        sums.targets, sums.squares = targets.sum(dim=0), squares.sum(dim=0)
    return Fit(sums, float(miss.sum() / total), explained, (squares > 0).all(dim=0))


def _factor(part: Part, ridge: float) -> Tensor:
    """Cholesky factor of a part's matrix, (P, P), with a ridge for each step."""
    return torch.linalg.cholesky(part.matrix + ridge * part.weight * torch.eye(len(part.matrix)).to(part.matrix))


def _accumulate(steps: Sequence[Step]) -> NormalEquations:
    sums = NormalEquations(*steps[0].rows.shape, device=steps[0].rows.device)
    for step in steps:
        sums.merge(step.sums)
    return sums


def best_view(last: Step, other: Step, tokenizer: Tokenizer, mirrored: bool, ridge: float) -> tuple[float, Step]:
    """Misfit of two steps, and the other step in its view: mirrored or not, shifted where that fits far better."""
    grid = tokenizer.grid
    turned = other.seen_as(
        View.of(tokenizer, places(grid, mirrored, (0, 0)).to(last.rows.device), mirrored=mirrored), tokenizer
    )
    (part,) = _accumulate([last, turned]).parts
    solved = torch.cholesky_solve(torch.cat([last.sums.targets, turned.sums.targets]).T, _factor(part, ridge))
    ours, theirs = solved.split(len(last.rows), dim=1)  # (P, N) each
    own = last.sums.squares - (last.sums.targets.T * ours).sum(dim=0)
    its = turned.sums.squares - (turned.sums.targets.T * theirs).sum(dim=0)
    between = 2 * last.sums.targets @ theirs  # (N, N)
    source = all_shifts(grid, False, FARTHEST).to(ours.device)  # (S, N)
    inside = source >= 0
    missed = own + its[source] - between.gather(1, source.T.clamp(min=0)).T
    total = (inside * (last.sums.squares + turned.sums.squares[source])).sum(dim=1)
    enough = total >= LEAST_COMPARED * total[0]
    misfit = torch.where(enough, (inside * missed).sum(dim=1).clamp(min=0) / total, torch.inf)
    best = int(misfit.argmin())
    best = best if misfit[best] < SHIFTED * misfit[0] else 0  # the first is no shift
    return float(misfit[best]), turned.seen_as(View.of(tokenizer, source[best]), tokenizer)


def steps_needed(last: Step, others: Sequence[Step]) -> int:
    """Least number of steps, the last one included, whose equations outnumber the unknowns of a patch.

    One where the last step alone determines its image; more than there are where even all of them do not suffice.
    """
    unknowns = last.rows.shape[1]
    if not len(last.basis):
        return 1
    total = last.equations
    for number, step in enumerate(sorted(others, key=lambda s: -s.equations), start=2):
        total += step.equations
        if total > unknowns:
            return number
    return len(others) + 2


def find_groups(
    last: Step, others: Sequence[Step], tokenizer: Tokenizer, tolerance: float, max_trials: int
) -> Iterator[tuple[Step, ...]]:
    """Sets of steps that share an image with the last one, as large as they fit, each in the view that shows it.

    Args:
        tolerance: largest relative misfit of steps that share an image, whatever their noise.
        max_trials: most sets of steps that are tried as seeds.
    """
    number = steps_needed(last, others)
    if number > len(others) + 1:  # not even all of them suffice
        return
    ridge = DECIDING_RIDGE if number <= 2 else RANKING_RIDGE
    views = [
        (*best_view(last, other, tokenizer, mirrored, ridge), i)
        for i, other in enumerate(others if number > 1 else ())
        for mirrored in (False, True)
    ]
    ranked = [(seen, i) for _, seen, i in sorted(views, key=lambda view: view[0])]
    found: list[set[int]] = []
    seeds = (s for s in combinations(range(len(ranked)), number - 1) if len({ranked[v][1] for v in s}) == number - 1)
    for seed in islice(seeds, max_trials):
        if any(set(seed) <= group for group in found):
            continue
        group = [last, *(ranked[v][0] for v in seed)]
        if number > 1 and not fit(group, tolerance=tolerance).shares_image(tolerance):
            continue
        members, used = set(seed), {ranked[v][1] for v in seed}
        for v, (seen, i) in enumerate(ranked):
            if i not in used and fit([*group, seen], tolerance=tolerance).shares_image(tolerance):
                group.append(seen)
                members.add(v)
                used.add(i)
        found.append(members)
        yield tuple(group)


def possible_error(estimate: Estimate, patches: Tensor) -> float:
    """Root mean square error that the equations leave possible, in normalised pixels.

    Along an open direction it is at most the size that the completed patches (N, P) have there, or 1.
    """
    sizes = (patches @ estimate.open.T).square().mean(dim=0).clamp(min=1.0)  # (k,)
    if estimate.precision.dim() == 3:
        variances = 1 / torch.linalg.eigvalsh(estimate.precision).clamp(min=1e-300)  # (N, k)
        variances = variances.clamp(max=float(sizes.max()) if len(sizes) else 1.0)
    else:
        variances = torch.minimum(1 / estimate.precision.clamp(min=1e-300), sizes).expand_as(estimate.centre)
    return float(variances.sum(dim=1).mean() / estimate.rows.shape[1]) ** 0.5


@dataclass(frozen=True, kw_only=True)
class BatchRounds(Attack):
    """Separates the images of small batches by the steps that share one.

    Attributes:
        tolerance: largest relative misfit (of squared norms) of steps that are taken to share an image; less where the
            noise of their messages explains less (`largest_misfit`).
        max_error: largest error that the equations leave possible in an image that is vouched for, root mean square in
            normalised pixels (0.1 is about 26 dB); an image below it is determined before any prior is applied. Of a
            batch of one also the largest by the message's noise in a patch that is vouched for.
        max_trials: most sets of steps tried.
        prior: settles what the equations leave open.
    """

    tolerance: float = 4e-3
    max_error: float = 0.1
    max_trials: int = 2000
    prior: VectorialVariation = field(default_factory=VectorialVariation)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.SEVERAL_ROUNDS})
    needs_one_of: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})
    updates_wanted: ClassVar[int] = 9  # three epochs of a client with three images

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: batches are separated by steps that share an image."""
        if images_in(observations[-1]) == 1:
            return "the batch holds one image, which needs no separation from others"
        return "only one update of this client was seen" if len(observations) == 1 else ""

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """Images of the last step's batch, identified ones first; `details` holds the search's numbers."""
        target = observations[-1]
        tokenizer = find_tokenizer(target.model, target.image_shape)
        last = read_step(target)
        others = self._readable(observations[:-1], target)
        images, shown, errors, used = [], [], [], []
        for group in find_groups(last, others, tokenizer, self.tolerance, self.max_trials):
            fitted = fit(group, tolerance=self.tolerance)
            estimate = fitted.sums.solve()
            patches = self.prior.settle(estimate, tokenizer, target.std).patches
            error = possible_error(estimate, patches)
            if error <= self.max_error:
                images.append(tokenizer.unpatchify(patches[None]))
                shown.append(fitted.shown)
                errors.append(error)
                used.append(len(group))
            if len(images) == last.num_examples:
                break
        missing = last.num_examples - len(images)
        found = torch.cat([*images, *[tokenizer.unpatchify(last.rows[None])] * missing])  # (B, C, H, W)
        pixels = target.to_pixels(found).float()
        known = torch.zeros_like(pixels[:, :1], dtype=torch.bool)
        doubt = HIDDEN if last.num_examples == 1 and last.masked else _noise(target, tokenizer)
        sure = torch.ones_like(last.errors, dtype=torch.bool)
        if last.num_examples == 1:  # of several images the joined steps' errors are not those of the last one
            sure = last.errors <= last.rows.shape[1] * self.max_error**2
        for pixel_known, rows in zip(known, [] if doubt else shown, strict=False):
            pixel_known[0] = _by_pixel(rows & sure, tokenizer)
        details = {
            "steps_read": len(others) + 1,
            "steps_needed": steps_needed(last, others),
            "identified": len(images),
            "steps_used": min(used, default=0),
            "possible_error": max(errors, default=float("inf")),
            "masked": last.masked,
        }
        diagnosis = _unidentified(target, last, others, len(images)) if missing else doubt
        return Reconstruction(pixels, known, diagnosis=diagnosis, details=details)

    def _readable(self, earlier: Sequence[Observation], target: Observation) -> list[Step]:
        """Equations of the earlier steps of the same client; steps that cannot be read are left out."""
        steps = []
        for observation in earlier:
            if observation.client == target.client and observation.image_shape == target.image_shape:
                try:
                    steps.append(read_step(observation))
                except UsageError:
                    continue
        return steps


def _noise(observation: Observation, tokenizer: Tokenizer) -> str:
    """That noise makes up too much of the position rows for their errors to be small ones, in words, or ""."""
    if position_gradient(observation, tokenizer) is None:
        return ""
    read = read_position_rows(observation)
    return "; ".join(unbalanced(read.imbalance, read.rounding)) if read.imbalance > LARGEST_IMBALANCE else ""


def _by_pixel(patches: Tensor, tokenizer: Tokenizer) -> Tensor:
    """(H, W) bool from (N,) bool."""
    grid = patches.reshape(tokenizer.grid)
    return grid.repeat_interleave(tokenizer.patch_size, 0).repeat_interleave(tokenizer.patch_size, 1)


def _unidentified(target: Observation, last: Step, others: Sequence[Step], identified: int) -> str:
    """Why some images of the batch are not identified, in words."""
    needed = steps_needed(last, others)
    reason = f"{describe(target, last.masked, len(last.rows))}; {identified} could be identified"
    if needed > len(others) + 1:
        return (
            f"{reason}: {len(others) + 1} readable steps hold too few equations ({last.equations} a patch in the "
            f"last, for {last.rows.shape[1]} unknowns); more steps are needed that hold the same image "
            "beside other images"
        )
    return f"{reason}: among {len(others)} earlier steps too few hold an image of the last one beside other images"
