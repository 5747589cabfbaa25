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
from fedmjp.training.config import Recipe, TrainConfig, default_config

DEFAULT = "default"
# A line is a pre-training: name -> how its options differ from those of --objective. Random masks hide as many patches
# as guided ones do (share times p); BERT's hide its 15 %.
MLM = {"masking": "random", "p": 0.15, "replacement": "bert", "restored": "masked"}
LINES: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    "none": {"masking": "none"},
    "random": {"masking": "random", "p": 0.0625},
    "attended": {"masking": "attended"},
    "mlm": MLM | {"lambda_1": 0},
    "mlm_dino": MLM,
    "bert": {"replacement": "bert"},
    "lambda_0.2": {"lambda_2": 0.2},
    "lambda_0.4": {"lambda_2": 0.4},
    "lambda_0.8": {"lambda_2": 0.8},
}
KS = (10, 20, 100, 200)
SHORT = dataclasses.replace(
    default_config("mst").recipe, epochs=4, batch_size=64, learning_rate=0.016, warmup_epochs=0.4
)
SMALL = "mst:outputs=256,hidden=256,bottleneck=64,local_crops=2,momentum=0.98"


@dataclass(frozen=True)
class MSTOptions(PretrainingOptions):
    """Pre-training with MST.  Tables 1 and 4 of its appendix, and its lambda_2 (section 10).

        python benchmarks/mst.py --data-path DIR

    Pre-trains once a line and seed, and measures k-NN accuracy for k = 10, 20, 100, 200 and a linear probe of student
    and teacher, beside the same model's before training; and of the pretext task whether it was learned: the loss
    against that of a student that ignores the image, the teacher's entropies, restored pixels against the mean colour.
    A training's rows are written when it ends. Writes rows.jsonl.gz, table.csv, three tables in Markdown and run.json
    to --out; --resume trains what is missing.
    """

    objective: str = SMALL
    """What all lines share, as --objective of fedmjp.train; a line changes some of it."""
    lines: tuple[str, ...] = tuple(LINES)
    """Which pre-trainings: default, none, random, attended (masking), mlm, mlm_dino, bert (replacement), lambda_0.2,
    lambda_0.4, lambda_0.8."""
    data: DataConfig = field(default_factory=lambda: DataConfig("cifar10", None, 10_000, 2_000))
    """What is trained on; the same images for all lines of a seed."""
    recipe: Recipe = field(default_factory=lambda: SHORT)
    """How to train, all lines alike. The defaults are a short training."""
    references: int = 5000
    """Training images whose features k-NN and linear probe read."""
    precision: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Type of activations in training."""
    threads: int = 1
    """Torch threads (0: torch's own choice)."""
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
        changes = ",".join(f"{name}={value}" for name, value in LINES[line].items())
        joint = "," if ":" in self.objective else ":"
        return self.training(f"{self.objective}{joint}{changes}" if changes else self.objective, seed)
