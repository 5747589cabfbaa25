"""A rounded message of one image, and the client's gradient around an image, in units of the errors found there.

What `attacks.gradient_matching.gauss_newton` searches with, whose module describes the problem: the likelihood, the
products with the gradient's derivative J and its transpose, and the preconditioner of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from attacks.gradient_matching.labels import infer_one_label
from attacks.gradient_matching.matched_update import extract_matched_update
from attacks.gradient_matching.simulation import build_simulation
from attacks.gradient_matching.unrolled import math_attention
from attacks.linear.image_prior import TouchingQuadratic, VectorialVariation
from attacks.linear.intervals import error_bounds, spacing
from attacks.linear.position_rows import bounds_of_update, position_gradient
from attacks.observation import Observation
from attacks.tokenizer import Tokenizer

# Precision of a normalised pixel by itself, the error that the image prior leaves where nothing is known (0.6), and
# the error of a float32 gradient relative to the rms entry of its parameter.
PIXEL_PRECISION, FLOAT32_ERROR = 1 / 0.6**2, 2e-7
# Misfit above which the prior's weight falls in proportion.
FAR = 10.0
# Relative eigenvalue below which a preconditioner's factor is taken for round-off.
LEAST_EIGENVALUE = 1e-9


class Message:
    """What was sent of one image, whitened, and what simulates it.

    Attributes:
        simulation: of the client; it has the weights.
        label: (1,) int64.
    """

    def __init__(self, observation: Observation, tokenizer: Tokenizer, prior: VectorialVariation) -> None:
        self.observation, self.tokenizer, self.prior = observation, tokenizer, prior
        update = extract_matched_update(observation)
        self.simulation, target = build_simulation(observation, [update], 1, exact=True)
        self.sent = {name: values[0].double() for name, values in target.values.items()}
        self.arithmetic = {n: FLOAT32_ERROR * float(sent.square().mean().sqrt()) for n, sent in self.sent.items()}
        self.deviations = {n: _deviation(error_bounds(observation, n), own) for n, own in self.arithmetic.items()}
        self.spacings = {name: spacing(observation, name) for name in self.sent}
        given, device = observation.labels, next(iter(self.sent.values())).device
        self.label = infer_one_label(update.gradients, self.simulation.head) if given is None else given.to(device)

    @cached_property
    def precision(self) -> Tensor:
        """D, (N, N); of messages with the gradients of positions and patch projection."""
        return _precision(self.observation, self.tokenizer)

    def normalised(self, images: Tensor) -> Tensor:
        """Images in [0, 1] as the model's input, float64."""
        images = images.double()
        mean, std = (images.new_tensor(v).view(1, -1, 1, 1) for v in (self.observation.mean, self.observation.std))
        return (images - mean) / std

    def in_pixels(self, images: Tensor) -> Tensor:
        """Differences of normalised images in units of [0, 1]."""
        return images * images.new_tensor(self.observation.std).view(1, -1, 1, 1)

    def damp(self, image: Tensor) -> Tensor:
        """D x, (1, C, H, W)."""
        return self.tokenizer.unpatchify((self.precision @ self.tokenizer.patchify(image)[0])[None])

    def linearise(self, image: Tensor) -> Linearised:
        """The simulated gradient around an image."""
        return Linearised(self, image)


