"""Sums over an update that vanish for the gradient of a classification loss, whatever the batch.

*Classifier.* The softmax cross-entropy's gradient with respect to the logits sums to zero over the classes, for hard
and for smoothed labels, so the columns of dL/dW of the classifier do too, for any batch and any number of steps.

*Positions.* Every token's gradient is added to one position row, or to the shared one, and to the bias of the patch
projection: the rows' sum equals dL/db (`attacks.linear.position_rows`).

What an update has beside a gradient (weight decay, noise) breaks both, by amounts that say what it is
(`attacks.fingerprints`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.classifier import classifier_weight, find_classifier
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Units of round-off above which an identity counts as broken.
BROKEN = 30.0


@dataclass(frozen=True)
class Identity:
    """Sums of gradients that vanish for the gradient of a cross-entropy.

    Attributes:
        of_update, of_weights: (n,) float64, the same sums of the update and of the weights.
        terms: entries of the update in each sum.
        round_off: expected size of an entry of `of_update` from rounding alone.
    """

    of_update: Tensor
    of_weights: Tensor
    terms: int
    round_off: float

    def is_broken(self) -> bool:
        """Whether more than round-off is left."""
        return float(rms(self.of_update)) > BROKEN * self.round_off

    def noise(self) -> float:
        """Standard deviation of noise in each entry of the update that would leave these sums."""
        return float(rms(self.of_update)) / self.terms**0.5


def rms(tensor: Tensor) -> Tensor:
    """Root mean square of all entries."""
    return tensor.double().square().mean().sqrt()


def classifier_sums(observation: Observation) -> Identity | None:
    """Sums over the classes of the classifier's weight gradient; None where the update holds none."""
    gradient = classifier_weight(observation)
    if gradient is None:
        return None
    weight = observation.model.get_submodule(find_classifier(observation)).weight.detach().double()
    return _identity(observation, [(1.0, gradient.double(), weight)], len(weight))


def position_balance(observation: Observation) -> Identity | None:
    """Position rows and shared row, minus the bias of the projection; None where the update lacks one of them."""
    tokenizer = tokenizer_of(observation)
    if tokenizer is None or tokenizer.bias not in observation.gradients or tokenizer.positions is None:
        return None
    parameters = {n: p.detach() for n, p in observation.model.named_parameters()}
    pairs = []
    for sign, read in (
        (1.0, lambda tensors: _patch_rows(tokenizer, tensors)),
        (1.0, tokenizer.shared_embedding),
        (-1.0, lambda tensors: tensors[tokenizer.bias]),
    ):
        gradient, weight = read(observation.gradients), read(parameters)
        if (gradient is None) != (weight is None):
            return None
        if gradient is not None:
            width = (-1, tokenizer.width)
            pairs.append((sign, gradient.double().reshape(width), weight.double().reshape(width)))
    return _identity(observation, pairs, sum(len(gradient) for _, gradient, _ in pairs))


def _patch_rows(tokenizer: Tokenizer, tensors: Mapping[str, Tensor]) -> Tensor | None:
    rows = tokenizer.position_rows(tensors)
    return None if rows is None else rows[tokenizer.prefix :]


def _identity(observation: Observation, pairs: list[tuple[float, Tensor, Tensor]], terms: int) -> Identity:
    """Signed sums over the rows of (sign, gradient, weight) triples."""
    of_update = sum(sign * gradient.sum(dim=0) for sign, gradient, _ in pairs)
    of_weights = sum(sign * weight.sum(dim=0) for sign, _, weight in pairs)
    eps, entries = torch.finfo(torch.float32).eps, torch.cat([gradient for _, gradient, _ in pairs])
    round_off = eps * float(rms(entries))
    if observation.kind == "weights" and observation.learning_rate:
        weights = torch.cat([weight for _, _, weight in pairs])
        round_off += eps * float(rms(weights)) / observation.learning_rate
    return Identity(of_update, of_weights, terms, round_off * terms**0.5)


def tokenizer_of(observation: Observation) -> Tokenizer | None:
    """The observed model's tokenizer; None where it is no ViT."""
    return observation.once(_find_tokenizer)


def _find_tokenizer(observation: Observation) -> Tokenizer | None:
    try:
        return find_tokenizer(observation.model, observation.image_shape)
    except UsageError:
        return None
