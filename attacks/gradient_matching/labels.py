"""Labels of a batch from the gradient of the classifier's bias.

With the mean cross-entropy over B images, the bias' gradient is b_k = mean_i p_ik - n_k / B, p the model's answers and
n_k how many images have label k. One image: p < 1, so b is negative at its label and nowhere else (iDLG, Zhao et al.
2020): exact. Several: every class with b_k < 0 is there at least once; the rest go where B (E p_k - b_k), the expected
count, is not yet met (as Wainakh et al. 2022, "User-Level Label Leakage from Gradients in Federated Learning"). E p
is the model's answer to a grey image, which is a guess on trained models.

Summed over k local steps the same holds with k B images, as far as the weights move little.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attacks.registry import UsageError


def infer_labels(bias: Tensor, expected: Tensor, count: int, steps: int = 1) -> Tensor:
    """Labels, ascending, (count,) int64.

    Args:
        bias: (K,) gradient of the classifier's bias, summed over `steps`.
        expected: (K,) E p, the model's mean answer.
        count: images in all steps together.
    """
    due = count * (expected - bias / steps)  # (K,)
    counts = (bias < 0).to(torch.int64)
    if counts.sum() > count:  # noise: no more labels than images
        counts = torch.zeros_like(counts)
    for _ in range(count - int(counts.sum())):
        counts[(due - counts).argmax()] += 1
    return torch.repeat_interleave(torch.arange(len(counts), device=bias.device), counts)


def head_bias(gradients: Mapping[str, Tensor], head: str) -> Tensor:
    """The gradient of the classifier's bias.

    Raises:
        UsageError: the update holds none.
    """
    if f"{head}.bias" not in gradients:
        raise UsageError(
            "the update holds no gradient of the classifier's bias, from which labels are inferred; grant labels, or "
            "use an attack that seeks them (dlg)"
        )
    return gradients[f"{head}.bias"]
