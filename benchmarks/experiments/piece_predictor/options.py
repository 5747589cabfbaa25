"""Options of what a placement learns from public photographs: the predictor of places, the mixture of borders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import DeviceOptions, check_positive


@dataclass(frozen=True)
class PublicPhotographs(DeviceOptions):
    """Photographs to learn from, and the file to write."""

    images: str = "tiny-imagenet"
    """A data set's name: its training images, and its test images for the accuracy."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int | None = None
    """Most training images (None: all of them)."""
    scored: Path | None = None
    """Folder of photographs that are scored later: training images that show one of them are left out."""
    image_size: int = 64
    """Pixels of a side to which the images are resized."""
    seed: int = 0
    """Fixes the choice of images, the start and all draws."""
    out: Path = Path("runs/public.safetensors")
    """The file to write."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "num_images", "image_size")
        if self.out.suffix != ".safetensors":
            raise UsageError(f"--out {self.out} must end in .safetensors")


@dataclass(frozen=True)
class Options(PublicPhotographs):
    """Train the predictor of places of `attacks.mjp.placement` on public photographs.

        python benchmarks/piece_predictor.py --images tiny-imagenet --data-path DIR     the predictor that ships
        python benchmarks/placement.py --predictor FILE.safetensors
        --attack-options patch_set.placement.predictor=FILE.safetensors

    Photographs whose pieces are placed later must not be among those of the training: name them with --scored, and
    images that show the same are left out. Writes --out and a card beside it (FILE.md), and nothing else.
    """

    steps: int = 4500
    """Steps of the optimiser, of 4096 pieces each."""
    width: int = 128
    """Channels of the network, a multiple of 16."""
    depth: int = 6
    """Blocks of the network."""
    learning_rate: float = 2e-3
    """Highest learning rate."""
    start: Path | None = None
    """A predictor to continue from, which sets the width and the depth (None: random weights)."""
    out: Path = Path("runs/piece_predictor.safetensors")
    """The file to write."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "steps", "width", "depth")
        if self.start is not None and self.start.resolve() == self.out.resolve():
            raise UsageError(f"--start {self.start} would be overwritten: pass another file to --out")
        if self.width % 16:
            raise UsageError(f"--width must be a multiple of 16, not {self.width}")
        if not self.learning_rate > 0:
            raise UsageError("--learning-rate must be above 0")


@dataclass(frozen=True)
class BorderOptions(PublicPhotographs):
    """Fit the mixture of borders of `attacks.mjp.placement` to public photographs.

        python benchmarks/border_mixture.py --images tiny-imagenet --data-path DIR     the mixture that ships
        python benchmarks/placement.py --mixture FILE.safetensors
        --attack-options patch_set.placement.mixture=FILE.safetensors

    Photographs whose pieces are placed later must not be among those of the fit: name them with --scored, and images
    that show the same are left out. Writes --out and a card beside it (FILE.md), and nothing else.
    """

    components: int = 24
    """Components of the mixture."""
    windows: int = 60_000
    """Windows drawn from all images together."""
    iterations: int = 10
    """Steps of expectation and maximisation."""
    out: Path = Path("runs/border_mixture.safetensors")
    """The file to write."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "components", "windows", "iterations")
