"""Attention maps and masks of MST: its Figure 1 in kind."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fedmjp.models import BuiltModel
from fedmjp.models.attention import candidates, class_attention, last_attention
from fedmjp.objectives.crop_encoder import encode_crops, grid_of
from fedmjp.objectives.places import members, random_subsets
from fedmjp.objectives.restoration import patch_values
from fedmjp.objectives.token_masks import candidate_count, replace_patches
from fedmjp.report.styles import SMALL, WIDTH, save
from fedmjp.training.trainer import Trainer

HIDDEN = 0.7  # grey of hidden patches


def attended(model: BuiltModel, images: Tensor) -> Tensor:
    """Attention (B, N) of the class token in the last block, mean over heads, as multiples of a uniform map."""
    found = class_attention(last_attention(model, images), model.module.num_prefix_tokens)
    return found * found.shape[1] / found.sum(dim=1, keepdim=True)


def taught(trainer: Trainer) -> BuiltModel:
    """The teacher of a training as a model."""
    return dataclasses.replace(trainer.model, module=trainer.learner.local.network)


@torch.no_grad()
def draw_attention(trainer: Trainer, before: Tensor, images: Tensor, path: Path) -> None:
    """A row an image: the image, attention before training and the teacher's after it, as many patches hidden at random
    and by attention, and the student's restoration of the latter.

    Args:
        trainer: after the training, with a teacher and a decoder.
        before: `attended` of the images before it.
        images: (B, C, H, W) in [0, 1].
        path: of the .png.
    """
    options, model = trainer.learner.objective, trainer.model
    module, normalised = model.module.eval(), model.normalise(images)
    attention = attended(taught(trainer), images)
    total = attention.shape[1]
    count = candidate_count(options.share, total)
    least = candidates(attention, count, most=False)
    some = members(random_subsets(len(images), total, count, torch.Generator().manual_seed(0), images.device), total)
    hide = partial(
        replace_patches,
        mask=least,
        token=module.pretext.mask_token,
        style=options.replacement,
        generator=torch.Generator().manual_seed(0),
    )
    grid = grid_of(module, normalised)
    restored = module.pretext.decoder(encode_crops(module, normalised, replace=hide)[:, 1:], grid)
    mean, deviation = (torch.tensor(one, device=images.device)[:, None, None] for one in (model.mean, model.std))
    restored = (restored * deviation + mean).clamp(0, 1)
    columns = {
        "image": images,
        "attention\nbefore training": before.unflatten(1, grid),
        "attention of\nthe teacher": attention.unflatten(1, grid),
        f"{count} of {total} hidden\nat random": _covered(images, some, model.patch_size),
        f"the {count} least\nattended hidden": _covered(images, least, model.patch_size),
        "restored\nfrom it": restored,
    }
    drawing = Figure(figsize=(WIDTH, WIDTH * len(images) / len(columns) + 0.35), layout="constrained")
    panels = drawing.subplots(len(images), len(columns), squeeze=False)
    ceiling = float(torch.cat([before, attention]).quantile(0.99))
    for column, (head, pictures) in enumerate(columns.items()):
        panels[0, column].set_title(head, fontsize=SMALL, pad=3)
        for row, picture in enumerate(pictures.cpu()):
            look = {"vmin": 0, "vmax": ceiling, "cmap": "viridis"} if picture.ndim == 2 else {}
            shown = picture if picture.ndim == 2 else picture.permute(1, 2, 0)
            panels[row, column].imshow(shown.numpy(), interpolation="nearest", **look)
            panels[row, column].set_axis_off()
    save(drawing, path)


def _covered(images: Tensor, mask: Tensor, size: int) -> Tensor:
    """Images (B, C, H, W) with the patches under `mask` (B, N) grey."""
    rows, columns = images.shape[2] // size, images.shape[3] // size
    values = patch_values(images, (size, size)).masked_fill(mask[..., None], HIDDEN)
    cut = values.unflatten(1, (rows, columns)).unflatten(3, (images.shape[1], size, size))  # (B, r, c, C, p, q)
    return cut.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
