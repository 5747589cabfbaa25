"""Epsilon of Gaussian noise on clipped per-image gradients, by the accountants of the package dp-accounting.

One step releases a sum in which each image has a part of norm at most C, plus noise N(0, (sigma C)^2). Data sets are
neighbours that differ in one image, whose gradient is there or is not. Two figures are given:

*As the clients train.* They walk through their images epoch by epoch in an order that does not depend on the images, so
that each image has a part in known steps. The steps together are one Gaussian mechanism of sensitivity sqrt(uses) C,
uses = sum over steps of (times the image is in the batch)^2 (composition of Gaussian mechanisms; Dong, Roth and Su
2022, "Gaussian differential privacy", corollary 3.3). Nothing is gained from sampling, for the server may know the
order. This figure holds.

*Under Poisson sampling* (Abadi et al. 2016, section 3.1): each step takes each image with probability q = batch size /
images, in secret. It is what papers report. It does not hold for an order that is shuffled once an epoch.

Both are computed from the privacy loss distribution (Koskela et al. 2020; Doroshenko et al. 2022), an upper bound that
is tight to its grid. The grid has `INTERVAL` of epsilon, more where epsilon is large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attacks.registry import UsageError

# Width of the privacy loss distribution's grid, and the epsilon above which it grows in proportion.
INTERVAL, COARSER_ABOVE = 1e-4, 10.0
# Epsilon above which none is computed: it bounds nothing, and the grid would be too wide.
LARGEST = 1000.0
# Noise multiplier above which a target epsilon counts as impossible, and the relative precision of what is found.
MOST_NOISE, PRECISION = 1e4, 1e-5


@dataclass(frozen=True)
class Schedule:
    """How often a training uses the images of a client; of several clients the largest figures.

    Attributes:
        images: of the client that holds the fewest.
        batch_size: images in a step.
        steps: of the client that takes the most, in the whole training.
        uses: largest sum over the steps of (times that an image is in the batch)^2.
    """

    images: int
    batch_size: int
    steps: int
    uses: int

    @classmethod
    def of_epochs(cls, images: int, batch_size: int, steps: int) -> Schedule:
        """Of a walk through `images` images in epochs, each in an order of its own.

        A batch that ends one epoch and begins the next may hold an image twice; then uses are counted double.
        """
        epochs = math.ceil(steps * batch_size / images)
        across = 1 if images % batch_size == 0 else 2
        return cls(images, batch_size, steps, across * epochs)

    @property
    def rate(self) -> float:
        """q, share of the images in a batch, in (0, 1]."""
        return min(self.batch_size / self.images, 1.0)


def check_target(epsilon: float | None, delta: float) -> None:
    """Refuse an epsilon or delta that no noise gives.

    Raises:
        UsageError: epsilon is not a positive number, or delta does not lie in (0, 1).
    """
    if epsilon is not None and not 0 < epsilon <= LARGEST:
        raise UsageError(f"--dp-epsilon must lie above 0 and be at most {LARGEST:g}, not {epsilon}")
    if not 0 < delta < 1:
        raise UsageError(f"--dp-delta must lie in (0, 1), and below 1 / images, not {delta}")


def epsilon_in_epochs(noise_multiplier: float, schedule: Schedule, delta: float) -> float:
    """Epsilon of each image as the clients train; infinite where its bound exceeds `LARGEST`.

    Args:
        noise_multiplier: sigma.
        delta: in (0, 1).

    Raises:
        UsageError: dp-accounting is not installed.
    """
    return _epsilon(_events().GaussianDpEvent(noise_multiplier / schedule.uses**0.5), noise_multiplier, delta)


def epsilon_by_sampling(noise_multiplier: float, schedule: Schedule, delta: float) -> float:
    """Epsilon of each image if every step were a Poisson sample; see `epsilon_in_epochs`."""
    events = _events()
    step = events.PoissonSampledDpEvent(schedule.rate, events.GaussianDpEvent(noise_multiplier))
    return _epsilon(events.SelfComposedDpEvent(step, schedule.steps), noise_multiplier, delta)


def noise_for(epsilon: float, schedule: Schedule, delta: float) -> float:
    """The least noise multiplier whose `epsilon_in_epochs` is at most `epsilon` (Balle and Wang 2018, theorem 8).

    Raises:
        UsageError: it is above `MOST_NOISE`, or dp-accounting is not installed.
    """
    _events()
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    def delta_at(noise: float) -> float:
        """Of the whole training at that noise multiplier."""
        return GaussianPrivacyLoss(noise / schedule.uses**0.5).get_delta_for_epsilon(epsilon)

    low, high = 0.0, MOST_NOISE
    if delta_at(high) > delta:
        raise UsageError(
            f"--dp-epsilon {epsilon:g} at --dp-delta {delta:g} needs a noise multiplier above {MOST_NOISE:g}; pass a "
            "larger epsilon, or fewer rounds"
        )
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high


def _epsilon(event: Any, noise_multiplier: float, delta: float) -> float:
    """Of a mechanism; the grid follows the coarser bound by Renyi divergences."""
    if noise_multiplier == 0:
        return math.inf
    from absl import logging
    from dp_accounting import pld, rdp

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # orders of divergence that are left out
    try:
        bound = rdp.RdpAccountant().compose(event).get_epsilon(delta)
    finally:
        logging.set_verbosity(verbosity)
    if not bound <= LARGEST:
        return math.inf
    interval = INTERVAL * max(1.0, bound / COARSER_ABOVE)
    return float(pld.PLDAccountant(value_discretization_interval=interval).compose(event).get_epsilon(delta))


def _events() -> Any:
    """The module that describes mechanisms.

    Raises:
        UsageError: dp-accounting is not installed.
    """
    try:
        from dp_accounting import dp_event
    except ImportError as error:
        raise UsageError("--defense dp_sgd computes epsilon by dp-accounting: pip install 'fedmjp[privacy]'") from error
    return dp_event
