"""Search for tokens that lie in the spans of the first MLP's gradients, over a few unknown coefficients for each patch.

Some patches are known up to a subspace, x_p = rows_p + c_p B with c_p (k,) unknown, from one update
(`attacks.linear.masked_update`) or from several (`attacks.linear.normal_equations`). `attacks.mjp.mlp_spans` measures
how far tokens are from those that the client's first MLP received. Together,

    minimise over C (N, k):  sum over tokens |residuals(z_i(C) + attention_i(C))|^2,

has 2 D + hidden - 2 N' equations a token for k unknowns and needs neither labels nor a backward pass of the model.

1. *Joint refinement.* Levenberg-Marquardt with conjugate gradients on Jacobian-vector products, preconditioned by each
   token's own Gauss-Newton block (attention held fixed), in coordinates in which the first layer's residual is
   isotropic, from a guess such as the image prior's. Patches at places that some update shows converge in a few steps.
2. *Separation.* Patches that no update shows share one embedding and one row, so the equations do not assign them to
   places: each solves the same equations, and two may converge to the same patch while another is missed. With the
   others' keys and values held fixed, many random starts are therefore refined independently; nearly every one
   converges to a true patch. Among the distinct local optima, as many as there are such patches go back into step 1,
   the ones of least residual that span most; the round with the least residual is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vjp

from attacks.mjp.mlp_spans import FirstBlock

# Two local optima are one patch when the squared residual rises by less than this share from one to the other.
SAME = 0.2
# A start has not converged to a patch when its squared residual exceeds the median one by this factor.
NON_CONVERGED = 20
# A local optimum is a patch of its own where this share of it lies outside the affine span of those of less residual.
OUTSIDE_SPAN = 0.1
CONJUGATE_STEPS, CONJUGATE_TOLERANCE = 25, 0.05
SINGLE_STEPS, SINGLE_PATIENCE, SINGLE_GAIN = 25, 3, 1e-3  # steps; of them without this relative gain before giving up
CHUNK = 64  # starts whose Jacobians are held in memory together


@dataclass(frozen=True)
class KnownPatches:
    """What linear equations give of the patches, before the search.

    Attributes:
        rows: (N, P) float64 normalised pixels; the unseen patches' rows are alike.
        basis: B, (k, P) orthonormal, the directions left unknown.
        masked: (N,) bool, places whose tokens bear the shared embedding in the update whose gradients are read.
        unseen: (N,) bool, places that no update shows: any of the unseen patches may be there.
        spread: (k,) deviation of an unseen patch along the basis, in proportion; None: as the seen patches'.
    """

    rows: Tensor
    basis: Tensor
    masked: Tensor
    unseen: Tensor
    spread: Tensor | None = None


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        u: (N, k) whitened coordinates.
        loss: sum of squared residuals.
        residual: their rms, in units of the layers' inputs.
        rounds: taken.
        local_optima: distinct ones found in the last round.
    """

    u: Tensor
    loss: float
    residual: float
    rounds: int
    local_optima: int


class UnknownTokens:
    """The tokens as a function of the unknown coefficients, in whitened coordinates u = c W.

    Args:
        block: the first block and the spans of its MLP.
    """

    def __init__(self, known: KnownPatches, block: FirstBlock) -> None:
        self.block, self.unseen = block, known.unseen
        self.rows, self.basis, self.spread = known.rows, known.basis, known.spread
        self.base = block.tokens(known.rows, known.masked)  # (N', D)
        self.prefix = len(block.prefix)
        mixed = known.basis @ block.projection.T  # (k, D)
        visible = (mixed - mixed.mean(dim=1, keepdim=True)) * block.module.norm2.weight
        visible = visible - (visible @ block.spans[0][:, :-1].T) @ block.spans[0][:, :-1]  # what the first layer shows
        self.whitening = torch.linalg.qr(visible.T).R.T  # W, (k, k)
        self.directions = torch.linalg.solve_triangular(self.whitening, mixed, upper=False)  # (k, D)

    def coordinates(self, patches: Tensor) -> Tensor:
        """u, (S, k), of the differences of patches (S, P) from their rows."""
        return (patches @ self.basis.T) @ self.whitening

    def patches(self, u: Tensor) -> Tensor:
        """(N, P)."""
        c = torch.linalg.solve_triangular(self.whitening.T, u.T, upper=True).T
        return self.rows + c @ self.basis

    def tokens(self, u: Tensor) -> Tensor:
        """(N', D)."""
        return torch.cat([self.base[: self.prefix], self.base[self.prefix :] + u @ self.directions])

    def residuals(self, u: Tensor) -> Tensor:
        """Of all tokens, (N', D + hidden + 2)."""
        z = self.tokens(u)
        return self.block.residuals(z + self.block.attend(z, z))

    def own_blocks(self, u: Tensor) -> Tensor:
        """Gauss-Newton matrices (N, k, k) of each patch's own coordinates with the attention held fixed."""
        z = self.tokens(u)
        attended = (z + self.block.attend(z, z))[self.prefix :]
        return torch.cat([self.block.curvature(part, self.directions)[0] for part in attended.split(CHUNK)])


