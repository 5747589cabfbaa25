"""Figures that need the weights: correlation of positions, relative attention, reassembled and mixed images.

They show one seed, the first of --seeds. Images are CIFAR-10's test images where the model was trained on them, and
photographs that ship with scikit-image elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from experiments.mp3.measures import block_tokens, position_correlation, relative_maps
from experiments.mp3.options import DEFAULT, LINES, SCRATCH, MP3Options
from experiments.mp3.reassembly import mixed, reassembled
from experiments.mp3.rows import Training, weights_of
from experiments.session import Session
from fedmjp.data import load_gallery
from fedmjp.data.imageset import ImageSet
from fedmjp.models import BuiltModel
from fedmjp.models.attention import every_attention
from fedmjp.objectives.learner import restore
from fedmjp.report.styles import NORMAL, SMALL, WIDTH, save
from fedmjp.training.trainer import load

REASSEMBLED_ETAS = (0.0, 0.25, 0.5, 0.75)  # of Figure 2
ROWS, PAIRS = 6, 4  # of images
ENCODER = "MP3"


def draw(options: MP3Options, session: Session) -> None:
    """Draw into --out what the weights in --weights allow, and say what is left out."""
    models = _models(options, session)
    if ENCODER not in models:
        session.say("figures of the encoder are not drawn: its weights are not in --weights")
        return
    test = load(options.pretraining(LINES[DEFAULT], options.seeds[0])).test
    own = options.data.data == "cifar10"
    shown = test if own else load_gallery("photos", size=models[ENCODER].image_size, limit=2 * PAIRS).images
    reassembly_figure(models[ENCODER], shown, options.out / "reassembled.png")
    mixture_figure(models[ENCODER], shown, options.out / "mixed.png")
    correlation_figure(models[ENCODER], test, session.device, options.out / "correlation.png")
    attention_figure(models, test, session.device, options.out / "attention.png")


def _models(options: MP3Options, session: Session) -> dict[str, BuiltModel]:
    """The first seed's encoder, that encoder fine-tuned, and the same model from scratch, as far as they are there."""
    seed = options.seeds[0]
    encoder = Training(options.pretraining(LINES[DEFAULT], seed))
    trainings = {ENCODER: encoder}
    trainings |= {"MP3, then labels": Training(options.supervised(LINES[DEFAULT], seed), encoder)}
    trainings |= {"from scratch": Training(options.supervised(LINES[SCRATCH], seed))}
    files = {name: weights_of(training, options) for name, training in trainings.items()}
    return {name: restore(file, session.device).model for name, file in files.items() if file.is_file()}


def reassembly_figure(model: BuiltModel, images: ImageSet, path: Path) -> None:
    """Images, and what their predicted places make of them at several masking ratios (Figures 2, 12, 13)."""
    originals = images.images(range(min(ROWS, len(images))))
    device = next(model.module.parameters()).device
    columns = {"original": originals} | {
        f"η = {eta:g}": reassembled(model, eta, originals.to(device), torch.Generator().manual_seed(0)).cpu()
        for eta in REASSEMBLED_ETAS
    }
    _picture_grid(columns, path)


