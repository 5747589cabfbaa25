"""A linear classifier on frozen features: multinomial logistic regression, solved to convergence.

Departs from DINO, MAE and MST, which train it by SGD on augmented images for 90 to 100 epochs: here features of
unchanged images are standardised (mean and deviation of the training set) and the convex problem

    mean cross-entropy + (decay / 2) |W|^2

is solved by L-BFGS, so that the result has no schedule and no seed. Figures are lower than with augmentation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmjp.data import DataBundle
from fedmjp.evaluation.features import Pool, features
from fedmjp.models import BuiltModel

DECAY = 1e-3
STEPS = 200


def fit_logistic(
    inputs: Tensor, labels: Tensor, classes: int, decay: float = DECAY, steps: int = STEPS
) -> tuple[Tensor, Tensor]:
    """Weights (classes, D) and biases (classes,) of the minimum.

    Args:
        inputs: (n, D).
        labels: (n,) int64 in 0..classes-1.
        decay: weight of the quadratic penalty; biases have none.
        steps: L-BFGS iterations at most.
    """
    weight = inputs.new_zeros(classes, inputs.shape[1]).requires_grad_()
    bias = inputs.new_zeros(classes).requires_grad_()
    settings = {"max_iter": steps, "history_size": 20, "tolerance_change": 1e-12, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([weight, bias], **settings)

    def closure() -> Tensor:
        """The objective at the present parameters, with its gradient, as L-BFGS asks for it."""
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = F.cross_entropy(F.linear(inputs, weight, bias), labels) + decay / 2 * weight.square().sum()
            loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def probe_accuracy(
    model: BuiltModel, data: DataBundle, device: torch.device, pool: Pool = "class", decay: float = DECAY
) -> float:
    """Top-1 accuracy in [0, 1] on the test images of a linear classifier fitted to the training images.

    Raises:
        UsageError: see `features`.
    """
    train, test = (features(model, images, device, pool) for images in (data.train, data.test))
    mean, deviation = train.mean(dim=0), train.std(dim=0).clamp(min=1e-6)
    weight, bias = fit_logistic((train - mean) / deviation, data.train.labels, len(data.classes), decay)
    found = F.linear((test - mean) / deviation, weight, bias).argmax(dim=1)
    return float((found == data.test.labels).float().mean())
