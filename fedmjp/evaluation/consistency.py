"""How much a jigsaw changes a model's answer: accuracy, Diff. Norm. and Consistency of the MJP paper (section 5.1).

Each test image x has a counterpart x~: a share gamma of its patches, chosen in blocks, shuffled among itself. Diff.
Norm. is |F(x) - F(x~)|^2 of the embeddings that the head reads ([CLS], or the pooled one of a model without), and
Consistency how often x and x~ get the same answer.

Departs from the paper: an embedding's scale is a matter of weights, so Diff. Norm. also stands in units of the mean
squared distance between the embeddings of two different images (1: a jigsaw moves an image as far as another image is).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import torch
from rich.progress import track
from torch import Tensor

from fedmjp.data import ImageSet
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.metrics import bootstrap_mean
from fedmjp.models import BuiltModel

BATCH = 100
SCORES = ("accuracy", "diff_norm", "diff_share", "consistency")


def ways(model: BuiltModel) -> tuple[str, ...]:
    """What a model can show at shuffled places, as MJP's option `positions` names it; as in training first."""
    if model.tells_origins:
        return ("index",)
    return ("unknown", "own") if model.hides_positions else ("own",)


@torch.no_grad()
def look(model: BuiltModel, seen: ClientInput) -> tuple[Tensor, Tensor]:
    """(embeddings (B, D) that the head reads, answers (B,)) for what a model sees."""
    module = model.module
    tokens = module.forward_features(model.normalise(seen.images), **seen.told())
    return module.forward_head(tokens, pre_logits=True), module.forward_head(tokens).argmax(dim=1)


def measure(
    model: BuiltModel,
    images: ImageSet,
    gammas: Sequence[float],
    *,
    seed: int,
    device: torch.device,
    positions: Sequence[str] | None = None,
) -> pd.DataFrame:
    """One line an image, a masking ratio and a treatment of positions: right, same, squared distance.

    Args:
        gammas: shares of patches that are shuffled, in [0, 1].
        seed: of masks and jigsaws; the same ones for every model of one patch grid and every treatment of positions.
        positions: treatments, of `ways(model)`; all of them by default.

    Returns:
        columns positions, gamma, right, same, distance, and spread: the mean squared distance between the embeddings of
        two different images. Leaves the model in evaluation mode.
    """
    generator = torch.Generator().manual_seed(seed)
    lines, embeddings = [], []
    model.module.to(device).eval()
    for pictures, labels in _batches(images, device, model.name):
        before, answer = look(model, ClientInput(pictures))
        embeddings.append(before.cpu().double())
        for gamma in gammas:
            state = generator.get_state()
            for way in positions or ways(model):
                generator.set_state(state)
                jigsaw = DEFENSES.get("mjp")(gamma=gamma, positions=way)
                after, second = look(model, jigsaw.on_input(pictures, model, generator, 1))
                lines.append(
                    pd.DataFrame(
                        {
                            "positions": way,
                            "gamma": gamma,
                            "right": (second == labels).cpu().numpy(),
                            "same": (second == answer).cpu().numpy(),
                            "distance": (after - before).square().sum(dim=1).cpu().numpy(),
                        }
                    )
                )
    frame = pd.concat(lines, ignore_index=True)
    return frame.assign(spread=2 * float(torch.cat(embeddings).var(dim=0).sum()))


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """A line a treatment of positions and masking ratio: means, accuracy and consistency in per cent.

    The intervals (NAME_low, NAME_high) are 95 % bootstrap intervals over images; they say nothing of another training
    of the same model.
    """
    lines = []
    for (way, gamma), group in frame.groupby(["positions", "gamma"], sort=False):
        line: dict[str, object] = {"positions": way, "gamma": gamma, "images": len(group)}
        scores = {
            "accuracy": 100 * group["right"].astype(float),
            "diff_norm": group["distance"],
            "diff_share": group["distance"] / group["spread"],
            "consistency": 100 * group["same"].astype(float),
        }
        for name in SCORES:
            interval = bootstrap_mean(scores[name].to_numpy())
            line |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
        lines.append(line)
    return pd.DataFrame(lines)


def _batches(images: ImageSet, device: torch.device, title: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, labels) in order, under a bar."""
    for start in track(range(0, len(images), BATCH), description=title, transient=True):
        indices = range(start, min(start + BATCH, len(images)))
        yield images.images(indices).to(device), images.labels[start : start + BATCH].to(device)
