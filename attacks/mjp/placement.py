"""Where recovered pieces of a photograph belong: by their borders, by what public photographs teach, or by both.

The jigsaw solver (`attacks.mjp.jigsaw_solver`) minimises a sum of costs, of a piece at a place and of two pieces side
by side: minus logarithms of probabilities, of a place among the empty ones, and of a neighbour among all other pieces
(the mean of both pieces' views, with a floor). Those of a neighbour are the softmax of

    PREDICTED x logit of the predictor + MIXED x log-ratio of the mixture - border / (1 + v / KNEE) x cost of a border,

the cost in units of its deviation, v the variance of the pieces' noise:

- the predictor (`attacks.mjp.piece_predictor`), shown the pieces that lie in known places, scores places and neighbours
  by what the pieces show;
- the mixture (`attacks.mjp.border_mixture`) compares the pixels on both sides of a border, and finds v;
- the border's cost is the solver's own, which noise misleads.

`learned` leaves out the last; `border` has it alone, with the weight `ALONE` at every v, which it cannot tell. The
weights were chosen after fits of the likelihood of true neighbours on photographs that no table of the project scores,
at 15, 20, 25 and 40 dB and without noise (docs, "Placing the pieces"). That of the places is half of what is likeliest
for a single piece, because the predictor errs about all pieces of a photograph together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from attacks.base import Attack
from attacks.mjp.border_mixture import read_mixture
from attacks.mjp.jigsaw_solver import RESTARTS, Costs, border_costs, solve
from attacks.mjp.piece_predictor import CHANNELS, UNKNOWN, read_predictor
from attacks.observation import Capability, ThreatModel
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

Solver = Literal["auto", "border", "learned", "both"]
# Weights of the logits of neighbours, and the variance of noise at which that of the borders has halved.
PREDICTED, MIXED, KNEE = 0.42, 0.42, 1e-3
# Weight of the borders where nothing else is known.
ALONE = 4.0
# Added to the probability of a pair of neighbours: what seems impossible may still happen.
FLOOR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How pieces are placed.

    Attributes:
        solver: border, learned, both, or auto: both where the threat model grants auxiliary data, else border.
        predictor: file of a `PiecePredictor`; "" for the one that ships.
        mixture: file of a `BorderMixture`; "" for the one that ships.
        restarts: most arrangements that belief propagation proposes.
        border: weight of the borders of pieces without noise.
        places: weight of the places beside the neighbours.
    """

    solver: Solver = "auto"
    predictor: str = ""
    mixture: str = ""
    restarts: int = RESTARTS
    border: float = 2.5
    places: float = 0.5

    @property
    def needs(self) -> frozenset[Capability]:
        """What the predictor needs, where it is used."""
        return frozenset({Capability.AUXILIARY_DATA} if self.solver in ("learned", "both") else ())

    def granted(self, threat_model: ThreatModel) -> Placement:
        """The same with auto resolved."""
        if self.solver != "auto":
            return self
        return replace(self, solver="both" if Capability.AUXILIARY_DATA in threat_model.grants else "border")

    def __call__(self, tokenizer: Tokenizer, patches: Tensor, masked: Tensor) -> Tensor:
        """As `place`, of patches (N, P) as a tokenizer cuts them."""
        pieces = patches.reshape(len(patches), tokenizer.channels, tokenizer.patch_size, tokenizer.patch_size)
        return self.place(tokenizer.grid, pieces, masked)

    def place(self, grid: tuple[int, int], pieces: Tensor, masked: Tensor) -> Tensor:
        """Order the pieces at masked places.

        Args:
            grid: (rows, columns), N places.
            pieces: (N, C, p, p) in [0, 1], the masked ones in any order.
            masked: (N,) bool, the places whose pieces may be exchanged.

        Returns:
            (N,) int64: place i takes piece order[i]; the identity where nothing is masked.

        Raises:
            UsageError: the file of predictor or mixture cannot be read, or the pieces have other than three channels.
        """
        return solve(grid, self.costs(grid, pieces, masked), masked, self.restarts)

    @torch.no_grad()
    def costs(self, grid: tuple[int, int], pieces: Tensor, masked: Tensor) -> Costs:
        """The costs that are minimised, of pieces (N, C, p, p)."""
        borders = border_costs(pieces)
        if self.solver in ("auto", "border"):
            return Costs(
                *(_beside(-ALONE * standardised(cost)).to(pieces.dtype) for cost in (borders.right, borders.below))
            )
        if pieces.shape[1] != CHANNELS:
            raise UsageError(
                f"what is learned of places is of {CHANNELS} channels, the images have {pieces.shape[1]}: pass "
                "placement.solver=border"
            )
        places = torch.where(masked, UNKNOWN, torch.arange(len(pieces), device=pieces.device))
        predictor, mixture = read_predictor(self.predictor).to(pieces.device), read_mixture(self.mixture)
        scores, variance = predictor(pieces.float()[None], grid, places[None]), mixture.variance(pieces)
        weight = self.border / (1 + variance / KNEE) if self.solver == "both" else 0.0
        sides = (
            (scores.right[0], pieces, borders.right),
            (scores.below[0], pieces.mT, borders.below),
        )
        right, below = (
            _beside(PREDICTED * logits + MIXED * mixture.right(turned, variance) - weight * standardised(cost))
            for logits, turned, cost in sides
        )
        chances = scores.place[0].masked_fill(~masked, -torch.inf).log_softmax(dim=1).T  # (places, pieces)
        at = torch.where(masked[:, None] & masked, -self.places * chances, 0.0)
        return Costs(*(cost.to(pieces.dtype) for cost in (right, below, at)))


def standardised(costs: Tensor) -> Tensor:
    """Costs (N, N) of pairs in units of their deviation, from their mean; those of a piece with itself do not count."""
    others = costs[~torch.eye(len(costs), dtype=torch.bool, device=costs.device)]
    return (costs - others.mean()) / others.std().clamp(min=1e-12)


@dataclass(frozen=True, kw_only=True)
class PlacingAttack(Attack):
    """An attack that has to place pieces.

    Attributes:
        placement: of the pieces that no update shows in their places.
    """

    placement: Placement = field(default_factory=Placement)

    def granted(self, threat_model: ThreatModel) -> Self:
        """See `Attack.granted`: with auxiliary data, pieces are placed by the learned predictor too."""
        return replace(self, placement=self.placement.granted(threat_model))

    def used(self) -> frozenset[Capability]:
        """See `Attack.used`."""
        return self.needs | self.placement.needs


def _beside(logits: Tensor) -> Tensor:
    """Minus the logarithm of the probability of a pair of neighbours, (N, N), the mean of both pieces' views."""
    itself = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    others = logits.masked_fill(itself, -torch.inf)
    views = [(others.softmax(dim=dim) + FLOOR).log() for dim in (0, 1)]
    return -((views[0] + views[1]) / 2).masked_fill(itself, 0.0)
