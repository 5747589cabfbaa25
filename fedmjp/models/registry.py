"""Models by name, over timm.

NAME is as timm builds it, NAME_nope has no position embedding, NAME_mjp has MJP's unknown one and its DAL map, NAME_idx
a second table that tells where a moved patch came from:

    built = build_model("deit_s_mjp", num_classes=10, weights="random", seed=0)
    logits = built.module(built.normalise(images), position_mask=mask)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from torch import Tensor, nn

from attacks.registry import Registry, UsageError
from fedmjp.models.vit import AprilBlock, BlockKind, ViT
from fedmjp.models.weights import load_weights

VARIANTS = ("", "_nope", "_mjp", "_idx")


@dataclass(frozen=True)
class ModelSpec:
    """One architecture.

    Attributes:
        timm_name: where timm's weights of it come from; None for the small models, which have none.
        image_size, patch_size: pixels. For Swin and ResNet `patch_size` is the tile that jigsawing moves.
        mean, std: normalisation of inputs in [0, 1].
        vit: keyword arguments of `ViT`; None for models that are not plain ViTs.
        changes: what a small Swin or ResNet changes of timm's architecture; no published weights fit it.
    """

    timm_name: str | None
    image_size: int
    patch_size: int
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    vit: dict[str, Any] | None = field(default=None)
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def published(self) -> str | None:
        """Where timm's weights of this very architecture come from, or None."""
        return None if self.changes else self.timm_name


MODELS: Registry[ModelSpec] = Registry("model")

_WIDTHS = {"ti": ("tiny", 192, 3), "s": ("small", 384, 6), "b": ("base", 768, 12)}
for _size, (_word, _dim, _heads) in _WIDTHS.items():
    _vit = {"embed_dim": _dim, "depth": 12, "num_heads": _heads}
    MODELS.register(f"vit_{_size}")(
        ModelSpec(f"vit_{_word}_patch16_224", 224, 16, IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD, _vit)
    )
    MODELS.register(f"deit_{_size}")(ModelSpec(f"deit_{_word}_patch16_224", 224, 16, vit=_vit))
for _pixels, _patch in ((32, 4), (64, 8)):
    MODELS.register(f"vit_mini_{_pixels}")(
        ModelSpec(None, _pixels, _patch, vit={"embed_dim": 192, "depth": 6, "num_heads": 3})
    )
# Three families of about the same cost a step, for comparisons on CPUs: an 8 x 8 grid of 4-pixel patches each.
MODELS.register("vit_micro_32")(ModelSpec(None, 32, 4, vit={"embed_dim": 64, "depth": 3, "num_heads": 2}))
_swin = {"img_size": 32, "window_size": 4, "embed_dim": 64, "depths": (2, 2), "num_heads": (2, 4)}
MODELS.register("swin_micro_32")(ModelSpec("swin_tiny_patch4_window7_224", 32, 4, changes=_swin))
_resnet = {"channels": (32, 64, 128, 256)}
MODELS.register("resnet_micro_32")(ModelSpec("resnet18", 32, 4, changes=_resnet))
MODELS.register("swin_t")(ModelSpec("swin_tiny_patch4_window7_224", 224, 16))
MODELS.register("resnet50")(ModelSpec("resnet50", 224, 16))


@dataclass(frozen=True)
class BuiltModel:
    """A model with all that its users must know about it.

    Attributes:
        module: takes normalised images and, for ViTs, `position_mask` and `origins`.
        name: as given, with its variant.
        provenance: where the weights come from, in words for a table.
    """

    module: nn.Module
    name: str
    block: BlockKind
    image_size: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    provenance: str

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return (self.image_size // self.patch_size,) * 2

    @property
    def hides_positions(self) -> bool:
        """Whether `position_mask` means anything to the module."""
        return getattr(self.module, "unk_embed", None) is not None

    @property
    def tells_origins(self) -> bool:
        """Whether `origins` means anything to the module."""
        return getattr(self.module, "idx_embed", None) is not None

    def normalise(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) in [0, 1] -> the model's input."""
        mean = torch.tensor(self.mean, device=images.device, dtype=images.dtype).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=images.device, dtype=images.dtype).view(1, -1, 1, 1)
        return (images - mean) / std


def model_names() -> list[str]:
    """Every name that `build_model` takes."""
    return [base + variant for base in MODELS for variant in (VARIANTS if MODELS.get(base).vit else ("",))]


def split_name(name: str) -> tuple[str, str]:
    """Split NAME[_nope|_mjp|_idx] into (NAME, variant).

    Raises:
        UsageError: unknown model; the message lists the names.
    """
    base, variant = next(((name.removesuffix(v), v) for v in VARIANTS[1:] if name.endswith(v)), (name, ""))
    if base not in MODELS or (variant and MODELS.get(base).vit is None):
        raise UsageError(f"unknown model {name!r}; choose from: {', '.join(model_names())}")
    return base, variant


def build_model(
    name: str,
    *,
    num_classes: int,
    weights: str = "auto",
    block: BlockKind = "standard",
    dal: str = "linear",
    seed: int = 0,
) -> BuiltModel:
    """Build a model by name.

    Args:
        weights: "random", "timm" (timm's published weights), a checkpoint's path, or "auto" (shipped weights of that
            name, else random).
        block: "april" swaps the first block for the one of APRIL's papers.
        dal: DAL map of the _mjp and _idx variants.
        seed: of the random initialisation; NAME and its variants share every weight that they have in common.

    Raises:
        UsageError: unknown name, missing or unfit weights, or an april block on a model that is no plain ViT.
    """
    base, variant = split_name(name)
    spec = MODELS.get(base)
    if block == "april" and spec.vit is None:
        raise UsageError(f"--block april needs a plain ViT, not {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _initialise(spec, variant, num_classes, dal)
    provenance = load_weights(module, name=name, source=weights, timm_name=spec.published, seed=seed)
    if block == "april":
        module.blocks[0] = AprilBlock(module.blocks[0])
    return BuiltModel(module, name, block, spec.image_size, spec.patch_size, spec.mean, spec.std, provenance)


def _initialise(spec: ModelSpec, variant: str, num_classes: int, dal: str) -> nn.Module:
    if spec.vit is None:
        return timm.create_model(spec.timm_name, num_classes=num_classes, **spec.changes)
    return ViT(
        img_size=spec.image_size,
        patch_size=spec.patch_size,
        num_classes=num_classes,
        pos_embed="none" if variant == "_nope" else "learn",
        unknown_position=variant == "_mjp",
        origin_table=variant == "_idx",
        dal=dal if variant in ("_mjp", "_idx") else "none",
        **spec.vit,
    )
