"""The lines of a table of trainings: each trained with every seed by `Trainer`, measured under jigsaws, kept as rows.

A line says which model trains under which defence; data, recipe and seeds are the table's. What decides about weights
and measurement makes a training's identity, and rows are filed under it: tables that share a line share its training,
and an interrupted table goes on where it stopped. Weights are not kept.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attacks import UsageError
from fedmjp.config import DataConfig, DefenseOptions, ModelConfig
from fedmjp.data import DataBundle
from fedmjp.defenses import DEFENSES
from fedmjp.evaluation.consistency import SCORES, measure, summarise, ways
from fedmjp.models import MODELS, split_name
from fedmjp.records import provenance
from fedmjp.records.rows import RowLog, Schema, pack_rows, unpack_rows
from fedmjp.training.config import PAPER_IMAGES, Recipe, TrainConfig
from fedmjp.training.trainer import Trainer, load

# One pass over a part of CIFAR-10 on a CPU core: rate and batch were chosen on one seed of a plain ViT of four blocks,
# among rates of 0.016 to 0.064 and batches of 16 to 64, and are the same for every line.
SHORT = Recipe(
    epochs=1,
    batch_size=32,
    learning_rate=0.02,
    warmup_epochs=0.1,
    repeats=1,
    rand_augment="none",
    smallest_crop=0.7,
    mixup=0,
    cutmix=0,
    erasing=0,
)


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes:
        name: as the table shows it.
        model: as `--model` takes it; the defence turns it into the variant it needs.
        defense: by name.
        options: of the defence, those that are not its defaults.
        against: name of the line that this one is held against, or "".
    """

    name: str
    model: str
    defense: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    against: str = ""


