"""Options of the leakage under each objective, and the lines of its table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import AttackOptions, check_positive

PRETRAINED = ("mp3", "droppos", "mst")  # names of --pretrained


@dataclass(frozen=True)
class Line:
    """One objective on one model.

    Attributes:
        objective: as --objective takes it.
        model: its name.
        weights: random, auto, or one of `PRETRAINED`.
        attacks: those that can read such an update.
        updates: numbers of updates of an image, with new draws in each, after which it is attacked.
        images: share of --num-images that are attacked.
    """

    objective: str
    model: str
    weights: str
    attacks: tuple[str, ...]
    updates: tuple[int, ...] = (1,)
    images: float = 1.0


_DROPPOS = "droppos:tau=inf,decoder_width=64"
_MST = "mst:local_crops=0,outputs=64,hidden=64,bottleneck=32"
LINES = {
    "supervised": Line("supervised", "vit_mini_32", "auto", ("patch_embedding",)),
    "mp3_trained": Line("mp3:eta=0.5", "vit_micro8_32", "mp3", ("position_head",)),
    "mp3_trained_default": Line("mp3:eta=0.75", "vit_micro8_32", "mp3", ("position_head",), images=0.2),
    "mp3_random": Line("mp3:eta=0.5", "vit_micro8_32", "random", ("position_head",), images=0.2),
    "droppos": Line(_DROPPOS, "vit_mini_32", "random", ("mjp_rounds",), (1, 16, 64), images=0.1),
    "droppos_learned": Line(
        f"{_DROPPOS},positions=learned", "vit_mini_32", "random", ("mjp_rounds",), (1, 16, 64), images=0.2
    ),
    "droppos_trained": Line(_DROPPOS, "vit_mini_32", "droppos", ("mjp_rounds",), (1, 16, 64), images=0.1),
    "mst": Line(_MST, "vit_micro8_32", "random", ("patch_embedding", "batch_rounds"), (1, 8), images=0.2),
    "mst_one_update": Line(_MST, "vit_micro8_32", "random", ("batch_tokens", "pixel_head"), images=0.2),
    "mst_trained": Line(
        _MST, "vit_micro8_32", "mst", ("patch_embedding", "batch_rounds", "batch_tokens", "pixel_head"), images=0.2
    ),
}


@dataclass(frozen=True)
class Options(AttackOptions):
    """What does an update leak under each objective?

    No defence: each client sends the float32 gradient of one image. Per objective the attacks that can read such an
    update; where it draws new masks or crops in each step, after several updates of the same image. An answer is
    compared with the image, and under MST with the two global crops that the client made of it.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run, or adds lines and
    images to a finished one.
    """

    lines: tuple[str, ...] = tuple(LINES)
    """Lines of the table."""
    pretrained: tuple[str, ...] = ()
    """NAME=FILE for the lines *_trained*: files of fedmjp.train under the objective of NAME, one of mp3, droppos and
    mst."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int = 50
    """Most images of a line; some lines take a fixed share of them."""
    steps: int = 800
    """Evaluations of the head's gradient in a search."""
    seed: int = 0
    """Fixes random weights and the clients' draws."""
    out: Path = Path("runs/objectives_leak")
    """Folder of rows and tables (the committed ones stand in results/objectives_leak)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "steps")
        unknown = [name for name in self.lines if name not in LINES]
        if unknown or not self.lines:
            raise UsageError(f"--lines {' '.join(unknown)}: choose from {', '.join(LINES)}")
        files = self.files()
        wanting = [n for n in self.lines if LINES[n].weights in PRETRAINED and LINES[n].weights not in files]
        if wanting:
            entries = " ".join(f"{LINES[name].weights}=FILE" for name in wanting)
            raise UsageError(f"--lines {' '.join(wanting)} need --pretrained {entries}; or name other --lines")
        super().validate()

    def files(self) -> dict[str, str]:
        """The files of --pretrained, by name.

        Raises:
            UsageError: an entry is no NAME=FILE.
        """
        pairs = [entry.partition("=") for entry in self.pretrained]
        for (name, _, file), entry in zip(pairs, self.pretrained, strict=True):
            if name not in PRETRAINED or not file:
                raise UsageError(f"--pretrained {entry}: write NAME=FILE, with NAME one of {', '.join(PRETRAINED)}")
        return {name: file for name, _, file in pairs}
