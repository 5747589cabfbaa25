"""Options of the leakage of updates that lack some parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import SuiteOptions, check_positive


@dataclass(frozen=True)
class Options(SuiteOptions):
    """Which part of an update has to be withheld before nothing leaks?

    No other defence: each client sends the gradient of one image, without one group of parameters. The attacks are
    chosen from what is left, and the strongest is found by the rule of the verdict. Groups: nothing, the position
    embedding, the patch projection, both, query, key and value of the first block, they and the position embedding, the
    whole first block, all layers before the third and the fifth block, and everything but the classifier, alone or with
    all biases (BitFit) or all norms.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run, or adds models,
    groups and images to a finished one.
    """

    models: tuple[str, ...] = ("vit_mini_32=auto", "vit_mini_64=auto", "vit_mini_64=random")
    """MODEL=SOURCE, or MODEL=SOURCE@PIXELS for another size of the images (positions are resampled); a source is
    random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    groups: tuple[str, ...] = ()
    """What is withheld, as the rows of the table call it ("position embedding"); none given: each group in turn."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int = 24
    """Most images for each model."""
    seed: int = 0
    """Fixes random weights."""
    out: Path = Path("runs/withheld")
    """Folder of rows and tables (the committed ones stand in results/withheld)."""

    def lines(self) -> list[tuple[str, str, int | None]]:
        """(model, source, pixels or None) for each entry of `models`.

        Raises:
            UsageError: an entry is not written so, or its model is unknown.
        """
        from fedmjp.models import split_name

        found = []
        for entry in self.models:
            model, _, rest = entry.partition("=")
            source, _, pixels = rest.partition("@")
            if not source or (pixels and not pixels.isdigit()):
                raise UsageError(f"--models {entry}: write MODEL=SOURCE or MODEL=SOURCE@PIXELS")
            split_name(model)
            found.append((model, source, int(pixels) if pixels else None))
        return found

    def withheld(self) -> tuple[str, ...]:
        """The groups that are withheld in turn.

        Raises:
            UsageError: there is no such group.
        """
        from experiments.withheld.groups import GROUPS, chosen

        return chosen(self.groups) or tuple(GROUPS)

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images")
        if not self.lines():
            raise UsageError("--models needs at least one entry")
        self.withheld()
        super().validate()
