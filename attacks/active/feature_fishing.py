"""Fishing by feature: every image of a batch by itself, whatever the labels, from as many rounds as it holds images.

Wen et al. 2022, "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification", section 3.3. The
server sets every row of the classifier to zero but w_t = s v, with v a direction of the features, s large, and
b_t = -s theta. Then p_t is 1 for images whose feature v.h exceeds the threshold theta, and 0 for the others, in the
client's arithmetic. With p_t - y_t from `attacks.active.head`, the difference of two such updates of the same batch is

    U(low) - U(high) = s / B  sum over images with low < v.h < high of the gradients of v.h

whatever their classes are. Its bias entry counts them, and its row of the classifier gives the mean of their features:
a threshold at the mean of v.h always separates two of them. A batch of B images therefore takes B - 1 thresholds,
besides one below all features, and one above them where the batch holds images of class t.

Departs from the paper: there the threshold is a quantile of the feature among public images, in the hope that one image
lies above, and a batch of several classes needs class fishing first. Here the search needs neither, but several rounds
on the same batch and on the same layers below: the client trains on all of its images in each step (FedSGD, or one
local step), without augmentation, dropout or a defence that draws anew, and the server sends it the same weights but
for the classifier in every round (`same_model`), which a server may. Where that does not hold the counts do not add up,
or the reader says that the difference is not the gradient of one image.

The difference is taken between float32 messages: the image is known less well than if it alone had sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.active.base import SendContext, Sending, hides_positions, nobody
from attacks.active.classifier_attack import ClassifierAttack, set_classifier
from attacks.active.head import SetHead, unit_direction
from attacks.linear.position_rows import unmet_assumptions
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

# s: two images of trained vit_mini_32 (CIFAR-10, 64 images) lie 2e-3 apart or more in v.h, and p_t passes from e^-10 to
# 1 - e^-10 within PASSAGE / s.
STEEPNESS = 1e5
PASSAGE = 20.0
# No feature of a final norm lies outside: the thresholds below and above all features.
BEYOND, OUTSIDE = 1e4, 5e3
# Largest distance of a count from a whole number: an image at the threshold itself sends a share.
WHOLE = 1e-2


@dataclass(frozen=True)
class Probe:
    """One prepared update, or what an update above all features would be where the batch holds no image of class t.

    Attributes:
        threshold: theta.
        above: B times dL/db_t: images above the threshold, less all of class t.
        features: B times v and the gradient of w_t: the sum of v.h over them, likewise.
        observation: the update; None where it is known to be zero.
        others: (K - 1,) -B times dL/db of the other classes: their images, less a number that all classes share.
    """

    threshold: float
    above: float
    features: float
    observation: Observation | None
    others: Tensor | None = None


@dataclass(frozen=True)
class Interval:
    """The images between two thresholds that follow each other.

    Attributes:
        low, high: the probes.
        count: images between them.
        mean: of v.h over them; NaN without any.
    """

    low: Probe
    high: Probe
    count: float
    mean: float

    @property
    def single(self) -> bool:
        """Whether one image lies between the thresholds."""
        return abs(self.count - 1) < WHOLE

    @property
    def divisible(self) -> bool:
        """Whether several images lie there, with room for a threshold between the two that are known."""
        return self.count > 1.5 and self.high.threshold - self.low.threshold > 2 * PASSAGE / STEEPNESS

    @property
    def centre(self) -> float:
        """`mean`, or the nearest threshold that is not one of the two: float32 may give a mean beyond them."""
        room = PASSAGE / STEEPNESS
        return min(max(self.mean, self.low.threshold + room), self.high.threshold - room)


@dataclass(frozen=True, kw_only=True)
class FeatureFishing(ClassifierAttack):
    """The images that the last update's threshold separates from all others.

    Args:
        target: the class t whose row is set; fewer rounds are needed where the client holds none of it.
        direction: seed of the random direction v.
    """

    direction: int = 0

    needs: ClassVar[frozenset[Capability]] = ClassifierAttack.needs | {Capability.SEVERAL_ROUNDS}
    kind: ClassVar[str] = "fishing by feature"
    same_model: ClassVar[bool] = True

    def send(self, context: SendContext) -> Sending:
        """See `ActiveAttack.send`.

        Raises:
            UsageError: the model has no classifier that can be set, or no class `target`.
        """
        layer, head = self.classifier_of(context)
        classes, width = head.weight.shape
        row = unit_direction(width, self.direction) * STEEPNESS
        bias = torch.zeros(classes, dtype=torch.float64)
        bias[self.target] = -STEEPNESS * next_threshold(*self.probes(context.history, layer))
        changes = set_classifier(context, layer, self.target, row, bias)
        return self.counting(context, layer, changes)

    def is_own(self, head: SetHead) -> bool:
        """See `ClassifierAttack.is_own`: the row is as steep as that of no honest classifier."""
        return _is_gated(head)

    def probes(self, observations: Sequence[Observation], layer: str) -> tuple[list[Probe], list[float]]:
        """The prepared updates by threshold, the first of each, and the thresholds that fell onto an image.

        The latter's updates hold a share of that image and separate nothing.
        """
        found: dict[float, Probe] = {}
        for observation in observations:
            try:
                head = self.read_head(observation, layer)
            except UsageError:  # an honest round
                continue
            if _is_gated(head) and head.is_in(observation):
                threshold = -float(head.bias[head.row]) / float(head.direction.norm())
                found.setdefault(threshold, _read_probe(observation, head, threshold))
        probes = [found[threshold] for threshold in sorted(found)]
        if probes and probes[0].threshold < -OUTSIDE and probes[-1].threshold < OUTSIDE:
            held = probes[0].observation.num_examples - probes[0].above
            probes += [Probe(BEYOND, 0.0, 0.0, None)] if abs(held) < WHOLE else []
        missed = [p.threshold for p in probes if abs(p.threshold) < OUTSIDE and abs(p.above - round(p.above)) > WHOLE]
        return [probe for probe in probes if probe.threshold not in missed], missed

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; the images that no earlier update separated, at most two.

        `details`: probes (prepared updates so far), separated (images so far), together (images that are still in an
        interval with another).
        """
        last = observations[-1]
        head = self.head_of(last)
        if last.local_steps > 1:
            raise UsageError(unmet_assumptions(1, last.local_steps)[0])
        head.row_gradient(last)  # says what a client withholds
        probes, _ = self.probes(observations, head.layer)
        intervals = intervals_of(probes)
        details = {
            "probes": len(probes),
            "separated": sum(i.single for i in intervals),
            "together": sum(round(i.count) for i in intervals if i.count > 1.5),
        }
        found = [
            self.read_alone(last, difference(i.low, i.high))
            for i in intervals
            if i.single and (i.low.observation is last or i.high.observation is last)
        ]
        answers = [one for one in found if one.images is not None]
        reasons = [_contradiction(probes, intervals), *(one.diagnosis for one in found)]
        diagnosis = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
        if not answers:
            return nobody(diagnosis or _nothing_new(details), details)
        images, known = torch.cat([one.images for one in answers]), None
        if all(one.known is not None for one in answers):
            known = torch.cat([one.known for one in answers]) & (not diagnosis)
        return Reconstruction(images, known, diagnosis=diagnosis, details=details)


