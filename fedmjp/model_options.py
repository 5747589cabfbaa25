"""Options of what is trained: the model, what it starts from, and the data.

Part of `fedmjp.config`; nothing of torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attacks.registry import UsageError
from fedmjp.models.registry import MODELS, split_name


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    model: str = "deit_s"
    """vit_s, deit_s, vit_ti, deit_ti, vit_b, deit_b, vit_mini_32, vit_mini_64, vit_micro_32, vit_micro8_32 and
    vit_micro16_32 with patches of 8 and 16 pixels (each also as NAME_nope without position embedding, NAME_rel with
    relative position biases instead, NAME_mjp with MJP's and NAME_idx with a table of origins), swin_t, swin_micro_32,
    resnet50, resnet_micro_32, or speech_mini for spoken words. Defences and objectives turn NAME into the variant that
    they need by themselves."""
    weights: str = "auto"
    """random, timm (published weights), auto (shipped weights of that name, else random), long (shipped weights of a
    longer training, for the variants of vit_mini_32 and vit_mini_64), or a checkpoint's path."""
    block: Literal["standard", "april"] = "standard"
    """First block: as people train it, or APRIL's without norm and residual, for which its closed form is exact."""
    image_size: int | None = None
    """Pixels of an image's side (none: those that the model is made for). timm resamples the position embedding of a
    plain ViT."""

    def side(self) -> int:
        """Pixels of an image's side.

        Raises:
            UsageError: unknown model, or an `image_size` that is no multiple of its patches' side.
        """
        spec = MODELS.get(split_name(self.model)[0])
        if self.image_size is None:
            return spec.image_size
        if self.image_size < 1 or self.image_size % spec.patch_size:
            raise UsageError(
                f"--image-size {self.image_size} must be a multiple of {spec.patch_size}, the side of {self.model}'s "
                "patches"
            )
        return self.image_size


@dataclass(frozen=True)
class EncoderConfig:
    """What training starts from, where that is not a model's own weights."""

    checkpoint: Annotated[Path | None, tyro.conf.arg(name="from", metavar="CHECKPOINT")] = None
    """Fine-tune the encoder of this checkpoint: its heads are dropped, and what it lacks (class token, position
    embedding) is new."""

    def validate(self, model: ModelConfig) -> None:
        """Check the options.

        Raises:
            UsageError: no such file, or weights named twice.
        """
        if self.checkpoint is not None and model.weights not in ("random", "auto"):
            raise UsageError(f"--from {self.checkpoint} gives the encoder; leave out --weights {model.weights}")
        if self.checkpoint is not None and not self.checkpoint.is_file():
            raise UsageError(f"no checkpoint at {self.checkpoint}; pass --from a model.safetensors of fedmjp.train")


@dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    data: str = "photos"
    """photos (embedded; photos-in-order is the same, but limits take the first ones, best views first), cifar10,
    cifar100, tiny-imagenet, imagenet, or folder:PATH (CLASS/IMAGE files; without class folders there are no labels).
    For segmentation: mosaics (made from the photographs), or masks:PATH (ADE20K's layout). For models of speech:
    speech:PATH (WORD/NAME.wav), or spoken (by espeak-ng)."""
    data_path: Path | None = None
    """Local copy of a named data set: parquet files in the hub's layout, or an image folder for imagenet."""
    train_limit: int | None = None
    """Use a random subset of this many training images."""
    test_limit: int | None = 24
    """Evaluate on a random subset of this many test images."""
