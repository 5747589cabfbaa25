"""Options of the calibration of the attacks' confidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from attacks.registry import UsageError
from experiments.scaffold import SuiteOptions, check_positive
from fedmjp.config import ATTACKS_HELP

ATTACKS_USED = (
    f"{ATTACKS_HELP} Chosen for each gamma and number of updates by the first client's updates; after the first update "
    "those that read several. The default is the closed forms that vouch for patches: searches vouch for none."
)


@dataclass(frozen=True)
class Options(SuiteOptions):
    """Is an attack's confidence justified?

    An attack vouches for the patches that it expects to be right above 25 dB (`known`), by its own error estimate. Its
    answer is certified where the gradient of the reconstruction is the one received (attacks/certificate.py). Both
    are compared with the originals, over MJP's masking ratios and numbers of updates: the share of patches vouched for
    against the share that is right, and how many certified answers are right in every patch.

    Clients of one image each send one update after the other under MJP, the model drifting in between; gamma 0 is no
    defence. Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run.
    """

    model: str = "vit_mini_64"
    """A plain ViT; under MJP its variant _mjp is attacked."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 24
    """Most images."""
    gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.9)
    """Masking ratios; 0 is no defence."""
    updates: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of updates after which the server attacks."""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=ATTACKS_USED)] = (
        "patch_embedding",
        "mjp_subspace",
        "mjp_rounds",
    )
    drift: float = 0.01
    """How far the weights move between updates, relative to their size."""
    seed: int = 0
    """Fixes weights, drift, masks and jigsaws."""
    out: Path = Path("runs/calibration")
    """Folder of rows and table (the committed ones stand in results/calibration)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "updates")
        if not (self.gammas and self.updates):
            raise UsageError("--gammas and --updates each need at least one value")
        if not all(0 <= gamma <= 1 for gamma in self.gammas):
            raise UsageError("--gammas takes numbers in [0, 1]")
        super().validate()
