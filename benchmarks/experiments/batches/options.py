"""Options of the leakage of small batches over several steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from attacks import ATTACKS, ThreatModel, UsageError
from experiments.scaffold import SuiteOptions, check_positive
from fedmjp.budgets import AUTO
from fedmjp.config import ATTACKS_HELP

PLANES = (2, 3, 5, 7)  # orders for which an affine plane is built: primes
ATTACKS_USED = (
    f"{ATTACKS_HELP} Chosen for each batch size by the steps of its first images: at the default budget batch_rounds "
    "and patch_embedding (5 to 30 s a step of a ViT-B on one core)."
)


@dataclass(frozen=True)
class Options(SuiteOptions):
    """Do small batches protect?

    No defence, no mask: clients send the gradient of a batch of two or three images, whose position rows add up. In a
    single step every image is mixed with the others. Clients train for several steps, and their images reappear in
    batches with different images: k^2 images are assigned like the points of an affine plane of order k to its k^2 + k
    lines, so that each image is in one batch with every other one exactly once, in k + 1 steps. The model moves between
    steps. The last step of the history is attacked, for each of k steps that together hold all images: by
    `batch_rounds` with the whole history, by `patch_embedding` that step alone.

    With --epochs, batches are those of any training loop instead: one client passes over all its --num-images, shuffled
    anew in every epoch, and --targets batches of the last epoch are attacked, each with the steps of all epochs.

        python benchmarks/batch_rounds.py --model vit_mini_64 --weights auto --images tiny-imagenet --data-path DIR \\
            --num-images 1000 --batch-sizes 2 --epochs 3

    Writes rows.jsonl.gz, table.csv, separated.png (the embedded photographs in a plane) and run.json to --out; --resume
    goes on with an unfinished run.
    """

    model: str = "vit_b"
    """A ViT whose channels and patch values both exceed (batch size - 1) times its number of patches."""
    weights: str = "random"
    """random, timm, auto, long, or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 36
    """Most images; a remainder that does not fill a plane (4 images for pairs, 9 for triples) is left out."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    batch_sizes: tuple[int, ...] = (2, 3)
    """Images a step: 2, 3, 5, 7 (the orders for which the plane is built), any from 2 on with --epochs."""
    epochs: int = 0
    """Passes over all images in batches shuffled anew (0: the lines of affine planes)."""
    targets: int = 25
    """Batches of the last epoch that are attacked, with --epochs."""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=ATTACKS_USED)] = (AUTO,)
    drift: float = 0.01
    """How far the weights move between steps, relative to their size."""
    seed: int = 0
    """Fixes weights, drift and the order of the images."""
    out: Path = Path("runs/batch_rounds")
    """Folder of rows, tables and figures (the committed ones stand in results/batch_rounds)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        if self.epochs < 0:
            raise UsageError("--epochs must be 0 or more")
        check_positive(self, "targets")
        for size in self.batch_sizes:
            if size < 2 or not (self.epochs or size in PLANES):
                built = "from 2 on" if self.epochs else "the steps are built for primes (2, 3, 5, 7)"
                raise UsageError(f"--batch-sizes {size}: {built}")
        if not self.batch_sizes:
            raise UsageError("--batch-sizes needs at least one number")
        least = min(self.batch_sizes) ** (1 if self.epochs else 2)
        if self.num_images < least:
            held = "batch" if self.epochs else "plane of the smallest batch"
            raise UsageError(f"--num-images must be at least {least}, a {held}")
        super().validate()
        for name in self.named():
            ATTACKS.get(name)().require(ThreatModel(), name)
