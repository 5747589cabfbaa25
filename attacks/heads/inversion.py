"""The image whose tokens give a dense head the gradient that was sent.

    minimise over x:    |dL/d[W, b](x) - sent|^2 / |sent|^2,

with dL/d[W, b] = sum_i d_i [h_i(x), 1]^T computed in a forward pass: what the loss is at the head's outputs is known,
so no gradient of the network is asked for, as it is in gradient matching. The patches are x_i = x_0 + c_i B within the
affine span that the gradient of the patch projection gives (`attacks.mjp.token_patches.known_span`), leaving (N - 1) N
unknowns of N P; the head's gradient has K (D + 1) entries. L-BFGS (`attacks.lbfgs`) in float64.

Near the image the difference is multiplied from the left by pinv(d^T), d as it is there: what is matched are features.

*Context.* Where only some tokens give keys and values, log-weights of all tokens as keys are searched beside the
patches, which brings the image near enough to ask each token (`attacks.heads.context`). The search goes on with the
tokens that pass; where that is no better than it was, it goes back to log-weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from attacks.heads.context import Context
from attacks.heads.encoder import Encoder
from attacks.lbfgs import descend
from attacks.linear.dense_head import DenseHead
from attacks.mjp.token_patches import KnownPatches

# d (N, K) of the head's outputs (N, K).
OutputGradient = Callable[[Tensor], Tensor]
# Relative squared residual at which the search ends: on photographs 60 to 90 dB.
REACHED = 1e-8
# Pairs of differences that L-BFGS keeps.
HISTORY = 50
# Evaluations between two looks at the context, at least.
LEAST_BETWEEN = 40
# Relative squared residual below which differences count as those of features; directions of d that are round-off.
NEAR, ROUND_OFF = 1e-2, 1e-6
# Log-weights start here, on a scale of WIDTH.
START, WIDTH = 1.0, 4.0


@dataclass
class HeadSearch:
    """A search for the patches of one image.

    Args:
        head: as sent, with its gradient.
        output_gradient: what the loss is at its outputs.
        encoder: patches to the tokens that it reads.
        span: of the patches.
        context: the tokens that give keys and values; None for all.
        coefficients: (N, k) along the span's directions, where the search begins; None for zeros.

    Attributes:
        evaluations: of the head's gradient, so far.
        residual: the last one.
        members: (N,) bool, the context; None where all tokens are in it, or while it is not known.
    """

    head: DenseHead
    output_gradient: OutputGradient
    encoder: Encoder
    span: KnownPatches
    context: Context | None
    coefficients: Tensor | None = None
    evaluations: int = 0
    residual: float = float("inf")
    members: Tensor | None = None
    sent: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sent = torch.cat([self.head.weight_gradient, self.head.bias_gradient[:, None]], dim=1)
        rows, basis = self.span.rows, self.span.basis
        if self.coefficients is None:
            self.coefficients = rows.new_zeros(len(rows), len(basis))
        self.log_weights = rows.new_full((len(rows),), START)

    @property
    def patches(self) -> Tensor:
        """(N, P) normalised, at present."""
        return self.span.rows + self.coefficients @ self.span.basis

    def run(self, steps: int) -> None:
        """Search for at most so many evaluations, line search excepted."""
        part = min(max(steps // 4, LEAST_BETWEEN), steps)
        while self.residual > REACHED and steps > 0:
            used = self.evaluations
            if self.context is None:
                self._descend([self.coefficients], self._everyone, part)
            elif self.members is None:
                self._search_context(part)
            else:
                self._check_context(part)
            steps -= max(self.evaluations - used, 1)

    def _search_context(self, steps: int) -> None:
        """Search log-weights too, then settle the context."""
        self._descend([self.coefficients, self.log_weights], self._soft, steps)
        self.members = self.context.members(self.patches)

    def _check_context(self, steps: int) -> None:
        """Search within the context; where that leads away, go back."""
        before = self.coefficients.clone(), self.residual
        self._descend([self.coefficients], self._hard, steps)
        if self.residual > before[1]:
            self.coefficients, self.residual = before
            self.members = None
        else:
            self.members = self.context.members(self.patches)

    def _everyone(self) -> None:
        """No log-weights: all tokens attend to all."""

    def _soft(self) -> Tensor:
        return functional.logsigmoid(WIDTH * self.log_weights)

    def _hard(self) -> Tensor:
        return torch.zeros_like(self.log_weights).masked_fill(~self.members, -torch.inf)

    def tokens(self) -> Tensor:
        """(N, D) that the head reads, at present."""
        if self.context is None:
            return self.encoder(self.patches)
        return self.encoder(self.patches, self._soft() if self.members is None else self._hard())

    def difference(self, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The head's gradient at the present patches less the one sent, (K, D + 1), and d there, (N, K)."""
        tokens = self.encoder(self.patches, key_bias)
        d = self.output_gradient(tokens @ self.head.weight.T + self.head.bias)
        return torch.cat([d.T @ tokens, d.sum(dim=0)[:, None]], dim=1) - self.sent, d

    def _weights(self, key_bias: Tensor | None) -> Tensor:
        """Of the rows of a difference: pinv(d^T), (N, K), which makes it one of features; far from the image (K, K)."""
        with torch.no_grad():
            left, d = self.difference(key_bias)
        if not left.square().sum() < NEAR * self.sent.square().sum():
            return torch.eye(len(left)).to(left)
        return torch.linalg.pinv(d.T, rtol=ROUND_OFF)

    def _descend(self, variables: list[Tensor], key_bias: Callable[[], Tensor | None], steps: int) -> None:
        size, weights = self.sent.square().sum(), self._weights(key_bias())
        whole = (weights @ self.sent).square().sum()

        def loss() -> Tensor | None:
            """The weighted residual at present; None once the residual is little enough."""
            left, _ = self.difference(key_bias())
            self.evaluations, self.residual = self.evaluations + 1, float(left.detach().square().sum() / size)
            return None if self.residual < REACHED else (weights @ left).square().sum() / whole

        descend(variables, loss, steps, HISTORY)
        self.residual = float(self.difference(key_bias())[0].detach().square().sum() / size)
