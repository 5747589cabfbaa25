"""Export of a training: half-precision weights, and a model card that describes their origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedmjp.defenses.chain import chain_name
from fedmjp.models.low_rank import merged_state
from fedmjp.models.weights import ORIGIN, Origin
from fedmjp.objectives import Objective
from fedmjp.records import provenance
from fedmjp.records.files import write_whole
from fedmjp.settings import split_entry
from fedmjp.training.config import PAPER_IMAGES, TrainConfig
from fedmjp.training.trainer import Trainer, build_learner

CARD = """# {name}, {data}

{summary}

| | |
|---|---|
| {score} of this file | {accuracy:.1%} of {accuracy_of}{tests} test images, undefended |
| training images | {images} of {data}, {classes} classes |
| data | {provenance} |
| start | {start} |
| objective | {objective} |
| defence in training | {defense} |
| epochs, steps | {epochs}, {steps} |
| recipe | {recipe} |
| activations | {precision} |
| speed | {speed:.0f} images/s on {device} |
| commit | {commit} |
| torch, timm | {torch}, {timm} |

    {command}

Weights are stored as float16. {terms}
"""


OWN_TERMS = """They are released under this project's licence; the images they were trained on are no
part of it and have terms of their own."""
OTHER_TERMS = """The weights that they started from, and the images they were trained on, have terms of their own,
which hold for these weights too."""


def export(
    trainer: Trainer, history: list[dict[str, float]], path: Path, program: str = "python -m fedmjp.train"
) -> float:
    """Write the weights as float16 to `path`, and the model card to the same path with the suffix .md.

    Args:
        trainer: the finished training.
        history: one record per epoch, from `Trainer.epoch`.
        path: the .safetensors file to write.
        program: how the command that trains is typed, without its options.

    Returns:
        Accuracy in [0, 1] of the weights in the written file, of what `Objective.accuracy_of` names.
    """
    state = merged_state(trainer.model.module)
    halves = {n: (t.detach().half() if t.is_floating_point() else t).cpu().contiguous() for n, t in state.items()}
    # One entry, because safetensors writes several in an order that changes from run to run.
    origin = json.dumps(vars(Origin.of(trainer.config.objective, trainer.model.name, halves)))
    write_whole(path, save(halves, metadata={ORIGIN: origin}))
    accuracy = _accuracy_of_file(trainer, path)
    write_whole(path.with_suffix(".md"), CARD.format(**_facts(trainer, history, accuracy, program)).encode())
    return accuracy


def _accuracy_of_file(trainer: Trainer, path: Path) -> float:
    """What the objective's evaluation finds of the written weights; what it keeps beside them is the trainer's."""
    classes, objective = len(trainer.data.classes), trainer.learner.objective
    read = build_learner(trainer.config, trainer.defense, classes, trainer.device, weights=str(path))
    return objective.evaluate(read.model, trainer.learner.local, trainer.data, trainer.device)[1]


def _facts(trainer: Trainer, history: list[dict[str, float]], accuracy: float, program: str) -> dict[str, Any]:
    config, data, versions = trainer.config, trainer.data, provenance.versions()
    own = config.model.weights == "random" and config.start.checkpoint is None
    steps, objective = int(sum(line["steps"] for line in history)), trainer.learner.objective
    seconds = sum(line["train_seconds"] for line in history)
    return {
        "name": trainer.model.name,
        "summary": _summary(config, steps * config.recipe.batch_size),
        "accuracy": accuracy,
        "score": "top-1 accuracy" if objective.score == Objective.score else objective.score,
        "accuracy_of": "" if objective.accuracy_of == Objective.accuracy_of else f"{objective.accuracy_of} in ",
        "objective": ", ".join([split_entry(config.objective, "--objective")[0], *_options(objective)]),
        "tests": len(data.test),
        "images": len(data.train),
        "classes": len(data.classes),
        "data": data.name,
        "provenance": data.provenance,
        "start": trainer.model.provenance,
        "defense": ", ".join([chain_name(config.defense), *_options(trainer.defense)]),
        "epochs": len(history),
        "steps": steps,
        "recipe": ", ".join([*_options(config.recipe), *_options(config.start)[1:]]),
        "precision": config.activations(),
        "speed": steps * config.recipe.batch_size / seconds,
        "device": provenance.device_name(trainer.device),
        "commit": provenance.commit(),
        "torch": torch.__version__,
        "timm": versions["timm"],
        "command": provenance.command(program),
        "terms": OWN_TERMS if own else OTHER_TERMS,
    }


def _summary(config: TrainConfig, seen: int) -> str:
    start = "From random weights" if config.model.weights == "random" else f"From {config.model.weights} weights"
    if config.start.checkpoint is not None:
        start = f"From the encoder of {config.start.checkpoint.name}"
    return (
        f"{start}, {seen:,} images seen in training; the papers' recipe sees {PAPER_IMAGES:,}. For audits of trained "
        "weights, not for accuracy."
    )


def _options(options: Any) -> list[str]:
    return [f"{name.replace('_', ' ')} {value}" for name, value in vars(options).items()]
