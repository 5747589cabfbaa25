"""What the units of a layer of bins hold (`attacks.active.architecture.BinLayer`), from the gradient of their rows.

A unit writes for the images between its own threshold and the next one. With c the gradient of the loss at what it
writes, the same for every unit, the row of unit k and its two anchors have the gradients

    dL/dw_kj = sum over the images in bin k of c (x - l_j),    dL/dv_k = s sum over the same images of c [q, 1],

and those of an empty bin are zero. x and q of a single image are quotients by its share c; of several they are a mean
weighted by c. The sparse variant of Fowl et al. 2022 in the package `breaching`, whose units saturate at the next
threshold, gives this too.

For one image the mean square of what comes back is the q that comes back beside it. For several it differs by their
variance, unless three or more shares of both signs cancel it, which happens the more often the less exactly the message
says both.

Noise in the message fills the empty bins, which therefore show its size. There are at least as many of them as the
layer has bins more than the batch has images; where it has none, the classifier's gradient shows the noise. What
rounding and entries that were left out cost: `attacks.linear.intervals`. Signs: `attacks.active.imprint_signs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.active.architecture import ADDED, ANCHOR, BinLayer, anchor_scale
from attacks.identities import classifier_sums
from attacks.linear.intervals import bounds_of, error_bounds, read_message, rounding_of_weights
from attacks.observation import Observation

# Largest difference of a recovered image's mean square from the recovered q, of images of unit variance. Two images at
# 30 dB from each other differ by less in a mixture of halves.
MIXED = 1e-3
# Standard deviations of what noise leaves that count as noise.
NOISE_UNITS = 4.0
# A mixture would show in a batch where rounding changes a normalised pixel by less than this, and noise the
# difference of the mean squares by less than so many `MIXED`.
EXACT, CLEAR = 1e-5, 10.0


@dataclass(frozen=True)
class ImprintRows:
    """The bins that hold images, by rising threshold.

    Attributes:
        images: (n, P) float64, normalised: the image of each, or its images' weighted mean.
        shares: (n,) float64, the sum of c.
        errors: (n,) float64, standard deviation of a recovered pixel, normalised, of images of unit variance.
        excess: (n,) float64, by how much the mean square of what came back exceeds the q beside it, but for what errors
            add: zero for one image.
        explained: (n,) float64, the excess that one image may show.
        clear: (n,) bool, whether the message is exact enough to tell one image from several.
        noise: standard deviation of the noise in an entry of the message.
    """

    images: Tensor
    shares: Tensor
    errors: Tensor
    excess: Tensor
    explained: Tensor
    clear: Tensor
    noise: float = 0.0

    @property
    def least(self) -> float:
        """Shares of this size or below are lost in noise."""
        return NOISE_UNITS * self.noise / anchor_scale(self.images.shape[1])


def read_rows(observation: Observation, layer: BinLayer) -> ImprintRows:
    """What an update of a model with a layer of bins in front says of them.

    Raises:
        UsageError: the update lacks the layer's gradient.
    """
    weight, anchor = observation.gradient_of(ADDED), observation.gradient_of(ANCHOR).double()
    bounds, levels = error_bounds(observation, ANCHOR), layer.levels.detach().double()
    # In float64 without a copy of the rows: squares of float16 would vanish.
    powers = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).square() / weight.shape[1]  # (K,)
    noise = message_noise(observation, powers)
    empty = noise**2 * (1 + NOISE_UNITS * math.sqrt(2 / weight.shape[1]))  # the most that a row of noise shows
    sends = anchor[:, 1].abs() > bounds[:, 1].clamp(min=NOISE_UNITS * noise)
    held = (sends & (powers >= empty) & (powers > 0)).nonzero()[:, 0]
    scaled, shares = (anchor[held] / layer.scale).unbind(dim=1)
    rows, sizes = weight[held].double(), shares.abs()
    images = (rows.unflatten(1, (len(levels), -1)) / shares[:, None, None] + levels[:, None]).mean(dim=1)
    of_anchors = (noise**2 + bounds[held].square() / 3).sqrt() / layer.scale / sizes[:, None]
    rounding = _rounding(observation, rows, held) / len(levels) ** 0.5 / sizes
    of_pixel = (noise**2 / len(levels) / sizes.square() + rounding.square()).sqrt()
    return _compared(images, scaled / shares, shares, (of_pixel, rounding, of_anchors), noise)


def _compared(
    images: Tensor, squares: Tensor, shares: Tensor, errors: tuple[Tensor, Tensor, Tensor], noise: float
) -> ImprintRows:
    """Images (n, P) beside the mean squares (n,) that their anchors give.

    Args:
        errors: standard deviations of a pixel (n,), the part of it that is rounding (n,), and of the anchors (n, 2), q
            first and the share second; all over the share.
    """
    (of_pixel, rounding, of_anchors), size, q = errors, images.shape[1], squares.abs()
    of_square, of_share = of_anchors.unbind(dim=1)
    beside = of_square + q * of_share + of_pixel.square() * math.sqrt(2 / size) + 2 * of_pixel * (q / size).sqrt()
    least = MIXED * q.clamp(min=1)
    explained = least + NOISE_UNITS * beside
    return ImprintRows(
        images=images,
        shares=shares,
        errors=(of_pixel.square() + of_share.square()).sqrt(),
        excess=images.square().mean(dim=1) - squares - of_pixel.square(),
        explained=explained,
        clear=(rounding < EXACT) & (explained < CLEAR * least),
        noise=noise,
    )


def _rounding(observation: Observation, rows: Tensor, held: Tensor) -> Tensor:
    """Standard deviation (n,) of what rounding and entries that were left out change in rows (n, J P) of units (n,)."""
    if not len(held):
        return rows[:, 0]
    lost = rounding_of_weights(observation, ADDED)
    bounds = bounds_of(rows, read_message(observation), None if lost is None else lost[held])
    return (bounds.square().mean(dim=1) / 3).sqrt()


def message_noise(observation: Observation, powers: Tensor) -> float:
    """Standard deviation of noise in an entry of the message; 0 where it holds none, or nothing shows it.

    Args:
        powers: (K,) float64, mean squares of the rows' gradients.
    """
    empty = len(powers) - observation.num_examples
    if empty > 0:
        return float(powers.sort().values[(empty - 1) // 2].sqrt())
    sums = classifier_sums(observation)
    return sums.noise() if sums is not None and sums.is_broken() else 0.0
