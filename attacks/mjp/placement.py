"""Where recovered pieces of a photograph belong: by their borders, by a learned predictor, or by both.

The jigsaw solver (`attacks.mjp.jigsaw_solver`) minimises a sum of costs, of a piece at a place and of two pieces side
by side. Borders give the second kind. The predictor (`attacks.mjp.piece_predictor`), shown the pieces that lie in
known places, gives both: minus the logarithm of the probability that it gives to a place among the empty ones, and to
a neighbour among all pieces (the mean of both pieces' views, with a floor). Together the three are added, borders in
units of their deviation; their weight was chosen among 0.5, 1 and 2 on eight validation images of Tiny-ImageNet.
Clusters of sure pieces are grown by the borders alone, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from attacks.base import Attack
from attacks.mjp.jigsaw_solver import MOST_MOVES, RESTARTS, Costs, border_costs, solve
from attacks.mjp.piece_predictor import CHANNELS, UNKNOWN, read_predictor
from attacks.observation import Capability, ThreatModel
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

Solver = Literal["auto", "border", "learned", "both"]
SOLVERS: tuple[Solver, ...] = ("border", "learned", "both")
# Added to the probability of a pair of neighbours: what the predictor thinks impossible may still happen.
FLOOR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How pieces are placed.

    Attributes:
        solver: border, learned, both, or auto: both where the threat model grants auxiliary data, else border.
        predictor: file of a `PiecePredictor`; "" for the one that ships.
        restarts: arrangements that are annealed, beside those grown from sure pairs.
        most_moves: of the annealing of one.
        border: weight of the borders beside the predictor.
        neighbour: weight of the predictor's neighbours beside its places.
    """

    solver: Solver = "auto"
    predictor: str = ""
    restarts: int = RESTARTS
    most_moves: int = MOST_MOVES
    border: float = 1.5
    neighbour: float = 1.0

    @property
    def words(self) -> str:
        """What places the pieces, for a diagnosis."""
        borders, learned = "their borders", "a predictor learned from public photographs"
        return {"learned": learned, "both": f"{borders} and {learned}"}.get(self.solver, borders)

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
            UsageError: the predictor's file cannot be read, or the pieces have other than three channels.
        """
        guides = (border_costs(pieces),) if self.solver == "both" else ()
        return solve(grid, self.costs(grid, pieces, masked), masked, self.restarts, self.most_moves, guides)

    def costs(self, grid: tuple[int, int], pieces: Tensor, masked: Tensor) -> Costs:
        """The costs that are minimised, of pieces (N, C, p, p)."""
        if self.solver in ("auto", "border"):
            return border_costs(pieces)
        learned = self.learned_costs(grid, pieces, masked)
        if self.solver == "learned":
            return learned
        borders = border_costs(pieces)
        weight = self.border / max(float(torch.stack([borders.right, borders.below]).std()), 1e-12)
        return Costs(borders.right * weight + learned.right, borders.below * weight + learned.below, learned.at)

    @torch.no_grad()
    def learned_costs(self, grid: tuple[int, int], pieces: Tensor, masked: Tensor) -> Costs:
        """Those of the predictor alone; see `costs`."""
        if pieces.shape[1] != CHANNELS:
            raise UsageError(
                f"the predictor of places is of {CHANNELS} channels, the images have {pieces.shape[1]}: pass "
                "placement.solver=border"
            )
        known = torch.arange(len(pieces), device=pieces.device)
        places = torch.where(masked, UNKNOWN, known)
        predictor = read_predictor(self.predictor).to(pieces.device)
        scores = predictor(pieces.float()[None], grid, places[None])
        empty = masked[:, None] & masked
        chances = scores.place[0].masked_fill(~masked, -torch.inf).log_softmax(dim=1).T  # (places, pieces)
        at = torch.where(empty, -chances, 0.0)
        right, below = (self.neighbour * _beside(logits[0]) for logits in (scores.right, scores.below))
        return Costs(*(cost.to(pieces.dtype) for cost in (right, below, at)))


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
