"""The whole image from one update with masked positions: visible patches exactly, masked ones one by one, then placed.

`attacks.linear.masked_update` gives every patch up to a subspace, x_p = rows_p + c_p B, c_p (k,) unknown, k at most the
number of masked patches. `attacks.mjp.span_search` finds the coefficients whose tokens lie in the spans of the first
MLP's gradients, and `attacks.mjp.jigsaw_solver` places the masked patches by their borders. It is gradient matching in
the reduced space without second derivatives.

The whole image stays below 40 dB where several masked patches are nearly uniform: few starts find them, and two that
differ by less than the round-off of the spans cannot be separated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.base import Attack
from attacks.linear.completion import VOUCHED_DEVIATION, render
from attacks.linear.image_prior import VectorialVariation
from attacks.mjp.jigsaw_solver import place
from attacks.mjp.joined_updates import JoinedUpdates, join_updates, updates_of_last_image
from attacks.mjp.mlp_spans import LAYERS, read_first_block
from attacks.mjp.span_search import KnownPatches, SearchResult, SpanSearch, UnknownTokens, expected_deviation
from attacks.mjp.subspace import nothing_masked
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# Residuals in units of the first MLP layer's (normalised) inputs above which nothing is vouched for; true images have
# 5e-5 to 1.5e-3 in float32.
LARGEST_RESIDUAL = 5e-3
# Of the search, by patches that no update shows (squared) and channels, on one CPU core.
SECONDS_OF_A_PAIR = 3e-4


@dataclass(frozen=True, kw_only=True)
class Unmix(Attack):
    """Whole image from one update with masked positions and the first block's weights and gradients.

    Attributes:
        search: for the patches that no update shows.
        prior: gives the start of the search.
    """

    search: SpanSearch = field(default_factory=SpanSearch)
    prior: VectorialVariation = field(default_factory=VectorialVariation)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """The layers of the first block whose spans are read."""
        wanted = [f"blocks.0.{layer}.weight" for layer in LAYERS]
        return tuple(name for name, _ in model.named_parameters() if name in wanted)

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        return nothing_masked(observations[-1:])

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: quadratic in the number of patches that no update shows."""
        try:
            rows = updates_of_last_image(self.updates(observations))
        except UsageError:
            return super().estimated_seconds(observations)
        unseen = int(torch.stack([r.masked for r in rows if r.masked.shape == rows[-1].masked.shape]).all(dim=0).sum())
        solves = super().estimated_seconds(observations) * len(rows)
        return solves + SECONDS_OF_A_PAIR * unseen**2 * rows[-1].tokenizer.width

    def updates(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """Those of a client's updates that the attack uses: the last one."""
        return observations[-1:]

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; vouches for patches that the residuals determine, never for those never shown.

        `details` holds the numbers of `known_patches`, and residual, rounds and local optima of the search.
        """
        observation, joined = observations[-1], join_updates(self.updates(observations))
        tokenizer = joined.tokenizer
        known, guess, details = self.known_patches(joined, observation.std)
        if not len(known.basis):
            return render(observation, tokenizer, guess, torch.ones_like(known.unseen), "", details)
        tokens = UnknownTokens(known, read_first_block(observation, tokenizer))
        found = self.search(tokens, tokens.coordinates(guess - known.rows))
        details |= {"residual": found.residual, "rounds": found.rounds, "local_optima": found.local_optima}
        scales = _pixel_scales(tokenizer, observation.std).to(guess)
        patches = tokens.patches(found.u)
        patches = patches[place(tokenizer, patches * scales, known.unseen)]
        sure = (expected_deviation(tokens, found.u, found.loss, scales) < VOUCHED_DEVIATION) & ~known.unseen
        return render(observation, tokenizer, patches, sure, _obstacle(found, joined), details)

    def known_patches(
        self, joined: JoinedUpdates, std: tuple[float, ...]
    ) -> tuple[KnownPatches, Tensor, dict[str, float]]:
        """What the updates give of the patches, the prior's guess of all of them (N, P), and numbers for the details.

        Raises:
            UsageError: the last update does not hold the equations that it would have to.
        """
        last, estimate = joined.last, joined.estimate()
        if joined.reasons:
            words = mask_in_words(joined)
            named = [] if not last.masked.any() or words in "; ".join(joined.reasons) else [words]
            raise UsageError("; ".join([*named, *joined.reasons]))
        guess = self.prior.settle(estimate, joined.tokenizer, std).patches
        if joined.equations.updates == 1:
            spread = last.spread[last.masked][0] if last.masked.any() else None
            known = KnownPatches(last.rows, last.basis, last.masked, last.masked, spread)
            return known, guess, {"masked": int(last.masked.sum()), "rank": last.rank}
        details = {
            "masked": int(last.masked.sum()),
            "updates": joined.equations.updates,
            "never_seen": int((~joined.shown).sum()),
            "open": len(estimate.open),
        }
        rows = estimate.patches(torch.zeros_like(estimate.centre))
        return KnownPatches(rows, estimate.open, last.masked, ~joined.shown), guess, details


def mask_in_words(joined: JoinedUpdates) -> str:
    """How many position rows of the last update are zero."""
    masked = joined.last.masked
    return f"{int(masked.sum())} of {len(masked)} position rows are exactly zero"


def _obstacle(found: SearchResult, joined: JoinedUpdates) -> str:
    """Why the search's answer is not to be trusted, or ""."""
    if found.residual <= LARGEST_RESIDUAL:
        return ""
    return (
        f"{mask_in_words(joined)}, and no image was found whose tokens lie in the spans of the first MLP's gradients "
        f"(residual {found.residual:.1e}, at most {LARGEST_RESIDUAL:.0e}): use mjp_subspace or mjp_rounds, or more "
        "rounds and starts"
    )


def _pixel_scales(tokenizer: Tokenizer, std: tuple[float, ...]) -> Tensor:
    """(P,): from normalised pixels to units of [0, 1]."""
    return torch.tensor(std, dtype=torch.float64).repeat_interleave(tokenizer.patch_dim // len(std))
