"""The image whose tokens at a block are those that were found there, in an order that is found with it.

    minimise over patches x_i = r + c_i V and places:    mean over i of |y_i(x) - y_token(i)|^2 / D,

y(x) the tokens that the model makes of the image at the block's second norm, each of length D^1/2. Tokens are placed by
what noise images say of places (`attacks.features.noise_images`): where the patches' span is known, 95 % of the true
tokens of ten photographs rightly, at the second block of trained `vit_mini_64`. L-BFGS in float64 then finds patches to
a token's last digits, because a unit of each coefficient moves a token about alike. Where a place has another place's
token, a residual remains (6e-5 to 3e-4 there on five photographs, where that of right places was 3e-6 and less); tokens
of such places are exchanged two by two, the likeliest exchange first, as long as that lowers the residual.

A place whose token was not found has a patch all the same: the other tokens depend on it a little. It is drawn to the
likeliest patch, and then to what its neighbours say of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import scipy.optimize
import torch
from torch import Tensor

from attacks.features.block_encoder import BlockEncoder
from attacks.features.noise_images import PlaceLikelihood
from attacks.lbfgs import descend

# Residual (mean square of a token's entries, whose size is 1) at which a search ends, and below which a place is right.
REACHED, RIGHT = 1e-10, 1e-7
# A place may have another's token where its residual is so many times the median.
SUSPECT = 30.0
# Steps of L-BFGS for all places, for two places in trial, and for all suspects after an exchange.
ALL, TRIED, KEPT = 60, 25, 30
# The search of patches goes on as long as it lowers the residuals to this share; so does the trial of an exchange.
LOWER = 0.7
# Pairs of differences that L-BFGS keeps.
HISTORY = 60
# What a patch without a token adds to the residual where it is one standard deviation (of patches) from the likeliest
# one, and from what its neighbours say of it.
PREFERENCE, COMPLETED = 1e-6, 1e-5
# Without a token: index of its place.
NONE = -1


@dataclass
class PlacedTokens:
    """A search for the patches of one image and the places of its tokens.

    Args:
        encoder: in float64.
        likelihood: of tokens at places.
        tokens: (S, D), as found at the block, S <= N'.

    Attributes:
        places: (N,) int64, the token at each patch's place; NONE where there is none.
        base: (N, P) float64, r at each place, or what a patch without a token is drawn to.
        coefficients: (N, k) float64.
        residuals: (N,), 0 where there is no token.
        evaluations: of the model, forward and backward, so far.
        preference: weight of what patches without a token are drawn to.
        exchanged: exchanges that were kept.
    """

    encoder: BlockEncoder
    likelihood: PlaceLikelihood
    tokens: Tensor
    places: Tensor = field(init=False)
    base: Tensor = field(init=False)
    coefficients: Tensor = field(init=False)
    residuals: Tensor = field(init=False)
    preference: float = PREFERENCE
    evaluations: int = 0
    exchanged: int = 0

    def __post_init__(self) -> None:
        count = self.encoder.tokenizer.num_patches
        costs = self.likelihood.costs(self.tokens)  # (N', S)
        rows, taken = scipy.optimize.linear_sum_assignment(costs.cpu().numpy())
        places = torch.full((len(costs),), NONE, device=costs.device)
        places[torch.as_tensor(rows, device=costs.device)] = torch.as_tensor(taken, device=costs.device)
        self.prefix = len(costs) - count
        self.costs, self.places = costs[self.prefix :], places[self.prefix :]
        self.base = self.likelihood.origin.expand(count, -1)
        self.coefficients = self.tokens.new_zeros(count, len(self.likelihood.directions))
        everywhere = torch.arange(count, device=costs.device)
        self.coefficients = self._expected(everywhere, self.places)
        self.residuals = self._residuals(self.coefficients, self.places).detach()

    def patches(self) -> Tensor:
        """(N, P) normalised, at present."""
        return self.base + self.coefficients @ self.likelihood.directions

    def complete(self, patches: Tensor) -> None:
        """Draw patches without a token to these (N, P), and search once more; kept unless tokens are missed more.

        The other tokens decide because on few patches they tell more than neighbours do.
        """
        empty, before = (self.places == NONE)[:, None], (self.base, self.preference)
        self.base, self.preference = torch.where(empty, patches, self.base), COMPLETED
        everywhere = torch.arange(len(empty), device=empty.device)
        found, left = self._descend(torch.where(empty, 0.0, self.coefficients), self.places, everywhere, ALL)
        if LOWER * left.sum() < self.residuals.sum():
            self._take(found, left, self.places)
        else:
            self.base, self.preference = before

    def run(self, steps: int) -> None:
        """Search with about `steps` evaluations at most."""
        everywhere = torch.arange(len(self.places), device=self.places.device)
        tried: set[tuple[int, ...]] = set()
        while float(self.residuals.mean()) > REACHED and self.evaluations < steps:
            before, exchanged = float(self.residuals.mean()), self.exchanged
            self._take(*self._descend(self.coefficients, self.places, everywhere, ALL), self.places)
            if float(self.residuals.mean()) < LOWER * before:
                continue
            while self.evaluations < steps and self._exchange(tried, steps):
                pass
            if self.exchanged == exchanged:
                break

    @property
    def suspects(self) -> Tensor:
        """(N,) bool, places that may have another place's token, or have none."""
        empty = self.places == NONE
        median = self.residuals[~empty].median() if not empty.all() else self.residuals.median()
        return empty | (self.residuals > torch.clamp(SUSPECT * median, min=RIGHT))

    def _exchange(self, tried: set[tuple[int, ...]], steps: int) -> bool:
        """Exchange two suspects' tokens where that helps; False where no exchange that is left to try does."""
        suspects = self.suspects.nonzero().flatten()
        if len(suspects) < 2:
            return False
        for one, other in self._likeliest(suspects):
            pair = torch.stack([one, other])
            key = (int(one), int(other), *self.places[pair].tolist())
            if key in tried:
                continue
            tried.add(key)
            places = self.places.clone()
            places[pair] = self.places[pair.flip(0)]
            coefficients = self.coefficients.clone()
            coefficients[pair] = self.coefficients[pair.flip(0)]  # a patch goes where its token goes
            found, left = self._descend(coefficients, places, pair, TRIED)
            before = self.residuals.sum()
            if left.sum() < before or left[pair].sum() < LOWER * self.residuals[pair].sum():
                found, left = self._descend(found, places, suspects, KEPT)
                if left.sum() < before:
                    self._take(found, left, places)
                    self.exchanged += 1
                    return True
            if self.evaluations >= steps:
                return False
        return False

    def _likeliest(self, suspects: Tensor) -> Tensor:
        """Pairs (M, 2) of suspects by what exchanging their tokens adds to the costs of places, the least first."""
        at, held = self.costs[suspects], self.places[suspects]
        own = torch.where(held == NONE, 0.0, at[:, held.clamp(min=0)])  # (n, n): of each suspect's token at each
        added = own + own.T - own.diagonal()[:, None] - own.diagonal()
        one, other = torch.triu_indices(len(suspects), len(suspects), 1, device=suspects.device)
        empty = (held[one] == NONE) & (held[other] == NONE)
        order = added[one, other].argsort()
        order = order[~empty[order]]
        return torch.stack([suspects[one[order]], suspects[other[order]]], dim=1)

    def _expected(self, places: Tensor, tokens: Tensor) -> Tensor:
        """(n, k) coefficients where a search begins: expected ones, zeros where there is no token."""
        expected = self.likelihood.coefficients(self.tokens[tokens.clamp(min=0)], places + self.prefix)
        return torch.where((tokens == NONE)[:, None], 0.0, expected)

    def _residuals(self, coefficients: Tensor, places: Tensor) -> Tensor:
        """(N,) mean squares of the differences of tokens from those found."""
        patches = self.base + coefficients @ self.likelihood.directions
        left = self.encoder(patches[None])[0, self.prefix :] - self.tokens[places.clamp(min=0)]
        return torch.where(places == NONE, 0.0, left.square().mean(dim=1))

    def _unlikely(self, coefficients: Tensor) -> Tensor:
        """A weak preference for expected patches where no token says anything, (n, k) to a number."""
        size = self.places.numel() * self.likelihood.spread.numel()
        return self.preference * (coefficients / self.likelihood.spread).square().sum() / size

    def _take(self, coefficients: Tensor, residuals: Tensor, places: Tensor) -> None:
        self.coefficients, self.residuals, self.places = coefficients, residuals, places

    def _descend(self, start: Tensor, places: Tensor, free: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """L-BFGS from `start` (N, k) over the coefficients of the places `free` (n,): coefficients and residuals."""
        moving = start[free].clone()

        def loss() -> Tensor | None:
            """What is missed at present; None once that is little enough."""
            coefficients = start.index_put((free,), moving)
            value = self._residuals(coefficients, places).mean() + self._unlikely(coefficients[places == NONE])
            self.evaluations += 1
            return None if float(value.detach()) < REACHED else value

        descend([moving], loss, steps, HISTORY)
        found = start.index_put((free,), moving)
        return found, self._residuals(found, places)
