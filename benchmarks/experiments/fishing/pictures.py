"""A client's whole batch as it is, as an honest server sees it, and as an active one does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from fedmjp.report.styles import SMALL, WIDTH, save

TITLES = {"original": "the client's images", "patch_embedding": "honest server: patch_embedding"}


def batch_figure(pictures: Mapping[str, Tensor], path: Path) -> None:
    """Draw batches side by side, each as a grid of its images.

    Args:
        pictures: title, or name of an attack -> (B, 3, H, W) in [0, 1]; NaN is drawn white.
        path: the .png to write; a .pdf goes beside it.
    """
    batch = next(iter(pictures.values()))
    side = -(-len(batch) // round(len(batch) ** 0.5))
    figure = Figure(figsize=(WIDTH, WIDTH / len(pictures) * 1.12), layout="constrained")
    for column, (name, images) in enumerate(pictures.items()):
        axes = figure.add_subplot(1, len(pictures), column + 1)
        axes.imshow(_mosaic(images.nan_to_num(1.0).clamp(0, 1), side).numpy())
        axes.set_title(TITLES.get(name, f"active server: {name}"), fontsize=SMALL)
        axes.set_axis_off()
    save(figure, path)


def _mosaic(images: Tensor, columns: int) -> Tensor:
    """(B, 3, H, W) as one picture (rows H, columns W, 3) with white lines between."""
    count, _, height, width = images.shape
    rows, gap = -(-count // columns), max(1, width // 16)
    canvas = images.new_ones(rows * (height + gap) - gap, columns * (width + gap) - gap, 3)
    for index, image in enumerate(images.cpu()):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        canvas[top : top + height, left : left + width] = image.permute(1, 2, 0)
    return canvas
