"""Options of what an update of few numbers determines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import RowOptions, check_positive


@dataclass(frozen=True)
class Options(RowOptions):
    """How much of an image is determined by the few numbers that some clients send?

    Clients of one image send the gradients of biases, norms or the classifier alone, to which no closed form applies.
    That a search finds nothing there says little; this says what there is to be found. Around the photograph the
    gradient is linear in the pixels, and the errors of float32 are known; from both follows how many numbers of the
    image the message determines, and with which error (Fisher information; Cramer 1946, Rao 1945). It says nothing of
    images far away, nor whether a search gets there.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run, or adds a model.
    """

    model: str = "vit_mini_32"
    """Model that clients train."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    image_size: int | None = None
    """Pixels of an image's side (none: those that the model is made for; positions are resampled)."""
    groups: tuple[str, ...] = (
        "all but biases and classifier",
        "all but norms and classifier",
        "all but the classifier",
    )
    """What is withheld, as the table of withheld.py calls it."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 8
    """Most images."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    seed: int = 0
    """Fixes random weights."""
    out: Path = Path("runs/identifiability")
    """Folder of rows and tables (the committed ones stand in results/identifiability)."""

    def withheld(self) -> tuple[str, ...]:
        """The groups that are withheld in turn.

        Raises:
            UsageError: there is no such group.
        """
        from experiments.withheld.groups import chosen

        return chosen(self.groups)

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images")
        if not self.withheld():
            raise UsageError("--groups needs at least one entry")
        super().validate()