def refine(unknown: UnknownTokens, u: Tensor, steps: int) -> tuple[Tensor, float]:
    """Levenberg-Marquardt on all coordinates u (N, k); returns them with the sum of squared residuals."""
    damping, residual = 1e-2, unknown.residuals(u)
    loss = float(residual.square().sum())
    for _ in range(steps):
        blocks = unknown.own_blocks(u)
        pull = vjp(unknown.residuals, u)[1]
        gradient = pull(residual)[0]
        while True:
            step = _damped_step(unknown, u, blocks, gradient, pull, damping)
            moved = unknown.residuals(u + step)
            reached = float(moved.square().sum())
            if reached < loss:
                break
            damping *= 8
            if damping > 1e6:
                return u, loss
        gained = (loss - reached) / loss
        u, residual, loss, damping = u + step, moved, reached, max(damping / 5, 1e-9)
        if gained < 1e-3:
            break
    return u, loss


def _damped_step(unknown: UnknownTokens, u: Tensor, blocks: Tensor, gradient: Tensor, pull, damping: float) -> Tensor:
    """Preconditioned conjugate gradients on (J^T J + damping diag) step = -gradient."""
    diagonal = damping * blocks.diagonal(dim1=1, dim2=2) + 1e-12
    factors = torch.linalg.cholesky(blocks + torch.diag_embed(diagonal))

    def precondition(x: Tensor) -> Tensor:
        return torch.cholesky_solve(x[..., None], factors)[..., 0]

    step, rest = torch.zeros_like(u), -gradient
    direction = solved = precondition(rest)
    product = start = (rest * solved).sum()
    for _ in range(CONJUGATE_STEPS):
        image = pull(jvp(unknown.residuals, (u,), (direction,))[1])[0] + diagonal * direction
        length = product / (direction * image).sum()
        step, rest = step + length * direction, rest - length * image
        solved = precondition(rest)
        previous, product = product, (rest * solved).sum()
        if product < CONJUGATE_TOLERANCE**2 * start:
            break
        direction = solved + product / previous * direction
    return step


