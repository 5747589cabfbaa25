"""ATS: train on images changed by a transformation policy (Gao et al., "Privacy-preserving Collaborative Learning with
Automatic Transformation Search", CVPR 2021, arXiv:2011.12505).

The paper searches policies of three transformations for a low similarity of gradients along a path from a blank to the
transformed image, and for a good accuracy score of an untrained model. The default is the pair of policies that its
released code uses for CIFAR-100 and ResNet20. What is attacked is the transformed image: an attack that inverts the
gradient exactly has that image, however it was made.

How a policy is written: `attacks.policies`. As in the released code every transformation of a policy is applied: the
probabilities in its list are not read.

Departs from it: the random crops and flips that the released training puts before a policy are left to the client's
recipe (`--augment`). The search is a command of its own (`fedmjp.ats_search`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attacks.policies import PUBLISHED, read_policies
from attacks.registry import UsageError
from fedmjp.defenses.base import ClientInput, Defense

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmjp.models import BuiltModel


@dataclass(frozen=True)
class TransformationPolicy(Defense):
    """Options of --defense ats."""

    random: ClassVar[bool] = True
    # The last two invert what the model was shown, and assume nothing of how it was made.
    known_by: ClassVar[tuple[str, ...]] = ("undo_policy", "patch_embedding", "token_span")

    ats_policy: str = PUBLISHED
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
        from attacks.transformations import transform_images

        if images.shape[1] != 3:
            raise UsageError(f"ats transforms images of three channels, and {model.name} takes {images.shape[1]}")
        return ClientInput(transform_images(images, read_policies(self.ats_policy), generator), rearrange=_refuse)


def _refuse(maps: Tensor) -> Tensor:
    raise UsageError("ats moves pixels, and label maps would not move along; train it with one label an image")
