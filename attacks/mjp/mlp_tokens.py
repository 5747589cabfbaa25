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
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.mjp.mlp_spans import MLPBlock
from attacks.mjp.optima import FOUND, OWN, Optima
from attacks.mjp.token_duals import normalised

FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-9, 1e8
# A start that has gained less than GAIN of its squared residual in PATIENCE steps has converged.
GAIN, PATIENCE = 1e-2, 3
# Entries that are held together: of Gauss-Newton matrices in memory, of Jacobians in the processor's cache.
MATRIX_ENTRIES, JACOBIAN_ENTRIES = 16_000_000, 400_000
# The noise explains more of the residuals where a token's own gradient is small, so that the least residual is a biased
# answer: in flat areas it lies between tokens, at 2 to 6 times what the noise explains, while this ratio is 0.6 to 1.3
# at true tokens and at its own optimum. The ratio is minimised from WEIGHED on where the family holds the tokens up to
# the noise; elsewhere from a certified optimum on, and the result is kept where the ratio falls below CONSISTENT.
WEIGHED, CONSISTENT = 30.0, 1.3
# A patch alone is found where the ratio is below CLEAR: at right ones it is 0.9 to 1.5, at wrong ones from 2.3 on.
CLEAR = 2.5
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


def cone(block: MLPBlock) -> Tensor:
    """Y (N', D): what the second norm receives of each row of V, up to a factor and a constant."""
    norm, span = block.module.norm2, block.spans[0]
    inputs = span.directions[:, :-1] - span.directions[:, -1:] * norm.bias
    return inputs / norm.weight
