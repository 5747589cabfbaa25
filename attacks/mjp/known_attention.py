"""Patches once most of them are about right: their attention is then known, and few numbers are left for each.

`attacks.mjp.mlp_tokens` finds a token without its attention, as one point of a span of N' dimensions, and
`attacks.mjp.token_patches` solves for the patch with attention unknown. Both leave more open than there is: patches are
known up to k directions, x_p = rows_p + c_p B (`KnownPatches`), and the attention of all tokens follows from the
patches. So, with the attention branch t_p computed from the present patches and held fixed,

    minimise over c_p (k,):   |outside_1([a, 1])|^2 + |outside_2([GELU(W_1 a + b_1), 1])|^2,
    a = norm2(z_p(c_p) + t_p),

for every place alone, and attention computed anew, in turn: a sweep. An error of one patch enters the others' attention
with its weight there, so that a few sweeps suffice. A patch is certified as a token is, by a residual at the noise of
the message, here with the attention of all present patches: where one of them is wrong, hardly any is certified.

*Search.* Places that some update shows converge from the image prior's guess. Unseen patches share one embedding and
one row, so that each of them solves the same equations: random starts around the coefficients of seen patches lead to
most of them. The local optima of least residual that span most are taken for the unseen patches of the next round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.mjp.mlp_spans import FirstBlock
from attacks.mjp.mlp_tokens import TokenFamily
from attacks.mjp.optima import FOUND, Optima, repeated
from attacks.mjp.token_patches import KnownPatches
from attacks.mjp.token_search import StartedSearch

# A start has not converged where its squared residual exceeds the median one by this factor.
NOT_CONVERGED = 20.0
# A local optimum is a patch of its own where this share of it lies outside the affine span of those of less residual.
OUTSIDE_SPAN = 0.1
# A round gains where the geometric mean of the residuals falls by more than this factor.
GAIN = 0.95
# Beside places that are fixed, whose attention is off by what the others lack: more than this. Below such a level of
# residuals sweeps of all places may end at the noise.
GAIN_BESIDE_FIXED, NEARLY = 0.5, 20.0
FEWEST_STARTS = 3  # missing patches for which starts are drawn at least
# A patch outside the range of pixels counts with this residual at least: patches that grow without bound may fit.
OUT_OF_RANGE = 1e4


@dataclass(frozen=True)
class Swept:
    """Patches after some sweeps.

    Attributes:
        c: (N, k) coefficients.
        ratios: (N,) squared residuals over what the noise of the message explains, with the attention of these patches;
            at least `OUT_OF_RANGE` for a patch whose pixels are those of no photograph.
    """

    c: Tensor
    ratios: Tensor

    @property
    def found(self) -> Tensor:
        """(N,) bool, those that the spans certify."""
        return self.ratios <= FOUND

    @property
    def level(self) -> float:
        """Geometric mean of the ratios."""
        return float(self.ratios.log().mean().exp())


class PatchSweeps:
    """The patches of one update along the directions that are left, with attention from all of them.

    Args:
        block: the first block.
        known: of the patches.
        limits: (2, P) normalised pixels between which those of a photograph lie.
    """

    def __init__(self, block: FirstBlock, known: KnownPatches, limits: Tensor) -> None:
        self.block, self.known, self.limits, self.prefix = block, known, limits, len(block.prefix)
        self.base = block.tokens(known.rows, known.masked)  # (N', D)
        self.family = TokenFamily(block, known.basis @ block.projection.T)
        self.solved = torch.linalg.pinv(self.family.directions)  # (D, k)

    def coefficients(self, patches: Tensor) -> Tensor:
        """c (N, k) of patches (N, P)."""
        return (patches - self.known.rows) @ self.known.basis.T

    def patches(self, c: Tensor) -> Tensor:
        """(N, P) of c (N, k)."""
        return self.known.rows + c @ self.known.basis

    def attended(self, c: Tensor) -> Tensor:
        """What the second norm receives of all tokens, (N', D), at c (N, k)."""
        tokens = self.tokens(c)
        return tokens + self.block.attend(tokens)

    def swept(self, c: Tensor) -> Swept:
        """c (N, k) with the residuals there."""
        losses, explained = self.family.losses(self.attended(c)[self.prefix :])
        ratios = losses / explained
        return Swept(c, torch.where(self.within(c), ratios, ratios.clamp(min=OUT_OF_RANGE)))

    def ratios_among(self, c: Tensor, x: Tensor) -> Tensor:
        """Ratios (N,) of the residuals of patches with x (N, k), each alone among the patches at c (N, k)."""
        own = self.tokens(x)[self.prefix :]
        losses, explained = self.family.losses(own + self.block.attend(own, self.tokens(c)))
        return losses / explained

    def within(self, c: Tensor, places: Tensor | None = None) -> Tensor:
        """(S,) bool: whether the pixels of patches with c (S, k) lie between the limits.

        Args:
            places: (S,) indices, or (1,), where all patches belong to places with the same row; by default all places.
        """
        rows = self.known.rows if places is None else self.known.rows[places]
        return within_limits(rows + c @ self.known.basis, self.limits)

    def sweep(self, c: Tensor, steps: int, places: Tensor | None = None) -> Tensor:
        """c (N, k) after so many Levenberg-Marquardt steps of every place, or of `places` (N,) bool, alone."""
        places = torch.ones_like(self.known.unseen) if places is None else places
        moved = c.clone()
        moved[places] = self._refined(c[places], self.attended(c)[self.prefix :][places], steps)[0]
        return moved

    def swept_once(self, c: Tensor, steps: int) -> Swept:
        """c (N, k) after so many steps of every place alone, with the residuals at the attention from before them."""
        moved, optima = self._refined(c, self.attended(c)[self.prefix :], steps)
        return Swept(moved, torch.where(self.within(moved), optima.ratios, optima.ratios.clamp(min=OUT_OF_RANGE)))

    def unseen(self, c: Tensor, x: Tensor, steps: int) -> tuple[Tensor, Optima]:
        """Patches of unseen places from x (S, k) on, at the attention that each has among the patches at c (N, k)."""
        own = self.base[self.prefix :][self.known.unseen][:1] + x @ self.family.directions
        return self._refined(x, own + self.block.attend(own, self.tokens(c)), steps)

    def of_tokens(self, c: Tensor, y: Tensor) -> Tensor:
        """Coefficients (S, k) of unseen patches whose tokens are nearest y (S, D), among the patches at c (N, k).

        Args:
            y: each up to a factor and a constant.
        """
        context, directions = self.tokens(c), self.family.directions
        own = context[self.prefix :][self.known.unseen].mean(dim=0)
        received = (own - own.mean() + self.block.attend(own[None], context)[0]).expand_as(y)
        received = received - received.mean(dim=1, keepdim=True)
        y = y - y.mean(dim=1, keepdim=True)
        moved = directions - directions.mean(dim=1, keepdim=True)
        equations = torch.cat([moved.T.expand(len(y), -1, -1), -y[:, :, None]], dim=2)  # (S, D, k + 1)
        moved = torch.linalg.lstsq(equations, -received[:, :, None]).solution[:, :-1, 0]
        return c[self.known.unseen].mean(dim=0) + moved

    def deviation(self, c: Tensor, scales: Tensor) -> Tensor:
        """Expected rms error (N,) of a patch's pixels at c (N, k), if what is left of the residuals is noise.

        Args:
            scales: (P,) what a normalised pixel is in units of [0, 1].
        """
        y, pixels = self.attended(c)[self.prefix :], self.known.basis * scales
        form = pixels @ pixels.T / len(scales)
        return self.family.expected(Optima(y, *self.family.losses(y)), form).sqrt()

    def tokens(self, c: Tensor) -> Tensor:
        """Tokens at the first block, (N', D), at c (N, k)."""
        tokens = self.base.clone()
        tokens[self.prefix :] += c @ self.family.directions
        return tokens

    def _refined(self, c: Tensor, attended: Tensor, steps: int) -> tuple[Tensor, Optima]:
        optima = self.family.refine_consistent(attended, steps)
        return c + (optima.y - attended) @ self.solved, optima


@dataclass(frozen=True, kw_only=True)
class SweepSearch(StartedSearch):
    """Sweeps, and random starts for the patches that no update shows.

    Attributes:
        sweeps, steps: sweeps of a round, and their Levenberg-Marquardt steps.
        start_steps: Levenberg-Marquardt steps of a start.
    """

    rounds: int = 6
    starts: int = 6
    sweeps: int = 2
    steps: int = 4
    start_steps: int = 25

    def __call__(self, sweeps: PatchSweeps, c: Tensor, fixed: Tensor | None = None) -> Swept:
        """The best round's patches, from c (N, k) on.

        Args:
            fixed: (N,) bool, places that the sweeps leave as they are: their patches are certified without attention.
                Once the residuals of all places are low, sweeps of all are tried.
        """
        generator, unseen = self.generator(), sweeps.known.unseen
        fixed = torch.zeros_like(unseen) if fixed is None else fixed
        best, pool, idle = sweeps.swept(c), c[:0], 0
        gain = GAIN_BESIDE_FIXED if fixed.any() else GAIN
        for number in range(self.rounds):
            reached = self.polished(sweeps, c, ~fixed)
            idle = 0 if reached.level < gain * best.level else idle + 1
            if fixed.any() and reached.level < min(NEARLY, best.level):
                whole = self.converged(sweeps, reached.c, torch.zeros_like(fixed))
                if int(whole.found.sum()) >= int((reached.found | fixed).sum()):
                    return whole
            best = min(best, reached, key=lambda one: one.level)
            missing = int((~(best.found | fixed))[unseen].sum())
            last = idle == self.patience or number == self.rounds - 1
            if last or bool((best.found | fixed).all()) or not unseen.any():
                break
            pool = self._optima(sweeps, best.c, pool, missing, generator)
            kept = best.c[unseen & fixed]
            chosen = most_spanning(torch.cat([kept, pool]), int(unseen.sum()), len(kept))[len(kept) :]
            open_places = unseen & ~fixed
            c = best.c.clone()
            c[open_places] = torch.cat([chosen, best.c[open_places]])[: int(open_places.sum())]
        return best

    def polished(self, sweeps: PatchSweeps, c: Tensor, places: Tensor | None = None) -> Swept:
        """c (N, k) after the sweeps of a round, of `places` (N,) bool only where given."""
        for _ in range(self.sweeps):
            c = sweeps.sweep(c, self.steps, places)
        return sweeps.swept(c)

    def converged(self, sweeps: PatchSweeps, c: Tensor, places: Tensor) -> Swept:
        """The best of c (N, k), of rounds of sweeps of `places` (N,) bool from there, and of all places from there."""
        best = sweeps.swept(c)
        for some in (places, None):
            for _ in range(self.rounds if some is None or some.any() else 0):
                reached = self.polished(sweeps, best.c, some)
                gained, best = reached.level < GAIN * best.level, min(best, reached, key=lambda one: one.level)
                if not gained:
                    break
        return best

    def _optima(self, sweeps: PatchSweeps, c: Tensor, pool: Tensor, missing: int, generator: torch.Generator) -> Tensor:
        """Distinct local optima (S, k) of unseen patches among the patches at c (N, k), by rising residual."""
        seen, unseen = c[~sweeps.known.unseen], c[sweeps.known.unseen]
        fresh = self._fresh(seen, self.starts * max(missing, FEWEST_STARTS), generator)
        x, found = sweeps.unseen(c, torch.cat([fresh, pool, unseen]), self.start_steps)
        ratios = found.ratios
        order = ratios.argsort()
        order = order[ratios[order] < NOT_CONVERGED * ratios.median()]
        matrices = sweeps.family.matrices(found.y[order])
        return x[order][repeated(x[order], found.losses[order], matrices)]

    def _fresh(self, seen: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Random coefficients (count, k) around those of seen patches (S, k)."""
        one = seen[torch.randint(len(seen), (count,), generator=generator).to(seen.device)]
        draw = torch.randn(one.shape, generator=generator, dtype=torch.float64)
        return one + draw.to(one) * seen.std(dim=0)


def within_limits(patches: Tensor, limits: Tensor) -> Tensor:
    """(N,) bool: whether all pixels of patches (N, P) lie between the limits (2, P)."""
    return ((patches >= limits[0]) & (patches <= limits[1])).all(dim=1)


def most_spanning(points: Tensor, count: int, first: int = 0) -> Tensor:
    """At most `count` of the points (S, k), in their order, that span most, affinely.

    Points are taken in their order as long as they stick out of the affine span of those taken; if these are too few,
    those farthest outside are added. The `first` points are taken in any case.
    """
    centred = points - points.mean(dim=0)
    size = centred.square().mean(dim=0).sum().sqrt().expand(len(points), 1)
    left = torch.cat([centred, size], dim=1)  # what the span of those taken leaves of each
    whole, taken = left.norm(dim=1), []
    while len(taken) < min(count, len(points)):
        share = left.norm(dim=1) / whole
        share[taken] = -1.0
        outside = (share > OUTSIDE_SPAN).nonzero()
        chosen = int(outside[0]) if len(outside) else int(share.argmax())
        chosen = len(taken) if len(taken) < first else chosen
        taken.append(chosen)
        unit = left[chosen] / left[chosen].norm().clamp(min=torch.finfo(left.dtype).tiny)
        left = left - (left @ unit)[:, None] * unit
    return points[taken]
