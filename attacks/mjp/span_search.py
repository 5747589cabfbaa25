"""Tokens as a function of a few unknown coefficients, and the search for those that the first MLP's gradients admit.

Some patches are known up to a subspace, x_p = rows_p + c_p B with c_p (k,) unknown, be it from one update
(`attacks.linear.masked_update`) or from what many updates leave open (`attacks.linear.normal_equations`).
`attacks.mjp.mlp_spans` tests whether tokens are those that the client's first MLP saw. Together,

    minimise over C (N, k):  sum over tokens |residuals(z_i(C) + attention_i(C))|^2,

has 2 D + hidden - 2 N' equations a token for k unknowns and needs neither labels nor a backward pass of the model.

1. *Joint refinement.* Levenberg-Marquardt with conjugate gradients on Jacobian-vector products, preconditioned by each
   token's own Gauss-Newton block (attention held fixed), in coordinates in which the first layer's residual is
   isotropic, from a guess such as the image prior's. Patches at places that some update shows converge in a few steps.
2. *Separation.* Patches that no update ever shows share one embedding and one row, so nothing says which is which: each
   solves the same equations, and two may run into the same patch while another is missed. With the others' keys and
   values held fixed, many random starts are therefore run on their own; nearly every one ends in a true patch. Among
   the distinct ends, as many as there are such patches go back into step 1, the surest that span most; the round
   with the least residual wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vjp

from attacks.mjp.mlp_spans import FirstBlock

# Ends of two starts are one patch when the squared residual rises by less than this share from one to the other.
SAME = 0.2
# An end is no patch when its squared residual exceeds that of the median end by this factor.
STRANDED = 20
# An end is a patch of its own where so much of it lies outside the affine span of the surer ones.
STICKING_OUT = 0.1
CONJUGATE_STEPS, CONJUGATE_TOLERANCE = 25, 0.05
LONE_STEPS, LONE_PATIENCE, LONE_GAIN = 25, 3, 1e-3  # steps; of them without this relative gain before giving up
CHUNK = 64  # starts whose Jacobians are held in memory together


@dataclass(frozen=True)
class Evidence:
    """What is known of the patches before the first block is asked.

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
class Found:
    """End of a search.

    Attributes:
        u: (N, k) whitened coordinates.
        loss: sum of squared residuals.
        residual: their rms, in units of the layers' inputs.
        rounds, ends: taken, and distinct ones found in the last.
    """

    u: Tensor
    loss: float
    residual: float
    rounds: int
    ends: int


class Mixture:
    """The tokens as a function of the unknown coefficients, in whitened coordinates u = c W.

    Args:
        block: the first block and the spans of its MLP.
    """

    def __init__(self, evidence: Evidence, block: FirstBlock) -> None:
        self.block, self.unseen = block, evidence.unseen
        self.rows, self.basis, self.spread = evidence.rows, evidence.basis, evidence.spread
        self.base = block.tokens(evidence.rows, evidence.masked)  # (N', D)
        self.prefix = len(block.prefix)
        mixed = evidence.basis @ block.projection.T  # (k, D)
        visible = (mixed - mixed.mean(dim=1, keepdim=True)) * block.module.norm2.weight
        visible = visible - (visible @ block.spans[0][:, :-1].T) @ block.spans[0][:, :-1]  # what the first layer tells
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


def refine(mixture: Mixture, u: Tensor, steps: int) -> tuple[Tensor, float]:
    """Levenberg-Marquardt on all coordinates u (N, k); returns them with the sum of squared residuals."""
    damping, residual = 1e-2, mixture.residuals(u)
    loss = float(residual.square().sum())
    for _ in range(steps):
        blocks = mixture.own_blocks(u)
        pull = vjp(mixture.residuals, u)[1]
        gradient = pull(residual)[0]
        while True:
            step = _damped_step(mixture, u, blocks, gradient, pull, damping)
            moved = mixture.residuals(u + step)
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


