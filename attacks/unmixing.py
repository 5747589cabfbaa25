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

Which is what reduced-space gradient matching would do, without its second derivatives; independent component analysis
on filtered pixels was not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import scipy.linalg
import torch
from torch import Tensor
from torch.func import jvp, vjp

from attacks.base import ATTACKS, Attack
from attacks.first_block import FirstBlock, read_first_block
from attacks.hidden import HiddenUpdate, read_update
from attacks.mjp_subspace import VOUCHED_DEVIATION, tokenizer_and_rows, why_not
from attacks.natural_prior import VectorialVariation
from attacks.observation import Capability, Observation, Reconstruction
from attacks.placement import place
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# Ends of two starts are one patch when they differ by less than this share of the ends' spread.
SAME = 1e-3
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


def settle_alone(mixture: Mixture, u: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt on single masked tokens, in the context of the tokens at u (N, k).

    Args:
        starts: (S, k) whitened coordinates.

    Returns:
        Coordinates (S, k) and sums of squared residuals (S,).
    """
    context, block = mixture.tokens(u), mixture.block
    base = mixture.base[mixture.prefix :][mixture.masked][:1]  # masked patches share rows and embedding, (1, D)

    def attended(x: Tensor) -> Tensor:
        z = base + x @ mixture.directions
        return z + block.attend(z, context)

    ends, losses = zip(
        *(_settle_chunk(block, attended, mixture.directions, x) for x in starts.split(CHUNK)), strict=True
    )
    return torch.cat(ends), torch.cat(losses)


def _settle_chunk(
    block: FirstBlock, attended: Callable[[Tensor], Tensor], directions: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
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
    return x, loss


def distinct(ends: Tensor, losses: Tensor) -> Tensor:
    """Ends (S, k) without repetitions, the one of least residual for each."""
    order = losses.argsort()
    near = torch.cdist(ends[order], ends[order]) < SAME * float(ends.std(dim=0).norm())
    kept: list[int] = []
    for i in range(len(order)):
        if not near[i, kept].any():
            kept.append(i)
    return ends[order[kept]]


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

    rounds: int = 5
    starts: int = 10
    steps: int = 6
    max_masked: int = 64
    seed: int = 0

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; visible patches that the residuals pin down are vouched for, masked ones never."""
        observation = observations[-1]
        try:
            tokenizer, rows = tokenizer_and_rows(observation)
        except UsageError as error:
            return Reconstruction(images=None, diagnosis=str(error))
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

        patches, deviation, details = update.rows, update.rows.new_zeros(len(rows)), {"masked": int(masked.sum())}
        if len(update.basis):
            patches, deviation, details = self._unmix(update, block, tokenizer, observation)
            order = place(tokenizer, patches * _scales(observation, tokenizer), masked)
            patches = patches[order]
        images = observation.to_pixels(tokenizer.unpatchify(patches[None])).float()
        sure = (deviation < VOUCHED_DEVIATION) & ~masked  # (N,)
        known = tokenizer.unpatchify(sure[None, :, None].expand(-1, -1, tokenizer.patch_dim).float())[:, :1] > 0
        return Reconstruction(images, known, details=details)

    def _unmix(
        self, update: HiddenUpdate, block: FirstBlock, tokenizer: Tokenizer, observation: Observation
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Patches (N, P), masked ones in any order, expected deviations (N,) in [0, 1], and the search's numbers."""
        mixture, masked = Mixture(update, block), update.clean.masked
        generator = torch.Generator().manual_seed(self.seed)
        settled = VectorialVariation().settle(update.estimate(), tokenizer, observation.std)
        u = mixture.coordinates(settled.patches - update.rows)
        count = int(masked.sum())
        u[masked] = self._fresh(mixture, update, count, generator)
        best, least, pool = u, float("inf"), u[:0]
        for number in range(self.rounds):
            u, loss = refine(mixture, u, self.steps)
            gained = (least - loss) / loss
            best, least = (u, loss) if loss < least else (best, least)
            if count > self.max_masked or number == self.rounds - 1 or (number > 1 and gained < 0.01):
                break
            fresh = self._fresh(mixture, update, self.starts * count, generator)
            pool = distinct(*settle_alone(mixture, best, torch.cat([best[masked], pool, fresh])))
            chosen = most_spanning(pool, count)
            u = best.clone()
            u[masked] = torch.cat([chosen, best[masked][: count - len(chosen)]])
        variance = least / max(block_equations(mixture) - best.numel(), 1)
        inverse = torch.linalg.pinv(mixture.own_blocks(best), hermitian=True)
        painted = torch.linalg.solve_triangular(mixture.whitening, update.basis, upper=False)  # (k, P)
        painted = painted * _scales(observation, tokenizer)
        deviation = ((inverse * (painted @ painted.T)).sum(dim=(1, 2)) * variance / painted.shape[1]).sqrt()
        details = {
            "masked": count,
            "rank": update.rank,
            "residual": least**0.5,
            "rounds": number + 1,
            "ends": len(pool),
        }
        return mixture.patches(best), deviation, details

    def _fresh(self, mixture: Mixture, update: HiddenUpdate, count: int, generator: torch.Generator) -> Tensor:
        """Random coordinates of masked patches, (count, k): what `attacks.hidden` expects of them, 1 to 10 times."""
        spread = update.spread[update.clean.masked][:1]  # (1, k)
        normal = torch.randn(count, spread.shape[1], generator=generator, dtype=torch.float64).to(spread)
        size = 10 ** torch.rand(count, 1, generator=generator, dtype=torch.float64).to(spread)
        return (normal * size * spread) @ mixture.whitening


def block_equations(mixture: Mixture) -> int:
    """Equations of the residuals of all tokens."""
    first, second = mixture.block.spans
    tokens = len(mixture.base)
    return tokens * (first.shape[1] - len(first) + second.shape[1] - len(second))


def _scales(observation: Observation, tokenizer: Tokenizer) -> Tensor:
    """(P,): from normalised pixels to units of [0, 1]."""
    std = torch.tensor(observation.std, dtype=torch.float64)
    return std.repeat_interleave(tokenizer.patch_dim // len(std)).to(observation.gradients[tokenizer.weight].device)
