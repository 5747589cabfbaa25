"""Options of the features that a batch's classifier gradient gives away."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import RowOptions, check_positive


@dataclass(frozen=True)
class Options(RowOptions):
    """Of how many images does the gradient of a classifier give the features?

    A client sends the gradient of its classifier for a batch (all else may be withheld). The server solves for what the
    classifier received of each image (attacks/features/classifier_features.py), with the labels granted and with labels
    that it infers. A feature counts as found where it is off by less than a thousandth of its length.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run, or adds a model.
    """

    model: str = "vit_mini_32"
    """Model that clients train."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    image_size: int | None = None
    """Pixels of an image's side (none: those that the model is made for; positions are resampled)."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Images in a batch, in turn."""
    batches: int = 10
    """Batches of each size; labels are drawn at random and may repeat."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    examples: int = 256
    """Images of noise whose features searches start from, and from which labels are guessed."""
    seed: int = 0
    """Fixes labels, noise and random weights."""
    out: Path = Path("runs/batch_features")
    """Folder of rows and tables (the committed ones stand in results/batch_features)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "batches", "examples")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise UsageError("--batch-sizes takes at least one size, and none below 1")
        super().validate()