def refine_each(unknown: UnknownTokens, u: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levenberg-Marquardt on single unseen tokens, in the context of the tokens at u (N, k).

    Args:
        starts: (S, k) whitened coordinates.

    Returns:
        Coordinates (S, k), sums of squared residuals (S,), and their Gauss-Newton matrices (S, k, k).
    """
    context, block = unknown.tokens(u), unknown.block
    base = unknown.base[unknown.prefix :][unknown.unseen][:1]  # unseen patches share rows and embedding, (1, D)

    def attended(x: Tensor) -> Tensor:
        z = base + x @ unknown.directions
        return z + block.attend(z, context)

    chunks = [_refine_chunk(block, attended, unknown.directions, x) for x in starts.split(CHUNK)]
    optima, losses, matrices = zip(*chunks, strict=True)
    return torch.cat(optima), torch.cat(losses), torch.cat(matrices)


def _refine_chunk(
    block: FirstBlock, attended: Callable[[Tensor], Tensor], directions: Tensor, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    loss = block.residuals(attended(x)).square().sum(dim=1)
    damping, idle = torch.full_like(loss, 1e-2), 0
    for _ in range(SINGLE_STEPS):
        matrix, gradient = block.curvature(attended(x), directions)
        diagonal = damping[:, None] * matrix.diagonal(dim1=1, dim2=2) + 1e-14
        step = -torch.linalg.solve(matrix + torch.diag_embed(diagonal), gradient)
        reached = block.residuals(attended(x + step)).square().sum(dim=1)
        better, gaining = reached < loss, reached < (1 - SINGLE_GAIN) * loss
        x = torch.where(better[:, None], x + step, x)
        loss = torch.where(better, reached, loss)
        damping = torch.where(better, damping / 4, damping * 6).clamp(1e-9, 1e6)
        idle = 0 if gaining.any() else idle + 1
        if idle == SINGLE_PATIENCE:
            break
    return x, loss, block.curvature(attended(x), directions)[0]


def distinct_optima(optima: Tensor, losses: Tensor, matrices: Tensor) -> Tensor:
    """Local optima (S, k) without repetitions and without starts that did not converge, the best one of each.

    Two of them are one patch if the residual's quadratic model at one of them hardly rises towards the other.
    """
    kept: list[int] = []
    for i in losses.argsort().tolist():
        if losses[i] > NON_CONVERGED * losses.median():
            break
        apart = optima[i] - optima[kept]  # (n, k)
        rise = (apart[:, None] @ matrices[kept] @ apart[..., None]).flatten()
        if (rise >= SAME * (losses[i] + losses[kept])).all():
            kept.append(i)
    return optima[kept]


def most_spanning(points: Tensor, count: int) -> Tensor:
    """At most `count` of the points (S, k), ordered by their residuals, that span most, affinely.

    Flat valleys (trained weights have them) leave several optima on the way to one patch. Points are therefore taken in
    their order as long as they stick out of the affine span of those taken; if these are too few, those farthest
    outside are added.

    Args:
        points: in ascending order of their residuals.
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
        taken.append(chosen)
        unit = left[chosen] / left[chosen].norm().clamp(min=torch.finfo(left.dtype).tiny)
        left = left - (left @ unit)[:, None] * unit
    return points[taken]


@dataclass(frozen=True, kw_only=True)
class SpanSearch:
    """Rounds of joint refinement and separation.

    Attributes:
        rounds: most of them.
        starts: random starts of a round, per unseen patch.
        steps: Levenberg-Marquardt steps of a joint refinement.
        max_unseen: most unseen patches that are separated; with more only the joint refinement is run.
        seed: of the random starts.
    """

    rounds: int = 6
    starts: int = 10
    steps: int = 6
    max_unseen: int = 96
    seed: int = 0

    def __call__(self, unknown: UnknownTokens, u: Tensor) -> SearchResult:
        """Search from u (N, k) on."""
        generator = torch.Generator().manual_seed(self.seed)
        unseen, spread = unknown.unseen, _spread(unknown, u)
        count = int(unseen.sum())
        best, least, pool, stale = u, float("inf"), u[:0], 0
        for number in range(self.rounds):
            u, loss = refine(unknown, u, self.steps)
            stale = 0 if loss < 0.99 * least else stale + 1
            best, least = (u, loss) if loss < least else (best, least)
            done = stale == 2 or (stale == 1 and len(pool) >= count)
            if done or not 0 < count <= self.max_unseen or number == self.rounds - 1:
                break
            fresh = _fresh(spread, self.starts * count, generator) @ unknown.whitening
            more = _from_optima(pool, self.starts * count // 2, generator)
            pool = distinct_optima(*refine_each(unknown, best, torch.cat([best[unseen], pool, fresh, more])))
            chosen = most_spanning(pool, count)
            u = best.clone()
            u[unseen] = torch.cat([chosen, best[unseen][: count - len(chosen)]])
        residual = least**0.5 / unknown.base.numel() ** 0.5
        return SearchResult(best, least, residual, number + 1, len(pool))


def _spread(unknown: UnknownTokens, u: Tensor) -> Tensor:
    """Deviations (k,) of an unseen patch's coefficients: the seen patches' size, in the given proportions or theirs."""
    seen = unknown.patches(u)[~unknown.unseen]
    own = ((seen - seen.mean(dim=0)) @ unknown.basis.T).square().mean(dim=0).sqrt()  # (k,)
    return own if unknown.spread is None else unknown.spread * own.norm() / unknown.spread.norm()


def _fresh(spread: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random coefficients of masked patches, (count, k).

    Masked patches exceed the spread (k,) that their update suggests in the trailing directions, by up to ten times:
    half of the starts draw a factor for each direction, half draw few directions and one factor.
    """

    def uniform(columns: int) -> Tensor:
        return torch.rand(count, columns, generator=generator, dtype=torch.float64).to(spread)

    normal = torch.randn(count, len(spread), generator=generator, dtype=torch.float64).to(spread)
    each = 10 ** (2 * uniform(len(spread)) - 1)
    few = (uniform(len(spread)) < 0.3) * 10 ** (0.4 + uniform(1))
    alternate = torch.arange(count, device=spread.device)[:, None] % 2 == 0
    return normal * torch.where(alternate, each, few) * spread


def _from_optima(optima: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Starts (count, k) from the optima found so far: a + b - c of three of them, every other one also pushed out of
    their affine span. None from fewer than two optima."""
    if len(optima) < 2:
        return optima[:0]
    a, b, c = optima[torch.randint(len(optima), (3, count), generator=generator).to(optima.device)]
    centred = optima - optima.mean(dim=0)
    free = torch.linalg.svd(centred, full_matrices=True).Vh[len(optima) - 1 :]  # (k - r, k), r the optima' affine rank
    size = centred.norm(dim=1).median() * 10 ** (1.5 * torch.rand(count, 1, generator=generator) - 1).to(optima)
    size[::2] = 0
    away = torch.randn(count, len(free), generator=generator, dtype=torch.float64).to(optima)
    return a + b - c + (away * size) @ free


def expected_deviation(unknown: UnknownTokens, u: Tensor, loss: float, scales: Tensor) -> Tensor:
    """Rms error of a patch's pixels, (N,), if the residuals left over are independent noise.

    Args:
        loss: sum of squared residuals at u (N, k).
        scales: (P,) standard deviation of each normalised pixel, in [0, 1].
    """
    equations = len(unknown.base) * sum(span.shape[1] - len(span) for span in unknown.block.spans)
    variance = loss / max(equations - u.numel(), 1)
    inverse = torch.linalg.pinv(unknown.own_blocks(u), hermitian=True)  # (N, k, k)
    pixels = torch.linalg.solve_triangular(unknown.whitening, unknown.basis, upper=False) * scales  # (k, P)
    return ((inverse * (pixels @ pixels.T)).sum(dim=(1, 2)) * variance / pixels.shape[1]).sqrt()
