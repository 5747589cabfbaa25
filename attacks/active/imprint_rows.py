"""What the units of a layer of bins hold (`attacks.active.architecture.BinLayer`), from the gradient of their rows.

A unit writes for the images between its own threshold and the next one. With c the gradient of the loss at what it
writes, the same for every unit, the row of unit k and its two anchors have the gradients

    dL/dw_kj = sum over the images in bin k of c (x - l_j),    dL/dv_k = s sum over the same images of c [q, 1],

and those of an empty bin are zero. x and q of a single image are quotients by its share c; of several they are a mean
weighted by c. The sparse variant of Fowl et al. 2022 in the package `breaching`, whose units saturate at the next
threshold, gives this too.

Noise in the message fills the empty bins, which therefore show its size. There are at least as many of them as the
layer has bins more than the batch has images; where it has none, the classifier's gradient shows the noise.

Of signs, the row of level j says which pixels exceed it, up to the sign of c, which an anchor says; rows of empty bins
have one sign. Nothing there tells one image from several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.active.architecture import ADDED, IMPRINT, LEVELS, anchor_scale
from attacks.active.bins import round_off
from attacks.identities import classifier_sums
from attacks.linear.grids import signs_of
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
        shares: (n,) float64, the sum of c; of signs, its sign.
        errors: (n,) float64, standard deviation of a recovered pixel, normalised, of images of unit variance.
        noise: standard deviation of the noise in an entry of the message.
        signs: whether the message holds signs.
        one_level: whether it does, and the layer has one level, so that nothing can be read.
    """

    places: Tensor
    images: Tensor
    squares: Tensor
    shares: Tensor
    errors: Tensor
    noise: float = 0.0
    signs: bool = False
    one_level: bool = False

    @property
    def least(self) -> float:
        """Shares of this size or below are lost in noise."""
        return NOISE_UNITS * self.noise / anchor_scale(self.images.shape[1])

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
    weight = observation.gradient_of(ADDED).double()
    levels = dict(observation.model.named_parameters())[LEVELS].detach().double()
    rows = weight.unflatten(1, (len(levels), -1))  # (K, J, P)
    anchor = f"{IMPRINT}.anchor.weight"
    scale = anchor_scale(rows.shape[2])
    squares, shares = (observation.gradient_of(anchor).double() / scale).unbind(dim=1)
    if weight.any() and signs_of(weight) is not None:
        return _of_signs(rows, shares, levels)
    noise = message_noise(observation, weight)
    sends = shares.abs() > max(round_off(observation, anchor), NOISE_UNITS * noise) / scale
    empty = noise**2 * (1 + NOISE_UNITS * math.sqrt(2 / weight.shape[1]))  # the most that a row of noise shows
    held = (sends & (weight.square().mean(dim=1) >= empty)).nonzero()[:, 0]
    own = shares[held]
    images = (rows[held] / own[:, None, None] + levels[:, None]).mean(dim=1)
    errors = math.sqrt(1 / len(levels) + scale**-2) * noise / own.abs()
    return ImprintRows(held, images, squares[held] / own, own, errors, noise)


def _of_signs(rows: Tensor, shares: Tensor, levels: Tensor) -> ImprintRows:
    """What signs say: the middles of the parts of a pixel's range between levels.

    Args:
        rows: (K, J, P), of which every entry has the same magnitude.
        shares: (K,) whose signs are those of c.
        levels: (J,) rising.
    """
    above = rows > 0
    held = (above.any(dim=(1, 2)) & ~above.all(dim=(1, 2))).nonzero()[:, 0]
    if len(levels) == 1:
        none = shares[:0]
        return ImprintRows(held[:0], rows[:0, 0], none, none, none, signs=True, one_level=True)
    part = float(levels[1] - levels[0])
    exceeds = above[held] == (shares[held] > 0)[:, None, None]
    images = levels[0] + part * (exceeds.sum(dim=1) - 0.5)
    errors = torch.full_like(shares[held], part / math.sqrt(12))
    squares = images.square().mean(dim=1) - errors.square()
    return ImprintRows(held, images, squares, shares[held].sign(), errors, signs=True)


def holds_signs(observation: Observation) -> bool:
    """Whether most parameters' gradients have entries of one magnitude."""
    one = [signs_of(gradient.double()) is not None for gradient in observation.gradients.values()]
    return sum(one) > len(one) / 2


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
