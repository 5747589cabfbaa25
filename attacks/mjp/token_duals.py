"""Which start leads to which token: dual vectors of the tokens found, and starts without these tokens.

In the notation of `attacks.mjp.mlp_tokens`, the gradients at the two layers' outputs, d_i at the second and
e_i = GELU'(W_1 a_i + b_1) * (W_2^T d_i) at the first, belong to one token: e_i lies in the column space of dL/dW_1, d_i
in that of dL/dW_2. For a token that is found this is a linear system with one solution, and e_i = (dL/dW_1) w_i gives
the dual vector w_i with w_i [a_j, 1] = 0 for all other tokens j. Starts from which the tokens found so far have been
removed by their duals lead to those that are still missing (Wedderburn's rank reduction, used for starts only: its
errors do not enter the answers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.mjp.mlp_spans import MLPBlock

SHIFT, INVERSE_STEPS = 1e-12, 4  # of the inverse iteration for a token's dual vector
# A point between tokens has parts along others of this length together: 2.3 to 5.4 were measured in uniform areas of
# DeiT-S at 224 pixels, where the noise explains such points, and 0.42 at most at tokens.
MIXED = 1.0


@dataclass(frozen=True)
class Removed:
    """Tokens that are removed from starts.

    Attributes:
        y: (n, D). duals: (n, N').
    """

    y: Tensor
    duals: Tensor

    @classmethod
    def of(cls, block: MLPBlock, y: Tensor) -> Removed:
        """Tokens y (n, D); a part of the hidden units (`MLPBlock.thinned`) gives their duals, too, less exactly."""
        return cls(y, dual_vectors(block, y))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Tensor) -> Removed:
        return Removed(self.y[index], self.duals[index])

    def mixtures(self, block: MLPBlock, sure: int = 0) -> Tensor:
        """(n,) bool: points that are mixtures of others of them: their duals say that they have parts along these.

        No token has any. The point with most is taken first: its own dual, which is none, then says nothing of others.

        Args:
            sure: so many of them, the first, are tokens in any case.
        """
        along = self.duals @ coordinates(block, self.y).T
        squares = (along / along.diagonal()[:, None]).fill_diagonal_(0.0).square()
        mixed = torch.zeros(len(self), dtype=torch.bool, device=self.y.device)
        for _ in range(sure, len(self)):
            parts = squares[~mixed].sum(dim=0).masked_fill(mixed, 0.0)
            parts[:sure] = 0.0
            if float(parts.max()) <= MIXED**2:
                break
            mixed[parts.argmax()] = True
        return mixed

    def left(self) -> Tensor:
        """Directions (N' - n, N') that the duals leave, orthonormal."""
        return torch.linalg.svd(self.duals, full_matrices=True).Vh[len(self) :]

    def joined(self, other: Removed) -> Removed:
        """These and others."""
        return Removed(torch.cat([self.y, other.y]), torch.cat([self.duals, other.duals]))


def normalised(y: Tensor) -> Tensor:
    """y (S, D) with mean 0 and length D^1/2."""
    centred = y - y.mean(dim=1, keepdim=True)
    return centred * (y.shape[1] ** 0.5 / centred.norm(dim=1, keepdim=True))


def without(block: MLPBlock, y: Tensor, tokens: Tensor, duals: Tensor) -> Tensor:
    """Candidates y (S, D) without their parts along tokens (n, D) whose dual vectors are given, (n, N')."""
    if not len(tokens):
        return y
    own, known = coordinates(block, y), coordinates(block, tokens)
    parts = torch.linalg.lstsq(duals @ known.T, duals @ own.T).solution.T  # (S, n)
    left = 1 - parts.sum(dim=1, keepdim=True)  # of the constant input 1
    return normalised((y - parts @ tokens) * left.sign())


def coordinates(block: MLPBlock, y: Tensor) -> Tensor:
    """[a, 1] along the rows of V, (S, N'), of y (S, D)."""
    span = block.spans[0]
    return block.module.norm2(y) @ span.directions[:, :-1].T + span.directions[:, -1]


def dual_vectors(block: MLPBlock, y: Tensor) -> Tensor:
    """w_i along the rows of V, (S, N'), of tokens y (S, D), up to a factor."""
    mlp, (outer, inner) = block.module.mlp, block.spans
    slope = block.activate(mlp.fc1(block.module.norm2(y)))[1]  # (S, H)
    back = mlp.fc2.weight.T @ inner.columns  # (H, N'): d_i = columns delta, e_i = slope * (back delta)
    found = []
    for own in slope:
        reached = own[:, None] * back
        inside = outer.columns.T @ reached  # (N', N')
        gram = reached.T @ reached - inside.T @ inside
        delta = torch.ones(len(gram), 1).to(gram)
        root = torch.linalg.cholesky(gram + SHIFT * gram.diagonal().mean() * torch.eye(len(gram)).to(gram))
        for _ in range(INVERSE_STEPS):  # towards the eigenvector of the least eigenvalue
            delta = torch.nn.functional.normalize(torch.cholesky_solve(delta, root), dim=0)
        found.append(inside @ delta[:, 0])
    if not found:
        return y.new_zeros(0, block.count)
    return torch.linalg.lstsq(outer.factor, torch.stack(found).T).solution.T
