"""The first step of Adam or AdamW, turned back into a gradient with the error of every entry.

Adam's moments start at zero and are corrected for it, so that whatever its betas are, its first step moves a weight by
rate * u,

    u = g / (|g| + eps),        g = eps u / (1 - |u|)

(Kingma and Ba 2015, algorithm 1; AdamW of Loshchilov and Hutter 2019 adds rate * lambda * w, which is subtracted
first). Where |g| is far above eps, u is +-1, and how far it is from 1 is lost in the returned weight: half the spacing
of that number, divided by the rate, is an error b of u, and g lies between eps (|u| - b) / (1 - |u| + b) and
eps (|u| + b) / (1 - |u| - b), or above the former where |u| + b reaches 1. So an entry keeps its magnitude up to about
eps / b and above it a sign and a lower bound: with eps = 1e-8, rate 1e-3 and weights of 0.02, up to 1e-2, which is most
of the position rows and a fifth of the patch projection of trained vit_mini_64.

Closed forms solve with such errors as they do with those of a message of few digits
(`attacks.linear.errors_in_variables`). Later steps divide by the moments of the earlier ones, whose large entries are
known up to their size only; they are not undone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks.linear.intervals import rounding_of_weights
from attacks.observation import Observation
from attacks.registry import UsageError

# Round-off of an optimiser's own arithmetic in u, in units of float32's.
ROUND_OFF_UNITS = 4.0
# Where nothing but a lower bound is known, the entry is taken to be at most so many times as large.
REACH = 10.0
# Share of the entries that may move by more than the rate.
TOO_FAR = 1e-3


def undo_first_step(observation: Observation, epsilon: float) -> Observation:
    """The gradient behind an update that is the first step of Adam, with `bounds`.

    Args:
        observation: returned weights after one step, decoupled weight decay subtracted.
        epsilon: of the optimiser.

    Raises:
        UsageError: the update is not of that kind.
    """
    if observation.kind != "weights" or observation.local_steps > 1 or not observation.learning_rate > 0:
        raise UsageError("the first step of Adam is undone in weights after one local step at a known learning rate")
    gradients, bounds, far, entries = {}, {}, 0, 0
    for name, sent in observation.gradients.items():
        step = sent.double()
        # The steps of most entries are as large as the rate: that is the optimiser, not a message of signs.
        error = rounding_of_weights(observation, name) + ROUND_OFF_UNITS * torch.finfo(torch.float32).eps * step.abs()
        far, entries = far + int((step.abs() > 1 + 2 * error).sum()), entries + step.numel()
        low, high = _interval(step.abs(), error, epsilon)
        gradients[name] = (step.sign() * (low + high) / 2).to(sent.dtype)
        bounds[name] = (high - low) / 2
    if far > TOO_FAR * entries:
        raise UsageError(
            f"{far / entries:.1%} of the weights moved by more than the learning rate {observation.learning_rate:g}: "
            "this is not the first step of Adam or AdamW at that rate and weight decay"
        )
    return replace(observation, gradients=gradients, bounds=bounds, kind="gradient", learning_rate=0.0)


def _interval(size: Tensor, error: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Least and largest |g| of entries with |u| = `size` up to `error`."""
    below, above = (size - error).clamp(min=0), size + error
    low = epsilon * below / (1 - below).clamp(min=torch.finfo(torch.float64).eps)
    high = epsilon * above / (1 - above).clamp(min=torch.finfo(torch.float64).tiny)
    bounded = (above < 1) & (high < REACH * low.maximum(epsilon * above))
    return low, torch.where(bounded, high, REACH * low)
