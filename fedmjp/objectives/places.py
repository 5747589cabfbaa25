"""What objectives that predict places have in common: random subsets of patches, smoothed targets and their weights,
the fixed 2-D sin-cos position embedding.

Grids are (rows, columns) with N = rows * columns patches in raster order, as timm cuts them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmjp.models.vit import fixed_positions


def random_subsets(batch: int, total: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """A random subset of 0..total-1 for each image, (B, count) int64, each row in ascending order.

    Drawn on the CPU, so that it is the same on every device.
    """
    keys = torch.rand(batch, total, generator=generator)
    return keys.argsort(dim=1)[:, :count].sort(dim=1).values.to(device)


def members(subsets: Tensor, total: int) -> Tensor:
    """Indices (B, count) as a mask (B, total) bool."""
    mask = torch.zeros(len(subsets), total, dtype=torch.bool, device=subsets.device)
    return mask.scatter_(1, subsets, True)


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Tokens (B, N, D) at indices (B, M): (B, M, D)."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[-1]))


def smoothed_places(grid: tuple[int, int], sigma: float) -> Tensor:
    """Position smoothing: the target distribution over places for each true place, (N, N) float64 (DropPos).

    w_ij = exp(-d_ij^2 / sigma^2) with d the Euclidean distance in patches on the true grid, each row divided by its own
    sum. Departs from the published code, where the grid is 224 // 14 = 16 patches wide although there are 14 x 14 of
    them, where column j is divided by the sum of row j, and where the 256 x 256 map is cut to its first 196 columns: at
    sigma 1 rows sum to 0.66 to 1.11.

    Args:
        grid: (rows, columns).
        sigma: in patches, at least 0; 0 gives the identity.
    """
    count = grid[0] * grid[1]
    if sigma == 0:
        return torch.eye(count, dtype=torch.float64)
    rows, columns = (axis.to(torch.float64) for axis in (torch.arange(grid[0]), torch.arange(grid[1])))
    places = torch.cartesian_prod(rows, columns)  # (N, 2)
    squares = (places[:, None] - places).square().sum(dim=-1)  # (N, N)
    return (-squares / sigma**2).softmax(dim=1)


def sincos_table(grid: tuple[int, int], width: int, prefix: int) -> Tensor:
    """The fixed 2-D sin-cos position embedding, (1, prefix + N, D); prefix tokens get zeros, as in MAE.

    One half of the channels is for the row and the other for the column; timm orders sines and cosines differently from
    MAE, which is a fixed permutation of channels.

    Args:
        width: D, a multiple of 4.
    """
    return F.pad(fixed_positions(grid, width), (0, 0, prefix, 0))[None]


@torch.no_grad()
def attentive_weights(module: nn.Module, images: Tensor, tau: float) -> Tensor:
    """Attentive reconstruction (DropPos): softmax over patches of cos(class, patch) / tau, (B, N), rows summing to 1.

    Features are the encoder's, of the whole image with all positions shown, without gradient.

    Args:
        module: a ViT with a class token.
        images: (B, C, H, W), normalised.
        tau: temperature, above 0.
    """
    features = module.forward_features(images)  # (B, prefix + N, D)
    first, patches = features[:, :1], features[:, module.num_prefix_tokens :]
    return (F.cosine_similarity(first, patches, dim=-1) / tau).softmax(dim=1)


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Cross-entropy with distributions as targets, averaged over all patches of the batch with weights, a scalar.

    Args:
        logits: (B, M, N).
        targets: (B, M, N), each row summing to 1.
        weights: (B, M), not negative, or None for equal ones.
    """
    losses = -(targets.to(logits) * logits.log_softmax(dim=-1)).sum(dim=-1)  # (B, M)
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()
