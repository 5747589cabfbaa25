"""Inversion by a server that knows what the client drew: noise is subtracted, and moved patches are put back.

A client whose random numbers follow from a seed that the server knows (one that travels in its orders, say) has no
secret: the server draws the same noise and the same permutation of patches. Without the noise the update is that of an
undefended client, which `patch_embedding` inverts; patches that were moved to places whose position the model saw
(`mjp:positions=own`) are put back. The capability `client_seed` grants what was drawn (`Drawn`), not the seed.

Where positions are hidden (MJP itself), knowing the draws adds nothing: the mask shows in the update anyway, as rows
that are zero, and the update does not depend on how the hidden patches are ordered among themselves. There the answer
is that of `mjp_subspace`.

Measured against the same update without that knowledge: docs/defenses.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from attacks.base import Attack
from attacks.closed_form.patch_embedding import PatchEmbedding
from attacks.linear.position_rows import read_position_rows
from attacks.mjp.subspace import MJPSubspace
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer


@dataclass(frozen=True, kw_only=True)
class KnownDraws(Attack):
    """Undo what the client drew, then solve.

    Args:
        plain: on updates without masked positions.
        masked: on updates with some.
    """

    plain: PatchEmbedding = field(default_factory=PatchEmbedding)
    masked: MJPSubspace = field(default_factory=MJPSubspace)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.CLIENT_SEED, Capability.POSITION_GRADIENT})

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        drawn = observations[-1].drawn
        if drawn is not None and (drawn.noise or drawn.order is not None):
            return ""
        if drawn is not None and drawn.more:
            return "what the client drew under this defence is neither noise nor an order that can be undone here"
        return "nothing that the client drew changed the update: patch_embedding gives the same answer"

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds those of the attack that solves, and the norm of the noise."""
        observation = without_noise(observations[-1])
        masked = bool(read_position_rows(observation).masked.any())
        solver = self.masked if masked else self.plain
        found = solver.reconstruct([observation])
        if observation.drawn is None:
            return found
        noise = [float(n.double().square().sum()) for n in observation.drawn.noise.values()]
        found = replace(found, details={**found.details, "noise_norm": sum(noise) ** 0.5})
        order = observation.drawn.order
        return found if masked or order is None or found.images is None else _put_back(found, order, observation)


def without_noise(observation: Observation) -> Observation:
    """The update less the noise that the client is known to have added; itself where none is known."""
    if observation.drawn is None or not observation.drawn.noise:
        return observation
    noise = observation.drawn.noise
    gradients = {n: g - noise[n].to(g) if n in noise else g for n, g in observation.gradients.items()}
    return replace(observation, gradients=gradients)


def _put_back(found: Reconstruction, order: Tensor, observation: Observation) -> Reconstruction:
    """The answer with every patch at its place in the image: place i shows patch order[i], (1, N) int64."""
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    if order.shape != (1, tokenizer.num_patches):
        raise UsageError(f"an order of {tuple(order.shape)} is not of one image of {tokenizer.num_patches} patches")
    back = order[0].argsort()

    def moved(maps: Tensor) -> Tensor:
        """(1, C, H, W) with its patches moved."""
        size, (rows, columns) = tokenizer.patch_size, tokenizer.grid
        cells = maps.reshape(1, -1, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, back]
        cells = cells.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
        return cells.reshape(maps.shape)

    known = None if found.known is None else moved(found.known)
    return replace(found, images=moved(found.images), known=known)