class Linearised:
    """The gradient around an image, in units of the errors that are found there, with the products J v and J^T w.

    Attributes:
        image: (1, C, H, W) float64, normalised.
        misfit: the mean of ((t - g(x)) / sigma)^2 over all entries.
        likelihood: the first sum of the objective.
        relaxed: weight of the prior in a step from here.
        deviations: of entries by parameter, sigma times the square root of the misfit where that exceeds 1.
        residual: t - g(x) in these units, by parameter.
        prior: of the image.
    """

    def __init__(self, message: Message, image: Tensor) -> None:
        simulation, self.message = message.simulation, message
        like = next(iter(simulation.weights.values()))
        self.image, self.fed = image, image.to(like, copy=True).requires_grad_()
        self.weights = [simulation.weights[name].detach().requires_grad_() for name in message.sent]
        with math_attention(), torch.enable_grad():
            known = simulation.weights | dict(zip(message.sent, self.weights, strict=True))
            loss = functional.cross_entropy(simulation.logits(known, self.fed, None), message.label)
            self.slope, *self.gradients = torch.autograd.grad(loss, [self.fed, *self.weights], create_graph=True)
        whitened = [d / message.deviations[name] for name, d in zip(message.sent, self.differences(), strict=True)]
        entries = sum(w.numel() for w in whitened)
        self.misfit = float(sum(w.square().sum() for w in whitened)) / entries
        self.prior = TouchingQuadratic(message.prior, image, message.observation.std)
        more = max(self.misfit, 1.0)
        self.likelihood = entries * (min(self.misfit, 1.0) - 1 + math.log(more))
        self.relaxed = min(1.0, FAR / more)
        self.residual = [w / more**0.5 for w in whitened]
        self.deviations = [sigma * more**0.5 for sigma in message.deviations.values()]

    def objective(self, relaxed: float) -> float:
        """What the search minimises, with a prior of some weight."""
        return self.likelihood + 2 * relaxed * self.prior.penalty

    def differences(self) -> list[Tensor]:
        """t - g(x), by parameter."""
        pairs = zip(self.message.sent.values(), self.gradients, strict=True)
        return [sent - found.detach().double() for sent, found in pairs]

    def excess(self) -> float:
        """What the squared residuals exceed those of rounding g(x) itself by, in sigma^2, for each value of a pixel.

        To the nearest number, or at random to one of both neighbours: whichever explains the residuals better. An image
        beside the photograph whose residuals have just the size of the other rounding would pass.
        """
        message, nearest, random = self.message, 0.0, 0.0
        for name, left in zip(message.sent, self.differences(), strict=True):
            gap, sigma = message.spacings[name], message.deviations[name]
            found = (message.sent[name] - left) / gap.clamp(min=torch.finfo(torch.float64).tiny)
            off = torch.where(gap > 0, found - found.round(), 0.0).abs()
            left = left.square() - message.arithmetic[name] ** 2
            nearest += float(((left - (off * gap).square()) / sigma.square()).sum())
            random += float(((left - (off * (1 - off)) * gap.square()) / sigma.square()).sum())
        return min(nearest, random, key=abs) / self.image.numel()

    def push(self, image: Tensor) -> list[Tensor]:
        """J v of (1, C, H, W), by parameter."""
        found = torch.autograd.grad(
            self.slope, self.weights, image.to(self.slope), retain_graph=True, allow_unused=True
        )
        pairs = zip(found, self.deviations, strict=True)
        return [torch.zeros_like(sigma) if g is None else g.double() / sigma for g, sigma in pairs]

    def pull(self, entries: Sequence[Tensor]) -> Tensor:
        """J^T w of whitened entries by parameter, (1, C, H, W) float64."""
        scaled = [(w / sigma).to(self.slope) for w, sigma in zip(entries, self.deviations, strict=True)]
        return torch.autograd.grad(self.gradients, self.fed, scaled, retain_graph=True)[0].double()

    def times(self, image: Tensor) -> Tensor:
        """(J^T J + K^T W K) x of (1, C, H, W), with the prior relaxed."""
        return self.pull(self.push(image)) + self.relaxed * self.prior.times(image)

    def preconditioner(self, probes: int, damping: float, generator: torch.Generator) -> Preconditioner:
        """C (x) I + A (x) B, with C = damping D + the mean of K^T W K."""
        tokenizer, precision = self.message.tokenizer, self.message.precision
        rows = columns = 0.0
        for _ in range(probes):
            signs = [torch.randint(0, 2, s.shape, generator=generator).to(s) * 2 - 1 for s in self.deviations]
            drawn = tokenizer.patchify(self.pull(signs))[0]  # (N, P)
            rows, columns = rows + drawn @ drawn.T / probes, columns + drawn.T @ drawn / probes
        known = damping * precision + self.relaxed * self.prior.typical * torch.eye(len(precision)).to(precision)
        return Preconditioner(tokenizer, known, rows / columns.trace(), columns)


class Preconditioner:
    """C (x) I + A (x) B on patches (N, P), by vectors that diagonalise C and A, and B."""

    def __init__(self, tokenizer: Tokenizer, known: Tensor, rows: Tensor, columns: Tensor) -> None:
        self.tokenizer = tokenizer
        inverse = torch.linalg.inv(torch.linalg.cholesky(_lifted(rows)))
        strengths, left = torch.linalg.eigh(inverse @ known @ inverse.T)
        self.left = inverse.T @ left  # A-orthonormal, and diagonalises C
        felt, self.right = torch.linalg.eigh(_lifted(columns))
        self.strengths = strengths[:, None] + felt  # (N, P)

    def __call__(self, image: Tensor) -> Tensor:
        """Product of the inverse with (1, C, H, W)."""
        turned = self.left.T @ self.tokenizer.patchify(image)[0] @ self.right / self.strengths
        return self.tokenizer.unpatchify((self.left @ turned @ self.right.T)[None])

    def draw(self, generator: torch.Generator) -> Tensor:
        """(1, C, H, W) with the inverse for its covariance."""
        drawn = torch.randn(self.strengths.shape, generator=generator, dtype=torch.float64).to(self.strengths)
        return self.tokenizer.unpatchify((self.left @ (drawn / self.strengths.sqrt()) @ self.right.T)[None])


def _lifted(moments: Tensor) -> Tensor:
    return moments + LEAST_EIGENVALUE * moments.diagonal().mean() * torch.eye(len(moments)).to(moments)


def _deviation(bounds: Tensor, arithmetic: float) -> Tensor:
    """Of every entry, by the message's precision and the client's arithmetic."""
    return (bounds.square() / 3 + arithmetic**2).sqrt().clamp(min=torch.finfo(torch.float32).tiny)


def _precision(observation: Observation, tokenizer: Tokenizer) -> Tensor:
    """D, (N, N): what dL/dE = G^T X says of combinations of patches, by the errors of both, and a pixel's own."""
    of_rows, of_products = bounds_of_update(observation, tokenizer)
    rows = position_gradient(observation, tokenizer)[tokenizer.prefix :].double()  # (N, D)
    variances = (of_products.square().mean(dim=1) + of_rows.square().sum(dim=0)) / 3  # (D,), pixels of variance 1
    own = PIXEL_PRECISION * torch.eye(len(rows)).to(rows)
    return own + (rows / variances.clamp(min=torch.finfo(torch.float64).tiny)) @ rows.T
