"""The tokens of an update from random starts, whose residuals `attacks.mjp.mlp_tokens` gives.

Starts for tokens that are missing come from the duals of those found (`attacks.mjp.token_duals`). Where most tokens are
known from elsewhere, the others are searched in what these leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.mjp.mlp_spans import MLPBlock
from attacks.mjp.mlp_tokens import TokenFamily, cone
from attacks.mjp.optima import Optima, repeated
from attacks.mjp.token_duals import Removed, normalised, without

# Two optima as near as this, in lengths of a token, are one in any case: the noise cannot tell them apart.
NEAR = 1e-4
NEAR_ASIDE = 1e-2  # of a token that is known roughly, whose gradient dominates: others are far from it
LEAST_STARTS = 12
# A token whose gradient dominates the sums has a ratio of up to some hundreds; in what roughly known tokens leave,
# others have as much. Where there is no token it is higher.
ATTRACTS = 1e3
# Where this share of a round's starts leads to one point that is no token by its residual, it is one whose own gradient
# dominates (the class token of DeiT-S at 224 pixels has a ratio of 48, and half of all starts led there).
CROWDED = 0.25
REPEATED = 1e-3  # starts that lead to points as near as this, in lengths of a token, need no steps of their own
CLOSE = 0.1  # one such point stands for all in so many lengths of a token
MANY = 4  # starts for each token that is missing at last, in few dimensions
POLISH = 12  # steps in the whole span after those among what the duals leave


@dataclass(frozen=True, kw_only=True)
class StartedSearch:
    """Rounds of random starts for what is missing.

    Attributes:
        rounds: at most.
        starts: of a round, for each token or patch that is missing.
        patience: rounds without a gain before giving up.
        seed: of the random starts.
    """

    rounds: int
    starts: float
    patience: int = 2
    seed: int = 0

    def generator(self) -> torch.Generator:
        """That of the random starts, at its beginning."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class TokenSearch(StartedSearch):
    """Refines guesses, then rounds of random starts, until all tokens are found; a new token is a gain.

    Attributes:
        steps: Levenberg-Marquardt steps of a start, at most.
    """

    rounds: int = 64
    patience: int = 6
    starts: float = 0.25
    steps: int = 40

    def __call__(self, block: MLPBlock, guess: Tensor) -> Optima:
        """The tokens that are found: at most N', or a few more where the noise splits one.

        Rounds are small, and what a round finds is removed from the starts of the next: those of one round meet in the
        same tokens. After a round without a gain the next one has twice as many starts, up to one for each token that
        is missing: in flat areas few starts lead to a token.

        Args:
            guess: (S, D) tokens at the second norm to start from, if any.
        """
        whole, generator, idle = TokenFamily(block, cone(block)), self.generator(), 0
        starts = whole.nearest(guess)
        tokens = Optima(starts[:0], starts[:0, 0], starts[:0, 0])
        removed = beyond = Removed.of(block, tokens.y)
        for _ in range(self.rounds + bool(len(starts))):
            missing = block.count - len(tokens) - len(beyond)
            if missing <= 0 or idle == self.patience:
                break
            # What is set aside may be no token: the last rounds before giving up go without it.
            every = removed.joined(beyond) if 2 * idle < self.patience else removed
            if not len(starts):
                share = max(min(self.starts * 2**idle, 1.0), self.starts)
                draw = whole.draw(max(round(share * missing), LEAST_STARTS), generator)
                starts = without(block, draw, every.y, every.duals)
            optima, crowded = self._reached(whole, every, starts)
            new = distinct(whole, tokens, optima[optima.found])
            aside = optima[crowded & ~optima.found & (optima.ratios < ATTRACTS) & _far(optima, beyond.y, CLOSE)]
            idle, starts = 0 if len(new) else idle + 1, starts[:0]
            tokens, removed = tokens.joined(new), removed.joined(Removed.of(block, new[:missing].y))
            beyond = beyond.joined(Removed.of(block, aside.y))
        return tokens

    def _reached(self, whole: TokenFamily, every: Removed, starts: Tensor) -> tuple[Optima, Tensor]:
        """The optima to which starts (S, D) lead, each once, and whether a round's starts crowd there, (S',) bool.

        First in what the duals of the tokens found leave, which has fewer dimensions, by a part of the hidden units.
        """
        rough = TokenFamily(whole.block.thinned, every.left() @ whole.directions)
        reached = rough.refine(starts, self.steps)
        reached = reached[reached.losses.argsort()]
        # By a part of the units, in flat areas, the residual hardly rises from one token to another: distance decides.
        apart = reached[~_near(reached.y, reached.y, REPEATED).tril(-1).any(dim=1)]
        crowded = _near(apart.y, reached.y).double().mean(dim=1) >= CROWDED
        return whole.refine(apart.y, POLISH), crowded

    def beside(self, block: MLPBlock, known: Removed, aside: Tensor) -> tuple[Optima, Tensor]:
        """Tokens beside those that are known from a family with less freedom, of what the duals of these leave.

        Where most are known, few dimensions are left, and there the residuals single out tokens that hardly differ, to
        which nearly every start leads. Starts are also kept off the tokens found so far and off those `aside`; what
        these leave is known less well, so that tokens are certified in what the known ones leave.

        Args:
            aside: (n, D) tokens that are known too roughly to be removed (a class token, whose gradient dominates).

        Returns:
            The tokens, and (S, D) points that the spans admit between those that are missing then, at most one for
            each: where the noise does not tell these apart, such points are starts for their patches.
        """
        whole, removed, generator, idle = TokenFamily(block, cone(block)), known, self.generator(), 0
        tokens = Optima(known.y[:0], known.y[:0, 0], known.y[:0, 0])
        if len(known) + len(aside) >= block.count:
            return tokens, tokens.y
        family = TokenFamily(block, removed.left() @ whole.directions)
        aside = normalised(family.refine(normalised(aside), POLISH).y)
        beyond = Removed.of(block, aside)
        for number in range(self.rounds):
            missing = block.count - len(removed) - len(aside)
            if missing <= 0 or idle == self.patience:
                break
            starts = self._starts_beside(block, removed, beyond, generator, missing, number % 2 == 1)
            optima = family.refine_weighed(starts.y, POLISH)
            new = distinct(family, tokens, optima[_apart(optima, aside)])
            new = new if len(new) else starts[_apart(starts, aside)]  # the family holds less apart what hardly differs
            new, idle = new[:missing], 0 if len(new) else idle + 1
            tokens, removed = tokens.joined(new), removed.joined(Removed.of(block, new.y))
        kept = ~removed.mixtures(block, len(known))
        tokens, removed = tokens[kept[len(known) :]], removed[kept]
        missing = block.count - len(removed) - len(aside)
        between = tokens.y[:0]
        if missing > 0:
            between = self._between(TokenFamily(block, removed.left() @ whole.directions), removed, aside, generator)
            between = between[:missing].repeat(missing, 1)[:missing]
        return Optima(tokens.y, *whole.losses(tokens.y)), between

    def _between(self, family: TokenFamily, removed: Removed, aside: Tensor, generator: torch.Generator) -> Tensor:
        """Points (S, D) of least ratio in what the tokens found leave: those admitted, or the best one alone."""
        block, every = family.block, removed.joined(Removed.of(family.block, aside))
        whole = TokenFamily(block, cone(block))
        rough = TokenFamily(block.thinned, every.left() @ whole.directions)
        draw = whole.draw(max(MANY * (block.count - len(every)), LEAST_STARTS), generator)
        starts = rough.refine_weighed(without(block, draw, every.y, every.duals), self.steps)
        optima = family.refine_weighed(starts.y, POLISH)
        optima = optima[_far(optima, aside) & (optima.ratios < ATTRACTS)]
        optima = optima[optima.ratios.argsort()]
        return optima.y[: max(int(optima.found.sum()), 1)]

    def _starts_beside(
        self, block: MLPBlock, removed: Removed, beyond: Removed, generator: torch.Generator, count: int, apart: bool
    ) -> Optima:
        """Distinct optima, by a part of the hidden units, of what removed tokens leave, and those beyond where `apart`.

        Args:
            count: tokens that are missing.
        """
        every, whole = removed.joined(beyond), cone(block)
        rough = TokenFamily(block.thinned, (every if apart else removed).left() @ whole)
        draw = TokenFamily(block, whole).draw(max(round(self.starts * count), LEAST_STARTS), generator)
        starts = rough.refine(without(block, draw, every.y, every.duals), self.steps)
        likely = starts.ratios < ATTRACTS
        # Where the tokens removed are known too roughly, none are likely, and still near tokens.
        return distinct(rough, starts[[]], starts[likely] if likely.any() else starts)


