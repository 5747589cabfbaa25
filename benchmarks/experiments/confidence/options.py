"""Options of the fit of the confidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import RowOptions, check_positive


@dataclass(frozen=True)
class Options(RowOptions):
    """Fit the curves of attacks/linear/confidence.py.

    Attacks the last photographs of a folder's random order (the calibration takes the first ones) as the calibration
    does, and writes to --out, for every completed patch, what its confidence depends on and whether it is right. The
    curves are fitted over all such files of --out, so that several calls, for example one a model, add up; every
    call prints the curves to be copied into the module. Writes NAME.npz and curves.csv; the same call overwrites its
    own file.
    """

    model: str = "vit_mini_64"
    """A plain ViT whose variant _mjp is attacked."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    images: str = "photos"
    """A folder of pictures or a data set's name; photos (embedded) are those of the tests."""
    reserved: int = 200
    """Photographs at the end of the random order that are set aside for fits."""
    num_images: int = 100
    """Of them, how many to use."""
    gammas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.9)
    """Masking ratios."""
    updates: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of updates after which the server attacks."""
    drift: float = 0.01
    """How far the weights move between updates, relative to their size."""
    seed: int = 0
    """Fixes weights, drift, masks and jigsaws, and the order of the photographs."""
    out: Path = Path("runs/confidence")
    """Folder of the files."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "reserved", "updates")
        if self.num_images > self.reserved:
            raise UsageError(f"--num-images {self.num_images} exceeds --reserved {self.reserved}")
        if not (self.gammas and self.updates):
            raise UsageError("--gammas and --updates each need at least one value")
        if not all(0 < gamma <= 1 for gamma in self.gammas):
            raise UsageError("--gammas takes numbers in (0, 1]")
        super().validate()
