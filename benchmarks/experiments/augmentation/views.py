"""What clients make of a photograph before they feed it, by name.

Every view is cut from a *scene*, the photograph with a margin of one patch on each side; the photograph is its middle.
Colours change as torchvision's ColorJitter changes them (brightness, contrast and saturation by 0.6 to 1.4), once
without clipping to [0, 1], as a client does that works on normalised tensors, and once with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2 import functional as F

View = Callable[[Tensor, int, torch.Generator], Tensor]  # scene (3, S, S), patch size, generator -> (3, S - 2p, S - 2p)
WEAKEST, STRONGEST = 0.6, 1.4


def photograph(scene: Tensor, patch_size: int, generator: torch.Generator | None = None) -> Tensor:
    """The middle of a scene."""
    return scene[..., patch_size:-patch_size, patch_size:-patch_size]


def mirrored(scene: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """Mirrored left to right with probability 1/2."""
    image = photograph(scene, patch_size)
    return image.flip(-1) if torch.rand((), generator=generator) < 0.5 else image


def patch_shifts(scene: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """Shifted by -1, 0 or 1 patches in each direction."""
    return _cut(scene, patch_size, patch_size * torch.randint(3, (2,), generator=generator))


def pixel_shifts(scene: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """Shifted by up to a patch in each direction, in pixels (a random crop of a padded photograph)."""
    return _cut(scene, patch_size, torch.randint(2 * patch_size + 1, (2,), generator=generator))


def _cut(scene: Tensor, patch_size: int, corner: Tensor) -> Tensor:
    side = scene.shape[-1] - 2 * patch_size
    top, left = corner.tolist()
    return scene[..., top : top + side, left : left + side]


def colours(scene: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """Brightness, contrast and saturation, not clipped."""
    return _recoloured(photograph(scene, patch_size), generator)


def mirrored_colours(scene: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """Both."""
    return _recoloured(mirrored(scene, patch_size, generator), generator)


def clipped_colours(scene: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """Brightness, contrast and saturation by torchvision's functions, each of which clips to [0, 1]."""
    image = photograph(scene, patch_size)
    for change, factor in zip(
        (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation), _factors(generator), strict=True
    ):
        image = change(image, factor)
    return image


def resized_crops(scene: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """torchvision's RandomResizedCrop at its defaults: 8 to 100 % of the area."""
    image = photograph(scene, patch_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        return RandomResizedCrop(image.shape[-1], interpolation=InterpolationMode.BILINEAR, antialias=True)(image)


def _factors(generator: torch.Generator) -> list[float]:
    return (WEAKEST + (STRONGEST - WEAKEST) * torch.rand(3, generator=generator)).tolist()


def _recoloured(image: Tensor, generator: torch.Generator) -> Tensor:
    brightness, contrast, saturation = _factors(generator)
    image = brightness * image
    image = contrast * image + (1 - contrast) * F.rgb_to_grayscale(image).mean()
    return saturation * image + (1 - saturation) * F.rgb_to_grayscale(image)


AUGMENTATIONS: dict[str, View] = {
    "none": photograph,
    "mirrored": mirrored,
    "patch shifts": patch_shifts,
    "colours": colours,
    "mirrored, colours": mirrored_colours,
    "colours, clipped": clipped_colours,
    "pixel shifts": pixel_shifts,
    "resized crops": resized_crops,
}
