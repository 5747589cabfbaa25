"""The training objective of a client: cross-entropy, plus the terms that its defence names.

A term is a function of the model and the position mask; `@TERMS.register("name")` makes it available to defences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional as F

from attacks.registry import Registry
from fedmjp.defenses import ClientInput
from fedmjp.models import BuiltModel

TERMS: Registry[Callable[[BuiltModel, Tensor | None], Tensor]] = Registry("objective term")


@TERMS.register("dal")
def dense_absolute_localisation(model: BuiltModel, position_mask: Tensor | None) -> Tensor:
    """Localisation loss of the visible position embeddings, a scalar (MJP, equation 4).

    Args:
        model: the model; without a DAL map the loss is 0.
        position_mask: (B, N) bool, True where a position is hidden, or None.

    Returns:
        The mean distance between true and predicted grid coordinates, in units of patches.
    """
    dal = getattr(model.module, "dal", None)
    if dal is None:
        return next(model.module.parameters()).new_zeros(())
    return dal(model.module.patch_positions(), model.grid, position_mask)


def client_loss(
    model: BuiltModel,
    images: Tensor,
    labels: Tensor,
    position_mask: Tensor | None,
    weights: Mapping[str, float],
    origins: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy plus the weighted terms, a scalar.

    Args:
        model: the model.
        images: (B, C, H, W) in [0, 1], after the defence.
        labels: (B,) int64, or (B, classes) probabilities (smoothed or mixed labels).
        position_mask: (B, N) bool or None.
        weights: term name -> weight (`Defense.loss_weights`).
        origins: (B, N) int64, for models that embed the original place of each patch (IDX), or None.

    Raises:
        UsageError: a name in `weights` is not registered.
    """
    forward_kwargs = ClientInput(images, position_mask, origins).forward_kwargs()
    logits = model.module(model.normalise(images), **forward_kwargs)
    loss = F.cross_entropy(logits, labels)
    for name, weight in weights.items():
        loss = loss + weight * TERMS.get(name)(model, position_mask)
    return loss
