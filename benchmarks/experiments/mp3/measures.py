"""What an encoder computes, layer by layer: neighbours (Figure 9), correlation of positions (10), heads (8, 11).

All of it on unchanged images, in float32, with every patch as context. Representations are the outputs of the blocks,
before the final norm; the paper does not say which.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from experiments.trained_models.attention_maps import attention_distance
from fedmjp.data import ImageSet
from fedmjp.evaluation.features import recorded_blocks
from fedmjp.evaluation.neighbours import neighbour_votes
from fedmjp.models import BuiltModel
from fedmjp.models.attention import every_attention

BATCH = 100
NEIGHBOURS = 20
CORRELATIONS = ("same_image", "two_images_same_place", "two_images_other_place")


@torch.no_grad()
def block_tokens(model: BuiltModel, images: ImageSet, device: torch.device) -> Iterator[Tensor]:
    """The patches' tokens (layers, B, N, D) of a batch at a time, in order; the model is left in evaluation mode."""
    module = model.module.eval()
    for start in range(0, len(images), BATCH):
        pixels = images.images(range(start, min(start + BATCH, len(images)))).to(device)
        with recorded_blocks(model) as kept:
            module.forward_features(model.normalise(pixels))
        yield torch.stack(kept)[:, :, module.num_prefix_tokens :].cpu()


def layer_neighbours(model: BuiltModel, train: ImageSet, test: ImageSet, device: torch.device) -> Tensor:
    """Whether the nearest neighbours of each test image vote for its class, (layers, n) bool.

    The features are the mean of the patches after each block.

    Args:
        train: at least `NEIGHBOURS` images.
        test: n images of the same classes.
    """
    references, asked = (
        torch.cat([tokens.mean(dim=2) for tokens in block_tokens(model, images, device)], dim=1)
        for images in (train, test)
    )
    return torch.stack(
        [
            neighbour_votes(own, train.labels, other, NEIGHBOURS, len(train.classes)).argmax(dim=1) == test.labels
            for own, other in zip(references, asked, strict=True)
        ]
    )


def position_correlation(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Pearson's correlation of the representations of each pair of places, over channels, averaged over images.

    Args:
        tokens: (n, N, D) of n > 1 images.

    Returns:
        (N, N) of two places in the same image, and (N, N) of a place in an image and one in the next image (of the last
        image: the first one).
    """
    centred = tokens.double() - tokens.double().mean(dim=-1, keepdim=True)
    unit = centred / centred.norm(dim=-1, keepdim=True)
    return tuple((unit @ other.mT).mean(dim=0) for other in (unit, unit.roll(-1, dims=0)))


def correlation_numbers(within: Tensor, across: Tensor) -> dict[str, float]:
    """Means over pairs of places, by `CORRELATIONS`: two places of one image, and of two images the same and others.

    Args:
        within, across: see `position_correlation`.
    """
    same = torch.eye(len(within), dtype=torch.bool)
    parts = (within[~same], across[same], across[~same])
    return {name: float(part.mean()) for name, part in zip(CORRELATIONS, parts, strict=True)}


def head_distances(model: BuiltModel, images: ImageSet, device: torch.device) -> Tensor:
    """(layers, heads): how far from a patch each head attends on average, in shares of the image's side."""
    prefix, found = model.module.num_prefix_tokens, []
    for start in range(0, len(images), BATCH):
        pixels = images.images(range(start, min(start + BATCH, len(images)))).to(device)
        attention = every_attention(model, pixels)
        found.append(torch.stack([attention_distance(one, prefix, model.grid) for one in attention]).cpu())
    return torch.cat(found, dim=1).mean(dim=1)


def uniform_distance(grid: tuple[int, int]) -> float:
    """The distance of `head_distances` for a head that attends to all patches alike."""
    total = grid[0] * grid[1]
    return float(attention_distance(torch.full((1, 1, total, total), 1 / total), 0, grid))


def relative_maps(attention: Tensor, prefix: int, grid: tuple[int, int]) -> Tensor:
    """Attention by offset (rows, columns) of key from query, averaged over pairs and images (Figures 8 and 11).

    Args:
        attention: (B, H, T, T).
        prefix: number of tokens before the patches.
        grid: (R, C) patches.

    Returns:
        (H, 2R - 1, 2C - 1), the offset (0, 0) in the middle; each key's share is of what the query gives to patches.
    """
    rows, columns = grid
    among = attention[:, :, prefix:, prefix:].double()
    among = (among / among.sum(dim=-1, keepdim=True)).mean(dim=0).flatten(1).cpu()  # (H, N * N)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))  # (N, 2)
    offset = places[None] - places[:, None] + torch.tensor([rows - 1, columns - 1])  # (N, N, 2), of key from query
    index = (offset[..., 0] * (2 * columns - 1) + offset[..., 1]).flatten()
    size = (2 * rows - 1) * (2 * columns - 1)
    sums = among.new_zeros(len(among), size).index_add_(1, index, among)
    return (sums / torch.bincount(index, minlength=size)).unflatten(1, (2 * rows - 1, 2 * columns - 1))
