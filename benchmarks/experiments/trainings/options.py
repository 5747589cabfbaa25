"""Options of the tables of trainings.

A variant says which model trains under which defence; data, recipe and seeds are those of the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from attacks.registry import UsageError
from experiments.scaffold import DeviceOptions
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.defenses import DEFENSES
from fedmjp.training.config import UNAUGMENTED, DefenseOptions, Recipe, TrainConfig

# One pass over a part of CIFAR-10 on a CPU core: rate and batch were chosen on one seed of a plain ViT of four blocks,
# among rates of 0.016 to 0.064 and batches of 16 to 64, and are the same for every line.
SHORT = dataclasses.replace(
    UNAUGMENTED, epochs=1, batch_size=32, learning_rate=0.02, warmup_epochs=0.1, smallest_crop=0.7
)

# One pass over trained weights: a tenth of the rate.
FINE = dataclasses.replace(SHORT, learning_rate=0.002)


@dataclass(frozen=True)
class Variant:
    """One line of a table: a model trained under a defence.

    Attributes:
        name: as the table shows it.
        model: as `--model` takes it; the defence turns it into the variant it needs.
        defense: by name.
        options: of the defence, those that are not its defaults.
        against: name of the variant that this one is compared with, or "".
        precision: type of activations in training, or "" for the table's.
    """

    name: str
    model: str
    defense: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    against: str = ""
    precision: Literal["", "float32", "bfloat16"] = ""


@dataclass(frozen=True)
class TrainingOptions(DeviceOptions):
    """What all trainings of a table have in common."""

    data: DataConfig = field(default_factory=lambda: DataConfig("cifar10", None, 20_000, 2_000))
    """What is trained on; the same images for all variants of a seed."""
    recipe: Recipe = field(default_factory=lambda: SHORT)
    """How to train, all variants alike. The defaults are one short pass."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each fixes weights, order, masks, and the subsets of images, for all variants alike."""
    gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Shares of patches that are shuffled when a trained model is measured."""
    precision: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Type of activations in training."""
    weights: str = "random"
    """What every training starts from: random, timm (published weights), or a checkpoint's path."""
    image_size: int | None = None
    """Pixels of an image's side (none: those that the model is made for)."""
    threads: int = 1
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    trainings: Path = Path("runs/trainings")
    """Folder of the trainings' rows, which tables share (the committed ones stand in results/trainings)."""
    checkpoints: Path | None = None
    """Folder that keeps the weights of what is trained now, with their model cards (none: they are not kept)."""
    train: bool = True
    """Train what is not in --trainings; without, the tables are written from what is there."""
    out: Path = Path("runs/trainings_table")
    """Folder of tables and figure (the committed ones stand in results/)."""
    resume: bool = False
    """Add to the rows in --trainings, where trainings that are there are not repeated, and write the tables anew."""

    def config(self, variant: Variant, seed: int) -> TrainConfig:
        """The options of one training, as `python -m fedmjp.train` takes them."""
        own = {variant.defense: DEFENSES.get(variant.defense)(**variant.options)}
        return TrainConfig(
            defense=variant.defense,
            model=ModelConfig(variant.model, self.weights, image_size=self.image_size),
            data=self.data,
            recipe=self.recipe,
            options=dataclasses.replace(DefenseOptions(), **own),
            precision=variant.precision or self.precision,
            device=self.device,
            threads=self.threads,
            seed=seed,
        )

    def check(self, variants: Sequence[Variant]) -> None:
        """Check options and variants.

        Raises:
            UsageError: options out of range, or a folder with rows and no --resume.
        """
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError("--seeds takes different numbers, at least one")
        for gamma in self.gammas:
            DEFENSES.get("mjp")(gamma=gamma).validate()
        if not {0.0, 0.5} <= set(self.gammas):
            raise UsageError("--gammas needs 0 (top-1 accuracy) and 0.5 (where the paper's tables stand)")
        for variant in variants:
            for seed in self.seeds:
                config = self.config(variant, seed)
                config.validate()
                config.model_name()
        begun = any(self.trainings.glob("rows.jsonl*"))
        if not self.train and not begun:
            raise UsageError(f"{self.trainings} holds no trainings; leave out --no-train")
        if self.train and begun and not self.resume:
            raise UsageError(f"{self.trainings} holds trainings already; pass --resume to add to them")
        if (self.out / "table.csv").exists() and not self.resume:
            raise UsageError(f"{self.out} holds a table already; pass --resume to write it anew, or another --out")

    def resume_hint(self) -> str:
        """How to go on after an interrupt."""
        return f"finished trainings are in {self.trainings}; go on with --resume"


@dataclass(frozen=True)
class TimedOptions(TrainingOptions):
    """A table that also times training steps of its variants, in turn."""

    model: str = "vit_micro_32"
    """Plain ViT."""
    timing_model: str = ""
    """Model whose steps are timed (none given: --model)."""
    timing_rounds: int = 0
    """Rounds of timed steps, one step a variant in each; 0 keeps the latency.csv in --out, if there is one."""


@dataclass(frozen=True)
class AblationOptions(TimedOptions):
    """The variants of MJP one by one.  Table 2 of the MJP paper.

        python benchmarks/ablation.py --data-path DIR

    Trains each variant once a seed, measures top-1 accuracy and Consistency (gamma 0.5), and times a training step of
    each against line A's. A variant is measured with the positions that it was trained with: at shuffled places E shows
    the place's own, F the place's own and the origin, G to J the unknown one. Trainings are kept in --trainings and
    shared with backbones.py and masking_ratio.py. Writes table.csv, table.md, latency.csv, figure.png and run.json to
    --out.
    """

    training_gamma: float = 0.1
    """Masking ratio in training of the variants with a jigsaw (the paper's choice for accuracy)."""
    out: Path = Path("runs/ablation")
    """Folder of tables and figure (the committed ones stand in results/ablation)."""