def _damped_step(mixture: Mixture, u: Tensor, blocks: Tensor, gradient: Tensor, pull, damping: float) -> Tensor:
    """Preconditioned conjugate gradients on (J^T J + damping diag) step = -gradient."""
    diagonal = damping * blocks.diagonal(dim1=1, dim2=2) + 1e-12
    factors = torch.linalg.cholesky(blocks + torch.diag_embed(diagonal))

    def precondition(x: Tensor) -> Tensor:
        return torch.cholesky_solve(x[..., None], factors)[..., 0]

    step, rest = torch.zeros_like(u), -gradient
    direction = solved = precondition(rest)
    product = start = (rest * solved).sum()
    for _ in range(CONJUGATE_STEPS):
        image = pull(jvp(mixture.residuals, (u,), (direction,))[1])[0] + diagonal * direction
        length = product / (direction * image).sum()
        step, rest = step + length * direction, rest - length * image
        solved = precondition(rest)
        previous, product = product, (rest * solved).sum()
        if product < CONJUGATE_TOLERANCE**2 * start:
            break
        direction = solved + product / previous * direction
    return step


def settle_alone(mixture: Mixture, u: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levenberg-Marquardt on single unseen tokens, in the context of the tokens at u (N, k).

    Args:
        starts: (S, k) whitened coordinates.

    Returns:
        Coordinates (S, k), sums of squared residuals (S,), and their Gauss-Newton matrices (S, k, k).
    """
    context, block = mixture.tokens(u), mixture.block
    base = mixture.base[mixture.prefix :][mixture.unseen][:1]  # unseen patches share rows and embedding, (1, D)

    def attended(x: Tensor) -> Tensor:
        z = base + x @ mixture.directions
        return z + block.attend(z, context)

    chunks = [_settle_chunk(block, attended, mixture.directions, x) for x in starts.split(CHUNK)]
    ends, losses, matrices = zip(*chunks, strict=True)
    return torch.cat(ends), torch.cat(losses), torch.cat(matrices)


def _settle_chunk(
    block: FirstBlock, attended: Callable[[Tensor], Tensor], directions: Tensor, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    loss = block.residuals(attended(x)).square().sum(dim=1)
    damping, idle = torch.full_like(loss, 1e-2), 0
    for _ in range(LONE_STEPS):
        matrix, gradient = block.curvature(attended(x), directions)
        diagonal = damping[:, None] * matrix.diagonal(dim1=1, dim2=2) + 1e-14
        step = -torch.linalg.solve(matrix + torch.diag_embed(diagonal), gradient)
        reached = block.residuals(attended(x + step)).square().sum(dim=1)
        better, gaining = reached < loss, reached < (1 - LONE_GAIN) * loss
        x = torch.where(better[:, None], x + step, x)
        loss = torch.where(better, reached, loss)
        damping = torch.where(better, damping / 4, damping * 6).clamp(1e-9, 1e6)
        idle = 0 if gaining.any() else idle + 1
        if idle == LONE_PATIENCE:
            break
    return x, loss, block.curvature(attended(x), directions)[0]


def distinct(ends: Tensor, losses: Tensor, matrices: Tensor) -> Tensor:
    """Ends (S, k) without repetitions and without those that stopped short, the one of least residual for each.

    Two ends are one patch if the residual's quadratic model at one of them hardly rises towards the other.
    """
    kept: list[int] = []
    for i in losses.argsort().tolist():
        if losses[i] > STRANDED * losses.median():
            break
        apart = ends[i] - ends[kept]  # (n, k)
        rise = (apart[:, None] @ matrices[kept] @ apart[..., None]).flatten()
        if (rise >= SAME * (losses[i] + losses[kept])).all():
            kept.append(i)
    return ends[kept]


def most_spanning(points: Tensor, count: int) -> Tensor:
    """At most `count` of the points (S, k), the surest first, that span most, affinely.

    Flat valleys (trained weights have them) leave several ends on the way to one patch. Points are therefore taken in
    their order as long as they stick out of the affine span of those taken; if these are too few, the ones that stick
    out most fill up.

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
        sticking = (share > STICKING_OUT).nonzero()
        chosen = int(sticking[0]) if len(sticking) else int(share.argmax())
        taken.append(chosen)
        unit = left[chosen] / left[chosen].norm().clamp(min=torch.finfo(left.dtype).tiny)
        left = left - (left @ unit)[:, None] * unit
    return points[taken]


@dataclass(frozen=True, kw_only=True)
class Search:
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

    def __call__(self, mixture: Mixture, u: Tensor) -> Found:
        """Search from u (N, k) on."""
        generator = torch.Generator().manual_seed(self.seed)
        unseen, spread = mixture.unseen, _spread(mixture, u)
        count = int(unseen.sum())
        best, least, pool, stale = u, float("inf"), u[:0], 0
        for number in range(self.rounds):
            u, loss = refine(mixture, u, self.steps)
            stale = 0 if loss < 0.99 * least else stale + 1
            best, least = (u, loss) if loss < least else (best, least)
            done = stale == 2 or (stale == 1 and len(pool) >= count)
            if done or not 0 < count <= self.max_unseen or number == self.rounds - 1:
                break
            fresh = _fresh(spread, self.starts * count, generator) @ mixture.whitening
            more = _from_ends(pool, self.starts * count // 2, generator)
            pool = distinct(*settle_alone(mixture, best, torch.cat([best[unseen], pool, fresh, more])))
            chosen = most_spanning(pool, count)
            u = best.clone()
            u[unseen] = torch.cat([chosen, best[unseen][: count - len(chosen)]])
        residual = least**0.5 / mixture.base.numel() ** 0.5
        return Found(best, least, residual, number + 1, len(pool))


def _spread(mixture: Mixture, u: Tensor) -> Tensor:
    """Deviations (k,) of an unseen patch's coefficients: the seen patches' size, in the given proportions or theirs."""
    seen = mixture.patches(u)[~mixture.unseen]
    own = ((seen - seen.mean(dim=0)) @ mixture.basis.T).square().mean(dim=0).sqrt()  # (k,)
    return own if mixture.spread is None else mixture.spread * own.norm() / mixture.spread.norm()


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


def _from_ends(ends: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Starts (count, k) from the ends found so far: a + b - c of three of them, every other one also pushed out of
    their affine span. None from fewer than two ends."""
    if len(ends) < 2:
        return ends[:0]
    a, b, c = ends[torch.randint(len(ends), (3, count), generator=generator).to(ends.device)]
    centred = ends - ends.mean(dim=0)
    free = torch.linalg.svd(centred, full_matrices=True).Vh[len(ends) - 1 :]  # (k - r, k), r the ends' affine rank
    size = centred.norm(dim=1).median() * 10 ** (1.5 * torch.rand(count, 1, generator=generator) - 1).to(ends)
    size[::2] = 0
    away = torch.randn(count, len(free), generator=generator, dtype=torch.float64).to(ends)
    return a + b - c + (away * size) @ free


def expected_deviation(mixture: Mixture, u: Tensor, loss: float, scales: Tensor) -> Tensor:
    """Rms error of a patch's pixels, (N,), if the residuals left over are independent noise.

    Args:
        loss: sum of squared residuals at u (N, k).
        scales: (P,) standard deviation of each normalised pixel, in [0, 1].
    """
    equations = len(mixture.base) * sum(span.shape[1] - len(span) for span in mixture.block.spans)
    variance = loss / max(equations - u.numel(), 1)
    inverse = torch.linalg.pinv(mixture.own_blocks(u), hermitian=True)  # (N, k, k)
    pixels = torch.linalg.solve_triangular(mixture.whitening, mixture.basis, upper=False) * scales  # (k, P)
    return ((inverse * (pixels @ pixels.T)).sum(dim=(1, 2)) * variance / pixels.shape[1]).sqrt()
