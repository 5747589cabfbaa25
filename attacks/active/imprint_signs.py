"""What signs say of the images in a layer of bins (`attacks.active.architecture.BinLayer`).

The row of unit k and level j has the signs of c (x - l_j): up to the sign of c, which pixels exceed the level. Of J
rising levels a pixel exceeds all below it and none above, whatever c is; so a row whose signs contradict that holds no
image, and the sign of c is the one with fewer contradictions. The pixels of an image lie in the middles of the parts of
their range between the levels, to half a part. Nothing there tells one image from several.

Noise before the signs were taken shows as contradictions. Entries that were left out before, of a sparse update, count
as positive: they move all pixels to one side, so that the image that comes back would not switch on its own unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attacks.active.architecture import ADDED, BinLayer
from attacks.linear.grids import signs_of
from attacks.linear.intervals import rounding_of_weights
from attacks.observation import Observation

# Share of contradictions from which on a row holds no image: half of the pairs of levels of a row of noise have one.
CONTRADICTIONS = 0.02
# The unit of an image is on, and the next one is not, where its brightness is shifted by so many parts of a pixel's
# range at most.
SHIFT = 0.25


@dataclass(frozen=True)
class SignedRows:
    """The bins that hold images, those without contradictions first.

    Attributes:
        images: (n, P) float64, normalised.
        error: largest error of a pixel, normalised, if the signs are those of an image.
        consistent: (n,) bool, whether the image switches on its own unit and not the next one.
        contradicted: whether further rows have both signs, and hold no image.
    """

    images: Tensor
    error: float
    consistent: Tensor
    contradicted: bool


def holds_signs(observation: Observation) -> bool:
    """Whether most parameters' gradients have entries of one magnitude; the layer's own rows are not asked."""
    known = dict(observation.model.named_parameters())
    found = [
        signs_of(gradient.double(), rounding_of_weights(observation, name)) is not None
        for name, gradient in observation.gradients.items()
        if name in known and name != ADDED
    ]
    return sum(found) > len(found) / 2


def read_signs(observation: Observation, layer: BinLayer) -> SignedRows:
    """What signs say of the bins of a layer with at least two levels.

    Raises:
        UsageError: the update lacks the layer's gradient.
    """
    levels = layer.levels.detach().double()
    rows = observation.gradient_of(ADDED).unflatten(1, (len(levels), -1))  # (K, J, P)
    held = ((rows > 0).any(dim=2).any(dim=1) & (rows < 0).any(dim=2).any(dim=1)).nonzero()[:, 0]
    above = rows[held] > 0
    both = torch.stack([above, rows[held] < 0])  # c positive, c negative
    wrong = (both[:, :, 1:] & ~both[:, :, :-1]).double().mean(dim=(2, 3))  # (2, n)
    least, sign = wrong.min(dim=0)
    order = least.argsort(stable=True)
    order = order[least[order] < CONTRADICTIONS]
    exceeds = both[sign[order], order]  # (n', J, P)
    part = float(levels[1] - levels[0])
    images = levels[0] + part * (exceeds.double().sum(dim=1) - 0.5)
    return SignedRows(images, part / 2, _switch(layer, images, held[order], part), len(order) < len(held))


def _switch(layer: BinLayer, images: Tensor, units: Tensor, part: float) -> Tensor:
    """Whether images (n, P) switch on their units (n,) and not the next ones, to `SHIFT` parts of their brightness."""
    height = layer.heights(images.to(layer.measure.weight)).detach().double()  # (n, K)
    allowed = SHIFT * part * float(layer.measure.weight.detach()[0].double().sum())
    own = height.gather(1, units[:, None])[:, 0]
    beyond = functional.pad(height, (0, 1), value=-torch.inf).gather(1, units[:, None] + 1)[:, 0]
    return (own > -allowed) & (beyond <= allowed)
