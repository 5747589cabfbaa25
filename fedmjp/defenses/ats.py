"""ATS: train on images changed by a transformation policy (Gao et al., "Privacy-preserving Collaborative Learning with
Automatic Transformation Search", CVPR 2021, arXiv:2011.12505).

The paper searches policies of three transformations for a low similarity of gradients along a path from a blank to the
transformed image, and for a good accuracy score of an untrained model. The default is the pair of policies that its
released code uses for CIFAR-100 and ResNet20. What is attacked is the transformed image: an attack that inverts the
gradient exactly has that image, however it was made.

A policy is written as in the paper: 3-1-7 applies transformations 3, 1 and 7 of the released code's library of 50,
numbered from 0, and 3-1-7+43-18-18 draws one of two policies for each image. As there, every transformation of a policy
is applied: the probabilities in the released list are not read.

Departs from it: the random crops and flips that the released training puts before a policy are left to the client's
recipe (`--augment`). The search is a command of its own (`fedmjp.ats_search`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attacks.registry import UsageError
from fedmjp.defenses.base import ClientInput, Defense

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmjp.models import BuiltModel


# The 25 pairs of AutoAugment's policy for CIFAR-10 in a row, with some levels changed.
_LIBRARY = """
invert 7, contrast 6, rotate 2, translate_x 9, sharpness 1, sharpness 3, shear_y 2, translate_y 2, autocontrast 5,
equalize 2, shear_y 5, posterize 5, color 3, brightness 5, sharpness 9, brightness 9, equalize 5, equalize 1,
contrast 7, sharpness 5, color 5, translate_x 5, equalize 7, autocontrast 8, translate_y 3, sharpness 6, brightness 6,
color 8, solarize 0, invert 0, equalize 0, autocontrast 0, equalize 8, equalize 4, color 5, equalize 5, autocontrast 4,
solarize 4, brightness 3, color 0, solarize 1, autocontrast 0, translate_y 3, translate_y 3, autocontrast 1,
solarize 1, equalize 5, invert 0, translate_y 3, autocontrast 1
"""
# (operation, level) by number.
LIBRARY = tuple((name, int(level)) for name, level in (entry.split() for entry in _LIBRARY.split(",")))


def read_policies(text: str) -> list[list[tuple[str, int]]]:
    """The policies that `text` names, such as 3-1-7+43-18-18, as (operation, level) in order.

    Raises:
        UsageError: another form, or a number that is not in the library.
    """
    try:
        return [[LIBRARY[int(number)] for number in policy.split("-")] for policy in text.split("+")]
    except (ValueError, IndexError) as error:
        raise UsageError(
            f"a policy is numbers from 0 to {len(LIBRARY) - 1} joined by '-', and several policies are joined by '+' "
            f"(3-1-7+43-18-18), not {text!r}"
        ) from error


@dataclass(frozen=True)
class TransformationPolicy(Defense):
    """Options of --defense ats."""

    random: ClassVar[bool] = True
    # They invert what the model was shown, and assume nothing of how it was made.
    known_by: ClassVar[tuple[str, ...]] = ("patch_embedding", "token_span")

    ats_policy: str = "3-1-7+43-18-18"
    """Numbers of transformations in the published library, joined by "-"; of several policies joined by "+" one is
    drawn for each image (released code, CIFAR-100 and ResNet20: 3-1-7+43-18-18)."""

    def validate(self) -> None:
        """Raise `UsageError` for a policy that cannot be read."""
        read_policies(self.ats_policy)

    def on_input(self, images: Tensor, model: BuiltModel, generator: torch.Generator, round: int) -> ClientInput:
        """Transform each image by a policy.

        Raises:
            UsageError: the inputs are not images of three channels.
        """
        from fedmjp.data.transformations import transform_images

        if images.shape[1] != 3:
            raise UsageError(f"ats transforms images of three channels, and {model.name} takes {images.shape[1]}")
        return ClientInput(transform_images(images, read_policies(self.ats_policy), generator), rearrange=_refuse)


def _refuse(maps: Tensor) -> Tensor:
    raise UsageError("ats moves pixels, and label maps would not move along; train it with one label an image")
