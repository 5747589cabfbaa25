"""Linear layers' gradients as conditions on their inputs, weighed by the noise of the message.

A linear layer's gradient is a sum over the N' tokens, S = [dL/dW, dL/db] = A^T Q with rows [input_i, 1] of Q and A, the
gradients of its outputs, unknown. The rows of S lie in the span of the inputs, so that every token fulfils

    v_k [input_i, 1] = 0        for each direction v_k that no row of S has.

This holds for the patch projection (inputs are the patches x_i) and for the layers of the first block, and is linear in
the patches wherever the input is. (The span test is DAGER's, Petrov et al. 2024, there on words.)

*Noise.* An entry of S is rounded relative to its row: the gradients of queries and keys are often a hundred times
smaller than those of values, and as much more precise. Each row is divided by its noise before the decomposition,
or most of the span sinks below the noise of the largest rows. If what the rows hold beyond N' directions exceeds
round-off, the client has added noise, which is then measured row by row.

*Weights.* No singular value is cut. Along a direction k within the span, v_k [input_i, 1] is taken for normal; its
variance starts proportional to the squared singular value s_k^2 and is re-estimated from the solution and its
covariance (EM for variance components, Dempster, Laird and Rubin 1977). Beyond the span nothing but the error of the
directions is left. With E the noise of S, an input q_i reads a direction w without signal as -e_i A^T+ E w, so that

    variance of v_k [input_i, 1] = nu^2 (A^T A)^-1_ii = nu^2 sum_(l within the span) (v_l [input_i, 1])^2 / s_l^2,

for all k beyond: a weak direction of the span along which tokens nevertheless extend makes every condition unsure. On
photographs this agrees with the true errors to a few per cent (random and trained small ViTs, float32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.attention import FirstAttention
from attacks.observation import Observation

# Noise of an entry of S: round-off units of the type, times the rms entry of its row.
ROUND_OFF_UNITS = 1.0
# Noise beyond the span above this multiple of round-off is measured row by row; where it is above the second number,
# relative to the entries of a row, sums of round-off do not explain it (honest float32 gradients: below 1e-6).
ADDED_NOISE, LEAST_ADDED = 4.0, 1e-5
# Least variance of a condition, relative to the mean variance of the inputs: float64 keeps what such weights leave.
LEAST_VARIANCE = 1e-11


@dataclass(frozen=True)
class InputSpan:
    """The singular value decomposition of a whitened gradient.

    Attributes:
        directions: v_k, (c, c) orthonormal rows by falling singular value.
        sizes: (c,) squared singular values in units of the noise, 0 beyond the gradient's rows.
        rank: N', directions that the inputs can have; the others are conditions.
        noise: of a whitened entry beyond the span; 1 where round-off is all there is, or where there is no beyond.
        added: the rows hold more beyond the span than sums of float32 leave: rounding of the message, noise of the
            client, or several local steps.
    """

    directions: Tensor
    sizes: Tensor
    rank: int
    noise: float
    added: bool = False

    def error(self, squares: Tensor) -> Tensor:
        """Variance of a condition, for inputs whose squares along the directions are (..., c)."""
        sizes = self.sizes[: self.rank].clamp(min=self.noise**2)
        return self.noise**2 * (squares[..., : self.rank] / sizes).sum(dim=-1)

    @property
    def conditions(self) -> Tensor:
        """The directions that no input has, (c - rank, c)."""
        return self.directions[self.rank :]

    def outside(self, inputs: Tensor) -> Tensor:
        """The part of inputs (..., c) along the conditions, (..., c), from the span's directions, which are fewer."""
        within = self.directions[: self.rank]
        return inputs - (inputs @ within.T) @ within


