"""The whole image from one update with masked positions: visible patches exactly, masked ones one by one, then placed.

`attacks.linear.masked_update` leaves every patch known up to a subspace, x_p = rows_p + c_p B, c_p (k,) unknown, k at
most the number of masked patches. `attacks.mjp.span_search` finds the coefficients whose tokens the first MLP's
gradients admit, and `attacks.mjp.jigsaw_solver` puts the pieces into the holes by their borders. It is gradient
matching in the reduced space without second derivatives.

The whole image stays below 40 dB where several masked patches are nearly uniform: few starts find them, and two that
differ by less than the round-off of the spans cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.base import Attack
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.masked_update import read_update, tokenizer_and_rows, why_not
from attacks.mjp.jigsaw_solver import place
from attacks.mjp.mlp_spans import LAYERS, read_first_block
from attacks.mjp.span_search import Evidence, Mixture, Search, expected_deviation
from attacks.mjp.subspace import VOUCHED_DEVIATION, settle
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# Residuals in units of the first MLP layer's (normalised) inputs above which nothing is vouched for; true images have
# 5e-5 to 1.5e-3 in float32.
UNSETTLED = 5e-3


@dataclass(frozen=True, kw_only=True)
class Unmix(Attack):
    """Whole image from one update with masked positions and the first block's weights and gradients.

    Attributes:
        search: for the patches that no update shows.
        prior: where the search starts.
    """

    search: Search = field(default_factory=Search)
    prior: VectorialVariation = field(default_factory=VectorialVariation)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """The layers of the first block whose spans are read."""
        wanted = [f"blocks.0.{layer}.weight" for layer in LAYERS]
        return tuple(name for name, _ in model.named_parameters() if name in wanted)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; patches that the residuals pin down are vouched for, those never shown never."""
        observation = observations[-1]
        tokenizer, rows = tokenizer_and_rows(observation)
        evidence, guess, told = self.evidence(observations, tokenizer, rows)
        if not len(evidence.basis):
            return _rendered(observation, tokenizer, guess, torch.ones_like(evidence.unseen), "", told)
        mixture = Mixture(evidence, read_first_block(observation, tokenizer))
        found = self.search(mixture, mixture.coordinates(guess - evidence.rows))
        told = {**told, "residual": found.residual, "rounds": found.rounds, "ends": found.ends}
        scales = _scales(observation, tokenizer)
        patches = mixture.patches(found.u)
        patches = patches[place(tokenizer, patches * scales, evidence.unseen)]
        sure = (expected_deviation(mixture, found.u, found.loss, scales) < VOUCHED_DEVIATION) & ~evidence.unseen
        diagnosis = ""
        if found.residual > UNSETTLED:
            sure = torch.zeros_like(sure)
            diagnosis = (
                f"{told['masked']} of {len(rows)} position rows are exactly zero, and no image was found whose tokens "
                f"the first MLP's gradients admit (residual {found.residual:.1e}, at most {UNSETTLED:.0e}): use "
                "mjp_subspace or mjp_rounds, or more rounds and starts"
            )
        return _rendered(observation, tokenizer, patches, sure, diagnosis, told)

    def evidence(
        self, observations: Sequence[Observation], tokenizer: Tokenizer, rows: Tensor
    ) -> tuple[Evidence, Tensor, dict[str, float]]:
        """What the last update says by itself, the prior's guess of all patches (N, P), and numbers for the details.

        Args:
            rows: (N, D), the patches' rows of the last update's position gradient.

        Raises:
            UsageError: it does not say what it would have to.
        """
        update = read_update(observations[-1], tokenizer, rows)
        masked = update.clean.masked
        refuse_unless_read(why_not(observations[-1], update, tokenizer), masked)
        settled = settle(self.prior, update.estimate(), tokenizer, observations[-1], ~masked)
        spread = update.spread[masked][0] if masked.any() else None
        evidence = Evidence(update.rows, update.basis, masked, masked, spread)
        return evidence, settled.patches, {"masked": int(masked.sum()), "rank": update.rank}


def refuse_unless_read(reasons: list[str], masked: Tensor) -> None:
    """Raise `UsageError` where there is a reason not to trust the update, telling the mask too."""
    hidden = f"{int(masked.sum())} of {len(masked)} position rows are exactly zero"
    told = [hidden] if masked.any() and hidden not in "; ".join(reasons) else []
    if reasons:
        raise UsageError("; ".join([*told, *reasons]))


def _rendered(
    observation: Observation,
    tokenizer: Tokenizer,
    patches: Tensor,
    sure: Tensor,
    diagnosis: str,
    details: dict[str, float],
) -> Reconstruction:
    """One image of patches (N, P), of which `sure` (N,) are vouched for."""
    images = observation.to_pixels(tokenizer.unpatchify(patches[None])).float()
    known = tokenizer.unpatchify(sure[None, :, None].expand(-1, -1, tokenizer.patch_dim).float())[:, :1] > 0
    return Reconstruction(images, known, diagnosis=diagnosis, details=details)


def _scales(observation: Observation, tokenizer: Tokenizer) -> Tensor:
    """(P,): from normalised pixels to units of [0, 1]."""
    std = torch.tensor(observation.std, dtype=torch.float64)
    return std.repeat_interleave(tokenizer.patch_dim // len(std)).to(observation.gradients[tokenizer.weight].device)
