"""Options of the leakage of clients that augment, and of the rate of false matches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import AttackOptions, RowOptions, check_positive

# Of `experiments.augmentation.views.AUGMENTATIONS`, which imports torch.
NAMES = (
    "none",
    "mirrored",
    "patch shifts",
    "colours",
    "mirrored, colours",
    "colours, clipped",
    "pixel shifts",
    "resized crops",
)


@dataclass(frozen=True)
class Options(AttackOptions):
    """Does augmentation protect against attacks over several updates?

    Clients of one image send several updates under MJP, every step jigsawed, each of a new view of the image, the model
    drifting in between; after the last one `mjp_subspace` (that update alone) and `mjp_rounds` (all of them) attack.
    Clients of four images send batches of two without a defence, in which any two images meet once and every image
    stands three times, each time in a new view; `batch_rounds` attacks the last two batches. The answer is compared
    with the view that the attacked update was computed on, and with the photograph before augmentation. Views: `none`,
    `mirrored`, `patch shifts`, `colours`, `mirrored, colours`, `colours, clipped`, `pixel shifts`, `resized crops`
    (experiments/augmentation/views.py).

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run.
    """

    model: str = "vit_mini_64"
    """Plain model; MJP turns it into the variant it needs."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int = 24
    """Most images; for batches a remainder that does not fill groups of four is left out."""
    gammas: tuple[float, ...] = (0.1, 0.3)
    """Masking ratios of MJP (none: batches alone)."""
    batches: bool = True
    """Attack batches of two, too."""
    updates: int = 6
    """Updates of a client under MJP."""
    views: tuple[str, ...] = ()
    """Numbers of augmentations, from 0 in the order above (none given: all)."""
    withhold: bool = False
    """Clients send everything but the position gradient (results/withheld_rounds)."""
    drift: float = 0.01
    """How far the weights move between updates, relative to their size."""
    seed: int = 0
    """Fixes views, masks and drift."""
    out: Path = Path("runs/augmentation")
    """Folder of rows and tables (the committed ones stand in results/augmentation)."""

    def augmentations(self) -> list[str]:
        """Names of the augmentations asked for.

        Raises:
            UsageError: no such number.
        """
        for number in self.views:
            if not number.isdigit() or int(number) >= len(NAMES):
                raise UsageError(f"--views {number}: numbers from 0 to {len(NAMES) - 1}")
        return [NAMES[int(number)] for number in self.views] or list(NAMES)

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "updates")
        if not (self.gammas or self.batches):
            raise UsageError("nothing to attack: give --gammas, or leave out --no-batches")
        self.augmentations()
        super().validate()


@dataclass(frozen=True)
class StrangerOptions(RowOptions):
    """How often are updates of different images taken for updates of one?

    A client sends one update for each of many images, in batches of one under MJP and in batches of two without a
    defence. Each of some of these updates is compared with all the others as the attacks over rounds compare them, in
    every view: no two show the same image, so that every pair that is joined is a false match. Batches of two are also
    compared with two later ones, of a drifted model, that share one image each with them: those that are not joined are
    missed.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run.
    """

    model: str = "vit_mini_64"
    """Plain model; MJP turns it into the variant it needs."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    images: str = "tiny-imagenet"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int = 1000
    """Most images of the client."""
    targets: int = 50
    """Updates that all others are compared with."""
    gammas: tuple[float, ...] = (0.1, 0.3)
    """Masking ratios of MJP (none: batches alone)."""
    drift: float = 0.01
    """How far the weights move before the later batches, relative to their size."""
    seed: int = 0
    """Fixes masks and drift."""
    out: Path = Path("runs/strangers")
    """Folder of rows and tables (the committed ones stand in results/strangers)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "targets")
        super().validate()
