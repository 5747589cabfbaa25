"""Infer the labels of a batch from the gradient of the classifier's bias.

With the mean cross-entropy over B images, the bias' gradient is b_k = mean_i p_ik - n_k / B, where p_i are the class
probabilities that the model predicts for image i and n_k is the number of images with label k. For one image p < 1, so
b is negative at its label and nowhere else (iDLG, Zhao et al. 2020), and the result is exact. For several images, every
class with b_k < 0 occurs at least once; the remaining labels are assigned where the expected count B (E p_k - b_k) is
not yet reached (as Wainakh et al. 2022, "User-Level Label Leakage from Gradients in Federated Learning"). E p is
approximated by the model's prediction for a grey image, which is inaccurate for trained models.

For the sum over k local steps the same holds with k B images, provided that the weights change little.

Where a client sent some entries only, the label's own may be missing from the bias. Of one image, row k of the weight's
gradient is (p_k - y_k) f with the feature f: the label's row is the one whose entries have the other sign than those of
all other rows, as far as they were sent in the same columns. No row is larger, because 1 - p_y is the sum of the other
probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attacks.registry import UsageError


def infer_labels(bias: Tensor, expected: Tensor, count: int, steps: int = 1) -> Tensor:
    """Labels of the batch in ascending order, (count,) int64.

    Args:
        bias: (K,) gradient of the classifier's bias, summed over `steps`.
        expected: (K,) E p, the model's mean class probabilities.
        count: number of images in all steps together.
        steps: number of local steps.
    """
    due = count * (expected - bias / steps)  # (K,)
    counts = (bias < 0).to(torch.int64)
    if counts.sum() > count:  # caused by noise: there are no more labels than images
        counts = torch.zeros_like(counts)
    for _ in range(count - int(counts.sum())):
        counts[(due - counts).argmax()] += 1
    return torch.repeat_interleave(torch.arange(len(counts), device=bias.device), counts)


def infer_sparse_label(weight: Tensor, bias: Tensor) -> Tensor:
    """Label of the one image of a sparse update, (1,) int64.

    Args:
        weight: (K, D) gradient of the classifier's weight, zero where an entry was not sent.
        bias: (K,) of its bias, likewise.
    """
    if (bias < 0).any():
        return bias.argmin()[None]
    rows = weight.double()
    lengths = rows.norm(dim=1).clamp(min=torch.finfo(rows.dtype).tiny)
    cosines = (rows @ rows.mT / lengths / lengths[:, None]).fill_diagonal_(0)
    sizes = lengths / rows.count_nonzero(dim=1).clamp(min=1).sqrt()
    scores = -cosines.sum(dim=1) + 1e-3 * sizes / sizes.max()  # sizes decide where no two rows share a column
    return torch.where(bias > 0, -torch.inf, scores).argmax()[None]


def infer_one_label(gradients: Mapping[str, Tensor], head: str) -> Tensor:
    """Label of the one image of an update, (1,) int64; from the weight alone where the bias was frozen or not sent.

    Args:
        gradients, head: see `head_bias`.

    Raises:
        UsageError: the update holds neither.
    """
    bias, weight = (gradients.get(f"{head}.{part}") for part in ("bias", "weight"))
    if weight is None:
        return head_bias(gradients, head).argmin()[None]
    return infer_sparse_label(weight, torch.zeros_like(weight[:, 0]) if bias is None else bias)


def head_bias(gradients: Mapping[str, Tensor], head: str) -> Tensor:
    """The gradient of the classifier's bias, (K,).

    Args:
        gradients: the update, by parameter name.
        head: name of the classifier's module.

    Raises:
        UsageError: the update does not contain it.
    """
    if f"{head}.bias" not in gradients:
        raise UsageError(
            "the update holds no gradient of the classifier's bias, from which labels are inferred; grant labels, or "
            "use an attack that optimises them (dlg)"
        )
    return gradients[f"{head}.bias"]
