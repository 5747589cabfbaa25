"""Every token's input of the first MLP from the gradients of that MLP alone, one token at a time.

Write a_i for what token i brings to the first MLP (the second norm's output) and h_i = GELU(W_1 a_i + b_1). The rows of
[dL/dW_1, dL/db_1] span the [a_i, 1] of all N' tokens, those of [dL/dW_2, dL/db_2] the [h_i, 1]
(`attacks.mjp.mlp_spans`). With N' below the number of channels, a token is a point of the first span, and among these
points the tokens are those whose [h, 1] lies in the second:

    minimise over u (m,):   |outside_1([a, 1])|^2 + |outside_2([GELU(W_1 a + b_1), 1])|^2,     a = norm2(y_0 + u Y),

H + 1 - N' equations for m <= N' unknowns. Nothing couples a token to another: no attention, no labels, no positions. So
the search is the same for one masked patch and for all patches of an image, with or without positions, and an answer is
certified token by token, by a residual at the noise of the message. On trained small ViTs every random start converges
to a token (192 of 192 on each of three photographs). Near a token, the ratio of this sum to what the noise of the
message explains of it is minimised instead (total least squares: the spans themselves have errors).

Starts for tokens that are missing come from the duals of those found (`attacks.mjp.token_duals`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.mjp.mlp_spans import MLPBlock
from attacks.mjp.optima import FOUND, OWN, Optima, repeated
from attacks.mjp.token_duals import Removed, normalised, without

# Two optima as near as this, in lengths of a token, are one in any case: the noise cannot tell them apart.
NEAR = 1e-4
NEAR_ASIDE = 1e-2  # of a token that is known roughly, whose gradient dominates: others are far from it
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-9, 1e8
# A start that has gained less than GAIN of its squared residual in PATIENCE steps has converged.
GAIN, PATIENCE = 1e-2, 3
# Entries that are held together: of Gauss-Newton matrices in memory, of Jacobians in the processor's cache.
MATRIX_ENTRIES, JACOBIAN_ENTRIES = 16_000_000, 400_000
LEAST_STARTS = 12
# The noise explains more of the residuals where a token's own gradient is small, so that the least residual is a biased
# answer: in flat areas it lies between tokens, at 2 to 6 times what the noise explains, while this ratio is 0.6 to 1.3
# at true tokens and at its own optimum. The ratio is minimised from WEIGHED on where the family holds the tokens up to
# the noise; elsewhere from a certified optimum on, and the result is kept where the ratio falls below CONSISTENT.
WEIGHED, CONSISTENT = 30.0, 1.3
# A patch alone is found where the ratio is below CLEAR: at right ones it is 0.9 to 1.5, at wrong ones from 2.3 on.
CLEAR = 2.5
# A token whose gradient dominates the sums has a ratio of up to some hundreds; in what roughly known tokens leave,
# others have as much. Where there is no token it is higher.
ATTRACTS = 1e3
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

    def gradients(self, y: Tensor, ratios: Tensor) -> Tensor:
        """Half gradient (S, m) at y (S, D) along Y: of the squared residuals less ratios (S,) of the explained ones."""
        at, (outer_span, inner_span) = _Linearised(self, y), self.block.spans
        first = outer_span.outside(at.first, 1.0)[:, :-1] - ratios[:, None] * self._explained_gradient(0, at.first)
        second = inner_span.outside(at.hidden, 1.0)[:, :-1] - ratios[:, None] * self._explained_gradient(1, at.hidden)
        gradient = first @ self._moved.T - at.share * (first * at.bent).sum(dim=1, keepdim=True)
        pulled = at.slope * second  # (S, H)
        gradient = gradient + pulled @ self._before.T - at.share * (pulled * at.bent_before).sum(dim=1, keepdim=True)
        return gradient / at.scale

    def _explained_gradient(self, layer: int, inputs: Tensor) -> Tensor:
        """Half gradient (S, n) of what the noise explains, along the inputs (S, n) of a layer."""
        conditions = inputs.shape[1] + 1 - self.block.count
        return conditions * self.block.spans[layer].error_gradient(inputs) + OWN * inputs

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

    def refine(self, y: Tensor, steps: int) -> Optima:
        """Levenberg-Marquardt from each of the starts y (S, D) along Y, at most so many steps."""
        optima = self.refined(y, steps, below=0.0)
        return replace(optima, y=normalised(optima.y))

    def refine_weighed(self, y: Tensor, steps: int) -> Optima:
        """`refine` by the ratio, once it is near: for families that hold the tokens up to the noise."""
        optima = self.refined(y, steps, below=WEIGHED)
        return replace(optima, y=normalised(optima.y))

    def refine_consistent(self, y: Tensor, steps: int) -> Optima:
        """The least residual, or from there the least ratio where it is consistent; with y plus the steps taken."""
        optima = self.refined(y, steps, below=0.0)
        near = optima.found.nonzero()[:, 0]
        again = self.refined(optima.y[near], steps, below=torch.inf)
        kept = again.ratios < CONSISTENT
        return optima.replaced(near[kept], again[kept])

    def refined(self, y: Tensor, steps: int, *, below: float) -> Optima:
        """`refine` with y plus the steps taken: the ratio is minimised where it is `below`, elsewhere the residual."""
        parts = [self._refine_chunk(part, steps, below) for part in y.split(self._chunk())]
        return Optima(*(torch.cat([getattr(part, n) for part in parts]) for n in Optima.__dataclass_fields__))

    def _refine_chunk(self, y: Tensor, steps: int, below: float) -> Optima:
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
            ratios = before / explained[active]
            weighed = ratios < below
            gradient = self.gradients(at, torch.where(weighed, ratios, 0.0))
            step = -torch.cholesky_solve(gradient[..., None], root)[..., 0] @ self.directions
            left, noise = self.losses(at + step)
            reached = torch.where(weighed, left * explained[active] / noise, left)
            better, new = reached < before, fresh[active]
            y[active] = torch.where(better[:, None], at + step, at)
            losses[active] = torch.where(better, left, before)
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

    def __call__(self, block: MLPBlock, guess: Tensor) -> Optima:
        """The tokens that are found: at most N', or a few more where the noise splits one.

        Args:
            guess: (S, D) tokens at the second norm to start from, if any.
        """
        whole = TokenFamily(block, cone(block))
        optima = whole.refine(whole.nearest(guess), self.steps)
        tokens = distinct(whole, optima[[]], optima[optima.found])
        generator, removed, idle = self.generator(), Removed.of(block, tokens.y), 0
        for _ in range(self.rounds):
            if len(tokens) >= block.count or idle == self.patience:
                break
            count = max(self.starts * (block.count - len(tokens)), LEAST_STARTS)
            starts = without(block, whole.draw(count, generator), removed.y, removed.duals)
            if len(tokens):  # first among what the duals leave, which has fewer dimensions
                family = TokenFamily(block, removed.left() @ whole.directions)
                starts = distinct(family, tokens[[]], family.refine(starts, self.steps)).y
            optima = whole.refine(starts, POLISH if len(tokens) else self.steps)
            new = distinct(whole, tokens, optima[optima.found])
            idle = 0 if len(new) else idle + 1
            removed = removed.joined(Removed.of(block, new[: block.count - len(tokens)].y))
            tokens = tokens.joined(new)
        return tokens

    def beside(self, block: MLPBlock, known: Removed, aside: Tensor) -> Optima:
        """Tokens beside those that are known from a family with less freedom, of what the duals of these leave.

        Where most are known, few dimensions are left, and there the residuals single out tokens that hardly differ, to
        which nearly every start leads. Starts are also kept off the tokens found so far and off those `aside`; what
        these leave is known less well, so that tokens are certified in what the known ones leave.

        Args:
            aside: (n, D) tokens that are known too roughly to be removed (a class token, whose gradient dominates).
        """
        whole, removed, generator, idle = TokenFamily(block, cone(block)), known, self.generator(), 0
        tokens = Optima(known.y[:0], known.y[:0, 0], known.y[:0, 0])
        if len(known) + len(aside) >= block.count:
            return tokens
        family = TokenFamily(block, removed.left() @ whole.directions)
        aside = normalised(family.refine(normalised(aside), POLISH).y)
        beyond = Removed.of(block, aside)
        for number in range(self.rounds):
            missing = block.count - len(removed) - len(aside)
            if missing <= 0 or idle == self.patience:
                break
            every = removed.joined(beyond)
            rough = TokenFamily(block.thinned, (every if number % 2 else removed).left() @ whole.directions)
            draw = whole.draw(max(self.starts * missing, LEAST_STARTS), generator)
            starts = rough.refine(without(block, draw, every.y, every.duals), self.steps)
            starts = distinct(rough, tokens[[]], starts[starts.ratios < ATTRACTS])
            optima = family.refine_weighed(starts.y, POLISH)
            new = distinct(family, tokens, optima[_apart(optima, aside)])
            new = new if len(new) else starts[_apart(starts, aside)]  # the family holds less apart what hardly differs
            new, idle = new[:missing], 0 if len(new) else idle + 1
            tokens, removed = tokens.joined(new), removed.joined(Removed.of(block, new.y))
        return Optima(tokens.y, *whole.losses(tokens.y))


def _apart(optima: Optima, aside: Tensor) -> Tensor:
    """(S,) bool: tokens that are none of those aside (n, D)."""
    near = torch.cdist(optima.y, aside) < NEAR_ASIDE * aside.shape[1] ** 0.5
    return optima.found & ~near.any(dim=1)


def cone(block: MLPBlock) -> Tensor:
    """Y (N', D): what the second norm receives of each row of V, up to a factor and a constant."""
    norm, span = block.module.norm2, block.spans[0]
    inputs = span.directions[:, :-1] - span.directions[:, -1:] * norm.bias
    return inputs / norm.weight


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
