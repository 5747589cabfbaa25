"""Options of the table that compares what a fine-tuning starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from attacks.registry import UsageError
from experiments.pretraining.mst_options import SMALL
from experiments.pretraining.shared_options import PretrainingOptions
from experiments.scaffold import check_positive
from fedmjp.config import DataConfig
from fedmjp.defenses import DEFENSES
from fedmjp.training.config import (
    UNAUGMENTED,
    DefenseOptions,
    Recipe,
    StartConfig,
    TrainConfig,
    default_config,
)

SUPERVISED = "supervised:pool=mean"


@dataclass(frozen=True)
class Start:
    """A pre-training.

    Attributes:
        objective: as --objective takes it.
        changes: of the recipe of the objective's paper, beside epochs and batch size.
    """

    objective: str
    changes: Mapping[str, float | str] = field(default_factory=dict)


SCRATCH = "scratch"
CROPS = {"smallest_crop": 0.35, "rand_augment": "none"}
# Rates are those of the tables of each objective, `supervised` has that of the fine-tuning.
STARTS: Mapping[str, Start | None] = {
    SCRATCH: None,
    "supervised": Start(
        SUPERVISED, {"learning_rate": 8e-3, "mixup": 0, "cutmix": 0, "erasing": 0, "repeats": 1} | CROPS
    ),
    "mp3": Start("mp3:eta=0.5", {"learning_rate": 16e-3} | CROPS),
    "droppos": Start("droppos:gamma=0,tau=inf,decoder_width=64", {"learning_rate": 8e-3, "clip_gradient": 1.0} | CROPS),
    "mst": Start(SMALL, {"learning_rate": 16e-3}),
}
DEFENCES = ("none", "mjp")
SHORT = dataclasses.replace(
    UNAUGMENTED, epochs=4, batch_size=64, learning_rate=8e-3, warmup_epochs=0.4, smallest_crop=0.35
)


@dataclass(frozen=True)
class StartOptions(PretrainingOptions):
    """Pre-training by each objective against a supervised one on the same images, then fine-tuned with and without MJP.

        python benchmarks/pretraining.py --data-path DIR

    Pre-trains the same model from the same random weights on the same images by each objective, fine-tunes each
    encoder, and random weights, on the labels of a part of these images, plainly and under MJP, and measures accuracy
    on unchanged test images. Pre-trained encoders are kept in --pretrained. A training's row is written when it ends.
    Writes rows.jsonl.gz, table.csv, table.md and run.json to --out; --resume trains what is missing.
    """

    model: str = "vit_micro8_32"
    """A plain ViT."""
    starts: tuple[str, ...] = tuple(STARTS)
    """What fine-tuning starts from: scratch (random weights), supervised, mp3, droppos, mst."""
    data: DataConfig = field(default_factory=lambda: DataConfig("cifar10", None, 20_000, 2_000))
    """What is pre-trained on; the same images for all lines of a seed."""
    labelled: int = 5_000
    """Fine-tuning images, a random subset of them; the supervised pre-training reads the labels of all."""
    pretraining_epochs: int = 2
    """Epochs of every pre-training."""
    recipe: Recipe = field(default_factory=lambda: SHORT)
    """How to fine-tune, all lines alike. The defaults are a short training."""
    gamma: float = 0.1
    """MJP's masking ratio in fine-tuning (its paper's choice for accuracy)."""
    precision: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Type of activations in training."""
    threads: int = 1
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    pretrained: Path = Path("runs/pretraining_weights")
    """Folder of the pre-trained encoders; what is there is not trained again."""
    out: Path = Path("runs/pretraining")
    """Folder of rows and tables (the committed ones stand in results/pretraining)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "labelled", "pretraining_epochs")
        strange = [name for name in self.starts if name not in STARTS]
        if strange or not self.starts:
            raise UsageError(f"--starts takes names from: {', '.join(STARTS)}; not {', '.join(strange) or 'none'}")
        if self.data.train_limit is not None and self.labelled > self.data.train_limit:
            raise UsageError(f"--labelled {self.labelled} is more than --train-limit {self.data.train_limit}")
        for name in self.starts:
            if name != SCRATCH:
                self.pretraining(name, self.seeds[0]).validate()
            for defense in DEFENCES:
                self.fine_tuning(defense, self.seeds[0]).validate()

    def pretraining(self, name: str, seed: int) -> TrainConfig:
        """The options of a pre-training."""
        start, epochs = STARTS[name], self.pretraining_epochs
        changes = {"epochs": epochs, "batch_size": self.recipe.batch_size, "warmup_epochs": epochs / 10}
        recipe = dataclasses.replace(default_config(start.objective).recipe, **changes, **start.changes)
        return dataclasses.replace(self.training(start.objective, seed), recipe=recipe)

    def fine_tuning(self, defense: str, seed: int, encoder: Path | None = None) -> TrainConfig:
        """The options of a fine-tuning.

        Args:
            encoder: the weights that it starts from, None for random ones.
        """
        return dataclasses.replace(
            self.training(SUPERVISED, seed),
            defense=defense,
            data=dataclasses.replace(self.data, train_limit=self.labelled),
            options=dataclasses.replace(DefenseOptions(), mjp=DEFENSES.get("mjp")(gamma=self.gamma)),
            start=StartConfig(encoder),
        )