def mixture_figure(model: BuiltModel, images: ImageSet, path: Path) -> None:
    """Pairs of images, and the two sets into which their patches are divided, put together (Figures 14, 15)."""
    device, generator = next(model.module.parameters()).device, torch.Generator().manual_seed(0)
    parts = []
    for pair in range(min(PAIRS, len(images) // 2)):
        both = images.images(range(2 * pair, 2 * pair + 2))
        parts.append(torch.cat([both, mixed(model, 0.5, both.to(device), generator).cpu()]))
    names = ("first image", "second image", "one set, η = 0.5", "the other set")
    _picture_grid(dict(zip(names, torch.stack(parts, dim=1), strict=True)), path)


def _picture_grid(columns: dict[str, Tensor], path: Path) -> None:
    """A column of images (n, C, H, W) for each name."""
    pictures = torch.stack(list(columns.values()), dim=1).permute(0, 1, 3, 4, 2).clamp(0, 1).numpy()  # (n, k, H, W, C)
    figure = Figure(figsize=(len(columns) * 1.05, len(pictures) * 1.05 + 0.2), layout="constrained")
    axes = figure.subplots()
    axes.imshow(_tiled(pictures, gap=2, fill=1.0), interpolation="nearest")
    _name_tiles(axes, list(columns), [], pictures.shape[2] + 2, pictures.shape[3] + 2)
    save(figure, path)


def _tiled(tiles: np.ndarray, gap: int = 1, fill: float = np.nan) -> np.ndarray:
    """(R, C, r, c, ...) as one picture (R (r + gap) - gap, ...), tiles apart by empty lines."""
    lines = ((0, 0), (0, 0), (0, gap), (0, gap), *((0, 0) for _ in tiles.shape[4:]))
    apart = np.moveaxis(np.pad(tiles, lines, constant_values=fill), 2, 1)  # (R, r + gap, C, c + gap, ...)
    rows, height, columns, width, *rest = apart.shape
    return apart.reshape(rows * height, columns * width, *rest)[:-gap, :-gap]


def _name_tiles(axes: Axes, columns: list[str], rows: list[str], height: int, width: int) -> None:
    """Names above the columns and beside the rows of `_tiled` pictures, whose tiles and gaps take height and width."""
    axes.set_xticks([(place + 0.5) * width - 1 for place in range(len(columns))], columns)
    axes.set_yticks([(place + 0.5) * height - 1 for place in range(len(rows))], rows)
    axes.tick_params(labelsize=SMALL, length=0, top=True, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def correlation_figure(model: BuiltModel, images: ImageSet, device: torch.device, path: Path) -> None:
    """Correlation of each place with every other, in one image and between two (Figure 10).

    Both panels are grids of grids: the tile at a place shows its correlation with all places.
    """
    last = torch.cat([tokens[-1] for tokens in block_tokens(model, images, device)])
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    panels = figure.subplots(1, 2)
    for axes, matrix, words in zip(panels, position_correlation(last), ("the same image", "two images"), strict=True):
        tiles = matrix.reshape(*model.grid, *model.grid).numpy()
        shown = axes.imshow(_tiled(tiles), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        axes.set_title(words, fontsize=NORMAL)
        axes.set_axis_off()
    _dress_bar(figure.colorbar(shown, ax=panels, shrink=0.8), "Correlation")
    save(figure, path)


def _dress_bar(bar: Colorbar, words: str) -> None:
    bar.set_label(words, fontsize=NORMAL)
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=SMALL)


def attention_figure(models: dict[str, BuiltModel], images: ImageSet, device: torch.device, path: Path) -> None:
    """Attention by offset of key from query: a row a model, a column a head (Figures 8, 11)."""
    pixels = images.images(range(min(len(images), 500))).to(device)
    maps = {}
    for name, model in models.items():
        found = [
            relative_maps(one, model.module.num_prefix_tokens, model.grid) for one in every_attention(model, pixels)
        ]
        maps[name] = torch.stack(found)  # (layers, heads, rows, columns)
    heads = next(iter(maps.values())).shape[1]
    uniform = 1 / np.prod(next(iter(models.values())).grid)
    tiles = np.stack([own.flatten(0, 1).numpy() for own in maps.values()]) / uniform  # (models, heads, rows, columns)
    names = [f"block {index // heads + 1}\nhead {index % heads + 1}" for index in range(tiles.shape[1])]
    figure = Figure(figsize=(WIDTH, 1.0 * len(maps) + 0.5), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(_tiled(tiles), norm=LogNorm(0.2, 5, clip=True), cmap="PuOr_r", interpolation="nearest")
    _name_tiles(axes, names, list(maps), tiles.shape[2] + 1, tiles.shape[3] + 1)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8, ticks=[0.2, 0.5, 1, 2, 5], format="%g")
    _dress_bar(bar, "Attention / uniform")
    save(figure, path)
