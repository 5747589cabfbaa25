"""Every token's input of the first MLP from the gradients of that MLP alone, one token at a time.

Write a_i for what token i brings to the first MLP (the second norm's output) and h_i = GELU(W_1 a_i + b_1). The rows of
[dL/dW_1, dL/db_1] span the [a_i, 1] of all N' tokens, those of [dL/dW_2, dL/db_2] the [h_i, 1]
(`attacks.mjp.mlp_spans`). With N' below the number of channels, a token is a point of the first span, and among these
points the tokens are those whose [h, 1] lies in the second:

    minimise over u (m,):   |outside_1([a, 1])|^2 + |outside_2([GELU(W_1 a + b_1), 1])|^2,     a = norm2(y_0 + u Y),

H + 1 - N' equations for m <= N' unknowns. Nothing couples a token to another: no attention, no labels, no positions. So
the search is the same for one masked patch and for all patches of an image, with or without positions, and an answer is
certified token by token, by a residual at the noise of the message. On trained small ViTs every random start converges
to a token (192 of 192 on each of three photographs).

Starts for tokens that are missing come from the duals of those found (`attacks.mjp.token_duals`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.mjp.mlp_spans import MLPBlock
from attacks.mjp.token_duals import dual_vectors, normalised, without

# A start has found a token where its squared residual is at most FOUND times what the noise of the message explains
# there, and OWN of its inputs' squared length (round-off of a token whose gradient dominates the sums). Ratios at true
# tokens are 0.7 to 2, up to 20 on photographs with flat areas; where a start has not converged, 500 and more, in flat
# areas from 2 on: there it lies between patches that hardly differ.
FOUND, OWN = 10.0, 1e-12
# Two of them are one token where the squared residual rises by less than this share of itself from one to the other ...
SAME = 0.2
# ... or where they are as near as this, in lengths of a token: the noise cannot tell them apart.
NEAR = 1e-4
NEAR_KNOWN = 1e-2  # of tokens whose own optimum in the whole span was not sought
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-9, 1e8
# A start that has gained less than GAIN of its squared residual in PATIENCE steps has converged.
GAIN, PATIENCE = 1e-2, 3
# Entries that are held together: of Gauss-Newton matrices in memory, of Jacobians in the processor's cache.
MATRIX_ENTRIES, JACOBIAN_ENTRIES = 16_000_000, 400_000
LEAST_STARTS = 12
POLISH = 12  # steps in the whole span after those among what the duals leave
# A Gauss-Newton matrix serves for further steps as long as each leaves less than this share of the squared residual.
KEPT = 0.3


@dataclass(frozen=True)
class TokenFamily:
    """Candidates y = y_0 + u Y for tokens at the second norm, and the misfit of the MLP's inputs there.

    Attributes:
        block: the first block and the spans of its MLP.
        directions: Y, (m, D).
    """

    block: MLPBlock
    directions: Tensor

    def __post_init__(self) -> None:
        block, norm, mlp = self.block, self.block.module.norm2, self.block.module.mlp
        moved = (self.directions - self.directions.mean(dim=1, keepdim=True)) * norm.weight  # (m, D)
        outer = block.spans[0].outside(moved)
        object.__setattr__(self, "_moved", moved)
        object.__setattr__(self, "_before", moved @ mlp.fc1.weight.T)  # (m, H)
        object.__setattr__(self, "_outer", outer)  # (m, D + 1)
        object.__setattr__(self, "_gram", outer @ outer.T)  # (m, m)

    @property
    def conditions(self) -> int:
        """How many a token meets: those of both layers."""
        return sum(span.directions.shape[1] - self.block.count for span in self.block.spans)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Random candidates, (count, D), of the sizes that the spectrum of the first layer's gradient suggests."""
        span = self.block.spans[0]
        draw = torch.randn(count, self.block.count, generator=generator, dtype=torch.float64).to(span.sizes)
        points = draw * span.sizes**0.25  # along the rows of V; singular values to the power 1/2
        y = (points * (points @ span.directions[:, -1:]).sign()) @ cone(self.block)
        return normalised(y)

    def nearest(self, y: Tensor) -> Tensor:
        """Combinations of the rows of Y next to y (S, D), normalised: steps along Y only dilute what lies outside."""
        return normalised(y @ torch.linalg.pinv(self.directions) @ self.directions)

    def losses(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Squared residuals (S,) of y (S, D), and what the noise of the message explains of them."""
        left, explained = 0.0, 0.0
        for inputs, span in zip(self._forward(y)[:2], self.block.spans, strict=True):
            left = left + span.outside(inputs, 1.0).square().sum(dim=1)
            conditions = inputs.shape[1] + 1 - self.block.count
            explained = explained + conditions * span.error(inputs) + OWN * inputs.square().sum(dim=1)
        return left, explained

    def _forward(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of both layers and the slope of the activation."""
        mlp = self.block.module.mlp
        first = self.block.module.norm2(y)
        hidden, slope = self.block.activate(mlp.fc1(first))
        return first, hidden, slope

    def gradients(self, y: Tensor) -> Tensor:
        """Half gradient (S, m) of the squared residuals at y (S, D) along Y."""
        return self._half_gradient(_Linearised(self, y))

    def matrices(self, y: Tensor) -> Tensor:
        """Gauss-Newton matrices (S, m, m) of the squared residuals at y (S, D) along Y."""
        at, (outer_span, inner_span) = _Linearised(self, y), self.block.spans
        share = at.share
        # First layer: (moved - share bent) outside the span, without forming it.
        bent = outer_span.outside(at.bent)  # (S, D + 1)
        cross = bent @ self._outer.T  # (S, m)
        matrix = self._gram - share[:, :, None] * cross[:, None] - cross[:, :, None] * share[:, None]
        matrix = matrix + bent.square().sum(dim=1)[:, None, None] * share[:, :, None] * share[:, None]
        # Second layer, a few starts at a time.
        few = max(JACOBIAN_ENTRIES // self._before.numel(), 1)
        parts = (t.split(few) for t in (matrix, share[:, :, None], at.bent_before[:, None], at.slope[:, None]))
        second = []
        for first, part, bent_before, slope in zip(*parts, strict=True):
            jacobian = (self._before - part * bent_before) * slope  # (S, m, H)
            inside = jacobian @ inner_span.directions[:, :-1].T  # (S, m, N')
            second.append(first.baddbmm(jacobian, jacobian.mT).baddbmm(inside, inside.mT, alpha=-1))
        return torch.cat(second) / at.scale[..., None].square()

    def _half_gradient(self, at: _Linearised) -> Tensor:
        outer_span, inner_span = self.block.spans
        left = outer_span.outside(at.first, 1.0)
        gradient = left @ self._outer.T - at.share * (left * outer_span.outside(at.bent)).sum(dim=1, keepdim=True)
        pulled = at.slope * inner_span.outside(at.hidden, 1.0)[:, :-1]  # (S, H)
        gradient = gradient + pulled @ self._before.T - at.share * (pulled * at.bent_before).sum(dim=1, keepdim=True)
        return gradient / at.scale

    def errors(self, optima: Optima) -> Tensor:
        """Mean squared error of an entry of y, (S,), if what is left of the residuals is independent noise."""
        moved = self.directions - self.directions.mean(dim=1, keepdim=True)
        return self.expected(optima, moved @ moved.T / moved.shape[1], torch.linalg.pinv(self.directions))

    def expected(self, optima: Optima, form: Tensor, inverse: Tensor | None = None) -> Tensor:
        """Expected quadratic form (S,) of the error of u, if what is left of the residuals is independent noise.

        Args:
            form: (m, m).
            inverse: of Y, (D, m), where the length of y lies in the family: the norm takes it away; it is no error.
        """
        variance = torch.maximum(optima.losses, optima.explained) / (self.conditions - len(self.directions))
        found = []
        for part in optima.y.split(self._chunk()):
            matrix = self.matrices(part)  # (S, m, m)
            mean = matrix.diagonal(dim1=1, dim2=2).mean(dim=1)
            if inverse is not None:
                along = part @ inverse  # (S, m)
                weight = mean / along.square().sum(dim=1)
                matrix = matrix + weight[:, None, None] * along[:, :, None] * along[:, None]
            matrix.diagonal(dim1=1, dim2=2).add_(1e-12 * mean[:, None])
            found.append((torch.cholesky_inverse(torch.linalg.cholesky(matrix)) * form).sum(dim=(1, 2)))
        return torch.cat(found) * variance

    def _chunk(self) -> int:
        """Starts whose matrices are held in memory together."""
        return max(MATRIX_ENTRIES // self._gram.numel(), 8)

    def refine(self, y: Tensor, steps: int, *, keep_scale: bool = False) -> Optima:
        """Levenberg-Marquardt from each of the starts y (S, D) along Y, at most so many steps.

        Args:
            keep_scale: return y plus the steps taken instead of its normalised form.
        """
        parts = [self._refine_chunk(part, steps) for part in y.split(self._chunk())]
        optima = Optima(*(torch.cat([getattr(part, n) for part in parts]) for n in Optima.__dataclass_fields__))
        return optima if keep_scale else replace(optima, y=normalised(optima.y))

    def _refine_chunk(self, y: Tensor, steps: int) -> Optima:
        y, size = y.clone(), len(self.directions)
        losses, explained = self.losses(y)
        damping, idle = torch.full_like(losses, FIRST_DAMPING), torch.zeros_like(losses)
        matrices, fresh = y.new_zeros(len(y), size, size), torch.zeros_like(losses, dtype=torch.bool)
        active, stale = torch.arange(len(y), device=y.device), torch.ones_like(fresh)
        for _ in range(steps):
            renewed, at, before = active[stale[active]], y[active], losses[active]
            if len(renewed):
                matrices[renewed] = self.matrices(y[renewed])
            fresh[active], stale[active] = stale[active], False
            matrix = matrices[active]
            diagonal = matrix.diagonal(dim1=1, dim2=2)
            damped = damping[active, None] * diagonal + 1e-12 * diagonal.mean(dim=1, keepdim=True)
            root = torch.linalg.cholesky_ex(matrix + torch.diag_embed(damped)).L
            step = -torch.cholesky_solve(self.gradients(at)[..., None], root)[..., 0] @ self.directions
            reached, noise = self.losses(at + step)
            better, new = reached < before, fresh[active]
            y[active] = torch.where(better[:, None], at + step, at)
            losses[active] = torch.where(better, reached, before)
            explained[active] = torch.where(better, noise, explained[active])
            factor = torch.where(better, 1 / 6, torch.where(new, 6.0, 1.0))
            damping[active] = (damping[active] * factor).clamp(LEAST_DAMPING, MOST_DAMPING)
            stale[active] = reached > KEPT * before
            gained = reached < (1 - GAIN) * before
            idle[active] = torch.where(gained, 0.0, idle[active] + new)
            there = new & ~gained & (losses[active] <= FOUND * explained[active])
            active = active[~there & (idle[active] < PATIENCE)]
            if not len(active):
                break
        return Optima(y, losses, explained)


class _Linearised:
    """The MLP's inputs at y (S, D) and their derivatives along the directions of a family.

    With y / scale = unit + mean, d first = (moved - share bent) / scale, d before GELU = W_1 d first.
    """

    def __init__(self, family: TokenFamily, y: Tensor) -> None:
        norm, mlp = family.block.module.norm2, family.block.module.mlp
        self.first, self.hidden, self.slope = family._forward(y)
        centred = y - y.mean(dim=1, keepdim=True)
        self.scale = (centred.square().mean(dim=1, keepdim=True) + norm.eps).sqrt()  # (S, 1)
        unit = centred / self.scale
        self.share = unit @ family.directions.T / unit.shape[1]  # (S, m)
        self.bent = unit * norm.weight  # (S, D)
        self.bent_before = self.bent @ mlp.fc1.weight.T  # (S, H)


@dataclass(frozen=True)
class Optima:
    """Local optima.

    Attributes:
        y: (S, D) tokens at the second norm, up to a factor and a constant: mean 0, length D^1/2 (unless the scale of
            the starts is kept).
        losses: (S,) squared residuals. explained: (S,) of them, what the noise of the message explains.
    """

    y: Tensor
    losses: Tensor
    explained: Tensor

    def __getitem__(self, index: Tensor | list[int]) -> Optima:
        return Optima(self.y[index], self.losses[index], self.explained[index])

    def __len__(self) -> int:
        return len(self.y)

    @property
    def found(self) -> Tensor:
        """(S,) bool, those that are tokens."""
        return self.losses <= FOUND * self.explained

    @property
    def ratios(self) -> Tensor:
        """(S,) squared residuals over what the noise of the message explains."""
        return self.losses / self.explained

    def joined(self, other: Optima) -> Optima:
        """These and others."""
        return Optima(*(torch.cat([getattr(self, n), getattr(other, n)]) for n in Optima.__dataclass_fields__))


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
    starts: int
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

    rounds: int = 16
    patience: int = 4
    starts: int = 2
    steps: int = 40

    def __call__(self, block: MLPBlock, guess: Tensor, known: Optima | None = None) -> Optima:
        """The tokens that are found: at most N', or a few more where the noise splits one.

        Args:
            guess: (S, D) tokens at the second norm to start from, if any.
            known: tokens that need not be searched, from a family with less freedom; the result begins with them.
        """
        whole, generator = TokenFamily(block, cone(block)), self.generator()
        optima = whole.refine(whole.nearest(guess), self.steps)
        tokens = optima[[]] if known is None else replace(known, y=normalised(known.y))
        near = NEAR if known is None else NEAR_KNOWN
        tokens = tokens.joined(distinct(whole, tokens, optima[optima.found], near))
        duals, idle = tokens.y.new_zeros(0, block.count), 0
        for _ in range(self.rounds):
            if len(tokens) >= block.count or idle == self.patience:
                break
            duals = torch.cat([duals, dual_vectors(block, tokens.y[len(duals) :])])
            count = max(self.starts * (block.count - len(tokens)), LEAST_STARTS)
            starts = without(block, whole.draw(count, generator), tokens.y, duals)
            if len(tokens):  # first among what the duals leave, which has fewer dimensions
                left = torch.linalg.svd(duals, full_matrices=True).Vh[len(duals) :]  # (N' - n, N')
                family = TokenFamily(block, left @ whole.directions)
                starts = distinct(family, optima[[]], family.refine(starts, self.steps)).y
            optima = whole.refine(starts, POLISH if len(tokens) else self.steps)
            new = distinct(whole, tokens, optima[optima.found], near)
            tokens, idle = tokens.joined(new), 0 if len(new) else idle + 1
        return tokens


def cone(block: MLPBlock) -> Tensor:
    """Y (N', D): what the second norm receives of each row of V, up to a factor and a constant."""
    norm, span = block.module.norm2, block.spans[0]
    inputs = span.directions[:, :-1] - span.directions[:, -1:] * norm.bias
    return inputs / norm.weight


def distinct(family: TokenFamily, tokens: Optima, optima: Optima, near: float = NEAR) -> Optima:
    """Those of the optima that are no token found before, nor each other's repetition, the best one of each.

    Two are one token if the residual's quadratic model at one of them hardly rises towards the other.

    Args:
        near: lengths of a token within which two are one in any case.
    """
    if not len(optima):
        return optima
    optima = optima[optima.losses.argsort()]
    joined, before = tokens.joined(optima), len(tokens)
    points = joined.y @ torch.linalg.pinv(family.directions)
    matrices = family.matrices(optima.y)
    apart = torch.cdist(joined.y, joined.y) >= near * joined.y.shape[1] ** 0.5
    return optima[repeated(points, joined.losses, matrices, before, apart)]


def repeated(
    points: Tensor, losses: Tensor, matrices: Tensor, before: int = 0, apart: Tensor | None = None
) -> list[int]:
    """Indices among the points (S, m) after the first `before` ones of those that repeat none before them.

    Args:
        points: coordinates, the later ones by rising losses (S,), squared residuals.
        matrices: (S - before, m, m), Gauss-Newton matrices of the later ones.
        apart: (S, S) bool, pairs that may differ; by default all.
    """
    kept = list(range(before))
    for i in range(before, len(points)):
        along = points[kept] - points[i]  # (n, m)
        rise = ((along @ matrices[i - before]) * along).sum(dim=1)
        same = rise < SAME * (losses[i] + losses[kept])
        if apart is not None:
            same = same | ~apart[i, kept]
        if not same.any():
            kept.append(i)
    return [i - before for i in kept[before:]]
