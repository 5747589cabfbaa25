"""Parameters that a client froze, in updates that hold zeros for them.

Weights that come back as they were sent, and frameworks that fill in what they do not train, give zeros. They say
nothing of an image: an attack that takes them for a gradient matches what no image has, or decomposes nothing, where it
could do without the parameter. They are left out as if they had not been sent.

Embeddings of positions stay as they are: a row of zeros is a masked place, and the attacks read it so.
"""

from __future__ import annotations

from dataclasses import replace

from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer


def without_frozen(observation: Observation) -> Observation:
    """The update without the gradients that are zero in every entry, but those of embeddings of positions.

    An update of nothing but zeros, and one without such gradients, is returned as it is.
    """
    left = observation.once(_left)
    return observation if left is None else left


def _left(observation: Observation) -> Observation | None:
    """See `without_frozen`; None where the update stays as it is (it must not hold itself)."""
    zero = {name for name, gradient in observation.gradients.items() if not gradient.any()}
    zero -= _tables(observation) if zero else set()
    if not zero or len(zero) == len(observation.gradients) or not observation.gradient_norm() > 0:
        return None
    return replace(observation, gradients={n: g for n, g in observation.gradients.items() if n not in zero})


def _tables(observation: Observation) -> set[str | None]:
    """The embeddings of positions, by name."""
    try:
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
    except UsageError:  # not a ViT
        return set()
    return {tokenizer.positions, tokenizer.shared_position}
