"""Options of the fit of the mixture on patches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import DeviceOptions, check_positive


@dataclass(frozen=True)
class Options(DeviceOptions):
    """Fit the image prior of the attack mjp_mixture to photographs.

        python benchmarks/patch_mixture.py                                   the mixture that ships
        python benchmarks/patch_mixture.py --images DIR --num-images 200 --out FILE.safetensors
        python benchmarks/mjp_adaptive.py --attacks mjp_mixture
            --attack-options mjp_mixture.prior.mixture=FILE.safetensors
            --grants model_weights position_gradient several_rounds auxiliary_data

    Photographs that are attacked later must not be among those of the fit. Writes --out and nothing else.
    """

    images: str = "photos"
    """photos (those of scikit-image), a folder of pictures, or a data set's name."""
    num_images: int | None = None
    """Most images (None: all of them)."""
    image_size: int = 224
    """Pixels of a side to which the images are resized; as the attacked ones."""
    components: int = 20
    """Components of the mixture."""
    patches: int = 60_000
    """Patches drawn from all images together."""
    iterations: int = 20
    """Steps of expectation and maximisation."""
    seed: int = 0
    """Fixes the choice of images and patches, and the start."""
    out: Path = Path("runs/patch_mixture.safetensors")
    """The file to write."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "num_images", "image_size", "components", "patches", "iterations")
        if self.out.suffix != ".safetensors":
            raise UsageError(f"--out {self.out} must end in .safetensors")
