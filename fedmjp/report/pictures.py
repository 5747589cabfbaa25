"""Reconstructions side by side with their originals, as a PNG and a PDF."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmjp.report.styles import DPI, LIGHT_GREY, SMALL, WIDTH, save

MAX_PANELS = 12
TALLEST = 880  # pixels of a PNG
CELL, GAP, CAPTION, HEADING, LINE = 1.15, 0.08, 0.2, 0.17, 0.135  # inches; cells are smaller where there are many
LETTERS = 16  # of a heading or a label, an inch
LABELS = (16, 20, 24, 28, 34)  # letters of a line of the rows' labels: the fewest at which they are no higher than rows
HATCH = 256  # pixels of the side of the pattern over pixels that are not vouched for


@dataclass(frozen=True)
class Reconstructed:
    """What one attack made of one image.

    Attributes:
        image: float array or tensor (C, H, W) in [0, 1], or None where the attack returned none.
        psnr: against the original, in dB, or None.
        note: why there is no image, or a remark; printed only in an empty cell.
        known: bool array or tensor (1, H, W) or (H, W), the pixels that the attack vouches for; the others are hatched.
            None where that is not known.
    """

    image: Any | None
    psnr: float | None
    note: str = ""
    known: Any | None = None


@dataclass(frozen=True)
class Panel:
    """One row of the reconstructions figure.

    Attributes:
        title: such as "mjp, round 1, client 0"; broken at commas and plus signs, and at spaces where that is too long.
        original: float array or tensor (C, H, W) in [0, 1]; None where it is not known.
        seen: the same, after the defence: what the model computed its gradient on. Not shown where it equals the
            original, or is None.
        reconstructions: attack name to what it made of the image, in the order to be shown.
    """

    title: str
    original: Any
    seen: Any
    reconstructions: dict[str, Reconstructed] = field(default_factory=dict)


def reconstructions_figure(
    panels: list[Panel],
    path: str | os.PathLike[str],
    *,
    seen_title: str = "what the\nmodel saw",
    title: str = "",
    dpi: float = DPI,
) -> None:
    """Draw original, what the model saw (where it differs) and every attack's reconstruction, one row per panel.

    Rows with the same attacks share their columns; a row with others has headings of its own.

    Args:
        panels: 1 to 12 panels.
        path: the .png to write; a .pdf goes beside it.
        seen_title: heading of the column of what the model saw.
        title: of the figure; "" for none.
        dpi: pixels an inch, fewer where the picture would be taller than 880 pixels.

    Raises:
        ValueError: no panel or more than 12.
    """
    if not 1 <= len(panels) <= MAX_PANELS:
        raise ValueError(f"reconstructions_figure draws 1 to {MAX_PANELS} panels, got {len(panels)}")
    given = [name for name in ("original", "seen") if any(_given(panel, name) is not None for panel in panels)]
    heads = {"original": "original", "seen": seen_title}
    rows = [
        {heads[name]: None if (image := _given(panel, name)) is None else Reconstructed(image, None) for name in given}
        | panel.reconstructions
        for panel in panels
    ]
    if _one_set_of_columns(panels):
        every = dict.fromkeys(name for row in rows for name in row)
        rows = [dict.fromkeys(every) | row for row in rows]
    else:
        rows = [{name: content for name, content in row.items() if content is not None} for row in rows]
    columns = max(map(len, rows))
    labels, margin, cell = _labels(panels, columns)
    headings = [
        [] if index and list(row) == list(rows[index - 1]) else _headings(row, cell) for index, row in enumerate(rows)
    ]
    lines = [max((words.count("\n") + 1 for words in heading), default=0) for heading in headings]
    top = 0.25 if title else 0.04
    width = margin + columns * (cell + GAP)
    height = top + sum(cell + CAPTION + HEADING * count for count in lines)
    figure, bottom = Figure(figsize=(width, height)), height - top
    for label, row, heading, count in zip(labels, rows, headings, lines, strict=True):
        bottom -= cell + HEADING * count
        figure.text(0.04 / width, (bottom + cell / 2) / height, label, fontsize=SMALL, va="center")
        for column, content in enumerate(row.values()):
            left = margin + column * (cell + GAP)
            axes = figure.add_axes((left / width, bottom / height, cell / width, cell / height))
            if heading:
                axes.set_title(heading[column], fontsize=SMALL, pad=3, linespacing=1.0)
            _draw_cell(axes, content, int(15 * cell))
        bottom -= CAPTION
    if title:
        figure.text(0.04 / width, 1 - 0.06 / height, title, fontsize=SMALL, va="top", weight="bold")
    save(figure, path, min(dpi, TALLEST / height))


def _labels(panels: list[Panel], columns: int) -> tuple[list[str], float, float]:
    """Labels of the rows, the width of the margin that they stand in, and the side of a cell beside it, in inches."""
    for letters in LABELS:
        parts = [panel.title.replace(" + ", ", + ").split(",") for panel in panels]
        lines = [
            [line for part in row for line in textwrap.wrap(part.strip(), letters, break_long_words=False)]
            for row in parts
        ]
        margin = 0.05 + letters / LETTERS
        cell = min(CELL, (WIDTH - margin) / columns - GAP)
        wide = max((len(line) for row in lines for line in row), default=0) > letters
        if not wide and LINE * max(map(len, lines)) <= cell + CAPTION:
            break
    return ["\n".join(row) for row in lines], margin, cell


def draw_picture(axes: Axes, image: Any | None, psnr: float | None) -> None:
    """One cell of a figure: an image (C, H, W) in [0, 1] with its PSNR (dB) below, or an empty cell."""
    _draw_cell(axes, None if image is None else Reconstructed(image, psnr))


def _given(panel: Panel, name: str) -> Any | None:
    """The original, or what the model saw unless it is the original."""
    image = getattr(panel, name)
    if name == "original" or image is None or panel.original is None:
        return image
    return None if np.allclose(_pixels(image), _pixels(panel.original), atol=2 / 255) else image


def _one_set_of_columns(panels: list[Panel]) -> bool:
    """Whether the rows agree in the order of the attacks that they share, so that columns can be common."""
    every = list(dict.fromkeys(name for panel in panels for name in panel.reconstructions))
    orders = [[every.index(name) for name in panel.reconstructions] for panel in panels]
    return all(order == sorted(order) for order in orders) and len(every) <= max(map(len, orders))


def _draw_cell(axes: Axes, content: Reconstructed | None, letters: int = 17) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=LIGHT_GREY, linewidth=0.6)
    if content is None:
        axes.set_axis_off()
        return
    if content.image is None:
        axes.set_facecolor("#f5f5f5")
        reason = textwrap.shorten(content.note or "no image returned", 100, placeholder=" …")
        place = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, textwrap.fill(reason, letters), fontsize=SMALL - 1.5, color="#444444", **place)
        return
    picture = _pixels(content.image)
    height, width = picture.shape[:2]
    extent = (0, width, height, 0)
    smooth = "nearest" if max(height, width) < 128 else "antialiased"
    axes.imshow(picture, vmin=0, vmax=1, cmap="gray", interpolation=smooth, extent=extent)
    if content.known is not None:
        axes.imshow(_hatching(content.known), interpolation="antialiased", extent=extent)
    if content.psnr is not None and np.isfinite(content.psnr):
        axes.set_xlabel(f"{content.psnr:.1f} dB", fontsize=SMALL, labelpad=2)


def _hatching(known: Any) -> np.ndarray:
    """(HATCH, HATCH, 4): thin diagonal lines, dark beside light, over the pixels that are not vouched for."""
    mask = np.asarray(known.detach().cpu() if hasattr(known, "detach") else known, dtype=bool)
    mask = mask.reshape(mask.shape[-2:])
    rows, columns = (np.arange(HATCH) * side // HATCH for side in mask.shape)
    unknown = ~mask[np.ix_(rows, columns)]
    stripe = np.add.outer(np.arange(HATCH), np.arange(HATCH)) % 16
    overlay = np.zeros((HATCH, HATCH, 4))
    for light, places in ((1.0, stripe < 2), (0.0, (stripe >= 2) & (stripe < 4))):
        overlay[unknown & places] = (light, light, light, 0.75)
    return overlay


def _pixels(image: Any) -> np.ndarray:
    """(C, H, W) in any float type, array or tensor, to (H, W, 3) or (H, W) in [0, 1]; NaN shows black.

    Of more than three channels the first three are shown, of two the first, as `records.images.save_image` does.
    """
    if hasattr(image, "detach"):  # a tensor, perhaps half precision and on a GPU
        image = image.detach().cpu().float()
    picture = np.nan_to_num(np.asarray(image, dtype=np.float64)).clip(0, 1)
    if picture.ndim != 3 or not len(picture) or len(picture) >= max(4, min(picture.shape[1:])):
        raise ValueError(f"an image is (C, H, W) with fewer channels than rows and columns, got {picture.shape}")
    return picture[:3].transpose(1, 2, 0) if len(picture) >= 3 else picture[0]


def _headings(names: Iterable[str], cell: float) -> list[str]:
    """Headings of a row's cells; where one is wider than its cell, every other one stands a line higher.

    Args:
        cell: side of a cell in inches.
    """
    letters = int(LETTERS * cell)
    words = [_broken(name, letters + 4) for name in names]
    if max(len(line) for heading in words for line in heading.splitlines()) <= letters + 2:
        return words
    raised = "\n" * max(heading.count("\n") + 1 for heading in words[::2])
    return [heading + raised * (column % 2) for column, heading in enumerate(words)]


def _broken(name: str, letters: int) -> str:
    """A name on at most two lines, broken at spaces; an attack's own name is never broken."""
    if "\n" in name:
        return name
    return "\n".join(textwrap.wrap(name.replace("breaching_", "breaching: "), letters, break_long_words=False)[:2])
