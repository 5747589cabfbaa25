"""Options of MP3's tables in kind, and the trainings that they compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from attacks.registry import UsageError
from experiments.pretraining.shared_options import PretrainingOptions
from experiments.scaffold import check_positive
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.training.config import UNAUGMENTED, Recipe, StartConfig, TrainConfig

Positions = Literal["absolute", "relative", "none"]
VARIANTS: Mapping[str, str] = {"absolute": "", "relative": "_rel", "none": "_nope"}
TRANSFER = "tiny-imagenet"


@dataclass(frozen=True)
class Line:
    """One training with labels, after MP3 or from scratch.

    Attributes:
        against: the line that it is compared with, or "".
        pretrained: whether it starts from an encoder that predicted places.
        positions: of the model that is trained with labels.
        eta: masking ratio of the pre-training.
        pretraining: its epochs, in units of --pretraining-epochs.
        epochs: epochs with labels, in units of --epochs.
        model: another one than --model, with patches of another size.
        transfer: whether the labels are those of another data set than the pre-training's.
    """

    against: str = ""
    pretrained: bool = True
    positions: Positions = "absolute"
    eta: float = 0.5
    pretraining: float = 1.0
    epochs: float = 1.0
    model: str = ""
    transfer: bool = False


SCRATCH, DEFAULT, BRIEF = "scratch_absolute", "mp3_absolute", "pretrained_shorter"
# In the order in which they are trained. The default of eta is the paper's for CIFAR-100. Masking ratios and patch
# sizes are compared after short pre-trainings.
LINES: Mapping[str, Line] = {
    SCRATCH: Line(pretrained=False),
    DEFAULT: Line(SCRATCH),
    "scratch_none": Line(pretrained=False, positions="none"),
    "mp3_none": Line("scratch_none", positions="none"),
    "scratch_relative": Line(pretrained=False, positions="relative"),
    "mp3_relative": Line("scratch_relative", positions="relative"),
    "scratch_shorter": Line(pretrained=False, epochs=0.3),
    "mp3_shorter": Line("scratch_shorter", epochs=0.3),
    BRIEF: Line(DEFAULT, pretraining=0.2),
    "eta_0": Line(BRIEF, eta=0.0, pretraining=0.2),
    "eta_0.75": Line(BRIEF, eta=0.75, pretraining=0.2),
    "eta_0.9": Line(BRIEF, eta=0.9, pretraining=0.2),
    "scratch_transfer": Line(pretrained=False, transfer=True),
    "mp3_transfer": Line("scratch_transfer", transfer=True),
    "scratch_patch_16": Line(pretrained=False, model="vit_micro16_32"),
    "mp3_patch_16": Line("scratch_patch_16", model="vit_micro16_32", pretraining=0.2),
    "scratch_patch_4": Line(pretrained=False, model="vit_micro_32"),
    "mp3_patch_4": Line("scratch_patch_4", model="vit_micro_32", pretraining=0.2),
    "scratch_longer": Line(pretrained=False, epochs=3),
    "mp3_longer": Line("scratch_longer", epochs=3),
    "pretrained_longer": Line(DEFAULT, pretraining=3),
}
TEST_ETAS = (0.0, 0.25, 0.5, 0.75, 0.9)  # of Figure 3
STEP_ETAS = (0.3, 0.5, 0.75, 0.9)  # of Table 2
SHORT = dataclasses.replace(UNAUGMENTED, epochs=10, batch_size=64, learning_rate=8e-3, smallest_crop=0.35)


@dataclass(frozen=True)
class MP3Options(PretrainingOptions):
    """Pre-training with MP3.  Its Tables 2, 3 and 7, and its Figures 2 to 15.

        python benchmarks/mp3.py --data-path DIR --transfer-path DIR

    Pre-trains without labels and trains with labels after it, or from scratch, on the same images, once a line and
    seed; measures accuracy, places predicted at other masking ratios, k nearest neighbours by layer, the correlation of
    positions and how far heads attend; times a step at each masking ratio; draws images reassembled from predicted
    places. A training's rows are written when it ends, and steps are timed once. Writes rows.jsonl.gz, table.csv,
    places.csv, structure.csv, claims.csv, steps.csv, figures and run.json to --out; --resume trains what is missing.
    """

    model: str = "vit_micro8_32"
    """A plain ViT; two lines have patches of other sizes."""
    lines: tuple[str, ...] = tuple(LINES)
    """Which trainings with labels; the pre-trainings that they need are trained with them."""
    data: DataConfig = field(default_factory=lambda: DataConfig("cifar10", None, 10_000, 2_000))
    """What is trained on, without and with labels; the same images for all lines of a seed."""
    transfer_path: Path | None = None
    """Local copy of tiny-imagenet, whose labels are those of two lines (Table 7)."""
    recipe: Recipe = field(default_factory=lambda: SHORT)
    """How to train with labels, all lines alike. The defaults are a short training."""
    pretraining_epochs: int = 30
    """Epochs without labels."""
    pretraining_rate: float = 16e-3
    """Peak learning rate without labels, per 512 images as --learning-rate."""
    references: int = 2000
    """Training images whose features the nearest neighbours are taken from."""
    timing_model: str = "vit_ti"
    """A plain ViT whose training step is timed."""
    timing_batch: int = 8
    """Images of a timed step."""
    timing_repeats: int = 10
    """Timed steps for each masking ratio; 0 times nothing."""
    weights: Path = Path("runs/mp3_weights")
    """Folder of trained weights. What is there is not trained again; figures of what an encoder computes need it."""
    threads: int = 1
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    out: Path = Path("runs/mp3")
    """Folder of rows, tables and figures (the committed ones stand in results/mp3)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        strange = [name for name in self.lines if name not in LINES]
        if strange or not self.lines:
            raise UsageError(f"--lines takes names from: {', '.join(LINES)}; not {', '.join(strange) or 'none'}")
        check_positive(self, "pretraining_epochs", "references")
        if self.timing_repeats < 0 or self.timing_batch < 2 or self.timing_batch % 2:
            raise UsageError("--timing-batch takes even numbers, --timing-repeats numbers from 0")
        for name in self.lines:
            self.pretraining(LINES[name], self.seeds[0]).validate()
            self.supervised(LINES[name], self.seeds[0]).validate()

    def pretraining(self, line: Line, seed: int) -> TrainConfig:
        """The options of the pre-training that a line starts from."""
        epochs = max(1, round(self.pretraining_epochs * line.pretraining))
        changes = {"epochs": epochs, "warmup_epochs": epochs / 20, "learning_rate": self.pretraining_rate}
        recipe = dataclasses.replace(self.recipe, label_smoothing=0, mixup=0, cutmix=0, erasing=0, repeats=1, **changes)
        config = self.training(f"mp3:eta={line.eta:g}", seed)
        return dataclasses.replace(config, recipe=recipe, model=ModelConfig(line.model or self.model, "random"))

    def supervised(self, line: Line, seed: int, encoder: Path | None = None) -> TrainConfig:
        """The options of a line's training with labels.

        Args:
            encoder: the weights that it starts from, None for random ones.
        """
        epochs = max(1, round(self.recipe.epochs * line.epochs))
        recipe = dataclasses.replace(self.recipe, epochs=epochs, warmup_epochs=epochs / 10)
        data = dataclasses.replace(self.data, data=TRANSFER, data_path=self.transfer_path)
        return dataclasses.replace(
            self.training("supervised", seed),
            model=ModelConfig(f"{line.model or self.model}{VARIANTS[line.positions]}", "random"),
            data=data if line.transfer else self.data,
            recipe=recipe,
            start=StartConfig(encoder),
        )
