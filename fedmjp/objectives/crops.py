"""Multi-crop views of a batch: random resized crops, flips, and BYOL's changes of colour (MST, appendix, section 2).

All images of a batch are changed at once, each by its own random numbers, which a CPU generator draws whatever the
device of the images. Departs from torchvision's transforms, which MST names, in these points: a crop that does not fit
is cut to the image instead of drawn again; crops are sampled bicubically without antialiasing; the four changes of
colour have a fixed order; hue turns in YIQ instead of HSV; the width of the blur is in units of 1/224 of the image's
side, because it was chosen for images of 224 pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ASPECT = (3 / 4, 4 / 3)  # width by height of a crop
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}  # BYOL, hue in turns
JITTERED, GREY = 0.8, 0.2  # probabilities
BLUR = (0.1, 2.0)  # standard deviation in pixels of an image of REFERENCE pixels
REFERENCE = 224
LUMA = (0.299, 0.587, 0.114)
YIQ = (LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


@dataclass(frozen=True)
class Colours:
    """Probabilities of the changes that differ between views."""

    blur: float
    solarise: float


# BYOL's two distorted views, and DINO's local ones.
FIRST, SECOND, LOCAL = Colours(1.0, 0.0), Colours(0.1, 0.2), Colours(0.5, 0.0)


def random_crops(
    images: Tensor, size: tuple[int, int], area: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """A crop of each image, resized, and flipped with probability 0.5.

    Args:
        images: (B, C, H, W) in [0, 1].
        size: (h, w) of the result in pixels.
        area: smallest and largest share of the image's area, in (0, 1].
        generator: on the CPU.

    Returns:
        (B, C, h, w) in [0, 1].
    """
    count, _, height, width = images.shape
    u = torch.rand(5, count, generator=generator)
    pixels = (area[0] + u[0] * (area[1] - area[0])) * height * width
    aspect = torch.exp(math.log(ASPECT[0]) + u[1] * (math.log(ASPECT[1]) - math.log(ASPECT[0])))
    tall = ((pixels / aspect).sqrt() / height).clamp(max=1)  # (B,), share of the height
    wide = ((pixels * aspect).sqrt() / width).clamp(max=1)
    flip = torch.where(u[4] < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 0, 2] = wide * flip, (2 * u[2] - 1) * (1 - wide)
    theta[:, 1, 1], theta[:, 1, 2] = tall, (2 * u[3] - 1) * (1 - tall)
    grid = F.affine_grid(theta.to(images), [count, images.shape[1], *size], align_corners=False)
    found = F.grid_sample(images, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return found.clamp(0, 1)


def change_colours(images: Tensor, colours: Colours, side: int, generator: torch.Generator) -> Tensor:
    """Jitter, grey, blur and solarise, each image by itself: (B, 3, h, w) in [0, 1] -> the same.

    Args:
        colours: the probabilities of blur and solarisation.
        side: of the whole image in pixels, for the width of the blur.
        generator: on the CPU.
    """
    u = torch.rand(9, len(images), generator=generator).to(images)
    changed = _where(u[0] < JITTERED, jitter(images, u[1:5]), images)
    changed = _where(u[5] < GREY, _luma(changed).expand_as(changed), changed)
    sigma = (BLUR[0] + u[7] * (BLUR[1] - BLUR[0])) * side / REFERENCE
    changed = _where(u[6] < colours.blur, blur(changed, sigma), changed)
    return _where(u[8] < colours.solarise, torch.where(changed < 0.5, changed, 1 - changed), changed)


def jitter(images: Tensor, u: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order.

    Args:
        images: (B, 3, h, w) in [0, 1].
        u: (4, B) in [0, 1), the strengths; 0.5 changes nothing.
    """
    b, c, s = (1 + (2 * u[i] - 1) * JITTER[n] for i, n in enumerate(("brightness", "contrast", "saturation")))
    images = (images * b.view(-1, 1, 1, 1)).clamp(0, 1)
    images = _blend(images, _luma(images).mean(dim=(2, 3), keepdim=True), c)
    images = _blend(images, _luma(images), s)
    angle = 2 * math.pi * JITTER["hue"] * (2 * u[3] - 1)
    to_yiq = torch.tensor(YIQ, dtype=images.dtype, device=images.device)
    turn = torch.eye(3, dtype=images.dtype, device=images.device).repeat(len(images), 1, 1)
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2], turn[:, 2, 1] = -angle.sin(), angle.sin()
    matrix = torch.linalg.inv(to_yiq) @ turn @ to_yiq  # (B, 3, 3)
    return torch.einsum("bij,bjhw->bihw", matrix, images).clamp(0, 1)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image (B, C, h, w) by a Gaussian of its own standard deviation (B,) in pixels."""
    count, channels, height, width = images.shape
    reach = min(max(1, math.ceil(3 * float(sigma.max()))), min(height, width) - 1)
    offsets = torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype)
    weights = torch.exp(-0.5 * (offsets / sigma[:, None]).square())
    weights = (weights / weights.sum(dim=1, keepdim=True)).repeat_interleave(channels, dim=0)  # (B C, K)
    flat = F.pad(images.reshape(1, count * channels, height, width), [reach] * 4, mode="reflect")
    flat = F.conv2d(flat, weights[:, None, :, None], groups=count * channels)
    return F.conv2d(flat, weights[:, None, None, :], groups=count * channels).view_as(images)


def _luma(images: Tensor) -> Tensor:
    weights = torch.tensor(LUMA, dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)


def _blend(images: Tensor, other: Tensor, share: Tensor) -> Tensor:
    share = share.view(-1, 1, 1, 1)
    return (share * images + (1 - share) * other).clamp(0, 1)


def _where(chosen: Tensor, changed: Tensor, images: Tensor) -> Tensor:
    return torch.where(chosen.view(-1, 1, 1, 1), changed, images)