def intervals_of(probes: Sequence[Probe]) -> list[Interval]:
    """What lies between the thresholds, in their order."""
    found = []
    for low, high in zip(probes, probes[1:], strict=False):
        count = low.above - high.above
        mean = (low.features - high.features) / count if count > 0.5 else float("nan")
        found.append(Interval(low, high, count, mean))
    return found


def next_threshold(probes: Sequence[Probe], missed: Sequence[float] = ()) -> float:
    """The threshold of the next round: below all features, above them, then amid the fewest images still together.

    Sums over a large batch give the mean of two features no better than float32 does. Where the threshold there fell
    onto an image, the next ones go to both sides of it in steps in which p_t passes from 0 to 1.

    Args:
        probes: by threshold.
        missed: thresholds that fell onto an image.
    """
    if not probes or probes[0].threshold > -OUTSIDE:
        return -BEYOND
    divisible = [interval for interval in intervals_of(probes) if interval.divisible]
    if len(probes) < 2 or not divisible:
        return BEYOND

    def tries(interval: Interval) -> int:
        """How many thresholds inside the interval have fallen onto an image."""
        return sum(interval.low.threshold < threshold < interval.high.threshold for threshold in missed)

    chosen = min(divisible, key=lambda one: (one.centre != one.mean, tries(one), one.count))
    count = tries(chosen)
    return chosen.centre + (count + 1) // 2 * (-1) ** count * PASSAGE / STEEPNESS


def difference(low: Probe, high: Probe) -> dict[str, Tensor]:
    """U(low) - U(high) by parameter name, of what the server has of both, for a classifier's row of length 1."""
    first = low.observation.gradients
    if high.observation is None:
        return {name: gradient / STEEPNESS for name, gradient in first.items()}
    second = high.observation.gradients
    return {name: (gradient - second[name]) / STEEPNESS for name, gradient in first.items() if name in second}


def _read_probe(observation: Observation, head: SetHead, threshold: float) -> Probe:
    weight, bias = head.row_gradient(observation)
    direction = (head.direction / head.direction.norm()).to(weight)
    scale, biases = observation.num_examples, head.bias_gradient(observation)
    return Probe(threshold, scale * bias, scale * float(weight @ direction), observation, -scale * head.others(biases))


def _is_gated(head: SetHead) -> bool:
    return abs(float(head.direction.norm()) / STEEPNESS - 1) < 0.1


def _contradiction(probes: Sequence[Probe], intervals: Sequence[Interval]) -> str:
    """Why the prepared updates are not those of one batch through one model, in words; "" where nothing shows it."""
    sent = [probe for probe in probes if probe.observation is not None]
    views = [probe.observation for probe in sent]
    tokenizer = find_tokenizer(views[0].model, views[0].image_shape)
    embeddings = [dict(view.model.named_parameters())[tokenizer.weight] for view in views]
    if not all(torch.equal(one, embeddings[0]) for one in embeddings):
        return "the layers below the classifier changed between the prepared rounds, so that updates cannot be compared"
    changes = [probe.others - sent[0].others for probe in sent]
    if any(float(change.max() - change.min()) > 0.5 for change in changes):
        return "the classes of the client's batch changed between the prepared rounds: it does not train on one batch"
    if any(hides_positions(view) for view in views):
        return (
            "the client hides positions, with masks that may differ between the prepared rounds: differences mix them"
        )
    if any(interval.count < -WHOLE or abs(interval.count - round(interval.count)) > WHOLE for interval in intervals):
        return (
            "the images between the thresholds do not add up to whole numbers: the client's batch changed between the "
            "prepared rounds, a defence or augmentation drew anew, or an image lies at a threshold"
        )
    return ""


def _nothing_new(details: Mapping[str, float]) -> str:
    return (
        f"this round's threshold separates no further image of the batch ({details['separated']:.0f} separated, "
        f"{details['together']:.0f} together after {details['probes']:.0f} prepared rounds)"
    )