def _apart(optima: Optima, aside: Tensor) -> Tensor:
    """(S,) bool: tokens that are none of those aside (n, D)."""
    return optima.found & _far(optima, aside)


def _far(optima: Optima, aside: Tensor, share: float = NEAR_ASIDE) -> Tensor:
    """(S,) bool: none of those aside (n, D)."""
    return ~_near(optima.y, aside, share).any(dim=1)


def _near(y: Tensor, aside: Tensor, share: float = NEAR_ASIDE) -> Tensor:
    """(S, n) bool: which of y (S, D) are which of those aside (n, D), known to this share of a token's length."""
    return torch.cdist(y, aside) < share * aside.shape[1] ** 0.5


def distinct(family: TokenFamily, tokens: Optima, optima: Optima) -> Optima:
    """Those of the optima that are no token found before, nor each other's repetition, the best one of each.

    Two are one token if the residual's quadratic model at one of them hardly rises towards the other.
    """
    if not len(optima):
        return optima
    optima = optima[optima.losses.argsort()]
    joined, before = tokens.joined(optima), len(tokens)
    points = joined.y @ torch.linalg.pinv(family.directions)
    matrices = family.matrices(optima.y)
    apart = torch.cdist(joined.y, joined.y) >= NEAR * joined.y.shape[1] ** 0.5
    return optima[repeated(points, joined.losses, matrices, before, apart)]
