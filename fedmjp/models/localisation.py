"""Dense absolute localisation (DAL): a loss that predicts each patch's grid coordinates from its position embedding.

Equation 4 of the MJP paper: the mean L1 distance between the grid coordinates (i, j), 1 <= i, j <= K, of each unmasked
patch and the coordinates that a map g predicts from its position embedding. As in the released code, a patch's distance
is the mean over its two coordinates, which is half of equation 4's sum (the defence's option `dal_distance` restores
the sum), the nonlinear map has one hidden layer (the paper calls it a 3-layer MLP, counting the input), coordinates are
in units of patches, and the PCA is a randomised one with 5 iterations. Departs from the code: coordinates count from 1
as in the paper, and the PCA uses a fixed seed, so that a run can be repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DAL_MAPS = ("none", "pca", "linear", "nonlinear")


class DenseAbsoluteLocalisation(nn.Module):
    """The map g: position embedding (D) -> grid coordinates (2), and its loss.

    Args:
        width: D.
        kind: "pca" (no parameters), "linear" or "nonlinear".

    Raises:
        ValueError: `kind` has another value.
    """

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        if kind not in DAL_MAPS[1:]:
            raise ValueError(f"unknown DAL map {kind!r}; choose from: {', '.join(DAL_MAPS[1:])}")
        self.kind = kind
        self.map: nn.Module = nn.Identity()
        if kind == "linear":
            self.map = nn.Linear(width, 2)
        elif kind == "nonlinear":
            self.map = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, positions: Tensor, grid: tuple[int, int], mask: Tensor | None = None) -> Tensor:
        """The mean distance over the visible positions of all images and both coordinates, in units of patches.

        Args:
            positions: (N, D) position embeddings of the patches.
            grid: (rows, columns) with rows * columns = N.
            mask: (B, N) bool, True where a position is hidden in that image; None if no position is hidden.
        """
        rows, columns = grid
        places = torch.cartesian_prod(
            torch.arange(1, rows + 1, device=positions.device), torch.arange(1, columns + 1, device=positions.device)
        ).to(positions)  # (N, 2)
        weights = positions.new_ones(len(positions)) if mask is None else (~mask).to(positions).sum(dim=0)  # (N,)
        distance = (places - self._read(positions, weights > 0)).abs().mean(dim=1)
        return (weights * distance).sum() / weights.sum().clamp(min=1)

    def _read(self, positions: Tensor, visible: Tensor) -> Tensor:
        return self._fitted(positions, visible) if self.kind == "pca" else self.map(positions)

    @staticmethod
    def _fitted(positions: Tensor, visible: Tensor) -> Tensor:
        """The two first principal components, in the positions' own precision: CUDA decomposes no bfloat16 matrix."""
        seen = positions[visible]
        if len(seen) < 3:  # two axes cannot be fitted to fewer than three points
            return positions.new_zeros(len(positions), 2)
        forked = torch.random.fork_rng(devices=[positions.device] if positions.is_cuda else [])
        with forked, torch.autocast(positions.device.type, enabled=False):
            torch.manual_seed(0)
            return positions @ torch.pca_lowrank(seen, q=2, niter=5)[2]
