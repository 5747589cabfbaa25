"""The feature of every image of a batch, from the classifier's gradient alone.

A classifier of K classes gives image i with the feature h_i the probabilities p_i = softmax(W h_i + b). With labels y_i
(K numbers, one of them 1), the mean cross-entropy of B images has the gradient

    B [dL/dW, dL/db] = sum_i (p_i - y_i) [h_i, 1]^T = A H,        A (K, B), H (B, D + 1).

Of one image this is a product of two vectors, and [h, 1] is its right one. Of several images, the rows of H lie in the
span of B right singular vectors V of the gradient, so H = M V with B^2 unknown numbers M. The server knows W and b, and
so A as a function of M, up to the labels. What is left to solve is

    A(M) M = B U S,        M V e = 1        (U S V the gradient, e the place of the constant 1)

for M: columns of A add up to zero, so these are K B equations. A has rank K - 1 at most, which bounds the batch:
B < K, and B <= D + 1. Labels may repeat; where they are not granted they are inferred, anew from the features that the
first guess leads to. The search is that of Levenberg (1944) and Marquardt (1963). It starts from
the rows that the gradient has for the labels, each mostly that of its own image, then from features of other images.
Solutions reproduce the gradient to its precision, or are no answer.

That the gradient of one image gives its feature is said in Zhu, Liu and Han 2019 and used by iDLG (Zhao et al. 2020)
for labels. Kariyappa et al. 2022 ("Cocktail Party Attack") unmix the inputs of a linear layer by independent component
analysis, without weights or labels; there the mixture is unknown, here it follows from the features themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attacks.classifier import classifier_gradient, find_classifier, gradient_error
from attacks.gradient_matching.labels import infer_labels
from attacks.observation import SUPERVISED, Observation
from attacks.registry import UsageError

# Steps from each start, and what the damping is multiplied by after a step that was taken, and after one that was not.
STEPS, LESS_DAMPING, MORE_DAMPING, FIRST_DAMPING = 80, 0.3, 4.0, 1e-2
# A search ends where a step lowers what is missed by less than this share.
LEAST_GAIN = 1e-3
# Searches at most: with labels that are granted, and with labels that are guessed, as a whole and exchanged singly.
STARTS, GUESSES, EXCHANGES = 24, 8, 120
# Exchanges are fewer where a search takes long: this many classes times fifth powers of the batch's size, in all.
MOST_EXCHANGES = 6e10
# A solution may miss the gradient by this many times the error of the message, and by this share of it, which the
# arithmetic of the client may make (1e-6 on a ViT-Ti in float32). Searches end below the last share.
EXPLAINED, ARITHMETIC, LEAST_MISFIT = 3.0, 5e-6, 1e-9
# Numbers of the largest Jacobian that is held: 0.5 GB.
LARGEST = 2**26


@dataclass(frozen=True)
class Features:
    """Inputs of the classifier of all images of a batch.

    Attributes:
        values: (B, D) float64.
        labels: (B,) int64, in the same order.
        error: relative error of the gradient that they were read from.
        starts: from which the search began until it was solved; 0 for one image, whose feature needs no search.
    """

    values: Tensor
    labels: Tensor
    error: float
    starts: int


@dataclass(frozen=True)
class _Equations:
    """A(M) M = T and M V e = 1.

    Attributes:
        logits: Q (B, K), with M Q the logits.
        onehot: (K, B), the labels.
        target: T = B U S, (K, B).
        ones: V e, (B,).
    """

    logits: Tensor
    onehot: Tensor
    target: Tensor
    ones: Tensor

    def misses(self, m: Tensor) -> Tensor:
        """(K B + B,) what M (B, B) leaves of the equations."""
        a = (m @ self.logits).softmax(dim=1).T - self.onehot
        return torch.cat([(a @ m - self.target).flatten(), (m @ self.ones - 1) * self.target.norm()])

    def jacobian(self, m: Tensor) -> Tensor:
        """(K B + B, B^2) derivative of `misses`."""
        count, classes = self.logits.shape
        p = (m @ self.logits).softmax(dim=1)  # (B, K)
        moved = self.logits.T[None] - (p @ self.logits.T)[:, None]  # (B, K, B): of log p_jk by M_jc
        slope = p[:, :, None] * moved
        eye = torch.eye(count).to(m)
        rows = torch.einsum("jb,jkc->kbjc", m, slope) + torch.einsum("kj,bc->kbjc", p.T - self.onehot, eye)
        ones = torch.einsum("ij,c->ijc", eye, self.ones) * self.target.norm()
        return torch.cat([rows.reshape(classes * count, -1), ones.reshape(count, -1)])


def classifier_features(observation: Observation, others: Tensor) -> Features:
    """Features of the batch behind an update.

    Args:
        observation: one step on B images.
        others: (n, D), features of other images, from which searches start after the first; all of them in turn.

    Raises:
        UsageError: the update holds no gradient of a classifier's weight and bias, is no step of cross-entropy, sums
            too many images, or no features reproduce it.
    """
    gradient = _checked(observation)
    count, device = observation.num_examples, gradient.device
    module = observation.model.get_submodule(find_classifier(observation))
    left, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
    error = gradient_error(observation, gradient, module.weight)
    if int((sizes > error).sum()) < count:
        raise UsageError(
            f"the classifier's gradient shows {int((sizes > error).sum())} of the {count} images above its error: "
            "noise, entries that were not sent, or images that are alike"
        )
    relative = error / float(sizes[0])
    if count == 1:
        label = gradient[:, -1].argmin()[None]
        return Features((right[0, :-1] / right[0, -1])[None], label.to(device), relative, 0)
    weights = torch.cat([module.weight, module.bias[:, None]], dim=1).detach().double()
    target, basis = count * left[:, :count] * sizes[:count], right[:count]
    enough = max(EXPLAINED * count * error, ARITHMETIC * float(target.norm()))
    unmixed = _Unmixed(count * gradient, basis, target, weights, others.to(gradient))
    granted = observation.labels
    guesses = unmixed.guesses() if granted is None else unmixed.from_all_starts(granted.to(device))
    number = 0
    for number, found in enumerate(guesses, start=1):
        if found.missed <= enough:
            return Features((found.m @ basis)[:, :-1], found.labels, relative, number)
    said = f"any of {number} guesses of the labels (grant labels)" if granted is None else "the labels granted"
    raise UsageError(f"no features of {count} images were found that reproduce the classifier's gradient with {said}")


def _checked(observation: Observation) -> Tensor:
    """[dL/dW, dL/db], (K, D + 1) float64."""
    gradient = classifier_gradient(observation)
    if gradient is None:
        raise UsageError("the update holds no gradient of a classifier's weight and bias")
    if observation.objective != SUPERVISED or observation.local_steps > 1:
        raise UsageError("the update is not one step of cross-entropy, which the features are read from")
    count, (classes, width) = observation.num_examples, gradient.shape
    if count > 1 and count >= min(classes, width):
        raise UsageError(
            f"a classifier of {classes} classes and {width - 1} channels keeps the features of at most "
            f"{min(classes, width) - 1} images apart, and the update sums {count}"
        )
    if classes * count**3 > LARGEST:
        raise UsageError(f"the equations of {count} images and {classes} classes do not fit the memory")
    return gradient


@dataclass(frozen=True)
class _Found:
    """The end of a search: labels (B,), M (B, B) and the norm of what it misses."""

    labels: Tensor
    m: Tensor
    missed: float


@dataclass(frozen=True)
class _Unmixed:
    """The searches for the features behind a gradient.

    Attributes:
        gradient: B [dL/dW, dL/db], (K, D + 1).
        basis: V, (B, D + 1).
        target: T, (K, B).
        weights: [W, b], (K, D + 1).
        others: (n, D), features of other images.
    """

    gradient: Tensor
    basis: Tensor
    target: Tensor
    weights: Tensor
    others: Tensor

    def search(self, labels: Tensor, number: int = 0) -> _Found:
        """The end of a search from the start of a number."""
        onehot = functional.one_hot(labels, len(self.weights)).T.to(self.gradient)
        equations = _Equations(self.basis @ self.weights.T, onehot, self.target, self.basis[:, -1])
        return _Found(labels, *_solve(equations, _with_ones(self.start(labels, number)) @ self.basis.T))

    def start(self, labels: Tensor, number: int) -> Tensor:
        """(B, D): other images' features; of number 0 the labels' rows, where a label's first image stands."""
        count = len(labels)
        places = (torch.arange(count, device=labels.device) + number * count) % len(self.others)
        others = self.others[places]
        if number:
            return others
        rows = self.gradient[labels]
        first = (labels[:, None] == labels).to(torch.int64).argmax(dim=1) == torch.arange(count, device=labels.device)
        usable = first & (rows[:, -1] < 0)
        return torch.where(usable[:, None], rows[:, :-1] / rows[:, -1:], others)

    def from_all_starts(self, labels: Tensor) -> Iterator[_Found]:
        """Searches with labels that are granted."""
        return (self.search(labels, number) for number in range(STARTS))

    def guesses(self) -> Iterator[_Found]:
        """Searches with labels that are guessed.

        Of class k the batch holds sum_i p_ik - B dL/db_k images. The sum is taken from the mean prediction for other
        images, then from the features that the labels so far lead to, until labels repeat. Then single labels of the
        guess that missed least are exchanged, first where these numbers speak for it, as long as less is missed.
        """
        count, tried, best = len(self.basis), set(), None
        predicted = (_with_ones(self.others) @ self.weights.T).softmax(dim=1).mean(dim=0)
        for _ in range(GUESSES):
            labels = infer_labels(self.gradient[:, -1] / count, predicted, count)
            if tuple(labels.tolist()) in tried:
                break
            tried.add(tuple(labels.tolist()))
            found = self.search(labels)
            yield found
            best = found if best is None or found.missed < best.missed else best
            predicted = self._predicted(found).mean(dim=0)
        exchanged = self._exchanged(best)
        for _ in range(min(EXCHANGES, int(MOST_EXCHANGES / (len(self.weights) * count**5)))):
            labels = next((one for one in exchanged if tuple(one.tolist()) not in tried), None)
            if labels is None:
                break
            tried.add(tuple(labels.tolist()))
            found = self.search(labels)
            yield found
            if found.missed < best.missed:
                best, exchanged = found, self._exchanged(found)

    def _predicted(self, found: _Found) -> Tensor:
        """(B, K), the probabilities that the model gives the images found."""
        return (found.m @ self.basis @ self.weights.T).softmax(dim=1)

    def _exchanged(self, found: _Found) -> Iterator[Tensor]:
        """Labels (B,) of which one is another than in `found`; those first that are nearest to the classes' numbers."""
        classes = len(self.weights)
        due = self._predicted(found).sum(dim=0) - self.gradient[:, -1]
        counts = torch.bincount(found.labels, minlength=classes)
        # What a label k less, and one of class j more, add to the squared distance of the counts from those due.
        less, more = 1 - 2 * (counts - due), 1 + 2 * (counts - due)
        kept = (counts > 0) & ~((counts == 1) & (self.gradient[:, -1] < 0))  # a negative entry shows the class
        costs = torch.where(kept[:, None], less[:, None] + more, torch.inf).fill_diagonal_(torch.inf)
        for place in costs.flatten().argsort()[: int(costs.isfinite().sum())].tolist():
            out, come = divmod(place, classes)
            labels = found.labels.clone()
            labels[(labels == out).nonzero()[0, 0]] = come
            yield labels.sort().values


def _with_ones(features: Tensor) -> Tensor:
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def _solve(equations: _Equations, m: Tensor) -> tuple[Tensor, float]:
    """M at the end of a search, and the norm of what it misses."""
    damping, missed = FIRST_DAMPING, equations.misses(m)
    for _ in range(STEPS):
        if missed.norm() <= LEAST_MISFIT * equations.target.norm():
            break
        jacobian = equations.jacobian(m)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ missed
        scale = normal.diagonal().clamp(min=1e-12 * float(normal.diagonal().mean()))
        step = torch.linalg.solve_ex(normal + damping * scale.diag(), slope).result.view_as(m)
        there = equations.misses(m - step)
        if there.norm() < missed.norm():
            gained = 1 - float(there.norm() / missed.norm())
            m, missed, damping = m - step, there, LESS_DAMPING * damping
            if gained < LEAST_GAIN:
                break
        else:
            damping *= MORE_DAMPING
            if damping > 1 / LEAST_MISFIT:
                break
    return m, float(missed.norm())
