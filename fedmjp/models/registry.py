"""The names of models and what they stand for, without importing torch or timm.

NAME is as timm builds it, NAME_nope has no position embedding, NAME_rel 2-D relative position biases instead of one,
NAME_mjp has MJP's unknown one and its DAL map, NAME_idx a second table with an embedding of the place that a moved
patch came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attacks.registry import Registry, UsageError

# Normalisations of timm's weights (`timm.data`): ImageNet's statistics, and Inception's range of [-1, 1].
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INCEPTION_MEAN = INCEPTION_STD = (0.5, 0.5, 0.5)
VARIANTS = ("", "_nope", "_mjp", "_idx", "_rel")
# Weights that ship with the package: --weights -> what follows the model's name in that of the file.
SHIPPED_WEIGHTS = {"auto": "", "long": ".long"}
NAMED_WEIGHTS = ("random", "timm", *SHIPPED_WEIGHTS)  # weights that are no file of the user's


@dataclass(frozen=True)
class ModelSpec:
    """One architecture.

    Attributes:
        timm_name: where timm's weights of it come from; None for the small models, which have none.
        image_size, patch_size: pixels. For Swin and ResNet `patch_size` is the tile that jigsawing moves.
        mean, std: normalisation of inputs in [0, 1].
        vit: keyword arguments of `ViT`; None for models that are not plain ViTs.
        changes: what a small Swin or ResNet changes of timm's architecture; no published weights fit it.
        speech: inputs are frames of sound (`fedmjp.data.frames`), a row of `image_size` patches of one pixel with as
            many channels as a frame has coefficients, and positions are the fixed sinusoids of Vaswani et al.
    """

    timm_name: str | None
    image_size: int
    patch_size: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    vit: dict[str, Any] | None = field(default=None)
    changes: dict[str, Any] = field(default_factory=dict)
    speech: bool = False

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an input."""
        side = self.image_size
        return (len(self.mean), 1, side) if self.speech else (len(self.mean), side, side)

    @property
    def published(self) -> str | None:
        """Where timm's weights of this very architecture come from, or None."""
        return None if self.changes else self.timm_name


MODELS: Registry[ModelSpec] = Registry("model")

_WIDTHS = {"ti": ("tiny", 192, 3), "s": ("small", 384, 6), "b": ("base", 768, 12)}
for _size, (_word, _dim, _heads) in _WIDTHS.items():
    _vit = {"embed_dim": _dim, "depth": 12, "num_heads": _heads}
    MODELS.register(f"vit_{_size}")(ModelSpec(f"vit_{_word}_patch16_224", 224, 16, INCEPTION_MEAN, INCEPTION_STD, _vit))
    MODELS.register(f"deit_{_size}")(ModelSpec(f"deit_{_word}_patch16_224", 224, 16, vit=_vit))
for _pixels, _patch in ((32, 4), (64, 8)):
    MODELS.register(f"vit_mini_{_pixels}")(
        ModelSpec(None, _pixels, _patch, vit={"embed_dim": 192, "depth": 6, "num_heads": 3})
    )
# Three families of about the same cost a step, for comparisons on CPUs: an 8 x 8 grid of 4-pixel patches each.
MODELS.register("vit_micro_32")(ModelSpec(None, 32, 4, vit={"embed_dim": 64, "depth": 3, "num_heads": 2}))
# The same with larger patches: a place is easier to predict among 16 or 4 (MP3's Figure 7).
for _patch in (8, 16):
    MODELS.register(f"vit_micro{_patch}_32")(
        ModelSpec(None, 32, _patch, vit={"embed_dim": 64, "depth": 3, "num_heads": 2})
    )
_swin = {"img_size": 32, "window_size": 4, "embed_dim": 64, "depths": (2, 2), "num_heads": (2, 4)}
MODELS.register("swin_micro_32")(ModelSpec("swin_tiny_patch4_window7_224", 32, 4, changes=_swin))
_resnet = {"channels": (32, 64, 128, 256)}
MODELS.register("resnet_micro_32")(ModelSpec("resnet18", 32, 4, changes=_resnet))
# MP3, section 4.3: frames of 40 MFCCs, 100 a second; heads are not stated there. The coefficients' common mean and
# deviation (but for the loudness, the first) are of spoken words, in the units of `fedmjp.data.frames`.
_speech = {"embed_dim": 32, "depth": 8, "num_heads": 4, "mlp_ratio": 2.0}
_speech |= {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1}
MODELS.register("speech_mini")(ModelSpec(None, 100, 1, (0.64, *(0.5,) * 39), (0.06,) * 40, vit=_speech, speech=True))
MODELS.register("swin_t")(ModelSpec("swin_tiny_patch4_window7_224", 224, 16))
MODELS.register("resnet50")(ModelSpec("resnet50", 224, 16))


def model_names() -> list[str]:
    """Every name that `build_model` takes."""
    return [base + variant for base in MODELS for variant in (VARIANTS if MODELS.get(base).vit else ("",))]


def check_drop_rate(option: str, rate: float, model: str) -> None:
    """Check `--drop-path` or `--dropout`, a probability that a part of a plain ViT is left out of a training step.

    Raises:
        UsageError: it does not lie in [0, 1), or the model called `model` is no plain ViT.
    """
    if not 0 <= rate < 1:
        raise UsageError(f"{option} must lie in [0, 1), not {rate}")
    if rate and MODELS.get(split_name(model)[0]).vit is None:
        raise UsageError(f"{option} needs a plain ViT, not {model}")


def split_name(name: str) -> tuple[str, str]:
    """Split NAME[_nope|_mjp|_idx|_rel] into (NAME, variant).

    Raises:
        UsageError: unknown model; the message lists the names.
    """
    base, variant = next(((name.removesuffix(v), v) for v in VARIANTS[1:] if name.endswith(v)), (name, ""))
    if base not in MODELS or (variant and MODELS.get(base).vit is None):
        raise UsageError(f"unknown model {name!r}; choose from: {', '.join(model_names())}")
    return base, variant
