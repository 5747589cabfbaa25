"""Hidden spans that no update shows whole, from the differences of updates of one image.

With more patches than channels an update shows only part of the span of its masked patches: of h hidden rows the D - U
channels beyond its U visible rows mix D - U combinations (`attacks.linear.masked_update`), and D - U < h. Its visible
rows are then wrong along directions that nothing in the update names. Other updates of the image name them. With D_t
the space of differences of the masked patches of update t, row p of update t is x_p plus something in D_t, so that

    l_s,p - l_t,p   lies in   D_s + D_t      for all p that both show.

*Pairs.* What the known directions B_s and B_t leave of these rows has at most dim(D_s + D_t) - dim(B_s + B_t)
directions: 10 for two updates of ViT-Ti at 224 pixels that hide 20 patches each, with some 150 rows. Their singular
values fall by four orders of magnitude there (2 to 50, then 5e-4 and less), and for updates of different images they do
not: what is left beyond says whether two updates show one image.

*Spans.* D_s lies in D_s + D_t for every t. Three updates are enough where the masks are disjoint:

    D_s = (D_s + D_t) cut (D_s + D_u),

found as the null space of the mean of what lies outside of each. Where all other updates hide a patch, its direction is
in the intersection as well; then less is known of the patches, and nothing wrong.

*Alike masks.* Two updates with the same mask and weights do not differ, with nearly the same ones in few directions.
Where masks overlap a pair counts only if all directions of D_s + D_t are found.

No weights, labels or order of the updates are needed, and the masks may differ in size. Two updates that hide disjoint
patches do not suffice: any complement of D_t in D_s + D_t would do for D_s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from attacks.linear.masked_update import MaskedUpdate
from attacks.linear.normal_equations import NormalEquations
from attacks.linear.views import all_shifts, mirror
from attacks.tokenizer import Tokenizer

# Updates of the same image that the spans follow from.
LEAST_UPDATES = 3
# Largest share of the rows, by squared size, that a pair of updates of one image leaves beyond its directions. At most
# 3e-8 between updates of one of eight photographs, 6e-4 and more between different ones (ViT-Ti, 224 pixels, float32,
# gamma 0.03 to 0.5).
AGREEMENT = 1e-5
# A singular value of the rows counts as a direction above this multiple of the largest of those beyond.
ABOVE_NOISE = 4.0
# Of an update's known directions so many may be noise: the gradients at the tokens of a pre-norm ViT are orthogonal to
# the constant vector, so that D - 1 channels hold them, and the last of D - U combinations is round-off.
NOISE_ONLY = 1
# Directions that noise turns by more than this squared sine are left to the differences to find.
LARGEST_TILT = 1e-2
# Rows that both updates show, beyond the directions that they may have, for the noise to be seen.
LEAST_SPARE = 8
# A direction is in all spaces where its squared sine with them is less than this on average.
COMMON = 1e-3
TINY = 1e-300


@dataclass(frozen=True)
class _Pair:
    """Two updates, compared.

    Attributes:
        span: (k, P) orthonormal, what their rows differ in.
        tilt: (k,) expected squared sine of the angle by which noise turns each row of `span`.
        misfit: share of the rows, by squared size, that lies beyond; infinite where too few rows are shown by both, or
            where these cannot show the whole span.
    """

    span: Tensor
    tilt: Tensor
    misfit: float

    @property
    def agrees(self) -> bool:
        """Whether both show one image, and the pair its span."""
        return self.misfit < AGREEMENT


def completes(first: MaskedUpdate, second: MaskedUpdate) -> bool:
    """Whether two narrow updates show one image, at the same places, behind masks that are different enough."""
    return first.narrow and second.narrow and _pair(first, second).agrees


def mirrored_update(update: MaskedUpdate, tokenizer: Tokenizer) -> MaskedUpdate:
    """The narrow update of the mirrored image."""
    source = all_shifts(tokenizer.grid, True, 0)[0].to(update.masked.device)
    return replace(
        update,
        rows=mirror(update.rows, tokenizer)[source],
        basis=mirror(update.basis, tokenizer),
        scale=update.scale[source],
        masked=update.masked[source],
    )


def complete_spans(updates: Sequence[MaskedUpdate]) -> list[MaskedUpdate]:
    """Narrow updates of one image, each with the whole span of its masked patches.

    Args:
        updates: at least `LEAST_UPDATES` of them, solved, each of which `completes` the last one.
    """
    p, like = updates[0].rows.shape[1], updates[0].rows
    outside, tilts = ([torch.zeros(p, p).to(like) for _ in updates] for _ in range(2))
    pairs = [0] * len(updates)
    for first, second in combinations(range(len(updates)), 2):
        pair = _pair(updates[first], updates[second])
        for number in (first, second) if pair.agrees else ():
            outside[number] += torch.eye(p).to(like) - pair.span.T @ pair.span
            tilts[number] += (pair.span.T * pair.tilt) @ pair.span
            pairs[number] += 1
    parts = zip(updates, outside, tilts, pairs, strict=True)
    return [_completed(update, sines / count, turned / count) for update, sines, turned, count in parts]


def _completed(update: MaskedUpdate, outside: Tensor, tilts: Tensor) -> MaskedUpdate:
    """An update with the directions that all its pairs have.

    Args:
        outside: (P, P) quadratic form, the squared sine of a direction with the pairs' spans, on average.
        tilts: the same of the angles by which noise turns these.
    """
    sines, vectors = torch.linalg.eigh(outside)
    basis = vectors[:, sines < COMMON].T.contiguous()
    tilt = torch.maximum(((basis @ tilts) * basis).sum(dim=1), sines[sines < COMMON]).clamp(min=0, max=1)
    equations = NormalEquations(*update.rows.shape, device=update.rows.device)
    equations.add(update.rows, basis, update.noise**-2, tilt)
    return replace(
        update, basis=basis, tilt=tilt, sizes=torch.ones_like(tilt), sums=equations, reasons=(), narrow=False
    )


def _pair(first: MaskedUpdate, second: MaskedUpdate) -> _Pair:
    """What the rows of two updates differ in, and how much else they do."""
    sure = [update.tilt < LARGEST_TILT for update in (first, second)]
    basis, mixed = torch.linalg.qr(torch.cat([first.basis[sure[0]], second.basis[sure[1]]]).T)
    known, tilt = basis.T, torch.cat([first.tilt[sure[0]], second.tilt[sure[1]]])
    tilt = tilt / mixed.diagonal().square().clamp(min=TINY)
    both = ~first.masked & ~second.masked
    missing = _dimension(first.masked, second.masked) - len(known)
    most = max(missing + 2 * NOISE_ONLY, 0)
    spare = min(int(both.sum()), known.shape[1] - len(known)) - most
    if spare < LEAST_SPARE:
        return _Pair(known, tilt, torch.inf)
    left = first.rows[both] - second.rows[both]
    left = left - (left @ known.T) @ known
    _, sizes, directions = torch.linalg.svd(left, full_matrices=False)
    beyond, noise = sizes[most:], float(sizes[most:].square().sum()) / spare  # of a row
    found = int((sizes[:most] > ABOVE_NOISE * beyond[0]).sum())
    if found < missing and (first.masked & second.masked).any():
        return _Pair(known, tilt, torch.inf)
    kept = first.rows[both] - (first.rows[both] @ known.T) @ known
    return _Pair(
        span=torch.linalg.qr(torch.cat([known, directions[:found]]).T).Q.T,
        tilt=torch.cat([tilt, noise / sizes[:found].square()]).clamp(max=1),
        misfit=float(beyond.square().sum() / kept.square().sum().clamp(min=TINY)),
    )


def _dimension(first: Tensor, second: Tensor) -> int:
    """The largest dimension of the sum of the spaces of differences of two sets of masked patches (N,) bool."""
    together = int((first | second).sum())
    return together - (1 if (first & second).any() else 2)
