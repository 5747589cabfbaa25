"""DINO's self-distillation as MST uses it: projection head, teacher, centre, loss over crossed views.

"Emerging Properties in Self-Supervised Vision Transformers" (Caron et al.): student and teacher outputs are compared
between different views of an image,

    L = mean over pairs g != v of  - sum_k softmax((t_g - c) / tau_t)_k  log softmax(s_v / tau_s)_k,

with g a global view that the teacher saw, v any view that the student saw, and c a running mean of the teacher's
outputs. The teacher's weights follow the student's as an exponential moving average. Without the centre all images may
get one output, without the low temperature every output may become uniform; at either the loss is useless and its
gradient is small. The pseudo-code of MST's appendix uses one temperature for both sides and no centre; its text says
that temperature and momentum are DINO's, and so they are here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ProjectionHead(nn.Module):
    """DINO's head: three layers, L2 norm, and prototypes of unit length.

    Args:
        width: D.
        hidden: channels of the two hidden layers.
        bottleneck: channels before the prototypes.
        outputs: K, number of prototypes.
    """

    def __init__(self, width: int, hidden: int, bottleneck: int, outputs: int) -> None:
        super().__init__()
        widths = (width, hidden, hidden, bottleneck)
        layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
        self.layers = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.prototypes = nn.Parameter(torch.empty(outputs, bottleneck))
        nn.init.trunc_normal_(self.prototypes, std=0.02)

    def forward(self, features: Tensor, frozen: bool = False) -> Tensor:
        """Cosines (B, K) of the projected class tokens (B, D) and the prototypes; `frozen` gives those no gradient."""
        prototypes = self.prototypes.detach() if frozen else self.prototypes
        return F.linear(F.normalize(self.layers(features), dim=-1), F.normalize(prototypes, dim=-1))


class Teacher(nn.Module):
    """A copy of the student's encoder and projection head that follows it; it has no decoder and takes no gradient.

    Args:
        student: the module that is trained, with the heads of `MST.attach`; without distillation it has no projection.
    """

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.network = copy.deepcopy(student)
        self.network.pretext = self.network.pretext.projection
        self.network.dal = None  # the localisation loss is the student's alone
        self.network.eval().requires_grad_(False)

    @torch.no_grad()
    def follow(self, student: nn.Module, momentum: float) -> None:
        """theta <- momentum theta + (1 - momentum) theta_student."""
        theirs = {n.replace("pretext.projection.", "pretext."): p for n, p in student.named_parameters()}
        for name, own in self.network.named_parameters():
            own.lerp_(theirs[name], 1 - momentum)


def momentum_at(start: float, progress: float) -> float:
    """DINO's schedule: from `start` to 1 along half a cosine; `progress` in [0, 1)."""
    return 1 - (1 - start) * (math.cos(math.pi * progress) + 1) / 2


def full(outputs: Tensor) -> Tensor:
    """Outputs in at least float32: divided by a temperature of 0.04, bfloat16's rounding would be felt."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def distillation_loss(student: Sequence[Tensor], targets: Sequence[Tensor], temperature: float) -> Tensor:
    """Mean cross-entropy over all pairs of a target and another view, a scalar.

    Args:
        student: outputs (B, K) of each view; the first are of the views that the targets are of.
        targets: probabilities (B, K) from `teacher_targets`, one a global view.
        temperature: the student's, above 0.
    """
    logs = [F.log_softmax(full(outputs) / temperature, dim=-1) for outputs in student]
    terms = [
        -(target * log).sum(dim=-1).mean() for g, target in enumerate(targets) for v, log in enumerate(logs) if v != g
    ]
    return torch.stack(terms).mean()


def teacher_targets(outputs: Tensor, centre: Tensor, temperature: float) -> Tensor:
    """softmax((t - c) / tau_t): (B, K) and (K,) -> (B, K)."""
    return F.softmax((full(outputs) - centre) / temperature, dim=-1)


@torch.no_grad()
def update_centre(centre: Tensor, outputs: Sequence[Tensor], momentum: float) -> None:
    """c <- momentum c + (1 - momentum) mean of the teacher's outputs (B, K) of all global views, in place."""
    centre.lerp_(torch.cat(list(outputs)).to(centre.dtype).mean(dim=0), 1 - momentum)


def entropy(probabilities: Tensor) -> Tensor:
    """In nats, over the last dimension: (..., K) -> (...)."""
    return -(probabilities * probabilities.clamp_min(1e-12).log()).sum(dim=-1)
