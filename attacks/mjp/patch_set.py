"""The patches of an image that a model without position embedding was trained on, from one update.

Without position embedding the update is the same for every order of the patches, so no attack can tell their order from
it. The patches themselves are no better hidden than under MJP, where one embedding is shared by the masked ones: the
rows of [dL/dE, dL/db] span the [x_i, 1] of all patches, so x_i = x_0 + c_i B with B known and c_i (k,) unknown, k < N,
and `attacks.mjp.mlp_tokens` finds every token. The order in which they are returned is that of
`attacks.mjp.placement`: a guess from natural images, never vouched for, and the answer says so (flag `order_guessed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from attacks.linear.dense_head import PLACES
from attacks.linear.position_rows import unmet_assumptions
from attacks.mjp.known_attention import PatchSweeps, SweepSearch
from attacks.mjp.mlp_spans import read_first_block
from attacks.mjp.patch_search import Searches, unmixed
from attacks.mjp.placement import PlacingAttack
from attacks.mjp.token_patches import known_span
from attacks.mjp.token_search import TokenSearch
from attacks.mjp.unmix import finished, layers_of, pixel_limits, pixel_scales, seconds_of_search
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer


@dataclass(frozen=True, kw_only=True)
class PatchSet(PlacingAttack):
    """All patches of one image without positions, in the order in which their borders fit.

    Attributes:
        search: for the tokens.
        sweep: for the patches, with known attention.
    """

    search: TokenSearch = field(default_factory=TokenSearch)
    sweep: SweepSearch = field(default_factory=SweepSearch)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """The layers of the first block whose spans are read."""
        return layers_of(model)

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        target = observations[-1]
        try:
            tokenizer = _tokenizer_without_positions(target)
            read_first_block(target, tokenizer)
        except UsageError as error:
            return str(error)
        try:
            PLACES.find(target, tokenizer)
        except UsageError:
            return ""
        return "the rows of the head are the places of the patches: position_head finds the patches and their order"

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: one search of all tokens and the placement of all patches."""
        try:
            tokenizer = _tokenizer_without_positions(observations[-1])
        except UsageError:
            return super().estimated_seconds(observations)
        return seconds_of_search(observations[-1], tokenizer, tokenizer.num_patches)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; vouches for no pixel, because the order of the patches is not in the update.

        `details` holds the numbers of `attacks.mjp.patch_search.unmixed`.
        """
        observation = observations[-1]
        tokenizer = _tokenizer_without_positions(observation)
        block, known = read_first_block(observation, tokenizer), known_span(observation, tokenizer)
        scales = pixel_scales(tokenizer, observation.std, known.rows.device)
        sweeps = PatchSweeps(block, known, pixel_limits(tokenizer, observation, scales.device))
        placed, details = unmixed(Searches(self.search, self.sweep), sweeps, known.rows[:0], known.rows, scales)
        words = "the model has no position embedding"
        return finished(observation, tokenizer, known, placed, known.rows, words, details, self.placement)


def _tokenizer_without_positions(observation: Observation) -> Tokenizer:
    """The tokenizer of a model without position embedding.

    Raises:
        UsageError: the model has one, or the update is not that of one image and one step.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    reasons = unmet_assumptions(observation.num_examples, observation.local_steps)
    if tokenizer.positions is not None or tokenizer.fixed_positions is not None:
        reasons.append("the model has a position embedding: patch_embedding and token_span place the patches by it")
    if reasons:
        raise UsageError("; ".join(reasons))
    return tokenizer
