"""Pre-train with MST and measure what came of it: neighbours, a linear probe, and the pretext task itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional as F

from experiments.pretraining.epochs import run_epochs, trained_columns
from experiments.pretraining.mst_options import BLOCKS, DEFAULT, KS, MSTOptions
from experiments.pretraining.mst_pictures import attended, draw_attention, taught
from experiments.pretraining.mst_render import LINEAR, LINEAR_BLOCKS, MST, ROWS
from experiments.pretraining.rows import asked, training_id
from experiments.rendering import read_rows
from fedmjp.evaluation.features import features
from fedmjp.evaluation.linear_probe import fit_logistic
from fedmjp.evaluation.neighbours import neighbour_votes
from fedmjp.evaluation.self_distillation import measure_pretext
from fedmjp.metrics import bootstrap_mean
from fedmjp.models import BuiltModel
from fedmjp.records import provenance
from fedmjp.records.rows import RowLog, pack_rows, unpack_rows
from fedmjp.records.run_record import note_rows
from fedmjp.training.config import TrainConfig
from fedmjp.training.trainer import Trainer

START, STUDENT, TEACHER = "start", "student", "teacher"
PICTURES = 5  # test images that are drawn
MEASURES = (*(f"knn_{k}" for k in KS), LINEAR, LINEAR_BLOCKS)


def run(options: MSTOptions, console: Console) -> None:
    """Train what is missing, then write and print the tables."""
    path = options.out / "rows.jsonl"
    unpack_rows(path)
    with RowLog(path, ROWS) as log:
        for seed in options.seeds:
            for line in options.lines:
                _train(line, options.config(line, seed), options, log, console)
    pack_rows(path)
    rows = read_rows(options.out, ROWS)
    note_rows(options.out, "python benchmarks/mst.py", rows, data=sorted(set(rows["provenance"])))
    MST.write(options.out)
    for table in sorted(options.out.glob("table*.md")):
        console.print(table.read_text(), highlight=False, markup=False, soft_wrap=True)


def _train(line: str, config: TrainConfig, options: MSTOptions, log: RowLog, console: Console) -> None:
    """Write the rows of one training, unless they are there."""
    name = training_id(config)
    if log.has({"training": name, "network": STUDENT, "measure": MEASURES[-1]}):
        return
    trainer = Trainer(config)
    found = list(_measured(START, trainer.model, trainer, options))
    pictures = trainer.data.test.images(range(min(PICTURES, len(trainer.data.test)))).to(trainer.device)
    before = attended(trainer.model, pictures)
    history = run_epochs(trainer, f"{line}, seed {config.seed}", console)
    teacher = trainer.learner.local
    if teacher is not None and trainer.learner.objective.lambda_1:
        found += _measured(TEACHER, taught(trainer), trainer, options)
    found += _measured(STUDENT, trainer.model, trainer, options)
    shared = {"training": name, "line": line, **asked(config), **_shared(trainer, history)}
    for row in found:
        log.append(shared | row)
    if line == DEFAULT and config.seed == options.seeds[0]:
        draw_attention(trainer, before, pictures, options.out / "attention.png")
    own = {row["measure"]: row["accuracy"] for row in found if row["network"] == STUDENT}
    console.print(
        f"{line}, seed {config.seed}: {own['knn_20']:.1f} % by 20 neighbours, {own['linear']:.1f} % by a linear probe, "
        f"{shared['images_per_second']:.0f} images/s",
        highlight=False,
    )


def _measured(network: str, model: BuiltModel, trainer: Trainer, options: MSTOptions) -> Iterator[dict[str, Any]]:
    """Accuracies (per cent, with bootstrap intervals over the test images) on class tokens."""
    data, step = trainer.data, max(1, len(trainer.data.train) // options.references)
    some = data.train.subset(range(0, step * options.references, step)[: options.references])
    several = [features(model, images, trainer.device, blocks=BLOCKS) for images in (some, data.test)]
    last = [found[:, -model.module.embed_dim :] for found in several]
    classes = len(data.classes)
    for k in KS:
        votes = neighbour_votes(last[0], some.labels, last[1], k, classes)
        yield {"network": network, "measure": f"knn_{k}", **_accuracy(votes, data.test.labels)}
    for measure, (train, test) in ((LINEAR, last), (LINEAR_BLOCKS, several)):
        mean, deviation = train.mean(dim=0), train.std(dim=0).clamp(min=1e-6)
        weight, bias = fit_logistic((train - mean) / deviation, some.labels, classes)
        answers = F.linear((test - mean) / deviation, weight, bias)
        yield {"network": network, "measure": measure, **_accuracy(answers, data.test.labels)}


def _accuracy(scores: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    interval = bootstrap_mean(100 * (scores.argmax(dim=1) == labels).double().numpy())
    return {"accuracy": interval.mean, "accuracy_low": interval.low, "accuracy_high": interval.high}


def _shared(trainer: Trainer, history: list[dict[str, float]]) -> dict[str, Any]:
    """What all rows of a training say: its last losses, its pretext task, its size and origin."""
    learner, columns = trainer.learner, trained_columns(trainer, history)
    pretext = measure_pretext(learner.objective, trainer.model, learner.local, trainer.data.test, trainer.device)
    return {
        **vars(pretext),
        **columns,
        "outputs": learner.objective.outputs,
        "images_per_second": columns["images_seen"] / columns["train_seconds"],
        "images": len(trainer.data.test),
        **provenance.columns(trainer.device),
    }
