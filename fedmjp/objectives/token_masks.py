"""Which patches MST hides from the student, and what stands in their place.

The masking follows the linear projection (MST, appendix, section 11): a hidden patch keeps its position embedding, and
its projection is replaced by one learned token, or as in BERT.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Strategy = Literal["none", "random", "attention", "attended"]
Replacement = Literal["token", "bert"]
BERT = (0.8, 0.1)  # shares of hidden tokens that become [MASK], and another patch; the others stay as they are


def candidate_count(share: float, patches: int) -> int:
    """round(share N), halves up."""
    return int(share * patches + 0.5)


def draw_mask(allowed: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Hide each allowed patch with probability p: (B, N) bool -> (B, N) bool; the generator is on the CPU."""
    return allowed & (torch.rand(allowed.shape, generator=generator) < p).to(allowed.device)


def replace_patches(
    patches: Tensor, mask: Tensor, token: Tensor, style: Replacement, generator: torch.Generator
) -> Tensor:
    """Projected patches (B, N, D) with those under `mask` (B, N) replaced.

    Args:
        token: (D,), learned.
        style: "token" everywhere; "bert": the token at 80 %, the projection of another patch of the batch at 10 %, the
            patch itself at 10 %.
        generator: on the CPU; drawn from for "bert" only.
    """
    if style == "token":
        return torch.where(mask[..., None], token.to(patches.dtype), patches)
    kind = torch.rand(mask.shape, generator=generator).to(mask.device)
    other = torch.randint(mask.numel(), mask.shape, generator=generator).to(mask.device)
    hidden, swapped = mask & (kind < BERT[0]), mask & (kind >= BERT[0]) & (kind < sum(BERT))
    changed = torch.where(swapped[..., None], patches.flatten(0, 1)[other], patches)
    return torch.where(hidden[..., None], token.to(patches.dtype), changed)