@dataclass(frozen=True)
class TrainingOptions:
    """What all lines of a table share."""

    data: DataConfig = field(default_factory=lambda: DataConfig("cifar10", None, 20_000, 2_000))
    """What is trained on; the same images for all lines of a seed."""
    recipe: Recipe = field(default_factory=lambda: SHORT)
    """How to train, all lines alike. The defaults are one short pass."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each fixes weights, order, masks, and the subsets of images, for all lines alike."""
    gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Shares of patches that are shuffled when a trained model is measured."""
    precision: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Type of activations in training."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    threads: int = 1
    """Torch threads (0: torch's own choice)."""
    trainings: Path = Path("runs/trainings")
    """Folder of the trainings' rows, which tables share (the committed ones stand in results/trainings)."""
    train: bool = True
    """Train what is not in --trainings; without, the tables are written from what is there."""
    out: Path = Path("runs/trainings_table")
    """Folder of tables and figure (the committed ones stand in results/)."""
    resume: bool = False
    """Add to the rows in --trainings, where trainings that are there are not repeated, and write the tables anew."""

    def config(self, line: Line, seed: int) -> TrainConfig:
        """The options of one training, as `python -m fedmjp.train` takes them."""
        own = {line.defense: DEFENSES.get(line.defense)(**line.options)}
        return TrainConfig(
            defense=line.defense,
            model=ModelConfig(line.model, "random"),
            data=self.data,
            recipe=self.recipe,
            options=dataclasses.replace(DefenseOptions(), **own),
            precision=self.precision,
            device=self.device,
            threads=self.threads,
            seed=seed,
        )

    def validate(self, lines: Sequence[Line]) -> None:
        """Check options and lines.

        Raises:
            UsageError: options out of range, or a folder with rows that were not asked to be gone on with.
        """
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError("--seeds takes different numbers, at least one")
        for gamma in self.gammas:
            DEFENSES.get("mjp")(gamma=gamma).validate()
        if not {0.0, 0.5} <= set(self.gammas):
            raise UsageError("--gammas needs 0 (top-1 accuracy) and 0.5 (where the paper's tables stand)")
        for line in lines:
            for seed in self.seeds:
                config = self.config(line, seed)
                config.validate()
                config.model_name()
        begun = any(self.trainings.glob("rows.jsonl*"))
        if not self.train and not begun:
            raise UsageError(f"{self.trainings} holds no trainings; leave out --no-train")
        if self.train and begun and not self.resume:
            raise UsageError(f"{self.trainings} holds trainings already; pass --resume to add to them")
        if (self.out / "table.csv").exists() and not self.resume:
            raise UsageError(f"{self.out} holds a table already; pass --resume to write it anew, or another --out")


# Rows of trainings, one a training and masking ratio at inference; `SCORE_low` and `SCORE_high` are bootstrap intervals
# over images.
TRAININGS = Schema(
    keys=(
        *("training", "model", "defense", "defense_parameters", "dataset", "train_limit", "test_limit", "recipe"),
        *("precision", "seed", "gamma", "positions", "images"),
        *(score + end for score in SCORES for end in ("", "_low", "_high")),
        *("train_loss", "test_loss", "steps", "images_seen", "train_seconds", "parameters", "weights", "provenance"),
        *("commit", "version", "torch_version", "device"),
    ),
    identity=("training", "gamma"),
)


def asked(config: TrainConfig) -> dict[str, Any]:
    """Everything that decides about a training's rows, as plain values; where its files lie does not."""
    identity = config.identity()
    return {
        "model": config.model_name(),
        "defense": config.defense,
        "defense_parameters": identity["options"][config.defense],
        "dataset": config.data.data,
        "train_limit": config.data.train_limit,
        "test_limit": config.data.test_limit,
        "recipe": identity["recipe"],
        "precision": config.precision,
        "seed": config.seed,
    }


def training_id(config: TrainConfig) -> str:
    """Name of a training in the rows: equal for equal `asked`."""
    return provenance.run_id(asked(config))


def train_lines(lines: Sequence[Line], options: TrainingOptions, console: Console) -> pd.DataFrame:
    """Train and measure what is not in `options.trainings` yet, seed by seed, so that one seed of all lines is whole
    first.

    Returns:
        the rows of `lines` and `options.seeds`, one a line, seed and masking ratio, with the line's name in `line`.

    Raises:
        UsageError: see `TrainingOptions.validate`, data that is not there, and a line without any training where none
            is to be made.
    """
    options.validate(lines)
    path = options.trainings / "rows.jsonl"
    unpack_rows(path)
    with RowLog(path, TRAININGS) as log:
        if options.train:
            _train_missing(log, lines, options, console)
        rows = pd.DataFrame(log.rows(), columns=list(TRAININGS.keys))
    pack_rows(path)
    parts = []
    for line in lines:
        wanted = [training_id(options.config(line, seed)) for seed in options.seeds]
        own = rows[rows["training"].isin(wanted) & rows["gamma"].isin(options.gammas)]
        if own.empty:
            raise UsageError(f"{options.trainings} holds no training of line {line.name}; leave out --no-train")
        parts.append(own.assign(line=line.name))
    return pd.concat(parts, ignore_index=True)


def limits(rows: pd.DataFrame) -> str:
    """What a table of such rows cannot tell, in words made from them."""
    seen = " or ".join(f"{images:,}" for images in sorted(set(rows["images_seen"])))
    data = "; ".join(sorted(set(rows["provenance"])))
    plain = rows[(rows["gamma"] == 0.5) & (rows["defense"] == "none") & ~rows["model"].str.endswith("_nope")]
    told = (
        f"Every training saw {seen} images ({data}); the paper's see {PAPER_IMAGES:,}. Whether a difference found here "
        "lasts, or one not found here comes, when training goes on, this cannot tell."
    )
    for model, own in plain.groupby("model", sort=False)["consistency"]:
        told += (
            f" A plain {model} keeps {own.mean():.1f} % of its answers under a jigsaw of half its patches: no defence "
            f"can add more than {100 - own.mean():.1f} points of Consistency to it."
        )
    return told


def _train_missing(log: RowLog, lines: Sequence[Line], options: TrainingOptions, console: Console) -> None:
    missing: dict[str, tuple[Line, TrainConfig]] = {}
    for seed in options.seeds:
        for line in lines:
            config = options.config(line, seed)
            name = training_id(config)
            if not all(log.has({"training": name, "gamma": gamma}) for gamma in options.gammas):
                missing.setdefault(name, (line, config))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    data: tuple[Any, DataBundle | None] = (None, None)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("trainings", total=len(missing))
        for number, (line, config) in enumerate(missing.values(), start=1):
            source = (config.seed, MODELS.get(split_name(config.model.model)[0]).image_size)
            if data[0] != source:
                data = (source, load(config))
            started = time.perf_counter()
            rows = train_and_measure(config, options.gammas, data[1])
            for row in rows:
                log.append(row)
            bar.update(task, advance=1)
            plain, half = (next(r for r in rows if r["gamma"] == gamma) for gamma in (0.0, 0.5))
            console.print(
                f"{number}/{len(missing)}  {line.name}, seed {config.seed}  accuracy {plain['accuracy']:.1f} %  "
                f"consistency {half['consistency']:.1f} %  {time.perf_counter() - started:.0f} s",
                highlight=False,
            )


def train_and_measure(
    config: TrainConfig, gammas: Sequence[float], data: DataBundle | None = None
) -> list[dict[str, Any]]:
    """Train once and measure at every masking ratio, with the positions shown as in training; a row each.

    Args:
        data: what `config` names, if it is loaded already.
    """
    trainer = Trainer(config, data)
    history = [trainer.epoch(number, lambda loss: None) for number in range(1, config.recipe.epochs + 1)]
    model = trainer.model
    trained_with = getattr(trainer.defense, "positions", "own")
    positions = trained_with if trained_with in ways(model) else ways(model)[-1]
    found = measure(model, trainer.data.test, gammas, seed=config.seed, device=trainer.device, positions=(positions,))
    steps = sum(line["steps"] for line in history)
    shared = {
        "training": training_id(config),
        **asked(config),
        "train_loss": history[-1]["train_loss"],
        "test_loss": history[-1]["test_loss"],
        "steps": steps,
        "images_seen": steps * config.recipe.batch_size,
        "train_seconds": sum(line["train_seconds"] for line in history),
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "weights": f"trained from {model.provenance.removesuffix(', NOT TRAINED')}",
        "provenance": trainer.data.provenance,
        **provenance.columns(trainer.device),
    }
    return [shared | line for line in summarise(found).to_dict("records")]