def span_of_inputs(gradient: Tensor, num_inputs: int, sent: torch.dtype) -> InputSpan:
    """Decompose a layer's gradient.

    Args:
        gradient: S, (R, c), any type.
        num_inputs: N', number of tokens that the layer was applied to.
        sent: type in which the gradient was sent.
    """
    s = gradient.to(torch.float64)
    rank = min(num_inputs, s.shape[1])
    round_off = ROUND_OFF_UNITS * torch.finfo(sent).eps * s.square().mean(dim=1).sqrt()  # (R,)
    scale = round_off.clamp(min=1e-12 * float(round_off.max()))
    sizes, directions = _decompose(s / scale[:, None])
    degrees = (s.shape[1] - rank) * max(len(s) - rank, 1)
    noise = float(sizes[rank:].sum() / degrees) ** 0.5 if degrees else 1.0
    added = noise > ADDED_NOISE and noise * torch.finfo(sent).eps > LEAST_ADDED
    if noise > ADDED_NOISE:
        outside = s - (s @ directions[:rank].T) @ directions[:rank]
        own = outside.norm(dim=1) / (s.shape[1] - rank) ** 0.5
        scale = torch.maximum(own, scale)
        sizes, directions = _decompose(s / scale[:, None])
        noise = float(sizes[rank:].sum() / degrees) ** 0.5
    return InputSpan(directions, sizes, rank, max(noise, torch.finfo(torch.float64).tiny), added)


def count_inputs(gradient: Tensor, sent: torch.dtype) -> int:
    """Number of directions of a layer's inputs that its gradient (R, c) shows above the noise of the message.

    For independent tokens and output gradients that is the number of tokens, as long as it is below R and c. The least
    number beyond which there is nothing but round-off.

    Args:
        sent: type in which the gradient was sent.
    """
    s = gradient.to(torch.float64)
    scale = ROUND_OFF_UNITS * torch.finfo(sent).eps * s.square().mean(dim=1).sqrt()
    sizes = torch.linalg.svdvals(s / scale.clamp(min=1e-12 * float(scale.max()))[:, None]).square()
    beyond = sizes.flip(0).cumsum(0).flip(0)  # of the directions from each on
    left = torch.arange(len(sizes), 0, -1).to(sizes) * (max(s.shape) - torch.arange(len(sizes)).to(sizes))
    above = (beyond > ADDED_NOISE**2 * left).nonzero()
    return int(above[-1]) + 1 if len(above) else 0


