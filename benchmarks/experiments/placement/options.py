"""Options of the table of pieces put back in their places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attacks.registry import UsageError
from experiments.scaffold import RowOptions, check_positive


@dataclass(frozen=True)
class Options(RowOptions):
    """How many pieces of a photograph are put back in their places?

        python benchmarks/placement.py --images DIR                                      64 pieces of 8 x 8 pixels
        python benchmarks/placement.py --images DIR --image-size 224 --patch-size 32 --resume      49
        python benchmarks/placement.py --images DIR --image-size 224 --patch-size 16 --resume      196

    A share gamma of the pieces is put in random order, in blocks as MJP hides them, and the others lie in their places;
    at 1 all are scrambled. Gaussian noise degrades every piece, so that the photograph with every piece in its place
    has the PSNR of --levels. The solvers (`attacks.mjp.placement`) get the same pieces in the same order.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run.
    """

    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 20
    """Most images."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    image_size: int = 64
    """Pixels of a side to which the images are resized."""
    patch_size: int = 8
    """Pixels of a piece's side."""
    gammas: tuple[float, ...] = (1.0, 0.9, 0.5)
    """Shares of the pieces that are scrambled, in (0, 1]."""
    levels: tuple[float, ...] = (15, 20, 25, 40, math.inf)
    """PSNR of the pieces in dB (inf: exact)."""
    solvers: tuple[Literal["border", "learned", "both"], ...] = ("border", "learned", "both")
    """What places the pieces; learned and both suppose an adversary with public photographs (auxiliary_data)."""
    predictor: str = ""
    """File of a predictor (none given: the one that ships)."""
    mixture: str = ""
    """File of a mixture of borders (none given: the one that ships)."""
    restarts: int = 48
    """Most arrangements that a solver tries, as in the attacks; it stops when six of them are the cheapest one."""
    seed: int = 0
    """Fixes the scrambling and the noise."""
    out: Path = Path("runs/placement")
    """Folder of rows and tables (the committed ones stand in results/placement)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "image_size", "patch_size", "restarts")
        if self.image_size % self.patch_size:
            raise UsageError(f"--image-size {self.image_size} is no multiple of --patch-size {self.patch_size}")
        if not (self.gammas and self.levels and self.solvers):
            raise UsageError("--gammas, --levels and --solvers each take at least one value")
        for gamma in self.gammas:
            if not 0 < gamma <= 1:
                raise UsageError(f"--gammas must lie in (0, 1], not {gamma}")
        for level in self.levels:
            if not level > 0:
                raise UsageError(f"--levels are PSNR above 0 dB, not {level}")
        super().validate()
