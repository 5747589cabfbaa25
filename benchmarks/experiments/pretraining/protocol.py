"""Pre-train with DropPos and measure the places that are predicted, in the 16 cases of the paper's tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from experiments.pretraining.epochs import run_epochs, trained_columns
from experiments.pretraining.options import GAMMAS, GAMMAS_POS, PICTURED, DropPosOptions
from experiments.pretraining.pictures import draw_places
from experiments.pretraining.render import DROPPOS
from experiments.pretraining.rows import ROWS, asked, training_id
from experiments.rendering import read_rows
from fedmjp.evaluation.positions import position_accuracy
from fedmjp.records import provenance
from fedmjp.records.rows import RowLog, pack_rows, unpack_rows
from fedmjp.records.run_record import note_rows
from fedmjp.training.config import TrainConfig
from fedmjp.training.trainer import Trainer

PICTURES = 6  # test images that are drawn


def run(options: DropPosOptions, console: Console) -> None:
    """Train what is missing, then write and print the table."""
    path = options.out / "rows.jsonl"
    unpack_rows(path)
    with RowLog(path, ROWS) as log:
        for seed in options.seeds:
            for name in options.chosen():
                _train(name, options.config(name, seed), options, log, console)
    pack_rows(path)
    rows = read_rows(options.out, ROWS)
    note_rows(options.out, "python benchmarks/droppos.py", rows, data=sorted(set(rows["provenance"])))
    DROPPOS.write(options.out)
    console.print((options.out / "table.md").read_text(), highlight=False, markup=False, soft_wrap=True)


def _train(line: str, config: TrainConfig, options: DropPosOptions, log: RowLog, console: Console) -> None:
    """Write the rows of one training, unless they are there."""
    name = training_id(config)
    cases = [{"training": name, "gamma": gamma, "gamma_pos": share} for gamma in GAMMAS for share in GAMMAS_POS]
    if all(log.has(case) for case in cases):
        return
    trainer = Trainer(config)
    history = run_epochs(trainer, f"{line}, seed {config.seed}", console)
    found = list(measure(trainer))
    shared = trained_columns(trainer, history) | provenance.columns(trainer.device)
    for row in found:
        log.append({"training": name, "line": line, **asked(config), **shared, **row})
    if line in PICTURED and config.seed == options.seeds[0]:
        pictures = trainer.data.test.images(range(min(PICTURES, len(trainer.data.test)))).to(trainer.device)
        draw_places(trainer.learner.objective, trainer.model, pictures, options.out / f"places_{line}.png")
    mean = sum(row["accuracy"] for row in found) / len(found)
    console.print(f"{line}, seed {config.seed}: {mean:.1f} % of places over {len(found)} cases", highlight=False)


def measure(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """Accuracy (per cent) of the predicted places of the test images in each case."""
    objective, images = trainer.learner.objective, trainer.data.test
    total = trainer.model.module.patch_embed.num_patches
    for gamma in GAMMAS:
        for share in GAMMAS_POS:
            case = dataclasses.replace(objective, gamma=gamma, gamma_pos=share)
            loss, accuracy = position_accuracy(case, trainer.model, images, trainer.device, trainer.config.seed)
            seen, hidden = case.counts(total)
            yield {
                "gamma": gamma,
                "gamma_pos": share,
                "accuracy": 100 * accuracy,
                "loss": loss,
                "seen": seen,
                "hidden": hidden,
                "patches": total,
                "images": len(images),
            }
