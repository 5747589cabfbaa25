"""What the units of a layer of bins hold (`attacks.active.architecture.BinLayer`), from the gradient of their rows.

A unit writes for the images between its own threshold and the next one. With c the gradient of the loss at what it
writes, the same for every unit, the row of unit k and its two anchors have the gradients

    dL/dw_k = sum over the images in bin k of c x,    dL/dv_k = s sum over the same images of c [q, 1],

and those of an empty bin are zero. x and q of a single image are quotients by its share c; of several they are a mean
weighted by c. The sparse variant of Fowl et al. 2022 in the package `breaching`, whose units saturate at the next
threshold, gives this too.

Noise in the message fills the empty bins, which therefore show its size. There are at least as many of them as the
layer has bins more than the batch has images; where it has none, the classifier's gradient shows the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from attacks.active.architecture import IMPRINT, anchor_scale
from attacks.active.bins import round_off
from attacks.identities import classifier_sums
from attacks.observation import Observation

# Largest difference of a recovered image's mean square from the recovered q, of images of unit variance. Two images at
# 30 dB from each other differ by less in a mixture of halves.
MIXED = 1e-3
# Standard deviations of what noise leaves that count as noise.
NOISE_UNITS = 4.0


@dataclass(frozen=True)
class ImprintRows:
    """The bins that hold images, by rising threshold.

    Attributes:
        places: (n,) int64, of the unit.
        images: (n, P) float64, normalised: the image of each, or its images' weighted mean.
        squares: (n,) float64, the image's mean square by the anchor, or the same mean of several.
        shares: (n,) float64, the sum of c.
        noise: standard deviation of the noise in an entry of the message.
    """

    places: Tensor
    images: Tensor
    squares: Tensor
    shares: Tensor
    noise: float = 0.0

    @property
    def least(self) -> float:
        """Shares of this size or below are lost in noise."""
        return NOISE_UNITS * self.noise / anchor_scale(self.images.shape[1])

    @property
    def errors(self) -> Tensor:
        """Standard deviation of a recovered pixel by noise, (n,), normalised, of images of unit variance."""
        scale = anchor_scale(self.images.shape[1])
        return math.sqrt(1 + scale**-2) * self.noise / self.shares.abs()

    @property
    def mixed_within(self) -> Tensor:
        """Difference of a recovered image's mean square from the q recovered beside it that one image may show, (n,).

        With noise of deviation e in a pixel, that of q has e sqrt(1 + q^2) / s, and the recovered image's mean square
        is larger by e^2 on average (`excess`), to e^2 sqrt(2 / P) and 2 e sqrt(q / P).
        """
        size, errors, squares = self.images.shape[1], self.errors, self.squares.abs()
        anchor = errors * (1 + squares.square()).sqrt() / anchor_scale(size)
        pixels = errors.square() * math.sqrt(2 / size) + 2 * errors * (squares / size).sqrt()
        return MIXED * squares.clamp(min=1) + NOISE_UNITS * (anchor + pixels)

    @property
    def excess(self) -> Tensor:
        """By how much the mean square of what came back exceeds the q recovered beside it, less what noise adds, (n,).

        Zero for one image, minus the variance among them for several.
        """
        return self.images.square().mean(dim=1) - self.squares - self.errors.square()


def read_rows(observation: Observation) -> ImprintRows:
    """What an update of a model with a `BinLayer` in front says of its bins.

    Raises:
        UsageError: the update lacks the layer's gradient.
    """
    weight = observation.gradient_of(f"{IMPRINT}.measure.weight").double()
    anchor = f"{IMPRINT}.anchor.weight"
    scale = anchor_scale(weight.shape[1])
    squares, shares = (observation.gradient_of(anchor).double() / scale).unbind(dim=1)
    noise = message_noise(observation, weight)
    sends = shares.abs() > max(round_off(observation, anchor), NOISE_UNITS * noise) / scale
    empty = noise**2 * (1 + NOISE_UNITS * math.sqrt(2 / weight.shape[1]))  # the most that a row of noise shows
    held = (sends & (weight.square().mean(dim=1) >= empty)).nonzero()[:, 0]
    own = shares[held]
    return ImprintRows(held, weight[held] / own[:, None], squares[held] / own, own, noise)


def message_noise(observation: Observation, weight: Tensor) -> float:
    """Standard deviation of noise in an entry of the message; 0 where it holds none, or nothing shows it.

    Args:
        weight: (K, P) float64, the rows' gradients.
    """
    empty = len(weight) - observation.num_examples
    if empty > 0:
        rows = weight.square().mean(dim=1).sqrt().sort().values
        return float(rows[(empty - 1) // 2])
    sums = classifier_sums(observation)
    return sums.noise() if sums is not None and sums.is_broken() else 0.0
