"""What is unusual about an update, in words a user can act on."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is unusual about an update.

    Attributes:
        name: in short: adaptive_steps, second_moments, weight_decay, noise, precision, sparsification, clipping,
            several_steps, learning_rate, scaled_loss, momentum.
        sentence: what was seen, what it means for the attacks and what to do.
        fixed: it was undone, or does not matter to the attacks.
        hinders: the attacks' equations do not hold on such an update, so that no answer is to be trusted.
        changes: by how much it makes the update differ from the gradient, relative to its norm, at most; infinite where
            that is not known.
    """

    name: str
    sentence: str
    fixed: bool = False
    hinders: bool = False
    changes: float = math.inf
