"""Is the original the nearest of many candidates to a reconstruction? A question that PSNR does not answer.

The embedding is that of LPIPS (Zhang et al. 2018; by default squeeze, whose weights ship with this package): the
features of its layers, each of unit length at every place and weighted as LPIPS weights it, averaged over a 2 x 2 grid
of the image; the distance is Euclidean. Chance is one in the number of candidates. A better embedding would find more:
a share is what this one finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedmjp.metrics.perceptual import Lpips

GRID = 2  # places a side over which features are averaged
BATCH = 128


def embed(images: Tensor, lpips: Lpips) -> Tensor:
    """(B, 3, H, W) in [0, 1] -> (B, F) float32 on the CPU; F is the same for images of one size."""
    network = lpips.network
    parameter = next(network.parameters())
    found = []
    with torch.no_grad():
        for batch in images.split(BATCH):
            scaled = network.scaling_layer(2 * batch.to(parameter) - 1)
            layers = []
            for features, weigh in zip(network.net.forward(scaled), network.lins, strict=True):
                weights = weigh.model[-1].weight.clamp(min=0).sqrt()  # (1, C, 1, 1)
                layers.append(functional.adaptive_avg_pool2d(functional.normalize(features) * weights, GRID).flatten(1))
            found.append(torch.cat(layers, dim=1).float().cpu())
    return torch.cat(found)


class Lineup:
    """Ranks reconstructions of images of one size.

    Args:
        others: (n, 3, H, W) in [0, 1], what stands beside an original.
        lpips: the embedding.
        beside: id of an original -> indices of the `others` that stand beside it; None for all of them.
    """

    def __init__(self, others: Tensor, lpips: Lpips, beside: Callable[[str], Sequence[int]] | None = None) -> None:
        self.lpips, self.others, self.beside = lpips, embed(others, lpips), beside

    def ranks(self, originals: Tensor, reconstructions: Tensor, ids: Sequence[str]) -> list[int]:
        """Place of each original among its candidates, by their distance from the reconstruction; 1 is the nearest.

        Args:
            originals, reconstructions: (B, 3, H, W) in [0, 1].
            ids: of the originals.
        """
        own, found = embed(originals, self.lpips), []
        for original, reconstruction, image_id in zip(own, embed(reconstructions, self.lpips), ids, strict=True):
            others = self.others if self.beside is None else self.others[torch.tensor(self.beside(image_id))]
            nearer = (others - reconstruction).norm(dim=1) < (original - reconstruction).norm()
            found.append(1 + int(nearer.sum()))
        return found
