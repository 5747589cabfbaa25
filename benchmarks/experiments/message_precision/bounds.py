"""The error that no unbiased estimate from the two equations of `patch_embedding` goes below.

In dL/dE = G^T X both sides are sent with errors of known size. No unbiased estimate of X has a smaller covariance than
the inverse of the Fisher information (Cramer 1946, Rao 1945), here with the factors G as unknowns of their own
(`attacks.linear.errors_in_variables.information`):

    E |x_np - X_np|^2 >= (H^-1)_np,np,    H = sum_d g_d g_d^T (x) (diag(s_d) + X^T diag(v_d) X)^-1

s_d and v_d are the variances of the entries of dL/dE and G in channel d. Rounding errors are uniform and are taken for
normal ones of the same variance: with three equations an unknown, as here, the difference is 0.4 dB (see the module).
An image prior is a bias, so that an estimate with one can be better where the message says little. With pixels drawn
from independent normal distributions of the image's variance tau^2 the information is H + I / tau^2 (van Trees 1968),
for biased estimates as well; an estimate that knows more of photographs than that may still be better.

Entries that were left out have errors of the size that the message shows of them (at most the least entry that was
sent), taken for normal ones like those of rounding.

*The whole message.* A server that computes the gradient g(x) from the weights has every entry for an equation, and the
pixels for its only unknowns (`gauss_newton`):

    E |x_i - X_i|^2 >= ((J^T J)^-1)_ii,      J = diag(1 / sigma) dg / dx    at the photograph,

with the deviations sigma that the message shows. Here several hundred equations stand for an unknown, and an estimate
that uses the edges of the uniform errors may go below what normal ones allow: the figure says what the message holds at
least, not what is out of reach.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks import Observation, find_tokenizer
from attacks.gradient_matching.rounded_message import Message
from attacks.linear.errors_in_variables import RoundedSystem, information
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.position_rows import bounds_of_update, position_gradient, projection_products

# Unknowns up to which the information is inverted as a dense matrix, and what is added to its diagonal, relative.
LARGEST, JITTER = 4096, 1e-12


def least_error(exact: Observation, sent: Observation, original: Tensor, *, normal: bool = False) -> float:
    """Mean squared error of a pixel in [0, 1] by the bound.

    Args:
        exact: the update before it was rounded.
        sent: the message.
        original: (1, C, H, W) in [0, 1], of at most `LARGEST` values.
        normal: of any estimate, where pixels are normal with the image's variance; else of unbiased ones.

    Raises:
        ValueError: the message has the digits of float32.
    """
    tokenizer = find_tokenizer(exact.model, exact.image_shape)
    bounds = bounds_of_update(sent, tokenizer)
    if bounds is None:
        raise ValueError("the message has the digits of float32: its errors are not those of rounding")
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (exact.mean, exact.std))
    patches = tokenizer.patchify((original.double() - mean) / std)[0]  # (N, P)
    rows = position_gradient(exact, tokenizer)[tokenizer.prefix :].double()
    system = RoundedSystem(rows, bounds[0], projection_products(exact, tokenizer).double(), bounds[1])
    found = information(system, patches)
    if normal:
        found = found + torch.eye(len(found), dtype=found.dtype) / patches.var()
    variances = _least_variances(found).view_as(patches)
    scale = tokenizer.patchify(std.expand_as(original))[0]
    return float((variances * scale.square()).mean())


def least_error_of_message(sent: Observation, original: Tensor) -> float:
    """The same where the estimate knows the whole gradient as a function of the image.

    Args:
        sent: the message, which `gauss_newton` can take.
        original: (1, C, H, W) in [0, 1], of at most `LARGEST` values.
    """
    message = Message(sent, find_tokenizer(sent.model, sent.image_shape), VectorialVariation())
    at, count = message.linearise(message.normalised(original)), original.numel()
    units = torch.eye(count, dtype=torch.float64).view(count, *original.shape)
    found = torch.stack([at.pull(at.push(unit)).flatten() for unit in units])
    variances = _least_variances((found + found.T) / 2).view(original.shape)
    std = torch.tensor(sent.std, dtype=torch.float64).view(1, -1, 1, 1)
    return float((variances * std.square()).mean())


def _least_variances(found: Tensor) -> Tensor:
    """Diagonal of the inverse of a matrix of information."""
    lifted = found + JITTER * found.diagonal().mean() * torch.eye(len(found), dtype=found.dtype)
    return torch.cholesky_inverse(torch.linalg.cholesky(lifted)).diagonal()


def psnr_of(error: float) -> float:
    """PSNR in dB of a mean squared error of pixels in [0, 1]."""
    return -10 * math.log10(error)
