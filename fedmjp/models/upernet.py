"""UPerNet on a timm encoder: segmentation_models_pytorch's decoder on the encoder's intermediate features.

Xiao et al., "Unified Perceptual Parsing for Scene Understanding"; the MJP supplement segments with it on Swin-Tiny
(section 4). Stages of Swin and ResNet at strides 4 and more go to the decoder as they are. A plain ViT has one stride,
its patch size: four of its blocks are brought to strides 4, 8, 16 and 32 by transposed convolutions and pooling, as
mmsegmentation does for ViTs with patches of 16 (its `Feature2Pyramid`). Departs from both: no auxiliary head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmjp.errors import needs_extra
from fedmjp.models.vit import ViT

STRIDES = (4, 8, 16, 32)  # of the decoder's features


class UPerNetHead(nn.Module):
    """Decoder and classifier of pixels.

    Args:
        module: the encoder, a `ViT` or a timm model that knows `forward_intermediates`.
        classes: number of classes.
        width: channels of the decoder.

    Raises:
        MissingExtra: segmentation_models_pytorch is not installed.
    """

    def __init__(self, module: nn.Module, classes: int, width: int) -> None:
        super().__init__()
        with needs_extra("segmentation", "--objective segmentation"):
            from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder
        if isinstance(module, ViT):
            self.rescale = _pyramid(module.embed_dim, module.patch_embed.patch_size[0])
            channels = [module.embed_dim] * len(STRIDES)
        else:
            self.rescale = None
            channels = [stage["num_chs"] for stage in module.feature_info if stage["reduction"] >= STRIDES[0]]
        # The decoder takes the channels of strides 1, 2, 4, ... and leaves out the first two.
        self.decoder = UPerNetDecoder([0, 0, *channels], encoder_depth=len(channels) + 1, decoder_channels=width)
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, features: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
        """Logits (B, classes, H, W) for an image of `size` (H, W).

        Args:
            features: of `encoder_features`.
        """
        if self.rescale is not None:
            features = [scale(feature) for scale, feature in zip(self.rescale, features, strict=True)]
        decoded = self.decoder([features[0], features[0], *features])
        return F.interpolate(self.classify(decoded), size, mode="bilinear", align_corners=False)


def encoder_features(module: nn.Module, images: Tensor, **forward_kwargs: Tensor) -> list[Tensor]:
    """Intermediate features (B, C, h, w), from the largest map to the smallest; of a ViT four maps of one size.

    Args:
        module: see `UPerNetHead`.
        images: (B, C, H, W), normalised.
        forward_kwargs: of `ClientInput`, for ViTs.
    """
    if not isinstance(module, ViT):
        found = module.forward_intermediates(images, norm=True, intermediates_only=True)
        strides = [stage["reduction"] for stage in module.feature_info]
        return [feature for feature, stride in zip(found, strides, strict=True) if stride >= STRIDES[0]]
    levels = len(STRIDES)
    blocks = [max(0, round(len(module.blocks) * level / levels) - 1) for level in range(1, levels + 1)]
    found: dict[int, Tensor] = {}
    handles = [
        module.blocks[b].register_forward_hook(lambda _, __, tokens, b=b: found.__setitem__(b, tokens))
        for b in set(blocks[:-1])
    ]
    try:
        last = module.forward_features(images, **forward_kwargs)
    finally:
        for handle in handles:
            handle.remove()
    grid = module.patch_embed.grid_size
    tokens = [*(found[b] for b in blocks[:-1]), last]  # only the last are normed; the decoder norms all
    return [t[:, module.num_prefix_tokens :].transpose(1, 2).unflatten(2, grid) for t in tokens]


def _pyramid(width: int, patch_size: int) -> nn.ModuleList:
    """Maps of stride `patch_size` to each of `STRIDES`."""
    return nn.ModuleList(_rescale(width, patch_size, stride) for stride in STRIDES)


def _rescale(width: int, own: int, wanted: int) -> nn.Module:
    """From one stride to another, both powers of two; each doubling but the last ends in a norm and GELU."""
    if own <= wanted:
        return nn.MaxPool2d(wanted // own) if own < wanted else nn.Identity()
    layers: list[nn.Module] = []
    for _ in range((own // wanted).bit_length() - 1):
        layers += [nn.ConvTranspose2d(width, width, 2, stride=2), nn.BatchNorm2d(width), nn.GELU()]
    return nn.Sequential(*layers[:-2])


def pixel_logits(module: nn.Module, images: Tensor, **forward_kwargs: Tensor) -> Tensor:
    """Logits (B, classes, H, W) of normalised images (B, C, H, W); `module.pretext` is a `UPerNetHead`."""
    features = encoder_features(module, images, **forward_kwargs)
    size = torch.Size(images.shape[-2:])
    return module.pretext(features, size)
