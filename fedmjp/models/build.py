"""Models built by name, over timm:

built = build_model("deit_s_mjp", num_classes=10, weights="random", seed=0)
logits = built.module(built.normalise(images), position_mask=mask)
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from attacks.registry import UsageError
from fedmjp.models.registry import MODELS, NAMED_WEIGHTS, ModelSpec, split_name
from fedmjp.models.vit import AprilBlock, BlockKind, ViT
from fedmjp.models.weights import PRETEXT, load_weights, read_state


@dataclass(frozen=True)
class BuiltModel:
    """A model with its name, input format and the origin of its weights.

    Attributes:
        module: takes normalised images and, for ViTs, `position_mask` and `origins`.
        name: as given, with its variant.
        provenance: where the weights come from, in words for a table.
        speech: see `ModelSpec`.
    """

    module: nn.Module
    name: str
    block: BlockKind
    image_size: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    provenance: str
    speech: bool = False

    @property
    def sized_name(self) -> str:
        """The name with the images' size, for tables whose lines are of models at several sizes."""
        return f"{self.name}, {self.image_size} px"

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        side = self.image_size // self.patch_size
        return (1 if self.speech else side, side)

    @property
    def hides_positions(self) -> bool:
        """Whether the module takes `position_mask`."""
        return getattr(self.module, "unk_embed", None) is not None

    @property
    def tells_origins(self) -> bool:
        """Whether the module takes `origins`."""
        return getattr(self.module, "idx_embed", None) is not None

    def normalise(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) in [0, 1] -> the model's input."""
        mean = torch.tensor(self.mean, device=images.device, dtype=images.dtype).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=images.device, dtype=images.dtype).view(1, -1, 1, 1)
        return (images - mean) / std


def build_model(
    name: str,
    *,
    num_classes: int,
    weights: str = "auto",
    block: BlockKind = "standard",
    dal: str = "linear",
    seed: int = 0,
    attach: Callable[[nn.Module], None] | None = None,
    adapt: Callable[[nn.Module], None] | None = None,
    image_size: int | None = None,
) -> BuiltModel:
    """Build a model by name.

    Args:
        weights: "random", "timm" (timm's published weights), "auto" (shipped weights of that name, else random), "long"
            (those of a longer training), or a checkpoint's path.
        block: "april" swaps the first block for the one of APRIL's papers.
        dal: DAL map of the _mjp and _idx variants.
        seed: of the random initialisation; NAME and its variants share every weight that they have in common.
        attach: adds an objective's heads to the new module, before weights are loaded (`Objective.attach`).
        adapt: changes layers (`Defense.adapt`) after weights are loaded, or before that for a checkpoint that holds
            parameters which it adds.
        image_size: pixels of an image's side (`resize_model`), or None for the model's own. Weights may be those of a
            model of either size.

    Raises:
        UsageError: unknown name, missing or unfit weights, or an april block or another size for a model that is no
            plain ViT.
    """
    base, variant = split_name(name)
    spec = MODELS.get(base)
    if block == "april" and spec.vit is None:
        raise UsageError(f"--block april needs a plain ViT, not {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _initialise(spec, variant, num_classes, dal)
        if attach is not None:
            attach(module)
    adapted = adapt is not None and _holds_added(weights, module, adapt)
    if adapted:
        adapt(module)
    about = {"image_size": spec.image_size, "patch_size": spec.patch_size, "mean": spec.mean, "std": spec.std}
    built = BuiltModel(module, name, block, **about, provenance="", speech=spec.speech)
    load = partial(load_weights, module, name=name, source=weights, timm_name=spec.published, seed=seed)
    built = load_at_size(built, image_size, None if weights in NAMED_WEIGHTS else Path(weights), load)
    if block == "april":
        module.blocks[0] = AprilBlock(module.blocks[0])
    if adapt is not None and not adapted:
        adapt_seeded(module, adapt, seed)
    return built


def load_at_size(
    built: BuiltModel, image_size: int | None, checkpoint: Path | None, load: Callable[[], str]
) -> BuiltModel:
    """The model with weights loaded and for images of another size, in the order that the weights ask for.

    Args:
        built: at its own size; changed in place.
        image_size: pixels of a side, None for its own.
        checkpoint: the file of the weights, None for weights by name.
        load: loads them into the module and returns their origin in words.

    Raises:
        UsageError: see `resize_model`; what `load` raises.
    """
    if image_size is None or image_size == built.image_size:
        return replace(built, provenance=load())
    if checkpoint is not None and _holds_positions(checkpoint, image_size // built.patch_size):
        return replace(resize_model(built, image_size), provenance=load())
    provenance = f"{load()}, resized to {image_size} px"
    return replace(resize_model(built, image_size), provenance=provenance)


def resize_model(built: BuiltModel, image_size: int) -> BuiltModel:
    """The model for images of another size; its position embedding and table of origins are resampled.

    Args:
        built: a plain ViT, changed in place.
        image_size: pixels of a side.

    Raises:
        UsageError: no plain ViT, or a size that does not divide into its patches.
    """
    if not _can_be_resized(built):
        raise UsageError(
            f"only a plain ViT with a learned position embedding, or none, takes images of another size than its own "
            f"{built.image_size} pixels, not {built.name!r} as it is built here"
        )
    if image_size % built.patch_size:
        raise UsageError(f"images of {image_size} pixels do not divide into patches of {built.patch_size}")
    built.module.set_input_size(img_size=image_size)
    return replace(built, image_size=image_size)


def _can_be_resized(built: BuiltModel) -> bool:
    """Whether nothing but learned tables of positions depends on the number of patches; heads of objectives may."""
    module = built.module
    if not isinstance(module, ViT) or getattr(module, "relative", None) is not None:
        return False
    fixed = module.pos_embed is not None and not isinstance(module.pos_embed, nn.Parameter)
    return not fixed and not hasattr(module, PRETEXT.rstrip("."))


def adapt_seeded(module: nn.Module, adapt: Callable[[nn.Module], None], seed: int) -> None:
    """Change a model's layers; what is new in it depends on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapt(module)


def _holds_added(weights: str, module: nn.Module, adapt: Callable[[nn.Module], None]) -> bool:
    """Whether `weights` is a checkpoint that holds parameters which `adapt` would add to the module."""
    if weights in NAMED_WEIGHTS:
        return False
    changed = deepcopy(module)
    adapt_seeded(changed, adapt, 0)
    added = changed.state_dict().keys() - module.state_dict().keys()
    return not added.isdisjoint(read_state(Path(weights)))


def _holds_positions(checkpoint: Path, side: int) -> bool:
    """Whether the checkpoint's position embedding is that of a grid of `side` times `side` patches."""
    positions = read_state(checkpoint).get("pos_embed")
    return positions is not None and positions.shape[1] == side**2 + 1


def _initialise(spec: ModelSpec, variant: str, num_classes: int, dal: str) -> nn.Module:
    if spec.vit is None:
        return timm.create_model(spec.timm_name, num_classes=num_classes, **spec.changes)
    channels, *size = spec.input_shape
    module = ViT(
        img_size=tuple(size),
        in_chans=channels,
        patch_size=spec.patch_size,
        num_classes=num_classes,
        pos_embed="none" if variant in ("_nope", "_rel") else "learn",
        relative_positions=variant == "_rel",
        unknown_position=variant == "_mjp",
        origin_table=variant == "_idx",
        dal=dal if variant in ("_mjp", "_idx") else "none",
        **spec.vit,
    )
    if spec.speech and module.pos_embed is not None:
        module.fix_positions()
    return module
