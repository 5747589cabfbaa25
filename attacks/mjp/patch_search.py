"""All patches of an update with masked positions, by several searches in turn.

Where a quarter of the patches is seen:

- these are searched from a guess, each with its attention in a span (`attacks.mjp.attended_tokens`);
- tokens that are missing then, in what those found leave of the first MLP's span (`attacks.mjp.token_search`);
- where few are missing still, their patches from what they bring to the attention of the tokens that were found
  (`attacks.mjp.shown_attention`): with the attention of all right, nearly every patch is certified;
- unless that is so, sweeps with known attention (`attacks.mjp.known_attention`) refine the patches;
- as long as some are wrong, they are refined with open attention (`attacks.mjp.open_attention`).

Elsewhere, or where many are missing still, all tokens are searched, their patches follow from linear equations
(`attacks.mjp.token_patches`), and sweeps refine them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.mjp.attended_tokens import Attended, AttendedSearch
from attacks.mjp.known_attention import PatchSweeps, SweepSearch, Swept, within_limits
from attacks.mjp.mlp_spans import FirstBlock
from attacks.mjp.mlp_tokens import TokenFamily, cone
from attacks.mjp.open_attention import OpenAttention
from attacks.mjp.optima import Optima
from attacks.mjp.shown_attention import ShownAttention
from attacks.mjp.token_patches import PlacedPatches, TokenPatches
from attacks.mjp.token_search import TokenSearch
from attacks.registry import UsageError

NO_TOKEN = "no token was found whose inputs of the first MLP lie in the spans of its gradients"
# Seen patches are searched apart where they are this share of all, and the other tokens beside them where this share of
# all is found: of DeiT-S at 224 pixels all tokens were found beside 44 of 197.
LEAST_SEEN, LEAST_KNOWN = 0.25, 1 / 6
# Where so many of all patches are found apart or beside these, or seen, all tokens are not searched again for the rest.
MOST_FOUND, MOST_SEEN = 0.9, 0.75
# Of the search beside them; and of sweeps after it, whose own random starts it leaves little to find.
FEW_ROUNDS, FEW_IDLE, FEW_STARTS = 24, 4, 1
FEW_SWEEPS = 2
# So many missing patches are solved for together, at most; rounds of that, and what a round must leave of the level.
FEW_MISSING, JOINT_ROUNDS, AS_GOOD_AS_BEFORE = 8, 4, 0.95
# What has less freedom, the guess or a patch with known attention, is as good where it leaves less than so many times
# the residual.
AS_GOOD = 1.3
# Patches that are not certified lie as near the guess as this share of the certified ones, or are left out.
FARTHEST = 0.9
# One that was never seen is left out where its squared residual exceeds what the noise explains by this factor.
PLAUSIBLE = 100.0


class Searches(NamedTuple):
    """For tokens, and for patches with known attention; the others search only where patches are seen."""

    tokens: TokenSearch
    sweep: SweepSearch
    attend: AttendedSearch = AttendedSearch()
    shown: ShownAttention = ShownAttention()
    opened: OpenAttention = OpenAttention()


class FromSeen(NamedTuple):
    """What the searches from seen patches give.

    Attributes:
        placed: the patches.
        c: (N, k) coefficients of all, the last ones.
        enough: whether so many seen patches were found that tokens were searched beside them.
        fits: whether most of all patches are certified with one attention: that of all, as shown, or open.
    """

    placed: PlacedPatches
    c: Tensor
    enough: bool
    fits: bool


def unmixed(
    searches: Searches, sweeps: PatchSweeps, start: Tensor, guess: Tensor, scales: Tensor
) -> tuple[PlacedPatches, dict[str, float]]:
    """Where enough patches are seen, from the start; unless that finds these, tokens, their patches, and sweeps.

    Args:
        sweeps: of the patches of the update, at the first block.
        start: (N, P) patches to start from, or none, where too little is known of them.
        guess: (N, P), of patches whose token is not found.
        scales: (P,) what a normalised pixel is in units of [0, 1].

    Returns:
        The patches, and for the details: tokens found, the median of their squared residuals over what the noise of
        the message explains, and, where tokens were searched, the median squared misfit of the equations of patch and
        attention.
    """
    block, unseen = sweeps.block, sweeps.known.unseen
    placed, enough, starts = PlacedPatches.none(sweeps.known), False, start[:0] @ block.projection.T
    if len(start):
        c = sweeps.coefficients(start)
        if seen_enough(int(unseen.sum()), len(start)):
            placed, c, enough, fits = _from_seen(searches, sweeps, c, scales)
            if placed.found.all() or (enough and fits and _few_missing(placed, unseen)):
                # In flat areas what is found may lie as far off as the noise allows, and the guess much nearer.
                guessed = placed.found & (sweeps.ratios_among(c, sweeps.coefficients(start)) < AS_GOOD * placed.misfit)
                return _with_guess(placed, guess, guessed & ~unseen), _numbers(placed.misfit)
        starts = sweeps.attended(c)
    tokens = searches.tokens(block, starts)
    if not len(tokens):
        if not placed.found.any():
            raise UsageError(NO_TOKEN)
        return placed, _numbers(placed.misfit[placed.found])
    alone, swept, numbers = of_tokens(tokens, searches.sweep, sweeps, guess, scales)
    alone, found = within(alone, sweeps), from_sweeps(sweeps, swept, scales)
    found = found.completed(alone, unseen) if mostly(swept.found) else alone.completed(found, unseen)
    if swept.found.all():
        return found, numbers
    first, second = sorted((found, placed), key=lambda one: -int(one.found.sum()))
    result = first.completed(second, unseen)
    # What was sure alone stays, and what was not is no surer among patches that do not all fit.
    sure, unsure = placed.found & (placed.deviation < VOUCHED_DEVIATION), placed.found & placed.deviation.isinf()
    result = result.replaced(sure & ~unseen, placed)
    result = replace(result, deviation=result.deviation.masked_fill(unsure, torch.inf))
    return result.doubted(~sure) if enough else result, numbers


def seen_enough(unseen: int, patches: int) -> bool:
    """Whether seen patches are searched apart, where so many of all are unseen."""
    return patches - unseen >= LEAST_SEEN * patches


def _few_missing(placed: PlacedPatches, unseen: Tensor) -> bool:
    """Whether few patches were not seen, or few were not found."""
    return _mostly_seen(unseen) or float(placed.found.double().mean()) >= MOST_FOUND


def _mostly_seen(unseen: Tensor) -> bool:
    """Whether few patches (N,) bool are unseen."""
    return float((~unseen).double().mean()) >= MOST_SEEN


def mostly(found: Tensor) -> bool:
    """Whether most of the patches (N,) bool are certified: of few, among wrong ones, many certificates are wrong."""
    return bool(found.double().mean() > 0.5)


def _from_seen(searches: Searches, sweeps: PatchSweeps, c: Tensor, scales: Tensor) -> FromSeen:
    """Patches found from c (N, k) on, where seen ones start from a guess."""
    attended = searches.attend(sweeps, c, scales)
    apart, unseen = attended.placed, sweeps.known.unseen
    c = torch.where(apart.found[:, None], sweeps.coefficients(apart.patches), c)
    fixed, enough = apart.found, int(apart.found.sum()) > LEAST_KNOWN * len(c)
    few = FEW_SWEEPS if _mostly_seen(unseen) else 1
    if enough and not fixed.all():
        search = replace(searches.tokens, rounds=FEW_ROUNDS, patience=FEW_IDLE, starts=FEW_STARTS)
        beside = search.beside(sweeps.block, attended.tokens, attended.prefix)
        apart, c, missing = _with_tokens(beside, sweeps, apart, c, scales)
        if 0 < int(missing.sum()) <= FEW_MISSING:
            joint = _joint(searches, sweeps, c, attended, missing)
            if float(joint.found.double().mean()) >= MOST_FOUND:
                return FromSeen(better(apart, from_sweeps(sweeps, joint, scales), unseen), joint.c, True, True)
    sweep = replace(searches.sweep, rounds=min(searches.sweep.rounds, few)) if enough else searches.sweep
    swept = sweep(sweeps, c, fixed)
    if not enough or swept.found.all():
        return FromSeen(better(apart, from_sweeps(sweeps, swept, scales), unseen), swept.c, enough, mostly(swept.found))
    c, opened = searches.opened(sweeps, swept.c, attended, scales)
    if mostly(swept.found) and sweeps.swept(c).level > AS_GOOD * swept.level:
        return FromSeen(better(apart, from_sweeps(sweeps, swept, scales), unseen), swept.c, enough, True)
    swept = sweep.converged(sweeps, c, torch.zeros_like(fixed))
    # Both number unseen places alike.
    opened = opened.replaced(swept.found & (swept.ratios < AS_GOOD * opened.misfit), from_sweeps(sweeps, swept, scales))
    placed = better(apart, opened, unseen) if mostly(opened.found) else apart.completed(opened, unseen)
    # Open directions may be those of what wrong patches have in common: sure is what was so without them.
    doubt = apart.deviation.isinf() & ~swept.found.all()
    return FromSeen(placed.doubted(doubt), swept.c, enough, mostly(opened.found))


def _joint(searches: Searches, sweeps: PatchSweeps, c: Tensor, attended: Attended, missing: Tensor) -> Swept:
    """The best of rounds, from c (N, k) on: the missing places (N,) bool together, for the attention of all, and every
    place alone, with that attention."""
    best = None
    for _ in range(JOINT_ROUNDS):
        reached = sweeps.swept_once(searches.shown(sweeps, c, attended, missing), searches.sweep.steps)
        gained = best is None or reached.level < AS_GOOD_AS_BEFORE * best.level
        best, c = reached if best is None else min(best, reached, key=lambda one: one.level), reached.c
        if not gained or best.found.all():
            break
    return best


def _with_tokens(
    found: tuple[Optima, Tensor], sweeps: PatchSweeps, apart: PlacedPatches, c: Tensor, scales: Tensor
) -> tuple[PlacedPatches, Tensor, Tensor]:
    """Patches that were found apart, c (N, k) of all, with the patches of further tokens, and places (N,) without one.

    Args:
        found: see `TokenSearch.beside`; points between tokens serve as starts.
    """
    tokens, between = found
    unseen, missing = sweeps.known.unseen, ~apart.found
    if len(tokens):
        placed = TokenPatches(sweeps.block, sweeps.known, scales).solve(tokens.y, errors_of(sweeps.block, tokens))
        placed = within(placed, sweeps)
        # Places that no update shows are alike: those that tokens took may hold a patch already.
        free = (unseen & ~apart.found).nonzero()[:, 0]
        took = (unseen & placed.found).nonzero()[:, 0][: len(free)]
        free = free[: len(took)]
        apart = apart.extended(free, placed.patches[took], placed.deviation[took], placed.misfit[took])
        c = c.index_put((free,), sweeps.coefficients(apart.patches)[free])
        # In flat areas the patch of a token alone may be farther off than its guess: it serves as a start.
        seen = (~unseen & ~apart.found & placed.found).nonzero()[:, 0]
        c = c.index_put((seen,), sweeps.coefficients(placed.patches)[seen])
        missing = (~apart.found).index_fill(0, seen, False)
    free = (unseen & ~apart.found).nonzero()[:, 0]
    if len(free) and len(between):
        x = sweeps.of_tokens(c, between)
        x = x[sweeps.within(x, free[:1])][: len(free)]
        c = c.index_put((free[: len(x)],), x)
    return apart, c, missing


def errors_of(block: FirstBlock, tokens: Optima) -> Tensor:
    """Mean squared error of an entry of tokens, (S,)."""
    return TokenFamily(block, cone(block)).errors(tokens)


def of_tokens(
    tokens: Optima, sweep: SweepSearch, sweeps: PatchSweeps, guess: Tensor, scales: Tensor
) -> tuple[PlacedPatches, Swept, dict[str, float]]:
    """The patches of tokens that were found, alone and with the attention of all, and numbers for the details.

    Args:
        guess: (N, P), from which the sweeps start where no token was found.
    """
    block, known = sweeps.block, sweeps.known
    placed = TokenPatches(block, known, scales).solve(tokens.y, errors_of(block, tokens))
    numbers = _numbers(tokens.losses / tokens.explained)
    if placed.found.any():
        numbers["misfit"] = float(placed.misfit[placed.found].median())
    start = torch.where(within_limits(placed.patches, sweeps.limits)[:, None], placed.patches, guess)
    return placed, sweep.converged(sweeps, sweeps.coefficients(start), ~placed.found), numbers


def _numbers(ratios: Tensor) -> dict[str, float]:
    """What `unmixed` says of tokens with squared residuals of these ratios (S,) to the noise."""
    return {"tokens": len(ratios), "residual": float(ratios.median())}


def from_sweeps(sweeps: PatchSweeps, swept: Swept, scales: Tensor) -> PlacedPatches:
    """The patches of the sweeps, NaN where they are outside the limits."""
    patches, deviation = sweeps.patches(swept.c), sweeps.deviation(swept.c, scales)
    patches[~within_limits(patches, sweeps.limits)] = torch.nan
    deviation[~swept.found] = torch.inf
    return PlacedPatches(patches, deviation, swept.found, swept.ratios)


def _with_guess(placed: PlacedPatches, guess: Tensor, instead: Tensor) -> PlacedPatches:
    """The patches, but the guess (N, P), which is not sure, at the places of `instead` (N,) bool."""
    patches = torch.where(instead[:, None], guess, placed.patches)
    return replace(placed, patches=patches, deviation=placed.deviation.masked_fill(instead, torch.inf))


def better(apart: PlacedPatches, swept: PlacedPatches, unseen: Tensor) -> PlacedPatches:
    """The patches of the sweeps, which have less freedom, but those found apart where these fit clearly better.

    Args:
        unseen: (N,) bool, places whose patches sweeps may have exchanged: there a certified one is as good as any.
    """
    fits_better = ~unseen & apart.found & ~(swept.misfit < AS_GOOD * apart.misfit)
    return swept.completed(apart, unseen).replaced(fits_better, apart)


def near_guess(placed: PlacedPatches, guess: Tensor, unseen: Tensor, share: float) -> PlacedPatches:
    """The patches, but the guess (N, P) where one that is not surely certified lies far from it, or fits badly.

    Args:
        unseen: (N,) bool.
        share: a patch may lie as far from the guess as this share of the certified ones that were seen; in so much
            noise that it mixes the rows of patches the guess is nearer than anything that is not certified: 0.
    """
    moved, sure = (placed.patches - guess).norm(dim=1), placed.found & placed.deviation.isfinite()
    if share and not (sure & ~unseen).any():
        return placed
    limit = moved[sure & ~unseen].quantile(share) if share else 0.0
    open_ones = ~placed.found & ~((placed.misfit < PLAUSIBLE) & (share > 0))
    far = torch.where(unseen, open_ones, ~sure & ~(moved <= limit))
    return replace(placed, patches=torch.where(far[:, None], guess, placed.patches))


def within(placed: PlacedPatches, sweeps: PatchSweeps) -> PlacedPatches:
    """The patches, of which those outside the limits do not count as found."""
    return replace(placed, found=placed.found & within_limits(placed.patches, sweeps.limits))
