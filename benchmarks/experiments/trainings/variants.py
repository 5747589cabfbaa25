"""Trainings of a table: each variant trained with every seed by `Trainer`, measured under jigsaws, kept as rows.

What decides about weights and measurement makes a training's identity, and rows are stored under it: tables that share
a variant share its training, and an interrupted table goes on where it stopped. How each training went, epoch by epoch,
stands in rows of its own (`HISTORY`, in a folder of that name). Weights are kept where asked.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attacks import UsageError
from experiments.rendering import read_rows
from experiments.trainings.options import TrainingOptions, Variant
from fedmjp.data import DataBundle
from fedmjp.evaluation.consistency import SCORES, measure, position_treatments, summarise
from fedmjp.records import provenance
from fedmjp.records.rows import RowLog, Schema, pack_rows, unpack_rows
from fedmjp.records.run_record import note_run
from fedmjp.training.card import export
from fedmjp.training.config import PAPER_IMAGES, TrainConfig
from fedmjp.training.trainer import Trainer, load

_ADDED = tuple(f"diff_norm_root{end}" for end in ("", "_low", "_high"))  # scores that rows of before lack
# Rows of trainings, one a training and masking ratio at inference; `SCORE_low` and `SCORE_high` are bootstrap intervals
# over images.
TRAININGS = Schema(
    keys=(
        *("training", "model", "defense", "defense_parameters", "dataset", "train_limit", "test_limit", "recipe"),
        *("start", "image_size", "precision", "seed", "gamma", "positions", "images"),
        *(score + end for score in SCORES for end in ("", "_low", "_high")),
        *("train_loss", "test_loss", "steps", "images_seen", "train_seconds", "parameters", "weights", "provenance"),
        *("commit", "version", "torch_version", "device"),
    ),
    identity=("training", "gamma"),
    optional=dict.fromkeys((*_ADDED, "start", "image_size")),
)
# Rows of a training's epochs, as `Trainer.epoch` describes them.
HISTORY = Schema(
    keys=(
        *("training", "model", "defense", "defense_parameters", "seed", "epoch", "steps", "rate", "train_loss"),
        *("test_loss", "test_accuracy", "test_images", "train_seconds", "images_per_second"),
        *("commit", "version", "torch_version", "device"),
    ),
    identity=("training", "epoch"),
)
_IN_BOTH = (
    "training",
    "model",
    "defense",
    "defense_parameters",
    "seed",
    "commit",
    "version",
    "torch_version",
    "device",
)


def asked(config: TrainConfig) -> dict[str, Any]:
    """Everything that decides about a training's rows, as plain values; where its files lie does not."""
    identity = config.identity()
    start = {} if config.model.weights == "random" else {"start": Path(config.model.weights).name}
    size = {} if config.model.image_size is None else {"image_size": config.model.image_size}
    return (
        start
        | size
        | {
            "model": config.model_name(),
            "defense": config.defense,
            "defense_parameters": identity["options"][config.defense],
            "dataset": config.data.data,
            "train_limit": config.data.train_limit,
            "test_limit": config.data.test_limit,
            "recipe": identity["recipe"],
            "precision": config.activations(),
            "seed": config.seed,
        }
    )


def training_id(config: TrainConfig) -> str:
    """Name of a training in the rows: equal for equal `asked`."""
    return provenance.run_id(asked(config))


def train_variants(variants: Sequence[Variant], options: TrainingOptions, console: Console) -> pd.DataFrame:
    """Train and measure what is not in `options.trainings` yet, seed by seed: all variants of
    one seed first.

    Returns:
        `rows_of` these variants.

    Raises:
        UsageError: see `TrainingOptions.check`, and data that is not there.
    """
    options.check(variants)
    if options.train:
        with (
            _unpacked(options.trainings, TRAININGS) as log,
            _unpacked(options.trainings / "history", HISTORY) as epochs,
        ):
            _train_missing(log, epochs, variants, options, console)
    return rows_of(variants, options, options.trainings)


@contextmanager
def _unpacked(folder: Path, schema: Schema) -> Iterator[RowLog]:
    """The rows of a folder, to append to; packed where the block ends without an exception."""
    path = folder / "rows.jsonl"
    unpack_rows(path)
    with RowLog(path, schema) as log:
        yield log
    if path.stat().st_size:
        pack_rows(path)
    else:  # every training is from before histories were kept
        path.unlink()


def note_history(folder: Path, program: str) -> None:
    """Write run.json beside the rows of `HISTORY` in a folder, if there are any.

    Args:
        program: how the command is typed, without its options.
    """
    if any(folder.glob("rows.jsonl.gz")):
        rows = read_rows(folder, HISTORY)
        note_run(folder, program, commits=rows["commit"], devices=rows["device"], rows=len(rows), finished=True)


