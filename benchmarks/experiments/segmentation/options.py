"""Options of the table of segmentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from attacks.registry import UsageError
from experiments.scaffold import RowOptions, check_positive
from experiments.trainings.options import SHORT
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.defenses import DEFENSES
from fedmjp.objectives import read_objective
from fedmjp.training.config import DefenseOptions, Recipe, StartConfig, TrainConfig

# Short; the rate was tried on one seed of the plain Swin. The same for every line.
MOSAICS = Recipe(
    **{**read_objective("segmentation").recipe, "epochs": 6, "learning_rate": 0.04, "warmup_epochs": 0.5}
    | {"smallest_crop": 0.5}
)


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: as the table shows it.
        model: as `--model` takes it.
        pretraining: the defence under which the encoder was pre-trained, or "" for random weights.
        defense: the defence under which segmentation is trained.
        against: name of the line that this one is compared with, or "".
    """

    name: str
    model: str
    pretraining: str = ""
    defense: str = "none"
    against: str = ""


@dataclass(frozen=True)
class Options(RowOptions):
    """Segmentation with and without MJP.  Table 3 of the MJP supplement.

        python benchmarks/segmentation.py --pretraining-path DIR

    Trains UPerNet on each model by the code of `python -m fedmjp.train --objective segmentation`, once a seed: from
    random weights, plainly and under MJP, and for --pretrained-models also plainly from encoders that were pre-trained
    on CIFAR-10 plainly and under MJP, which is the supplement's comparison. Measures mean IoU and mean accuracy over
    classes on unchanged test images. A line "colour alone" classifies each pixel by its own colour. Pre-trained
    encoders are kept in --pretrained. Writes rows.jsonl.gz, table.csv and run.json to --out.
    """

    models: tuple[str, ...] = ("swin_micro_32", "vit_micro_32")
    """Encoders."""
    pretrained_models: tuple[str, ...] = ("swin_micro_32",)
    """Those of them that are trained from pre-trained weights, too."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each fixes weights, order, masks and the images, for all lines alike."""
    gamma: float = 0.1
    """MJP's masking ratio (the paper's choice for accuracy)."""
    data: str = "mosaics"
    """mosaics, or masks:PATH in ADE20K's layout."""
    train_limit: int | None = None
    """Use a random subset of this many training images."""
    test_limit: int | None = None
    """Evaluate on a random subset of this many test images."""
    pretraining: Literal["cifar10", "cifar100", "tiny-imagenet", "photos"] = "cifar10"
    """Images of the pre-training."""
    pretraining_path: Path | None = None
    """Local copy of them."""
    pretraining_limit: int = 10_000
    """Use a random subset of this many of them."""
    recipe: Recipe = field(default_factory=lambda: MOSAICS)
    """How to train segmentation, all lines alike."""
    pretrained: Path = Path("runs/segmentation_pretrained")
    """Folder of the pre-trained encoders; what is there is not trained again."""
    threads: int = 1
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    out: Path = Path("runs/segmentation")
    """Folder of rows and table (the committed ones stand in results/segmentation)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "train_limit", "test_limit", "pretraining_limit")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError("--seeds takes different numbers, at least one")
        for line in lines_of(self.models, self.pretrained_models):
            self.config(line, self.seeds[0]).validate()

    def config(self, line: Line, seed: int) -> TrainConfig:
        """The options of one training of segmentation, but for its start (`started`)."""
        return TrainConfig(
            defense=line.defense,
            objective="segmentation",
            model=ModelConfig(line.model, "random"),
            data=DataConfig(self.data, None, self.train_limit, self.test_limit),
            recipe=self.recipe,
            precision="float32",
            options=self._defense_options(),
            device=self.device,
            threads=self.threads,
            seed=seed,
        )

    def started(self, line: Line, seed: int) -> TrainConfig:
        """The options of one training with the pre-trained encoder that its line names."""
        if not line.pretraining:
            return self.config(line, seed)
        weights = self.pretraining_config(line, seed).out / "model.safetensors"
        return dataclasses.replace(self.config(line, seed), start=StartConfig(weights))

    def pretraining_config(self, line: Line, seed: int) -> TrainConfig:
        """The options of one supervised pre-training, in a folder of its own."""
        return TrainConfig(
            defense=line.pretraining,
            model=ModelConfig(line.model, "random"),
            data=DataConfig(self.pretraining, self.pretraining_path, self.pretraining_limit, 2_000),
            recipe=SHORT,
            precision="float32",
            options=self._defense_options(),
            device=self.device,
            threads=self.threads,
            seed=seed,
            out=self.pretrained / f"{line.model}-{line.pretraining}-{seed}",
            resume=True,
        )

    def _defense_options(self) -> DefenseOptions:  # type: ignore[valid-type]
        return dataclasses.replace(DefenseOptions(), mjp=DEFENSES.get("mjp")(gamma=self.gamma))


def lines_of(models: Sequence[str], pretrained: Sequence[str]) -> list[Line]:
    """Two lines a model, and two more for each of `pretrained`."""
    lines = []
    for model in models:
        lines += [Line(model, model), Line(f"{model}, MJP in segmentation", model, defense="mjp", against=model)]
    for model in pretrained:
        plain = Line(f"{model}, pre-trained", model, "none")
        lines += [plain, Line(f"{plain.name} with MJP", model, "mjp", against=plain.name)]
    return lines
