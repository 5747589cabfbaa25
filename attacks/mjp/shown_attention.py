"""Patches that are missing, from what they bring to the attention of the tokens that were found.

Every token receives its attention from all patches, missing ones among them. Tokens y_p that are certified without
attention (`attacks.mjp.attended_tokens`) show what they received. With M the missing places, all other patches held
where they are, z_p the token of place p and t_p(c_M) its attention branch,

    minimise over c_M (m, k):   sum_p |s_p y_p + m_p - z_p - t_p(c_M)|^2 + v |c_M - start|^2 / spread^2,

s_p and m_p the scale and the constant that leave least of it (`attacks.mjp.open_attention`), v the mean square of what
is left at present, so that the prior fades as the fit improves; the start is what stood there, or the mean of the seen
patches where that lies outside the range of pixels. Attention is a sum of values with weights that hardly
differ: D equations for one patch of k < D unknowns, many times over. Of several patches they tell the sum best, and the
patches apart only as far as weights and norms differ. The sum is what all other tokens need: with it their attention
is right, sweeps certify them, and find the missing ones one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.functional import jvp

from attacks.mjp.attended_tokens import Attended, spread_of
from attacks.mjp.known_attention import PatchSweeps
from attacks.mjp.mlp_spans import FirstBlock
from attacks.mjp.open_attention import attention_errors

# Damping in units of the mean diagonal: at first, its factors after a step that fails and one that succeeds, and how
# many may fail in a row.
DAMPING, HARDER, EASIER, FAILURES = 1e-2, 4.0, 0.2, 8
# A step that lowers the cost by less than this share ends the search, unless it was damped by more than that.
GAIN, UNDAMPED = 0.01, 1e-4


@dataclass(frozen=True, kw_only=True)
class ShownAttention:
    """Levenberg-Marquardt steps of all missing patches together.

    Attributes:
        steps: at most.
        tokens: of those certified without attention, so many of least deviation show what they received.
        unknowns: m k, at most; where more patches are missing, some are taken for alike.
    """

    steps: int = 16
    tokens: int = 32
    unknowns: int = 400

    def __call__(self, sweeps: PatchSweeps, c: Tensor, attended: Attended, missing: Tensor) -> Tensor:
        """Coefficients (N, k), of which those of the missing places (N,) bool are solved for, the others those of c."""
        sure = attended.placed.deviation[attended.places].argsort()[: self.tokens]
        gone, context = torch.cat([missing.new_zeros(sweeps.prefix), missing]), sweeps.tokens(c)
        own = context[sweeps.prefix :][attended.places[sure]]
        shown = Shown(sweeps.block, attended.tokens.y[sure], own, context[~gone])
        typical = c[~sweeps.known.unseen].mean(dim=0)
        start = torch.where(sweeps.within(c)[missing, None], c[missing], typical)
        base, directions, k = sweeps.base[gone] + start @ sweeps.family.directions, sweeps.family.directions, c.shape[1]
        alike = torch.arange(len(base), device=c.device) % max(self.unknowns // k, 1)

        def errors(x: Tensor) -> Tensor:
            """Where the groups of alike places moved by x (g k,)."""
            return shown.errors(base + x.reshape(-1, k)[alike] @ directions)

        def slopes(x: Tensor) -> Tensor:
            """Derivatives of these errors by x (g k,)."""
            return shown.slopes(base + x.reshape(-1, k)[alike] @ directions, directions, alike)

        moved = self._minimum(errors, slopes, start.new_zeros(k * (int(alike.max()) + 1)), spread_of(sweeps, c))
        return c.index_put((missing,), start + moved.reshape(-1, k)[alike])

    def _minimum(
        self, errors: Callable[[Tensor], Tensor], slopes: Callable[[Tensor], Tensor], x: Tensor, spread: float
    ) -> Tensor:
        """Where the errors (e,) of x (n,), zeros at first, and its length are least; slopes are (e, n)."""
        left, damping, one = errors(x), DAMPING, torch.eye(len(x)).to(x)
        for _ in range(self.steps):
            jacobian, weight = slopes(x), float(left.square().mean()) / spread**2
            matrix, slope = jacobian.T @ jacobian + weight * one, jacobian.T @ left + weight * x
            before, scale = float(left.square().sum() + weight * x.square().sum()), matrix.diagonal().mean()
            for _ in range(FAILURES):
                moved = x - torch.linalg.solve(matrix + damping * scale * one, slope)
                found = errors(moved)
                after = float(found.square().sum() + weight * moved.square().sum())
                if after < before:
                    break
                damping *= HARDER
            else:
                break
            x, left = moved, found
            if after > (1 - GAIN) * before and damping < UNDAMPED:
                break
            damping *= EASIER
        return x


class Shown:
    """What tokens received from attention, as they show it, beside what they receive from given patches.

    Args:
        block: the first block.
        tokens: (S, D) at the second norm, each up to a factor and a constant.
        own: (S, D) theirs at the first block.
        context: (n, D) the tokens at the first block that stay.
    """

    def __init__(self, block: FirstBlock, tokens: Tensor, own: Tensor, context: Tensor) -> None:
        self.block, self.tokens, self.own = block, tokens, own
        self.query, (_, key, value) = block.heads(own)[0], block.heads(context)
        scores = self.query @ key.mT
        self.top = scores.amax(dim=-1, keepdim=True)
        weights = (scores - self.top).exp()  # (heads, S, n)
        self.sums, self.total = weights @ value, weights.sum(dim=-1, keepdim=True)

    def received(self, further: Tensor) -> Tensor:
        """The attention branch (S, D), with further tokens (m, D) at the first block beside the context."""
        mixed = self._mixed(*self.block.heads(further)[1:])[0]
        return self.block.attention_branch(mixed.transpose(0, 1).flatten(1)) + self.block.attention_bias

    def errors(self, further: Tensor) -> Tensor:
        """`attention_errors` (S D,) with further tokens (m, D)."""
        return attention_errors(self.tokens, self.own + self.received(further)).flatten()

    def slopes(self, further: Tensor, directions: Tensor, alike: Tensor) -> Tensor:
        """Derivatives (S D, g k) of the errors where all tokens of a group move along directions (k, D).

        Args:
            alike: (m,) group of each token.
        """
        m, k = len(further), len(directions)
        points, along = further.repeat_interleave(k, dim=0), directions.repeat(m, 1)
        (_, key, value), (_, moved_key, moved_value) = jvp(self.block.heads, (points,), (along,))
        key, value = key[:, ::k], value[:, ::k]  # (heads, m, d)
        mixed, shares = self._mixed(key, value)
        scores = (self.query @ moved_key.mT).unflatten(-1, (m, k))  # (heads, S, m, k)
        apart = value[:, None] - mixed[:, :, None]  # (heads, S, m, d)
        moved = moved_value.unflatten(1, (m, k))[:, None] + scores[..., None] * apart[:, :, :, None]
        moved = shares[..., None, None] * moved  # (heads, S, m, k, d)
        groups = moved.new_zeros(*moved.shape[:2], int(alike.max()) + 1, *moved.shape[3:]).index_add(2, alike, moved)
        branch = self.block.attention_branch(groups.flatten(2, 3).permute(1, 2, 0, 3).flatten(2))  # (S, g k, D)
        branch = branch - branch.mean(dim=-1, keepdim=True)
        tokens = self.tokens - self.tokens.mean(dim=1, keepdim=True)
        unit = (tokens / tokens.norm(dim=1, keepdim=True))[:, None]
        return ((branch * unit).sum(dim=-1, keepdim=True) * unit - branch).transpose(1, 2).flatten(0, 1)

    def _mixed(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the output projection receives (heads, S, d), and the weights (heads, S, m) of further tokens."""
        weights = (self.query @ key.mT - self.top).exp()
        total = self.total + weights.sum(dim=-1, keepdim=True)
        return (self.sums + weights @ value) / total, weights / total
