"""Which start leads to which token: dual vectors of the tokens found, and starts without these tokens.

In the notation of `attacks.mjp.mlp_tokens`, the gradients at the two layers' outputs, d_i at the second and
e_i = GELU'(W_1 a_i + b_1) * (W_2^T d_i) at the first, belong to one token: e_i lies in the column space of dL/dW_1, d_i
in that of dL/dW_2. For a token that is found this is a linear system with one solution, and e_i = (dL/dW_1) w_i gives
the dual vector w_i with w_i [a_j, 1] = 0 for all other tokens j. Starts from which the tokens found so far have been
removed by their duals lead to those that are still missing (Wedderburn's rank reduction, used for starts only: its
errors do not enter the answers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.mjp.mlp_spans import MLPBlock

SHIFT, INVERSE_STEPS = 1e-12, 4  # of the inverse iteration for a token's dual vector
# An optimum as near to a token that was removed, in lengths of a token, is that token, and replaces it once.
REPEATED = 0.05


@dataclass(frozen=True)
class Removed:
    """Tokens that are removed from starts.

    Attributes:
        y: (n, D). duals: (n, N'). renewed: (n,) bool, those that an optimum in the whole span has replaced.
    """

    block: MLPBlock
    y: Tensor
    duals: Tensor
    renewed: Tensor

    @classmethod
    def of(cls, block: MLPBlock, y: Tensor) -> Removed:
        """Tokens y (n, D)."""
        return cls(block, y, dual_vectors(block, y), torch.zeros(len(y), dtype=torch.bool, device=y.device))

    def __len__(self) -> int:
        return len(self.y)

    def left(self) -> Tensor:
        """Directions (N' - n, N') that the duals leave, orthonormal."""
        return torch.linalg.svd(self.duals, full_matrices=True).Vh[len(self) :]

    def renewed_by(self, y: Tensor) -> Removed:
        """With tokens y (S, D) in the place of those that they repeat; the same object where they repeat none."""
        if not len(self) or not len(y):
            return self
        distances, nearest = (torch.cdist(y, self.y) / y.shape[1] ** 0.5).min(dim=1)
        order = distances.argsort(descending=True)  # the nearest one last: it stands
        order = order[(distances[order] < REPEATED) & ~self.renewed[nearest[order]]]
        if not len(order):
            return self
        which = nearest[order].unique()
        mine = torch.stack([order[nearest[order] == one][-1] for one in which])
        duals = self.duals.index_put((which,), dual_vectors(self.block, y[mine]))
        renewed = self.renewed.index_fill(0, which, True)
        return replace(self, y=self.y.index_put((which,), y[mine]), duals=duals, renewed=renewed)

    def extended(self, y: Tensor) -> Removed:
        """With further tokens y (S, D), at most N' in all."""
        y = y[: self.block.count - len(self)]
        more = Removed.of(self.block, y)
        pairs = ((self.y, more.y), (self.duals, more.duals), (self.renewed, torch.ones_like(more.renewed)))
        return Removed(self.block, *(torch.cat(pair) for pair in pairs))


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