@dataclass(frozen=True)
class BackboneOptions(TrainingOptions):
    """Three families of backbones with and without MJP.  Table 1 and Figure 2 (a), (b) of the MJP paper.

        python benchmarks/backbones.py --data-path DIR

    Trains each model plainly and under MJP, once a seed, by the code of `python -m fedmjp.train`, and measures top-1
    accuracy, Diff. Norm. and Consistency (gamma 0.5) as consistency.py does. Swin and ResNet have no position embedding
    of patches, so that MJP is the jigsaw alone there. Trainings are kept in --trainings and shared with ablation.py and
    masking_ratio.py. Writes table.csv, table.md, figure.png and run.json to --out.
    """

    models: tuple[str, ...] = ("resnet_micro_32", "vit_micro_32", "swin_micro_32")
    """Models, each trained plainly and under MJP."""
    training_gamma: float = 0.1
    """MJP's masking ratio in training (the paper's choice for accuracy)."""
    out: Path = Path("runs/backbones")
    """Folder of tables and figure (the committed ones stand in results/backbones)."""


@dataclass(frozen=True)
class RatioOptions(TrainingOptions):
    """MJP trained with different masking ratios.  Table 3 and Figure 2 (c) of the MJP paper.

        python benchmarks/masking_ratio.py --data-path DIR

    Trains a ViT under MJP at each masking ratio, once a seed, and measures top-1 accuracy, Diff. Norm. and Consistency
    at gamma 0.5, and accuracy against the masking ratio at inference. A ratio of 0 is the localisation loss alone,
    without an unknown embedding (line D of the paper's Table 2, with which its Table 3 agrees). Trainings are kept in
    --trainings and shared with backbones.py and ablation.py. Writes table.csv, table.md, figure.png and run.json to
    --out.
    """

    model: str = "vit_micro_32"
    """Plain ViT."""
    training_gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Masking ratios in training; the others are compared with the first."""
    out: Path = Path("runs/masking_ratio")
    """Folder of tables and figure (the committed ones stand in results/masking_ratio)."""


@dataclass(frozen=True)
class FineTuningOptions(TrainingOptions):
    """A trained ViT fine-tuned with and without MJP.  Tables 1 to 3 of the MJP paper.

        python benchmarks/fine_tuning.py --data-path DIR
        python benchmarks/fine_tuning.py --weights FILE.safetensors --data-path DIR --seeds 0 --lines A E G J

    Every line starts from the same weights and sees the same images in the same order. Measures top-1 accuracy, Diff.
    Norm. and Consistency (gamma 0.5) as consistency.py does. Trainings are kept in --trainings and shared with
    ablation.py. Writes table.csv, table.md, figure.png and run.json to --out.
    """

    model: str = "vit_ti"
    """Plain ViT."""
    weights: str = "timm"
    """What every training starts from: timm (published weights), or a checkpoint's path."""
    image_size: int | None = 160
    """Pixels of an image's side (none: those that the model is made for)."""
    data: DataConfig = field(default_factory=lambda: DataConfig("tiny-imagenet", None, 12_000, 2_000))
    """What is trained on; the same images for all lines of a seed."""
    recipe: Recipe = field(default_factory=lambda: FINE)
    """How to train, all lines alike. The defaults are one pass at a low rate."""
    gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.9)
    """Shares of patches that are shuffled when a trained model is measured."""
    lines: tuple[str, ...] = ("A", "J")
    """Lines of the paper's Table 2; the others are compared with A, the plain model."""
    training_gamma: float = 0.1
    """Masking ratio in training of these lines (the paper's choice for accuracy)."""
    more_gammas: tuple[float, ...] = (0.5, 0.9)
    """Further masking ratios in training of line J (Table 3)."""
    out: Path = Path("runs/fine_tuning")
    """Folder of tables and figure (the committed ones stand in results/fine_tuning)."""


@dataclass(frozen=True)
class PrecisionOptions(TimedOptions):
    """One recipe in float32 and in bfloat16, plainly and under MJP.

        python benchmarks/precision.py --data-path DIR --timing-rounds 30

    Trains once a seed in each precision, measures accuracy and Consistency in float32, and times training steps of both
    in turn. Trainings are kept in --trainings. Writes table.csv, table.md, latency.csv, figure.png and run.json to
    --out.
    """

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Each fixes weights, order, masks, and the subsets of images, for all variants alike."""
    training_gamma: float = 0.1
    """Masking ratio in training under MJP."""
    out: Path = Path("runs/precision")
    """Folder of tables and figure (the committed ones stand in results/precision)."""


@dataclass(frozen=True)
class CurveOptions:
    """Training with and without MJP side by side (Figure 6 of the MJP paper).

        python benchmarks/training_curves.py runs/plain runs/mjp runs/nope

    Takes folders of `python -m fedmjp.train` and writes table.csv (a line a training), history.csv (a line an epoch),
    curves_DATA.png and run.json to --out. What a step costs under MJP is measured by mjp_overhead.py, in one process:
    two trainings at two times cannot tell.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of finished trainings."""
    out: Path = Path("runs/training_curves")
    """Folder of tables and figure (the committed ones stand in results/training)."""