def rows_of(variants: Sequence[Variant], options: TrainingOptions, trainings: Path) -> pd.DataFrame:
    """The rows in the folder `trainings` of these variants and `options.seeds`.

    Returns:
        one row a variant, seed and masking ratio, with the variant's name in `line`.

    Raises:
        UsageError: a variant without any training.
    """
    rows, parts = read_rows(trainings, TRAININGS), []
    for variant in variants:
        wanted = [training_id(options.config(variant, seed)) for seed in options.seeds]
        own = rows[rows["training"].isin(wanted) & rows["gamma"].isin(options.gammas)]
        if own.empty:
            raise UsageError(f"{trainings} holds no training of {variant.name}; leave out --no-train")
        parts.append(own.assign(line=variant.name))
    return pd.concat(parts, ignore_index=True)


def limits(rows: pd.DataFrame, with_paper: bool) -> str:
    """What a table of such rows cannot show, with figures from the rows.

    Args:
        with_paper: whether the table compares with a paper's figures.
    """
    seen = " or ".join(f"{images:,}" for images in sorted(set(rows["images_seen"])))
    data = "; ".join(sorted(set(rows["provenance"])))
    start = "".join(f", from {name}, whose own training is not counted" for name in rows["start"].dropna().unique())
    text = f"Every training saw {seen} images ({data}){start}"
    text += f"; the paper's see {PAPER_IMAGES:,}. " if with_paper else ". "
    text += (
        "Whether a difference found here lasts, or one not found here comes, when training goes on, this cannot tell."
    )
    if not with_paper:
        return text
    plain = rows[(rows["gamma"] == 0.5) & (rows["defense"] == "none") & ~rows["model"].str.endswith("_nope")]
    for model, own in plain.groupby("model", sort=False)["consistency"]:
        text += (
            f" A plain {model} keeps {own.mean():.1f} % of its answers under a jigsaw of half its patches: no defence "
            f"can add more than {100 - own.mean():.1f} points of Consistency to it."
        )
    return text


def _train_missing(
    log: RowLog, epochs: RowLog, variants: Sequence[Variant], options: TrainingOptions, console: Console
) -> None:
    missing: dict[str, tuple[Variant, TrainConfig]] = {}
    for seed in options.seeds:
        for variant in variants:
            config = options.config(variant, seed)
            name = training_id(config)
            if not all(log.has({"training": name, "gamma": gamma}) for gamma in options.gammas):
                missing.setdefault(name, (variant, config))
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    data: tuple[Any, DataBundle | None] = (None, None)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("trainings", total=len(missing))
        for number, (variant, config) in enumerate(missing.values(), start=1):
            source = (config.seed, config.model.side())
            if data[0] != source:
                data = (source, load(config))
            started = time.perf_counter()
            kept = None
            if options.checkpoints is not None:
                line = re.sub(r"[^\w.]+", "_", variant.name.replace("γ", "gamma"))
                kept = options.checkpoints / f"{line}-{config.seed}.safetensors"
            rows, history = train_and_measure(config, options.gammas, data[1], kept)
            for line in history:
                if not epochs.has(line):  # a training whose rows were lost half-way is repeated
                    epochs.append(line)
            for row in rows:
                log.append(row)
            bar.update(task, advance=1)
            plain, half = (next(r for r in rows if r["gamma"] == gamma) for gamma in (0.0, 0.5))
            console.print(
                f"{number}/{len(missing)}  {variant.name}, seed {config.seed}  accuracy {plain['accuracy']:.1f} %  "
                f"consistency {half['consistency']:.1f} %  {time.perf_counter() - started:.0f} s",
                highlight=False,
            )


def train_and_measure(
    config: TrainConfig, gammas: Sequence[float], data: DataBundle | None = None, kept: Path | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train once and measure at every masking ratio, with the positions shown as in training.

    Args:
        data: what `config` names, if it is loaded already.
        kept: file for the weights (`export`), or None.

    Returns:
        a row of `TRAININGS` a masking ratio, and one of `HISTORY` an epoch.
    """
    trainer = Trainer(config, data)
    history = [trainer.epoch(number, lambda loss: None) for number in range(1, config.recipe.epochs + 1)]
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        export(trainer, history, kept, f"python benchmarks/{Path(sys.argv[0]).name}")
    model = trainer.model
    trained_with = getattr(trainer.defense, "positions", "own")
    positions = trained_with if trained_with in position_treatments(model) else position_treatments(model)[-1]
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
    measured = [shared | line for line in summarise(found).to_dict("records")]
    whose = {name: shared[name] for name in HISTORY.keys if name in shared}
    return measured, [whose | epoch for epoch in history]
