"""The closed form on the patch projection, on models of speech: frames are patches of one pixel with 40 channels."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from attacks import ATTACKS, Observation
from experiments.session import Session
from experiments.speech.options import LeakOptions
from experiments.speech.render import LEAK, LEAKS
from fedmjp.data import Gallery, load_data
from fedmjp.models import MODELS, ViT

ATTACK = "patch_embedding"
MODEL = "speech_mini"


def run(options: LeakOptions, console: Console) -> None:
    """Attack, write the table, and print it."""
    session = Session(options, console, LEAKS)
    data = load_data(options.data, size=MODELS.get(MODEL).image_size, train_limit=options.words, seed=options.seed)
    words = data.train
    session.check_images(Gallery(words, data.name, data.provenance))
    with session.rows() as rows, session.bar() as bar:
        task = bar.add_task("updates", total=2 * len(options.widths) * len(words))
        for width in options.widths:
            for positions in ("fixed", "learned"):
                model = speech_model(width, positions, len(words.classes), options.seed)
                for index, name in enumerate(words.ids):
                    about = {"width": width, "positions": positions, "attack": ATTACK, "word": name}
                    if not rows.has(about):
                        frames, label = words.images([index]), words.labels[index : index + 1]
                        row = attacked(model, frames, label) | {"model": MODEL, "weights": "random, NOT TRAINED"}
                        row |= {"seed": options.seed, "provenance": data.provenance}
                        rows.append(session.columns | about | row)
                    bar.advance(task)
    session.finish("python benchmarks/speech_leak.py", LEAK)
    console.print((options.out / "table.csv").read_text(), highlight=False)


def speech_model(width: int, positions: str, classes: int, seed: int) -> ViT:
    """The paper's model with another width, and its fixed positions or learned ones."""
    spec = MODELS.get(MODEL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = spec.vit | {"embed_dim": width}
        size, channels = spec.input_shape[1:], spec.input_shape[0]
        model = ViT(img_size=size, patch_size=spec.patch_size, in_chans=channels, num_classes=classes, **shape)
    if positions == "fixed":
        model.fix_positions()
    return model.eval()


def attacked(model: ViT, frames: Tensor, label: Tensor) -> dict[str, Any]:
    """Columns of the row of one word.

    Args:
        model: sent to the client.
        frames: (1, 40, 1, 100) in [0, 1].
        label: (1,) int64.
    """
    found = ATTACKS.get(ATTACK)()([observed(model, frames, label)])
    explained = error = None
    if found.images is not None:
        wrong = (found.images - frames).square()
        spread = (frames - frames.mean(dim=-1, keepdim=True)).square()
        explained, error = 100 * float(1 - wrong.sum() / spread.sum()), float(wrong.mean().sqrt())
    rank = found.details.get("rank")
    return {"explained": explained, "rmse": error, "rank": rank, "diagnosis": found.diagnosis, "seconds": found.seconds}


def observed(model: nn.Module, frames: Tensor, label: Tensor) -> Observation:
    """What the server has of the gradient of one word."""
    spec = MODELS.get(MODEL)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (spec.mean, spec.std))
    loss = F.cross_entropy(model((frames - mean) / std), label)
    parameters = dict(model.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    return Observation(gradients, model, 1, spec.input_shape, spec.mean, spec.std)
