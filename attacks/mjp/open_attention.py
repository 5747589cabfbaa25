"""Patches while a few others are wrong yet: every place alone, with open what all tokens' attention has in common.

Sweeps (`attacks.mjp.known_attention`) compute the attention of a token from all patches. A wrong one changes what every
token receives, by its weight there and far above the noise: no patch is certified, and steps lead away from right ones.
But what wrong patches change is much the same for all tokens: on DeiT-S at 224 pixels, with 4 to 8 of 196 patches
wrong, three directions hold 99 % of it. Tokens that were certified without attention (`Attended`) show which. With y_p
such a token, z_p(c_p) what its patch brings, and t_p the attention branch among the present patches,

    e_p = s_p y_p + m_p - z_p(c_p) - t_p,     s_p, m_p the scale and the constant that leave least of it.

The singular vectors E (r, D) of the e_p stay open at every place, beside its patch:

    minimise over c_p (k,), g_p (r,):   |outside_1([a, 1])|^2 + |outside_2([GELU(W_1 a + b_1), 1])|^2,
    a = norm2(z_p(c_p) + t_p + g_p E),

k + r unknowns, for far more equations. A patch is certified as a token is, by a residual at the noise of the message;
its expected error has g open as well. From the tokens found so, directions follow again, for the attention among the
better patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.mjp.attended_tokens import SETTLED, Attended, spread_of
from attacks.mjp.known_attention import PatchSweeps
from attacks.mjp.mlp_tokens import CLEAR, TokenFamily
from attacks.mjp.token_patches import PlacedPatches


@dataclass(frozen=True, kw_only=True)
class OpenAttention:
    """Steps of all patches with attention open along some directions.

    Attributes:
        rounds: attention is computed anew so often.
        directions: r, at most.
        steps: Levenberg-Marquardt steps of a round, at most.
        surest: share of the tokens certified without attention, those of least deviation, that give the first ones.
    """

    rounds: int = 2
    directions: int = 10
    steps: int = 12
    surest: float = 0.25

    def __call__(
        self, sweeps: PatchSweeps, c: Tensor, attended: Attended, scales: Tensor
    ) -> tuple[Tensor, PlacedPatches]:
        """Coefficients (N, k) from c (N, k) on, and the patches that are certified, sure or not as in `Attended`.

        Args:
            scales: (P,) what a normalised pixel is in units of [0, 1].
        """
        deviation = attended.placed.deviation[attended.places]
        sure = deviation.argsort()[: max(round(self.surest * len(deviation)), self.directions)]
        places, tokens = attended.places[sure], attended.tokens.y[sure]
        for _ in range(self.rounds):
            received = sweeps.attended(c)[sweeps.prefix :]
            errors = attention_errors(tokens, received[places])
            family = TokenFamily(sweeps.block, torch.cat([sweeps.family.directions, self._leading(errors)]))
            start = received + errors.mean(dim=0)
            optima = family.refine_consistent(start, self.steps)
            moved = c + ((optima.y - start) @ torch.linalg.pinv(family.directions))[:, : c.shape[1]]
            within = sweeps.within(moved)
            c, found = torch.where(within[:, None], moved, c), within & (optima.ratios < CLEAR)
            if not found.any():
                break
            places = found.nonzero()[:, 0]
            tokens = optima.y[places]
        pixels = F.pad(sweeps.known.basis * scales, (0, 0, 0, len(family.directions) - c.shape[1]))
        form = pixels @ pixels.T / len(scales)
        deviation = family.expected(optima, form).sqrt()
        deviation[deviation >= SETTLED * spread_of(sweeps, c) * float(form.trace().sqrt())] = torch.inf
        return c, PlacedPatches(sweeps.patches(c), deviation, found, optima.ratios)

    def _leading(self, errors: Tensor) -> Tensor:
        """Singular vectors (r, D) of errors (S, D), as long as a root mean square error is along them."""
        _, sizes, right = torch.linalg.svd(errors, full_matrices=False)
        return right[: self.directions] * sizes[: self.directions, None] / len(errors) ** 0.5


def attention_errors(tokens: Tensor, received: Tensor) -> Tensor:
    """What tokens (S, D), each known up to a factor and a constant, have beyond what was received (S, D)."""
    tokens, received = (one - one.mean(dim=1, keepdim=True) for one in (tokens, received))
    factor = (tokens * received).sum(dim=1, keepdim=True) / tokens.square().sum(dim=1, keepdim=True)
    return factor * tokens - received
