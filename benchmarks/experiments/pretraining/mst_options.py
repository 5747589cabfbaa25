"""Options of the tables of MST."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attacks.registry import UsageError
from experiments.pretraining.shared_options import PretrainingOptions
from fedmjp.config import DataConfig
from fedmjp.settings import write_value
from fedmjp.training.config import Recipe, TrainConfig, default_config

DEFAULT = "default"


@dataclass(frozen=True)
class Line:
    """One pre-training.

    Attributes:
        changes: how its options differ from those of --objective.
        epochs: its epochs, in units of --epochs; the warm-up stays as it is.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    epochs: float = 1.0


# Random masks hide as many patches as guided ones do (share times p) where no share is named; BERT's hide its 15 %.
MLM = {"masking": "random", "p": 0.15, "replacement": "bert", "restored": "masked"}
LINES: Mapping[str, Line] = {
    DEFAULT: Line(),
    "none": Line({"masking": "none"}),
    "random": Line({"masking": "random", "p": 0.0625}),
    "attended": Line({"masking": "attended"}),
    "mlm": Line(MLM | {"lambda_1": 0}),
    "mlm_dino": Line(MLM),
    "bert": Line({"replacement": "bert"}),
    "lambda_0.2": Line({"lambda_2": 0.2}),
    "lambda_0.4": Line({"lambda_2": 0.4}),
    "lambda_0.8": Line({"lambda_2": 0.8}),
    "longer": Line(epochs=3),
    "random_0.25": Line({"masking": "random", "p": 0.25}),
    "random_0.5": Line({"masking": "random", "p": 0.5}),
    "no_norm": Line({"decoder_norm": False}),
    "none_no_norm": Line({"masking": "none", "decoder_norm": False}),
    "random_0.01_no_norm": Line({"masking": "random", "p": 0.01, "decoder_norm": False}),
}
KS = (10, 20, 100, 200)
BLOCKS = 4  # that DINO's linear probe of a ViT-S reads
SHORT = dataclasses.replace(
    default_config("mst").recipe, epochs=4, batch_size=64, learning_rate=0.016, warmup_epochs=0.4
)
SMALL = "mst:outputs=256,hidden=256,bottleneck=64,local_crops=2,momentum=0.98"


@dataclass(frozen=True)
class MSTOptions(PretrainingOptions):
    """Pre-training with MST.  Tables 1 to 4 of its appendix, its masks (section 9) and its lambda_2 (section 10).

        python benchmarks/mst.py --data-path DIR

    Pre-trains once a line and seed, and measures k-NN accuracy for k = 10, 20, 100, 200 and two linear probes of
    student and teacher (of the last class token, and of the last four blocks' as DINO's), beside the same model's
    before training; and of the pretext task whether it was learned: the loss against that of a student that ignores
    the image, the teacher's entropies, restored pixels against the mean colour. A training's rows are written when it
    ends. Writes rows.jsonl.gz, table.csv, tables in Markdown and run.json to --out; --resume trains what is missing.
    """

    objective: str = SMALL
    """What all lines share, as --objective of fedmjp.train; a line changes some of it."""
    lines: tuple[str, ...] = tuple(LINES)
    """Which pre-trainings: default, none, random, attended, random_0.25, random_0.5 (masking), mlm, mlm_dino, bert
    (replacement), lambda_0.2, lambda_0.4, lambda_0.8, no_norm, none_no_norm, random_0.01_no_norm (decoder without batch
    norm), longer (three times the epochs)."""
    data: DataConfig = field(default_factory=lambda: DataConfig("cifar10", None, 10_000, 2_000))
    """What is trained on; the same images for all lines of a seed."""
    recipe: Recipe = field(default_factory=lambda: SHORT)
    """How to train, all lines alike. The defaults are a short training."""
    references: int = 5000
    """Training images whose features k-NN and linear probe read."""
    precision: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Type of activations in training."""
    threads: int = 1
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    out: Path = Path("runs/mst")
    """Folder of rows, tables and run.json (the committed ones stand in results/mst)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        strange = [name for name in self.lines if name not in LINES]
        if strange or not self.lines:
            raise UsageError(f"--lines takes names from: {', '.join(LINES)}; not {', '.join(strange) or 'none'}")
        images = self.data.train_limit or self.references
        if not max(KS) <= self.references <= images:
            raise UsageError(f"--references must lie between {max(KS)} and the training images, not {self.references}")
        if self.objective.partition(":")[0] != "mst":
            raise UsageError(f"--objective is mst:option=value,..., not {self.objective!r}")
        for name in self.lines:
            self.config(name, self.seeds[0]).validate()

    def config(self, line: str, seed: int) -> TrainConfig:
        """The options of one training, as `python -m fedmjp.train` takes them."""
        own = LINES[line]
        changes = ",".join(f"{name}={write_value(value)}" for name, value in own.changes.items())
        joint = "," if ":" in self.objective else ":"
        config = self.training(f"{self.objective}{joint}{changes}" if changes else self.objective, seed)
        epochs = max(1, round(self.recipe.epochs * own.epochs))
        return dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, epochs=epochs))
