"""The effect of a jigsaw on predictions: accuracy, Diff. Norm. and Consistency of the MJP paper (section 5.1).

Each test image x has a counterpart x~, in which a share gamma of the patches, chosen in blocks, is randomly permuted.
Diff. Norm. is |F(x) - F(x~)|^2, where F(x) is the input embedding of the classifier head ([CLS], or the pooled
embedding in a model without [CLS]). Consistency is the share of images for which x and x~ are predicted as the same
class.

The script that comes with the paper's code (its consistency.py) takes the norm itself, without the square that the
paper's formula has; which of the two the paper's tables hold is not stated. Both are measured, the norm as
`diff_norm_root`.

Departs from the paper: the scale of an embedding depends on the weights, so Diff. Norm. is also given in units of the
mean squared distance between the embeddings of two different images (1: the jigsaw changes an embedding as much as
replacing the image by another one).
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
SCORES = ("accuracy", "diff_norm", "diff_norm_root", "diff_share", "consistency")


def position_treatments(model: BuiltModel) -> tuple[str, ...]:
    """The values of MJP's option `positions` that the model supports, the one used in training first."""
    if model.tells_origins:
        return ("index",)
    return ("unknown", "own") if model.hides_positions else ("own",)


@torch.no_grad()
def embed_and_predict(model: BuiltModel, seen: ClientInput) -> tuple[Tensor, Tensor]:
    """Embeddings (B, D) at the classifier head's input, and predicted classes (B,) int64.

    Args:
        model: the model.
        seen: the model's input, B images.
    """
    module = model.module
    tokens = module.forward_features(model.normalise(seen.images), **seen.forward_kwargs())
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
    """Compare the predictions for each image with and without a jigsaw; the model is left in evaluation mode.

    Args:
        model: the model; it is moved to `device`.
        images: labelled test images.
        gammas: shares of patches that are shuffled, in [0, 1].
        seed: of masks and jigsaws, which are the same for every model with the same patch grid and every treatment of
            positions.
        device: where to compute.
        positions: treatments out of `position_treatments(model)`; all of them by default.

    Returns:
        One row per image, gamma and treatment, with the columns positions, gamma, right (the prediction for x~ is
        correct), same (the predictions are equal), distance (squared, between the embeddings), and spread: the mean
        squared distance between the embeddings of two different images.
    """
    generator = torch.Generator().manual_seed(seed)
    lines, embeddings = [], []
    model.module.to(device).eval()
    for pictures, labels in _batches(images, device, model.name):
        before, prediction = embed_and_predict(model, ClientInput(pictures))
        embeddings.append(before.cpu().double())
        for gamma in gammas:
            state = generator.get_state()
            for treatment in positions or position_treatments(model):
                generator.set_state(state)
                jigsaw = DEFENSES.get("mjp")(gamma=gamma, positions=treatment)
                after, second = embed_and_predict(model, jigsaw.on_input(pictures, model, generator, 1))
                lines.append(
                    pd.DataFrame(
                        {
                            "positions": treatment,
                            "gamma": gamma,
                            "right": (second == labels).cpu().numpy(),
                            "same": (second == prediction).cpu().numpy(),
                            "distance": (after - before).square().sum(dim=1).cpu().numpy(),
                        }
                    )
                )
    frame = pd.concat(lines, ignore_index=True)
    return frame.assign(spread=2 * float(torch.cat(embeddings).var(dim=0).sum()))


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per treatment of positions and gamma, with means over images; accuracy and consistency in per cent.

    The intervals (NAME_low, NAME_high) are 95 % bootstrap intervals over images. They do not cover the variation
    between trainings of the same model.

    Args:
        frame: from `measure`.
    """
    lines = []
    for (treatment, gamma), group in frame.groupby(["positions", "gamma"], sort=False):
        line: dict[str, object] = {"positions": treatment, "gamma": gamma, "images": len(group)}
        scores = {
            "accuracy": 100 * group["right"].astype(float),
            "diff_norm": group["distance"],
            "diff_norm_root": group["distance"].pow(0.5),
            "diff_share": group["distance"] / group["spread"],
            "consistency": 100 * group["same"].astype(float),
        }
        for name in SCORES:
            interval = bootstrap_mean(scores[name].to_numpy())
            line |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
        lines.append(line)
    return pd.DataFrame(lines)


def _batches(images: ImageSet, device: torch.device, title: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, labels) in order, with a progress bar."""
    for start in track(range(0, len(images), BATCH), description=title, transient=True):
        indices = range(start, min(start + BATCH, len(images)))
        yield images.images(indices).to(device), images.labels[start : start + BATCH].to(device)
