"""Image transformations by name and level, with the magnitudes of ATS (Gao et al., "Privacy-preserving Collaborative
Learning with Automatic Transformation Search", CVPR 2021; github.com/gaow0007/ATSPrivacy).

Operations are timm's; levels from 0 to 9, filling and interpolation are those of the released code: enhancements by a
factor of 1 +- 0.5 at most, where AutoAugment has 0.9. Images pass through 8 bits a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment
from torch import Tensor

HIGHEST = 9  # level
GREY, BLACK = (128, 128, 128), (0, 0, 0)


@dataclass(frozen=True)
class Operation:
    """One kind of transformation.

    Attributes:
        apply: (image, argument) -> image.
        argument: level in [0, 9] -> the argument's magnitude.
        signed: whether the magnitude gets a random sign.
    """

    apply: Callable[..., Image.Image]
    argument: Callable[[int], float] = lambda level: 0.0
    signed: bool = False

    def __call__(self, image: Image.Image, level: int, sign: int) -> Image.Image:
        """The image transformed at a level; `sign` is 1 or -1."""
        return self.apply(image, self.argument(level) * (sign if self.signed else 1))


def _linear(start: float, end: float) -> Callable[[int], float]:
    return lambda level: start + (end - start) * level / HIGHEST


def _enhanced(enhance: Callable[..., Image.Image]) -> Operation:
    return Operation(lambda image, amount: enhance(image, 1 + amount), _linear(0, 0.5), signed=True)


def _moved(move: Callable[..., Image.Image], largest: float, resample: Image.Resampling) -> Operation:
    def apply(image: Image.Image, amount: float) -> Image.Image:
        """Move an image; what comes in is black."""
        return move(image, amount, fillcolor=BLACK, resample=resample)

    return Operation(apply, _linear(0, largest), signed=True)


OPERATIONS = {
    "autocontrast": Operation(lambda image, _: auto_augment.auto_contrast(image)),
    "brightness": _enhanced(auto_augment.brightness),
    "color": _enhanced(auto_augment.color),
    "contrast": _enhanced(auto_augment.contrast),
    "equalize": Operation(lambda image, _: auto_augment.equalize(image)),
    "invert": Operation(lambda image, _: auto_augment.invert(image)),
    "posterize": Operation(lambda image, bits: auto_augment.posterize(image, round(bits)), _linear(8, 4)),
    "rotate": Operation(
        lambda image, angle: auto_augment.rotate(image, angle, fillcolor=GREY, resample=Image.Resampling.NEAREST),
        _linear(0, 30),
    ),
    "sharpness": _enhanced(auto_augment.sharpness),
    "shear_y": _moved(auto_augment.shear_y, 0.3, Image.Resampling.BICUBIC),
    "solarize": Operation(auto_augment.solarize, _linear(256, 0)),
    "translate_x": _moved(auto_augment.translate_x_rel, 150 / 331, Image.Resampling.NEAREST),
    "translate_y": _moved(auto_augment.translate_y_rel, 150 / 331, Image.Resampling.NEAREST),
}


def transform_images(
    images: Tensor, policies: Sequence[Sequence[tuple[str, int]]], generator: torch.Generator
) -> Tensor:
    """Each image after one of the policies, drawn for it.

    Args:
        images: (B, 3, H, W) in [0, 1].
        policies: each a sequence of (name in `OPERATIONS`, level), which are all applied, in order.
        generator: draws the policy and the signs of its transformations.
    """
    draws = {"generator": generator, "device": generator.device}
    changed = []
    for pixels in images.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy():
        policy = policies[int(torch.randint(len(policies), (), **draws))]
        picture = Image.fromarray(pixels)
        for name, level in policy:
            picture = OPERATIONS[name](picture, level, 1 - 2 * int(torch.randint(2, (), **draws)))
        changed.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    return torch.stack(changed).to(images) / 255