def _decompose(s: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values (c,) and right singular vectors as rows (c, c)."""
    short = s if len(s) <= s.shape[1] else torch.linalg.qr(s).R  # same right singular vectors, fewer rows
    _, sizes, directions = torch.linalg.svd(short, full_matrices=True)
    return torch.cat([sizes.square(), sizes.new_zeros(len(directions) - len(sizes))]), directions


def layer_gradient(gradients: Mapping[str, Tensor], weight: str) -> Tensor:
    """S = [dL/dW, dL/db] of the layer whose weight is called `weight`, (R, c + 1); (R, c) where no bias was sent.

    Raises:
        KeyError: `gradients` lacks the weight's.
    """
    columns, bias = gradients[weight].flatten(1), gradients.get(bias_of(weight))
    return columns if bias is None else torch.cat([columns, bias[:, None].to(columns)], dim=1)


def attention_gradient(observation: Observation, attention: FirstAttention) -> Tensor:
    """[dL/dW_qkv, dL/db_qkv] of the first attention, (3 D, D + 1); (3 D, D) where not all biases were sent."""
    parts = [layer_gradient(observation.gradients, name) for name in attention.weights]
    width = min(part.shape[1] for part in parts)
    return torch.cat([part[:, :width] for part in parts])


def bias_of(weight: str) -> str:
    """Name of the bias beside a weight."""
    return f"{weight.removesuffix('weight')}bias"


class InputEquations:
    """The conditions of one layer on every patch, with their weights.

    The inputs are q_i = M x_i + o_i + t_i d with t_i an unknown number for each patch (the scale that a norm divides
    by), which is eliminated.

    Args:
        span: of the layer's inputs.
        matrix: M, (c, P).
        constants: o, (N, c).
        scale: mean squared length of a q_i, as far as it is known beforehand.
        free: d, (c,), or None.
        normal_within: the inputs are taken for normal along the directions of the span, too; else only the conditions
            count.
    """

    def __init__(
        self,
        span: InputSpan,
        matrix: Tensor,
        constants: Tensor,
        scale: float,
        *,
        free: Tensor | None = None,
        normal_within: bool = True,
    ) -> None:
        self.span, self.least = span, LEAST_VARIANCE * scale / len(matrix)
        self.matrix, self.constants = span.directions @ matrix, constants @ span.directions.T  # (c, P), (N, c)
        self.free = None if free is None else span.directions @ free
        self.normal_within = normal_within
        self._set_variance(span.sizes * scale / span.sizes[: span.rank].sum())

    @property
    def unsure(self) -> float:
        """Variance of a condition."""
        return float(self.variance[-1])

    def normal(self) -> tuple[Tensor, Tensor]:
        """H (P, P) and r (N, P) of the conditions' weighted squares, x H x - 2 r x, with t_i eliminated."""
        return self._sums(self._weights())[:2]

    def conditions(self) -> tuple[Tensor, Tensor, Tensor]:
        """H (P, P), r (N, P) and q (N,) of the squares x H x - 2 r x + q, without what is taken for normal."""
        weights = 1 / self.variance
        weights[: self.span.rank] = 0
        return self._sums(weights)

    def _sums(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H, r and q under weights (c,)."""
        weighted = weights[:, None] * self.matrix
        h, r, q = self.matrix.T @ weighted, -self.constants @ weighted, self.constants.square() @ weights
        if self.free is not None:
            pull = weights * self.free
            along, total = self.matrix.T @ pull, pull @ self.free
            h = h - torch.outer(along, along) / total
            r = r + torch.outer(self.constants @ pull, along) / total
            q = q - (self.constants @ pull).square() / total
        return h, r, q

    def _weights(self) -> Tensor:
        weights = 1 / self.variance
        if not self.normal_within:
            weights[: self.span.rank] = 0
        return weights

    def reweigh(self, patches: Tensor, covariance: Tensor) -> None:
        """Re-estimate the variances from a solution.

        Args:
            patches: x, (N, P).
            covariance: a square root R of the covariance of each x_i, (P, P): covariance R R^T.
        """
        inputs, matrix = self._inputs(patches), self.matrix
        if self.free is not None:
            matrix = matrix - torch.outer(self.free, self._pull() @ matrix)
        self._set_variance(inputs.square().mean(dim=0) + (matrix @ covariance).square().sum(dim=1))

    def misfit(self, patches: Tensor) -> float:
        """Rms of the conditions at patches (N, P) over what their errors make it; 0 without conditions.

        At the right patches of messages that are exact, rounded or noisy it is 0.6 to 6, and up to 14 where they were
        refined by other layers' conditions (small ViTs, ViT-Ti and DeiT-S).
        """
        squares = self._inputs(patches).square().mean(dim=0)
        beyond = squares[self.span.rank :]
        return float((beyond.mean() / self.span.error(squares)).sqrt()) if len(beyond) else 0.0

    def _inputs(self, patches: Tensor) -> Tensor:
        """Inputs along the directions, (N, c), without t_i d."""
        inputs = patches @ self.matrix.T + self.constants
        return inputs if self.free is None else inputs - torch.outer(inputs @ self._pull(), self.free)

    def _pull(self) -> Tensor:
        """What t_i is of the inputs along the directions, (c,)."""
        pull = self._weights() * self.free
        return pull / (pull @ self.free)

    def _set_variance(self, squares: Tensor) -> None:
        """From mean squares along the directions, (c,)."""
        variance = squares.clone()
        if self.span.rank < len(variance):
            error = self.span.error(squares)
            variance[self.span.rank :] = error
            variance = torch.maximum(variance, error)
        self.variance = variance.clamp(min=self.least)
