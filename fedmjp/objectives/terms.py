"""Terms that a defence adds to the objective's loss.

A term is a function of the model and the position mask; `@TERMS.register("name")` makes it available to defences, which
name it in `Defense.loss_weights`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attacks.registry import Registry
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


@TERMS.register("bottleneck_divergence")
def bottleneck_divergence(model: BuiltModel, position_mask: Tensor | None) -> Tensor:
    """Divergence of a variational bottleneck's Gaussian from the unit Gaussian, a scalar in bits (PRECODE).

    Args:
        model: with a bottleneck, after a forward pass in training.
        position_mask: not read.

    Returns:
        The mean over the batch of that pass, summed over the bottleneck's channels.
    """
    return model.module.bottleneck.take_divergence()
