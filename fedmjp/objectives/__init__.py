"""What a client minimises: cross-entropy, plus the terms that its defence asks for by name.

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
    """MJP's equation 4 on the visible position embeddings, in patches; 0 for a model without a DAL map."""
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
        images: (B, C, H, W) in [0, 1], as the defence leaves them.
        labels: (B,) int64, or (B, classes) probabilities (smoothed or mixed labels).
        position_mask: (B, N) bool or None.
        weights: term name -> weight (`Defense.loss_weights`).
        origins: (B, N) int64 or None, for models that are told where moved patches come from.
    """
    told = ClientInput(images, position_mask, origins).told()
    logits = model.module(model.normalise(images), **told)
    loss = F.cross_entropy(logits, labels)
    for name, weight in weights.items():
        loss = loss + weight * TERMS.get(name)(model, position_mask)
    return loss
