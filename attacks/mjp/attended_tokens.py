"""Patches whose attention is only known to lie in a span: every place alone, in few dimensions.

`attacks.mjp.known_attention` computes a token's attention from all patches, which is wrong for every token as long as
some patches are; `attacks.mjp.mlp_tokens` needs no attention, but searches all N' dimensions of the first MLP's span.
Here both spans serve together. With z_p(c) the token at place p and c (k,) what is left open of its patch, the input of
the second norm is

    y = z_p(c) + W o(w) + bias,     [o(w), 1] in the row space of [dL/dW_o, dL/db_o] of the attention's output
                                    projection: w has N' - 1 coordinates,

and y, without its mean, is a combination of what the first MLP's span allows: D - 1 - N' homogeneous linear equations
for (c, w), whatever the other patches are. They are solved in units of what is expected of the unknowns: c lies within
`SPREAD` of the guess's own deviation, w has variances in proportion to the squared singular values, and the equations
have the noise of the message. Directions whose singular value in these units is large are taken from the linear
equations. Of the others those stay free whose effect on y exceeds the noise: on DeiT-S at 224 pixels, with 20 patches
masked, 19 or 20 of 215. Within them Levenberg-Marquardt minimises the residuals of both layers of the MLP, as
`TokenFamily` does, and a patch is certified as a token is: by a residual at the noise of the message, with no other
patch in it.

Class and register tokens solve the same equations with nothing left open but their attention. Patches that no update
shows follow from what all these leave of the first MLP's span (`TokenSearch.beside`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attacks.mjp.known_attention import PatchSweeps
from attacks.mjp.mlp_spans import FirstBlock
from attacks.mjp.mlp_tokens import CLEAR, TokenFamily
from attacks.mjp.optima import Optima
from attacks.mjp.token_duals import Removed, normalised
from attacks.mjp.token_patches import PlacedPatches
from attacks.mjp.token_search import ATTRACTS

# Standard deviation of the error of the guess's coefficients, in units of that of the coefficients among patches.
SPREAD = 0.3
# Coordinates of attention count for what the sizes of the span's directions follow where their mean square exceeds that
# of the error of the guessed attention by this factor.
ABOVE_ERROR = 4.0
# Singular values from which on linear equations settle a direction, and effects, in units of the noise of an entry,
# from which on another stays free: for all seen patches, and for those not found then.
LEVELS = ((2.0, 4.0), (20.0, 0.0))
# A certified patch is sure where the noise leaves less than this share of the guess's expected error.
SETTLED = 0.5


@dataclass(frozen=True)
class AttentionScales:
    """What the guessed attention says of its coordinates in the span, and of the noise.

    Attributes:
        variances: (N',) of a coordinate among tokens. error: of a guessed coordinate.
        scale: standard deviation of the entries of what the second norm receives. noise: of an equation, in its unit.
    """

    variances: Tensor
    error: float
    scale: float
    noise: float

    @classmethod
    def guessed(cls, sweeps: PatchSweeps, c: Tensor) -> AttentionScales | None:
        """From the attention among the patches at c (N, k); None where it lies outside the span altogether."""
        block, span, prefix = sweeps.block, sweeps.block.attention, sweeps.prefix
        seen = ~sweeps.known.unseen
        tokens = sweeps.tokens(c)
        mixed = block.mix(tokens)[prefix:]  # (N, D)
        along = mixed[seen] @ span.directions[:, :-1].T + span.directions[:, -1]
        conditions = span.directions.shape[1] - len(span.directions)
        error = span.outside(mixed[seen], 1.0).square().sum(dim=1).median() / conditions
        squares = along.square().mean(dim=0)
        clear = squares > ABOVE_ERROR * error
        if not clear.any():
            return None
        ratio = (squares / span.sizes)[clear].median()
        variances = ratio * span.sizes
        attended = tokens + block.attend(tokens)
        scale = attended[prefix:][seen].std(dim=1, correction=0).median()
        norm = block.module.norm2
        own = block.spans[0].error(norm(attended[prefix:][seen])).median()
        gain = (block.attention_branch(torch.eye(mixed.shape[1]).to(c)) * norm.weight).square().sum() / mixed.shape[1]
        others = span.noise**2 * len(span.sizes) * ratio * gain / scale**2
        return cls(variances, float(error), float(scale), float((own + others).sqrt()))

    def along(self, block: FirstBlock, tokens: Tensor, context: Tensor) -> Tensor:
        """Coordinates (S, N') of the attention of tokens (S, D) among others (N', D), shrunk by their errors.

        They are moved, by the least in units of their deviations, so that the constant input is 1.
        """
        directions = block.attention.directions
        along = block.mix(tokens, context) @ directions[:, :-1].T + directions[:, -1]
        along = along * self.variances / (self.variances + self.error)
        weighed = self.variances * directions[:, -1]
        return along + (1 - along @ directions[:, -1])[:, None] * weighed / (weighed @ directions[:, -1])


class AttendedFamily:
    """Tokens y of one place, with open patch and attention, reduced to what linear equations leave.

    Args:
        sweeps: of the update's patches.
        scales: of attention.
        coefficients: (k, k), rows that c is a standard normal combination of; (0, k) where no patch is open.
        cut: singular value from which on linear equations settle a direction.
        effect: length on y from which on another stays free, in units of the noise of an entry.
    """

    def __init__(
        self, sweeps: PatchSweeps, scales: AttentionScales, coefficients: Tensor, cut: float, effect: float
    ) -> None:
        block, self.coefficients, self.k = sweeps.block, coefficients, len(coefficients)
        self.block, span = block, block.attention
        half = scales.variances.sqrt()
        weighed = span.directions[:, -1] * half
        level = torch.linalg.svd(weighed[None], full_matrices=True).Vh[1:]  # (N' - 1, N'), of constant input 0
        branch = block.attention_branch(level * half @ span.directions[:, :-1])
        self.rows = torch.cat([coefficients @ sweeps.family.directions, branch])  # (k + N' - 1, D)
        outer, norm = block.spans[0].directions, block.module.norm2
        self.inside = torch.linalg.qr((outer[:, :-1] - outer[:, -1:] * norm.bias).T).Q.T  # (N', D)
        self.unit = scales.scale * scales.noise
        left, sizes, right = torch.linalg.svd(self._outside(self.rows), full_matrices=True)
        settled = min(int((sizes >= cut).sum()), len(self.rows) - 1)  # one direction stays free in any case
        self.solve = right[:settled].T / sizes[:settled] @ left[:, :settled].T  # (D, k + N' - 1)
        known = torch.cat([sizes, sizes.new_zeros(max(len(self.rows) - len(sizes), 0))])[: len(self.rows)]
        free = (left / (1 + known.square()).sqrt())[:, settled:].T  # (k + N' - 1 - settled, k + N' - 1)
        moved = free @ self.rows
        own, effects, _ = torch.linalg.svd(moved - moved.mean(dim=1, keepdim=True), full_matrices=False)
        least = torch.clamp(effects[0], max=effect * self.unit)
        self.free = own[:, effects >= least].T @ free  # (free, k + N' - 1)
        self.family = TokenFamily(block, self.free @ self.rows)
        self.thinned = TokenFamily(block.thinned, self.family.directions)
        self.solved = torch.linalg.pinv(self.family.directions)

    def _outside(self, y: Tensor) -> Tensor:
        """What the first MLP's span does not allow of y (S, D), in units of the noise."""
        moved = (y - y.mean(dim=1, keepdim=True)) * self.block.module.norm2.weight
        return (moved - (moved @ self.inside.T) @ self.inside) / self.unit

    def refine(self, tokens: Tensor, along: Tensor, steps: int) -> tuple[Tensor, Optima]:
        """Steps of c (S, k) from tokens (S, D) and coordinates of attention (S, N'), and the optima reached.

        A part of the hidden units leads to them, the whole block says what they leave.
        """
        mixed = along @ self.block.attention.directions[:, :-1]
        y = tokens + self.block.attention_branch(mixed) + self.block.attention_bias
        moved = -self._outside(y) @ self.solve
        start = y + moved @ self.rows
        reached = self.thinned.refine_consistent(start, steps).y
        moved = moved + (reached - start) @ self.solved @ self.free
        return moved[:, : self.k] @ self.coefficients, Optima(reached, *self.family.losses(reached))

    def deviation(self, optima: Optima, pixels: Tensor) -> tuple[Tensor, float]:
        """Expected rms error (S,) of a patch's pixels, and that of the guess, if what is left of residuals is noise.

        Args:
            pixels: (k, P) of a step of c, in units of [0, 1].
        """
        moved = self.free[:, : self.k] @ self.coefficients @ pixels
        variance = (torch.maximum(optima.losses, optima.explained) / self.family.conditions)[:, None, None]
        precision = self.family.matrices(optima.y) / variance + torch.eye(len(moved)).to(moved)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        form = moved @ moved.T / pixels.shape[1]
        return (inverse * form).sum(dim=(1, 2)).sqrt(), float(form.trace().sqrt())


class Attended(NamedTuple):
    """What is found with attention in a span.

    Attributes:
        placed: the patches that are certified; the deviation is infinite where they are not sure.
        tokens: theirs, with duals. places: (S,) indices, theirs.
        prefix: (n, D) roughly the tokens of the class and the registers.
    """

    placed: PlacedPatches
    tokens: Removed
    places: Tensor
    prefix: Tensor


@dataclass(frozen=True, kw_only=True)
class AttendedSearch:
    """Seen patches from their guess, each alone.

    Attributes:
        steps: Levenberg-Marquardt steps of a start, at most.
    """

    steps: int = 40

    def __call__(self, sweeps: PatchSweeps, c: Tensor, scales: Tensor) -> Attended:
        """The patches that are certified, from c (N, k) on.

        Args:
            scales: (P,) what a normalised pixel is in units of [0, 1].
        """
        seen, placed = ~sweeps.known.unseen, PlacedPatches.none(sweeps.known)
        spread = spread_of(sweeps, c) * torch.eye(c.shape[1]).to(c)
        y, where = sweeps.base[:0], torch.arange(0, device=c.device)
        for level in LEVELS:
            rest = (seen & ~placed.found).nonzero()[:, 0]
            attention = AttentionScales.guessed(sweeps, c) if len(rest) else None
            if attention is None:
                break
            family = AttendedFamily(sweeps, attention, spread, *level)
            context = sweeps.tokens(c)
            own = context[sweeps.prefix :][rest]
            moved, optima = family.refine(own, attention.along(sweeps.block, own, context), self.steps)
            moved = c[rest] + moved
            good = (optima.ratios < CLEAR) & sweeps.within(moved, rest)
            optima, moved, places = optima[good], moved[good], rest[good]
            y, where = torch.cat([y, optima.y]), torch.cat([where, places])
            deviation, guessed = family.deviation(optima, sweeps.known.basis * scales)
            c = c.index_put((places,), moved)
            deviation[deviation >= SETTLED * guessed] = torch.inf
            placed = placed.extended(places, sweeps.patches(c)[places], deviation, optima.ratios)
        tokens = Removed.of(sweeps.block.thinned, normalised(y))
        mixed = tokens.mixtures(sweeps.block)
        return Attended(placed.without(where[mixed]), tokens[~mixed], where[~mixed], self._prefix(sweeps, c))

    def _prefix(self, sweeps: PatchSweeps, c: Tensor) -> Tensor:
        """Class and register tokens, (n, D), among patches with c (N, k): solved for, or as they are among these.

        Their gradient may dominate the noise, so that neither is certified.
        """
        attention = AttentionScales.guessed(sweeps, c) if sweeps.prefix else None
        if attention is None:
            return sweeps.base[:0]
        family, context = AttendedFamily(sweeps, attention, c[:0], *LEVELS[0]), sweeps.tokens(c)
        own = context[: sweeps.prefix]
        optima = family.refine(own, attention.along(sweeps.block, own, context), self.steps)[1]
        solved = (optima.ratios < ATTRACTS)[:, None]
        return torch.where(solved, normalised(optima.y), normalised(sweeps.attended(c)[: sweeps.prefix]))


def spread_of(sweeps: PatchSweeps, c: Tensor) -> float:
    """Expected deviation of the guess's coefficients, from those of seen patches among c (N, k)."""
    return SPREAD * float(c[~sweeps.known.unseen].std(dim=0).square().mean().sqrt())
