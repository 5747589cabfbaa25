"""How training images are augmented: settings, and the sets of them that have a name.

What draws the images is `fedmjp.data.augmentation`; here nothing of torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Augmentation:
    """How an image changes each time it is drawn; the defaults mirror it with probability one half, no more.

    Attributes:
        smallest_crop: smallest share of an image's area that a random crop takes, in (0, 1]; the crop is resized.
        rand_augment: timm's RandAugment string, or "none".
        mixup: alpha of Mixup, 0 for none.
        cutmix: alpha of CutMix, 0 for none; with both, each batch draws one of them.
        erasing: probability that a rectangle of an image is erased by noise, in [0, 1].
        label_smoothing: share of the label spread over all classes, in [0, 1].
        mirror: probability that an image is mirrored, in [0, 1].
        colour: largest relative change of brightness, contrast and saturation, in [0, 1]; not with RandAugment.
    """

    smallest_crop: float = 1.0
    rand_augment: str = "none"
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0
    label_smoothing: float = 0.0
    mirror: float = 0.5
    colour: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed, which needs an even number of them."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def softens(self) -> bool:
        """Whether labels become probabilities over classes."""
        return self.mixes or self.label_smoothing > 0


NO_AUGMENTATION = "none"
# DeiT's (Touvron et al. 2021, table 9), which the MJP paper trains with.
DEIT = Augmentation(0.08, "rand-m9-mstd0.5-mmax9-inc1", mixup=0.8, cutmix=1.0, erasing=0.25, label_smoothing=0.1)
AUGMENTATIONS = {
    "flip": Augmentation(),
    "crop+flip": Augmentation(smallest_crop=DEIT.smallest_crop),
    "colour": Augmentation(mirror=0.0, colour=0.4),  # timm's default for ImageNet
    "mixup": Augmentation(mirror=0.0, mixup=DEIT.mixup),
    "cutmix": Augmentation(mirror=0.0, cutmix=DEIT.cutmix),
    "deit": DEIT,
}
