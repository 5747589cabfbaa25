"""SPP: shuffle the patches of an image and the pixels inside its patches (Table 2 of the MJP paper, after Tolstikhin et
al., "MLP-Mixer", who test so how much a model relies on order).

An image's patches are put in a random order, and one random order of the p^2 pixels acts in all of them; the three
colours of a pixel stay together. Departs from Mixer, which draws one permutation for the whole training: a model could
learn to undo that one. Neither paper says how often a training step is shuffled; at every step the model would never
see an ordered image and fail on the test images, so the default is half of them, as MJP's released code jigsaws.
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


@dataclass(frozen=True)
class ShuffledPatchesAndPixels(Defense):
    """Options of --defense spp."""

    random: ClassVar[bool] = True
    moves_patches: ClassVar[bool] = True
    # It inverts shuffled and unshuffled steps alike; no attack here undoes the order of the shuffled ones.
    known_by: ClassVar[tuple[str, ...]] = ("patch_embedding",)

    spp_probability: float = 0.5
    """Probability that a step's images are shuffled at all."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 <= self.spp_probability <= 1:
            raise UsageError(f"--spp-probability must lie in [0, 1], not {self.spp_probability}")

    def on_input(self, images: Tensor, model: BuiltModel, generator: torch.Generator, round: int) -> ClientInput:
        """Shuffle patches and pixels of each image, all positions shown. The generator's device only draws."""
        import torch

        from fedmjp.defenses.masking import jigsaw_order, move_patches, move_pixels

        if bool(torch.rand((), generator=generator, device=generator.device) >= self.spp_probability):
            return ClientInput(images)
        patches, pixels = (
            jigsaw_order(torch.ones(len(images), count, dtype=torch.bool, device=generator.device), generator)
            for count in (model.grid[0] * model.grid[1], model.patch_size**2)
        )

        def rearrange(maps: Tensor) -> Tensor:
            """Move patches, and the pixels of each, as those of the images."""
            moved = move_patches(maps, patches.to(maps.device), model.patch_size)
            return move_pixels(moved, pixels.to(maps.device), model.patch_size)

        return ClientInput(rearrange(images), rearrange=rearrange)
