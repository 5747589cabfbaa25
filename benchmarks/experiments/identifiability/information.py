"""What a message determines of its image to first order: the Fisher information of the client's gradient.

With g(x) the gradient that the client computes of an image x, and errors of deviation sigma_e in its entries e, no
unbiased estimate of x from the message has a smaller covariance than H^-1 (Cramer 1946, Rao 1945), where

    H = J^T J,      J_ei = 1 / sigma_e dg_e / dx_i    at the photograph.

An eigenvector of H with eigenvalue h is a combination of pixels that the message determines with deviation
1 / sqrt(h), and with h = 0 not at all. A server that knows the variance v of the pixels, and nothing else of
photographs, is left with the mean of 1 / (h + 1 / v) over all of them.

The errors are measured: a client's gradient in float32 against the same in float64, one deviation for a parameter, at
least the round-off of a single operation. They are taken for independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks import Observation, find_tokenizer
from attacks.gradient_matching.rounded_message import Message
from attacks.gradient_matching.unrolled import math_attention
from attacks.linear.image_prior import VectorialVariation
from attacks.registry import UsageError

# Largest Jacobian that is held, in numbers (2 GB of float64), and columns of it that are computed together.
LARGEST, TOGETHER = 2**28, 32
# Deviation of a pixel in [0, 1] at 25 dB, where a patch counts as recovered.
RECOGNISABLE = 10 ** (-25 / 20)


@dataclass(frozen=True)
class Determined:
    """What a message of `sent` numbers determines of an image of `values` numbers.

    Attributes:
        identifiable: combinations of pixels with a deviation below that of 25 dB.
        psnr: of the least mean squared error, dB, where pixels vary as those of the image do.
    """

    sent: int
    values: int
    identifiable: int
    psnr: float


def derivatives(observation: Observation, original: Tensor) -> dict[str, Tensor]:
    """J^T by parameter, (values, entries) float64: by pixels in [0, 1], in units of the errors of float32.

    Args:
        observation: one image and one step, whose gradient is that of the cross-entropy.
        original: (1, C, H, W) in [0, 1].

    Raises:
        UsageError: the message has so many numbers that J does not fit.
    """
    exact = replace(observation, model=deepcopy(observation.model).double())
    message = Message(exact, find_tokenizer(observation.model, observation.image_shape), VectorialVariation())
    entries, values = sum(sent.numel() for sent in message.sent.values()), original.numel()
    if entries * values > LARGEST:
        raise UsageError(
            f"the message has {entries:,} numbers, the image {values:,}: their derivatives do not fit; withhold more, "
            f"up to {LARGEST // values:,} numbers"
        )
    at = message.linearise(message.normalised(original))
    sigma = {n: _error(left, message.arithmetic[n]) for n, left in zip(message.sent, at.differences(), strict=True)}
    units = torch.eye(values, dtype=torch.float64).view(values, *original.shape)
    units = units / units.new_tensor(observation.std).view(1, 1, -1, 1, 1)
    found = {name: [] for name in message.sent}
    with math_attention():
        for some in units.split(TOGETHER):
            pushed = torch.autograd.grad(
                at.slope, at.weights, some.to(at.slope), retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            for (name, sent), columns in zip(message.sent.items(), pushed, strict=True):
                none = columns is None  # the loss does not depend on this parameter
                columns = sent.new_zeros(len(some), sent.numel()) if none else columns.flatten(1).double()
                found[name].append(columns.cpu() / sigma[name])
    return {name: torch.cat(columns) for name, columns in found.items()}


def determined(columns: Mapping[str, Tensor], original: Tensor) -> Determined:
    """What parameters determine together.

    Args:
        columns: of `derivatives`, those parameters.
        original: (1, C, H, W) in [0, 1].
    """
    values, variance = original.numel(), float(original.double().var())
    triangle = torch.linalg.qr(torch.cat(list(columns.values()), dim=1).T, mode="r").R  # J^T J squares the round-off
    strengths = torch.zeros(values, dtype=torch.float64)
    found = torch.linalg.svdvals(triangle).square()
    strengths[: len(found)] = found
    left = 1 / (strengths + 1 / variance)
    return Determined(
        sum(own.shape[1] for own in columns.values()),
        values,
        int((strengths > RECOGNISABLE**-2).sum()),
        float(-10 * left.mean().log10()),
    )


def _error(left: Tensor, least: float) -> float:
    """Deviation of a parameter's entries: what float32 left between message and gradient, or the least there can be."""
    return max(float(left.square().mean().sqrt()), least, torch.finfo(torch.float32).tiny)
