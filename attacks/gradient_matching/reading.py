"""What an attack matches of an update: gradients without the localisation loss, and the mask of hidden positions.

An MJP client's masked positions send exact zeros, so the mask is in the message. Simulated clients are handed the same
mask. The localisation loss depends on no image: `attacks.linear.position_rows` takes it out of the position rows, and
its own map's gradients are left alone, as are those of all parameters that no image reaches
(`attacks.gradient_matching.simulation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.linear.position_rows import IMBALANCE, position_gradient, remove_localisation
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer


@dataclass(frozen=True)
class Reading:
    """One update, read.

    Attributes:
        gradients: by parameter name, what is worth matching.
        mask: (N,) bool, positions to hide from the simulated client too, or None.
        flags: warnings, see `attacks.observation.Reconstruction`.
    """

    gradients: Mapping[str, Tensor]
    mask: Tensor | None
    flags: tuple[str, ...]


def read(observation: Observation) -> Reading:
    """Read one update. Position rows that hold more than images and a known term are not matched."""
    gradients, flags = dict(observation.gradients), []
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in observation.model.modules()):
        flags.append("batch_statistics_assumed")
    try:
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
    except UsageError:  # not a ViT: it hides no positions
        return Reading(gradients, None, tuple(flags))
    rows = position_gradient(observation, tokenizer)
    if rows is None:
        return Reading(gradients, None, tuple(flags))
    clean, masked, weight, imbalance = remove_localisation(observation, tokenizer, rows[tokenizer.prefix :])
    if tokenizer.localisation is not None and imbalance > IMBALANCE:
        del gradients[tokenizer.positions]
    elif weight:
        sent = gradients[tokenizer.positions]
        rows = torch.cat([rows[: tokenizer.prefix], clean.to(rows)])
        gradients[tokenizer.positions] = rows.reshape(sent.shape)
    if tokenizer.mask_argument is None:
        hidden = (rows[tokenizer.prefix :] == 0).all(dim=1).any()
        return Reading(gradients, None, (*flags, "zero_rows_ignored") if hidden else tuple(flags))
    if not masked.any():
        return Reading(gradients, None, tuple(flags))
    if observation.num_examples > 1 or observation.local_steps > 1:
        flags.append("one_mask_assumed")  # rows are zero where all images of the update are masked
    return Reading(gradients, masked, tuple(flags))
