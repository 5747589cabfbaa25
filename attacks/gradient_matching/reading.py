"""What an attack matches of an update: gradients without the localisation loss, and the mask of hidden positions.

An MJP client's masked positions send exact zeros, so the mask is in the message. Simulated clients are handed the same
mask. The localisation loss depends on no image: `attacks.linear.position_rows` takes it out of the position rows, and
its own map's gradients are left alone, as are those of all parameters that no image reaches
(`attacks.gradient_matching.simulation`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.closed_form.base import position_rows
from attacks.linear.masked_update import IMBALANCE
from attacks.linear.position_rows import clean_rows
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
    rows = position_rows(observation, tokenizer)
    if rows is None:
        return Reading(gradients, None, tuple(flags))
    clean = clean_rows(observation, tokenizer, rows[tokenizer.prefix :])
    if getattr(observation.model, "dal", None) is not None and clean.imbalance > IMBALANCE:
        del gradients[tokenizer.positions]
    elif clean.dal_weight:
        sent = gradients[tokenizer.positions]
        rows = torch.cat([rows[: tokenizer.prefix], clean.rows.to(rows)])
        gradients[tokenizer.positions] = rows.reshape(sent.shape)
    if not takes_mask(observation.model):
        hidden = (rows[tokenizer.prefix :] == 0).all(dim=1).any()
        return Reading(gradients, None, (*flags, "zero_rows_ignored") if hidden else tuple(flags))
    if not clean.masked.any():
        return Reading(gradients, None, tuple(flags))
    if observation.num_examples > 1 or observation.local_steps > 1:
        flags.append("one_mask_assumed")  # rows are zero where all images of the update are masked
    return Reading(gradients, clean.masked, tuple(flags))


def takes_mask(model: nn.Module) -> bool:
    """Whether the model can be told to hide positions."""
    known = "position_mask" in inspect.signature(model.forward).parameters
    return known and any("unk" in name.lower() for name, _ in model.named_parameters())
