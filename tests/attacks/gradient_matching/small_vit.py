"""A ViT of 17 tokens whose gradients differ between patches as in a trained model: distinct positions, sharp attention.

A freshly initialised ViT treats all tokens almost equally, and no attack makes progress on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks import ATTACKS, Observation, Reconstruction
from fedmjp.metrics import score
from fedmjp.models import BuiltModel
from fedmjp.models.vit import ViT
from tests.conftest import observe, photographs

SIZE, PATCH, CLASSES = 16, 4, 8
SCALES = {"patch_embed": 1.0, "pos_embed": 50.0, "unk_embed": 50.0, "qkv": 8.0}


def small_vit(*, masked: bool = False, dal: str = "none") -> BuiltModel:
    """A ViT for 16 x 16 pixels with patches of 4 x 4, 64 channels and two blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ViT(
            img_size=SIZE,
            patch_size=PATCH,
            num_classes=CLASSES,
            embed_dim=64,
            depth=2,
            num_heads=2,
            unknown_position=masked,
            dal=dal,
        ).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 and not name.startswith("dal"):
                parameter *= next((scale for part, scale in SCALES.items() if part in name), 4.0)
    return BuiltModel(module, "small", "standard", SIZE, PATCH, (0.5,) * 3, (0.25,) * 3, "random")


def view(model: BuiltModel, first: int = 1, count: int = 1, **changes) -> tuple[Observation, Tensor]:
    """The update of `count` photographs, starting with number `first` and labelled by their numbers, and the images."""
    images = photographs(SIZE, first + count)[first:]
    return observe(model, images, torch.arange(first, first + count) % CLASSES, **changes), images


def attack(name: str, observation: Observation, **options) -> Reconstruction:
    """Run one attack on one update."""
    return ATTACKS.get(name)(**options)([observation])


def psnr(found: Reconstruction, images: Tensor) -> float:
    """Mean PSNR over the batch, in dB."""
    return float(score(found.images, images, patch_size=PATCH)["psnr"].mean())
