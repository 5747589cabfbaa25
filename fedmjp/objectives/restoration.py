"""MST's global image decoder, and its L1 loss.

The appendix gives the loss as `abs(p - q).sum().mean()`: a sum over all values of the batch, whose scale grows with
batch, resolution and channels and is not the one at which lambda_2 = 0.6 "roughly" balances the two losses. Here the
mean over values is the default and the sum an option. The text at hand does not say which layers the decoder has; here
it is a 3 x 3 convolution over the grid of tokens, batch norm, ReLU, and a linear map to the pixels of each patch.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

Reduction = Literal["mean", "sum"]


class ImageDecoder(nn.Module):
    """Tokens of all patches -> the image.

    In training a pass takes its batch-norm statistics from the tokens that it is given: called once for each global
    view, as `MST` does, they come from different images and never from local views (appendix, section 3).

    Args:
        width: D.
        patch: (height, width) of a patch in pixels.
        channels: of the image.
        norm: whether there is a batch norm.
    """

    def __init__(self, width: int, patch: tuple[int, int], channels: int, norm: bool) -> None:
        super().__init__()
        self.patch, self.channels = patch, channels
        self.mix = nn.Conv2d(width, width, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(width) if norm else None
        self.predict = nn.Conv2d(width, channels * patch[0] * patch[1], 1)

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, N, D) in raster order on a grid of (rows, columns) -> (B, C, H, W), normalised as the input is."""
        maps = self.mix(tokens.transpose(1, 2).unflatten(2, grid))  # (B, D, rows, columns)
        pixels = self.predict(F.relu(maps if self.norm is None else self.norm(maps)))
        pixels = pixels.unflatten(1, (self.channels, *self.patch))  # (B, C, p, q, rows, columns)
        return pixels.permute(0, 1, 4, 2, 5, 3).flatten(4, 5).flatten(2, 3)


def patch_values(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cut images (B, C, H, W) into patches: (B, N, C p q), in raster order."""
    cut = images.unflatten(3, (-1, patch[1])).unflatten(2, (-1, patch[0]))  # (B, C, rows, p, columns, q)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def restoration_loss(
    restored: Tensor, images: Tensor, mask: Tensor | None, patch: tuple[int, int], reduction: Reduction
) -> Tensor:
    """L1 distance of restored and true pixels, a scalar.

    Args:
        restored, images: (B, C, H, W), normalised.
        mask: (B, N) bool, the patches that count, or None for all; without any True the loss is 0.
        patch: (height, width) in pixels.
        reduction: mean over the values that count, or their sum over the batch.
    """
    errors = (restored - images).abs()
    if mask is not None:
        errors = patch_values(errors, patch)[mask]
    return errors.sum() if reduction == "sum" else errors.sum() / max(1, errors.numel())
