"""Images reassembled from the places that DropPos predicts, as the figures of its paper show them.

Grey: places that nothing was put on. A patch that was given its position stands there; of the others, which stand where
the model says, a frame marks each that belongs elsewhere. Where two patches are put on one place, the given one is
shown, and of two predicted ones the one of the larger probability.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from fedmjp.models import BuiltModel
from fedmjp.objectives.droppos import DropPos, place_logits
from fedmjp.objectives.places import random_subsets
from fedmjp.report.styles import SMALL, VERMILION, WIDTH, save

CASES = ((0.0, 0.75), (0.5, 0.75), (0.75, 0.75))  # (gamma, gamma_pos) of each pair of columns
EMPTY = 0.7


@dataclasses.dataclass(frozen=True)
class Reassembled:
    """What the encoder was given of images, and where it put the rest.

    Attributes:
        given: (B, C, H, W), the patches with a position.
        image: the same, and the others at the places predicted for them.
        wrong: of each image the places of `image` that hold a patch from elsewhere.
    """

    given: Tensor
    image: Tensor
    wrong: list[list[int]]


@torch.no_grad()
def reassemble(objective: DropPos, model: BuiltModel, images: Tensor, seed: int) -> Reassembled:
    """Hide positions by the objective's ratios and put every seen patch where the model says it belongs.

    Args:
        objective: with the ratios.
        model: with DropPos' decoder, left in evaluation mode.
        images: (B, C, H, W) in [0, 1].
        seed: of what is shown.
    """
    module, generator = model.module.eval(), torch.Generator().manual_seed(seed)
    total, size = module.patch_embed.num_patches, model.patch_size
    seen, hidden = objective.counts(total)
    shown = random_subsets(len(images), total, seen, generator, images.device)  # (B, K)
    slots = random_subsets(len(images), seen, hidden, generator, images.device)  # (B, M)
    confidence, predicted = place_logits(module, model.normalise(images), shown, slots).softmax(dim=-1).max(dim=-1)
    given, image, wrong = torch.full_like(images, EMPTY), torch.full_like(images, EMPTY), []
    columns = model.grid[1]

    def copy(source: int, target: int, to: Tensor, number: int) -> None:
        rows, across = (divmod(place, columns) for place in (source, target))
        patch = images[number, :, rows[0] * size :, rows[1] * size :][:, :size, :size]
        to[number, :, across[0] * size :, across[1] * size :][:, :size, :size] = patch

    for number in range(len(images)):
        unplaced = shown[number, slots[number]].tolist()
        origin = {}  # place -> the patch that is put there
        for slot in confidence[number].argsort().tolist():
            origin[int(predicted[number, slot])] = unplaced[slot]
        fixed = [place for place in shown[number].tolist() if place not in unplaced]
        origin |= {place: place for place in fixed}
        for place in fixed:
            copy(place, place, given, number)
        for place, source in origin.items():
            copy(source, place, image, number)
        wrong.append(sorted(place for place, source in origin.items() if source != place))
    return Reassembled(given, image, wrong)


def draw_places(objective: DropPos, model: BuiltModel, images: Tensor, path: Path, seed: int = 0) -> None:
    """A row an image: the image, and for each of `CASES` what has its position, and all that is seen put in place.

    Args:
        objective: of the training; its ratios are replaced by those of the cases.
        images: (B, C, H, W) in [0, 1].
        path: of the .png.
    """
    found = [
        reassemble(dataclasses.replace(objective, gamma=gamma, gamma_pos=share), model, images, seed)
        for gamma, share in CASES
    ]
    heads, parts = ["image"], [(images, [[]] * len(images))]
    for (gamma, share), case in zip(CASES, found, strict=True):
        heads += [f"γ {gamma:g}, γ_pos {share:g}\ngiven", "put in place"]
        parts += [(case.given, [[]] * len(images)), (case.image, case.wrong)]
    drawing = Figure(figsize=(WIDTH, WIDTH * len(images) / len(parts) + 0.35), layout="constrained")
    axes = drawing.subplots(len(images), len(parts), squeeze=False)
    for column, (head, (pictures, wrong)) in enumerate(zip(heads, parts, strict=True)):
        axes[0, column].set_title(head, fontsize=SMALL, pad=3)
        for row, picture in enumerate(pictures):
            panel = axes[row, column]
            panel.imshow(picture.permute(1, 2, 0).cpu().numpy(), vmin=0, vmax=1, interpolation="nearest")
            panel.set_axis_off()
            for place in wrong[row]:
                down, across = divmod(place, model.grid[1])
                corner, side = (across * model.patch_size, down * model.patch_size), model.patch_size - 1
                panel.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=VERMILION, linewidth=0.9))
    save(drawing, path)
