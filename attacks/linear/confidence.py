"""How probable it is that a patch which an image prior completed is right: above `RIGHT_DB`.

The prior gives two deviations (`attacks.linear.image_prior`): of a patch among fixed neighbours, and of an error that
all patches share. Both are too small where the photograph has more texture than total variation expects, and by a
factor that depends on what settled the patch. So they are calibrated on photographs: the logarithm of a patch's error
is taken to be logistic around a linear function of their logarithms (logistic regression of "right", Platt 1999), with
one curve for each state of knowledge: one update or several, shown by at least one of them or by none.

    P(right) = 1 / (1 + exp(-(a + b_0 log2(side / 8) + b_1 log deviation + b_2 log shared + b_3 log surroundings)))

`surroundings` is the mean norm of the image's gradient in the visible patches around: texture that a hidden patch
probably continues. The coefficients were fitted (`benchmarks/confidence.py`) on photographs of ImageNet that the
calibration's tables do not score, MJP with the localisation loss, float32: 100 with vit_mini_64 (trained, patches of 8
pixels) and 16 with DeiT-S (random weights, patches of 16) at gamma 0.1, 0.3, 0.5 and 0.9 after 1, 2, 4 and 8 updates,
and 50 with vit_mini_64 at gamma 0.9 after 20 and 80; both models have the same total weight. Patches of less than 8 or
more than 16 pixels take the nearer end's curve; they were not calibrated.

A probability is no claim yet. `surest` claims as many patches of an image as are expected to be right, the most
probable ones: the share that it claims is the share that it expects.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.linear.image_prior import Settled
from attacks.tokenizer import Tokenizer

# A patch is right above this PSNR: the threshold of `fedmjp.metrics.patch_recovery`.
RIGHT_DB = 25.0
# (a, b_0, b_1, b_2, b_3) by (several updates, shown by at least one).
CURVES = {
    (False, True): (-19.946, 0.160, -4.422, -0.745, 0.500),
    (True, True): (-22.291, -1.544, -3.146, -1.771, -0.597),
    (False, False): (-22.473, -1.259, -4.261, -0.420, -0.299),
    (True, False): (-16.298, -0.878, -1.684, -0.783, -1.198),
}
# Least values whose logarithms are taken: deviations, and gradients of an image in [0, 1].
LEAST_DEVIATION, LEAST_GRADIENT = 1e-6, 1e-3


def covariates(settled: Settled, shown: Tensor, tokenizer: Tokenizer) -> Tensor:
    """(N, 4) float64: what the probability of being right depends on, see the module.

    Args:
        settled: the completed patches, some direction of which was open.
        shown: (N,) bool, patches that at least one update shows.
        tokenizer: of the attacked model.
    """
    side = torch.full_like(settled.deviation, tokenizer.patch_size / 8).log2().clamp(0, 1)
    shared = torch.full_like(settled.deviation, settled.shared).clamp(min=LEAST_DEVIATION).log()
    around = _surroundings(settled.gradient, shown.to(settled.gradient), tokenizer.grid)
    deviation = settled.deviation.clamp(min=LEAST_DEVIATION).log()
    return torch.stack([side, deviation, shared, around.clamp(min=LEAST_GRADIENT).log()], dim=1)


def probabilities(settled: Settled, shown: Tensor, tokenizer: Tokenizer, *, several: bool) -> Tensor:
    """(N,) float64 in [0, 1], the probability that each completed patch is above `RIGHT_DB`.

    Args:
        settled, shown, tokenizer: see `covariates`.
        several: whether more than one update gave the equations.
    """
    if not settled.open:
        return torch.ones_like(settled.deviation)
    curves = torch.tensor([CURVES[several, False], CURVES[several, True]]).to(settled.deviation)  # (2, 5)
    curve = curves[shown.long()]  # (N, 5)
    return torch.sigmoid(curve[:, 0] + (curve[:, 1:] * covariates(settled, shown, tokenizer)).sum(dim=1))


def surest(probability: Tensor) -> Tensor:
    """(N,) bool, as many patches as are expected to be right (the sum of the probabilities, rounded), likeliest first.

    Args:
        probability: (N,) in [0, 1].
    """
    count = int(probability.sum().round())
    chosen = torch.zeros_like(probability, dtype=torch.bool)
    chosen[probability.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def _surroundings(gradient: Tensor, shown: Tensor, grid: tuple[int, int]) -> Tensor:
    """(N,) mean of `gradient` (N,) over the visible patches among each patch and its eight neighbours.

    Where none of them is visible, over all visible patches; where none is at all, over all patches.
    """

    def total(values: Tensor) -> Tensor:
        """Sums over each patch and its eight neighbours."""
        padded = F.pad(values.reshape(1, 1, *grid), (1, 1, 1, 1))
        return 9 * F.avg_pool2d(padded, 3, stride=1).flatten()

    weight = shown if shown.any() else torch.ones_like(shown)
    everywhere = (gradient * weight).sum() / weight.sum()
    count = total(weight)
    return torch.where(count > 0.5, total(gradient * weight) / count.clamp(min=0.5), everywhere)
