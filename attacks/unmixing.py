"""The whole image from one update with masked positions: visible patches exactly, masked ones one by one, then placed.

`attacks.hidden` leaves every patch known up to a subspace: x_p = rows_p + c_p B, c_p (k,) unknown, k at most the number
of masked patches M. `attacks.first_block` tests whether tokens are those that the client's first MLP saw. Together,

    minimise over C (N, k):  sum over tokens |residuals(z_i(C) + attention_i(C))|^2,

has 2 D + hidden - 2 N' equations a token for k unknowns and needs neither labels nor a backward pass of the model.

1. *Joint refinement.* Levenberg-Marquardt with conjugate gradients on Jacobian-vector products, preconditioned by each
   token's own Gauss-Newton block (attention held fixed), in coordinates in which the first layer's residual is
   isotropic, from the image prior of `mjp_subspace`. Visible patches converge in a few steps.
2. *Separation.* All masked positions share one embedding, so nothing says which masked token is which: each solves the
   same equations, and two may run into the same patch while another is missed. With the others' keys and values held
   fixed, many random starts are therefore run on their own; nearly every one ends in a true patch. Among the distinct
   ends, M that span most (pivoted QR) go back into step 1; the round with the least residual wins.
3. *Placement.* `attacks.placement`: the pieces into the holes by their borders.

It is gradient matching in the reduced space without second derivatives. The whole image stays below
40 dB where several masked patches are nearly uniform: few starts find them, and two that differ by less than the
round-off of the spans cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import scipy.linalg
import torch
from torch import Tensor, nn
from torch.func import jvp, vjp

from attacks.base import ATTACKS, Attack
from attacks.first_block import LAYERS, FirstBlock, read_first_block
from attacks.hidden import HiddenUpdate, read_update, tokenizer_and_rows, why_not
from attacks.mjp_subspace import VOUCHED_DEVIATION, settle
from attacks.natural_prior import VectorialVariation
from attacks.observation import Capability, Observation, Reconstruction
from attacks.placement import place
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# Ends of two starts are one patch when the squared residual rises by less than this share from one to the other.
SAME = 0.2
# Residuals in units of the first MLP layer's (normalised) inputs above which nothing is vouched for; true images have
# 5e-5 to 1.5e-3 in float32.
UNSETTLED = 5e-3
# An end is no patch when its squared residual exceeds that of the median end by this factor.
STRANDED = 20
CONJUGATE_STEPS, CONJUGATE_TOLERANCE = 25, 0.05
LONE_STEPS, LONE_PATIENCE, LONE_GAIN = 25, 3, 1e-3  # steps; of them without this relative gain before giving up
CHUNK = 64  # starts whose Jacobians are held in memory together


class Mixture:
    """The tokens as a function of the unknown coefficients, in whitened coordinates u = c W.

    Args:
        update: rows (N, P) and basis (k, P) of one update.
        block: the first block and the spans of its MLP.
    """

    def __init__(self, update: HiddenUpdate, block: FirstBlock) -> None:
        self.block, self.masked = block, update.clean.masked
        self.rows, self.basis = update.rows, update.basis
        self.base = block.tokens(update.rows, self.masked)  # (N', D)
        self.prefix = len(block.prefix)
        mixed = update.basis @ block.projection.T  # (k, D)
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
    """Levenberg-Marquardt on single masked tokens, in the context of the tokens at u (N, k).

    Args:
        starts: (S, k) whitened coordinates.

    Returns:
        Coordinates (S, k), sums of squared residuals (S,), and their Gauss-Newton matrices (S, k, k).
    """
    context, block = mixture.tokens(u), mixture.block
    base = mixture.base[mixture.prefix :][mixture.masked][:1]  # masked patches share rows and embedding, (1, D)

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
    """The `count` points (S, k) that span most, affinely: pivots of a QR decomposition of [points - mean, size]."""
    centred = points - points.mean(dim=0)
    size = centred.square().mean(dim=0).sum().sqrt().expand(len(points), 1)
    extended = torch.cat([centred, size], dim=1)
    pivots = scipy.linalg.qr(extended.T.cpu().numpy(), pivoting=True, mode="economic")[2][:count]
    return points[torch.as_tensor(pivots.copy(), device=points.device, dtype=torch.int64)]


@ATTACKS.register("unmix")
@dataclass(frozen=True, kw_only=True)
class Unmix(Attack):
    """Whole image from one update with masked positions and the first block's weights and gradients.

    Attributes:
        rounds: most rounds of joint refinement and separation.
        starts: random starts of a round, per masked patch.
        steps: Levenberg-Marquardt steps of a joint refinement.
        max_masked: most masked patches that are separated; with more only the joint refinement is run.
        seed: of the random starts.
    """

    rounds: int = 6
    starts: int = 10
    steps: int = 6
    max_masked: int = 64
    seed: int = 0

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """The layers of the first block whose spans are read."""
        wanted = [f"blocks.0.{layer}.weight" for layer in LAYERS]
        return tuple(name for name, _ in model.named_parameters() if name in wanted)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; visible patches that the residuals pin down are vouched for, masked ones never."""
        observation = observations[-1]
        tokenizer, rows = tokenizer_and_rows(observation)
        update = read_update(observation, tokenizer, rows)
        reasons = why_not(observation, update, tokenizer)
        masked = update.clean.masked
        if not reasons and len(update.basis):
            try:
                block = read_first_block(observation, tokenizer)
            except UsageError as error:
                reasons.append(str(error))
        if reasons:
            hidden = f"{int(masked.sum())} of {len(masked)} position rows are exactly zero"
            told = [hidden] if masked.any() and hidden not in "; ".join(reasons) else []
            return Reconstruction(images=None, diagnosis="; ".join([*told, *reasons]))

        diagnosis = ""
        patches, deviation, details = update.rows, update.rows.new_zeros(len(rows)), {"masked": int(masked.sum())}
        if len(update.basis):
            patches, deviation, details = self._unmix(update, block, tokenizer, observation)
            order = place(tokenizer, patches * _scales(observation, tokenizer), masked)
            patches = patches[order]
            if details["residual"] > UNSETTLED:
                deviation = torch.full_like(deviation, torch.inf)
                diagnosis = (
                    f"{int(masked.sum())} of {len(masked)} position rows are exactly zero, and no image was found "
                    f"whose tokens the first MLP's gradients admit (residual {details['residual']:.1e}, at most "
                    f"{UNSETTLED:.0e}): use mjp_subspace, or more rounds and starts"
                )
        images = observation.to_pixels(tokenizer.unpatchify(patches[None])).float()
        sure = (deviation < VOUCHED_DEVIATION) & ~masked  # (N,)
        known = tokenizer.unpatchify(sure[None, :, None].expand(-1, -1, tokenizer.patch_dim).float())[:, :1] > 0
        return Reconstruction(images, known, diagnosis=diagnosis, details=details)

    def _unmix(
        self, update: HiddenUpdate, block: FirstBlock, tokenizer: Tokenizer, observation: Observation
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Patches (N, P), masked ones in any order, expected deviations (N,) in [0, 1], and the search's numbers."""
        mixture, masked = Mixture(update, block), update.clean.masked
        generator = torch.Generator().manual_seed(self.seed)
        settled = settle(VectorialVariation(), update.estimate(), tokenizer, observation, ~masked)
        u = mixture.coordinates(settled.patches - update.rows)
        count, seen = int(masked.sum()), settled.patches[~masked]
        spread = update.spread[masked][0]  # (k,), in proportion; in size as the visible patches
        spread = spread * ((seen - seen.mean(dim=0)) @ update.basis.T).norm() / (len(seen) ** 0.5 * spread.norm())
        best, least, pool, stale = u, float("inf"), u[:0], 0
        for number in range(self.rounds):
            u, loss = refine(mixture, u, self.steps)
            stale = 0 if loss < 0.99 * least else stale + 1
            best, least = (u, loss) if loss < least else (best, least)
            done = stale == 2 or (stale == 1 and len(pool) >= count)
            if done or count > self.max_masked or number == self.rounds - 1:
                break
            fresh = _fresh(spread, self.starts * count, generator) @ mixture.whitening
            more = _from_ends(pool, self.starts * count // 2, generator)
            pool = distinct(*settle_alone(mixture, best, torch.cat([best[masked], pool, fresh, more])))
            chosen = most_spanning(pool, count)
            u = best.clone()
            u[masked] = torch.cat([chosen, best[masked][: count - len(chosen)]])
        deviation = expected_deviation(mixture, best, least, _scales(observation, tokenizer))
        details = {
            "masked": count,
            "rank": update.rank,
            "residual": least**0.5 / (len(mixture.base) * tokenizer.width) ** 0.5,
            "rounds": number + 1,
            "ends": len(pool),
        }
        return mixture.patches(best), deviation, details


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


def _scales(observation: Observation, tokenizer: Tokenizer) -> Tensor:
    """(P,): from normalised pixels to units of [0, 1]."""
    std = torch.tensor(observation.std, dtype=torch.float64)
    return std.repeat_interleave(tokenizer.patch_dim // len(std)).to(observation.gradients[tokenizer.weight].device)
