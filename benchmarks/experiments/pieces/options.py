"""Options of the table of patches up to their order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attacks.registry import UsageError
from experiments.scaffold import RowOptions, check_positive


@dataclass(frozen=True)
class Options(RowOptions):
    """What does one update show of the patches whose positions it does not?

    Clients of one image send one update: under MJP, where `unmix` attacks, and of a model without position embedding,
    where `patch_set` does. What these attacks find is a set of patches; in which order they stand is a guess by their
    borders. So the answer is scored twice: with the patches of hidden positions assigned to those of the photograph
    in the best way, and as the attack placed them, with each of --solvers.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run.
    """

    model: str = "vit_mini_64"
    """Plain model; its variants _mjp and _nope are attacked."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    image_size: int | None = None
    """Pixels of a side, for a plain ViT, whose position embedding is resampled (None: the model's own)."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 50
    """Most images."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    gammas: tuple[float, ...] = (0.1, 0.5, 0.9)
    """Masking ratios of MJP."""
    without_positions: bool = True
    """Attack the model without position embedding too."""
    withhold_positions: bool = False
    """Clients under MJP do not send the position embedding's gradient, so that the mask has to be found as well."""
    solvers: tuple[Literal["border", "learned", "both"], ...] = ("border",)
    """What places the pieces (`attacks.mjp.placement`); learned and both suppose an adversary with public photographs
    (auxiliary_data)."""
    seed: int = 0
    """Fixes masks."""
    out: Path = Path("runs/pieces")
    """Folder of rows and tables (the committed ones stand in results/pieces)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "image_size")
        if not (self.gammas or self.without_positions):
            raise UsageError("nothing to attack: give --gammas, or leave out --no-without-positions")
        if not self.solvers:
            raise UsageError("--solvers takes at least one of border, learned and both")
        super().validate()
