"""Which patches MJP hides: blocks anywhere, single patches, those that attention chooses, or always the same ones.

MJP draws blocks anew in every step (section 4.2). MST (Li et al., NeurIPS 2021) hides the patches that the class token
attends to least, so that what matters is kept (its `attention`); for privacy the opposite, `attended`, is of interest.
Both are the client's own model's, in its last block, of the ordered image with all positions shown: one more forward
pass a step. Departs from MST, which hides each of the least attended patches with a probability: exactly round(gamma N)
are hidden, so that the mask of an image follows from image and weights.

`fixed` gives an image one mask for its whole life: the sampler's, drawn from a keyed hash of the image's 8-bit pixels
and the client's number. Updates of one image then have the same unknowns in their equations. Two views of a photograph
(mirrored, cropped) are two images with two masks. A server that knows the number can tell from a mask whether a given
image was trained on; a client keeps it to itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from fedmjp.defenses.masking import count_masked
from fedmjp.models import BuiltModel
from fedmjp.models.attention import candidates, class_attention, last_attention

Sampler = Callable[[int, tuple[int, int], float, torch.Generator], Tensor]


def attention_masks(images: Tensor, model: BuiltModel, gamma: float, *, most: bool) -> Tensor:
    """The patches that the class token attends to least, or most, as (B, N) bool with round(gamma N) True a row.

    The model keeps its mode.

    Args:
        images: (B, C, H, W) in [0, 1].

    Raises:
        UsageError: the model is not a plain ViT with a class token.
    """
    training = model.module.training
    attention = class_attention(last_attention(model, images), model.module.num_prefix_tokens)
    model.module.train(training)
    return candidates(attention, count_masked(gamma, attention.shape[1]), most=most)


def fixed_masks(images: Tensor, grid: tuple[int, int], gamma: float, sampler: Sampler, key: int) -> Tensor:
    """One mask for each image, the same whenever it is seen, (B, N) bool on the CPU.

    Args:
        images: (B, C, H, W) in [0, 1].
        grid: patches (rows, columns).
        sampler: of `fedmjp.defenses.masking`.
        key: the client's number, at least 0.
    """
    secret = key.to_bytes(8, "big")
    masks = []
    for pixels in (255 * images.clamp(0, 1)).round().to(torch.uint8).cpu():
        digest = hashlib.blake2b(pixels.numpy().tobytes(), key=secret, digest_size=8).digest()
        own = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        masks.append(sampler(1, grid, gamma, own))
    return torch.cat(masks)
