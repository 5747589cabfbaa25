"""The last block's attention in numbers and pictures: Figure 4 of the MJP paper.

The paper calls MJP's attention "more diverse and content-aware" and shows pictures of it; it measures nothing. Here, on
test images:

    entropy         of a head's [CLS] map over the patches, as a share of a uniform map's: 1 is a uniform map
    distance        between a patch and the patches it attends to, heads averaged, in shares of the image's side
    head_diversity  Jensen-Shannon divergence of the heads' [CLS] maps, as a share of its largest value: 0 all heads
                    attend to the same patches, 1 to different ones ("diverse")
    content         Kullback-Leibler divergence, in bits, of an image's [CLS] map (heads averaged) from the mean map of
                    all images: 0 is the same map whatever the image shows ("content-aware"). Its mean is the mutual
                    information of image and place

Divergences on grids of different sizes do not compare, and sharper maps (less entropy) can diverge further, so the
three are to be read together. The figure is drawn on photographs that ship with scikit-image, never on the data set's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import Tensor

from experiments.rendering import csv
from experiments.session import prepare_torch
from experiments.trained_models.checkpoints import load_bundle, load_trained
from experiments.trained_models.options import AttentionOptions
from experiments.trainings.seeds import mean_over_seeds
from fedmjp.data import DataBundle, load_gallery
from fedmjp.metrics import bootstrap_mean
from fedmjp.models import BuiltModel, build_model, split_name
from fedmjp.models.attention import last_attention
from fedmjp.records import provenance
from fedmjp.records.run_record import note_run
from fedmjp.report.pictures import draw_picture
from fedmjp.report.styles import SMALL, WIDTH, save

BATCH = 50
PER_LINE, HEAD = 2, 0.5  # models in a line of the figure; inches of their headings
MEASURES = ("entropy", "distance", "head_diversity", "content")


def cls_maps(attention: Tensor, prefix: int) -> Tensor:
    """Attention of [CLS] to the patches: attention (B, H, T, T) -> (B, H, N), each summing to 1.

    Args:
        prefix: number of tokens before the patches.
    """
    maps = attention[:, :, 0, prefix:].double()
    return maps / maps.sum(dim=-1, keepdim=True)


def entropy(shares: Tensor) -> Tensor:
    """Entropy in nats over the last axis of shares that sum to 1."""
    return -torch.special.xlogy(shares, shares).sum(dim=-1)


def attention_distance(attention: Tensor, prefix: int, grid: tuple[int, int]) -> Tensor:
    """(B, H): mean distance from a patch to the patches that each head attends to, in shares of the image's side.

    Args:
        attention: (B, H, T, T).
        prefix: number of tokens before the patches.
        grid: (rows, columns) of patches.
    """
    among = attention[:, :, prefix:, prefix:].double()
    among = among / among.sum(dim=-1, keepdim=True)  # (B, H, N, N)
    sides = torch.tensor(grid, dtype=torch.float64)
    places = torch.cartesian_prod(*(torch.arange(side, dtype=torch.float64) for side in grid)) / sides  # (N, 2)
    apart = torch.cdist(places, places).to(among.device)
    return (among * apart).sum(dim=-1).mean(dim=2)


def head_diversity(maps: Tensor) -> Tensor:
    """(B,): Jensen-Shannon divergence between the heads' maps (B, H, N) as a share of its largest value, log H."""
    if maps.shape[1] == 1:
        return torch.zeros(len(maps), dtype=maps.dtype)
    return (entropy(maps.mean(dim=1)) - entropy(maps).mean(dim=1)) / log(maps.shape[1])


def content(maps: Tensor) -> Tensor:
    """(B,): Kullback-Leibler divergence, in bits, of each map (B, N) from the mean of all maps."""
    mean = maps.mean(dim=0, keepdim=True)
    return (torch.special.xlogy(maps, maps) - torch.special.xlogy(maps, mean)).sum(dim=-1) / log(2)


def measure(model: BuiltModel, bundle: DataBundle, device: torch.device) -> pd.DataFrame:
    """`MEASURES`, one line a test image."""
    prefix, parts, attended = model.module.num_prefix_tokens, [], []
    for pictures in batches(bundle, device, model.name):
        attention = last_attention(model, pictures)
        maps = cls_maps(attention, prefix)
        attended.append(maps.mean(dim=1).cpu())
        shares = entropy(maps).mean(dim=1) / log(maps.shape[-1])
        apart = attention_distance(attention, prefix, model.grid).mean(dim=1)
        parts.append(torch.stack([shares, apart, head_diversity(maps)], dim=1).cpu())
    found = torch.cat([torch.cat(parts), content(torch.cat(attended))[:, None]], dim=1)
    return pd.DataFrame(found.numpy(), columns=list(MEASURES))


def batches(bundle: DataBundle, device: torch.device, title: str) -> Iterator[Tensor]:
    """Test images in order, under a bar."""
    count = len(bundle.test)
    for start in track(range(0, count, BATCH), description=title, transient=True):
        yield bundle.test.images(range(start, min(start + BATCH, count))).to(device)


@dataclass(frozen=True)
class Measured:
    """A line of the table.

    Attributes:
        name: of the model.
        trainings: the same model once a training.
        bundle: the images that they are measured on.
    """

    name: str
    trainings: list[BuiltModel]
    bundle: DataBundle


def build_subjects(options: AttentionOptions, device: torch.device) -> list[Measured]:
    """Trained models in the order asked for, then the same architectures with random weights; each with its images.

    Raises:
        UsageError: data or weights that are not there, or weights for other classes.
    """
    found, bundles = list[Measured](), dict[int, DataBundle]()
    for name, subject in options.subjects().items():
        size = options.side(subject)
        bundles[size] = bundles.get(size) or load_bundle(options, subject)
        models = [load_trained(options, name, source, bundles[size]) for source in subject.sources]
        found.append(Measured(name, models, bundles[size]))
    untrained = {"weights": "random", "seed": options.seed, "image_size": options.image_size}
    for base in dict.fromkeys(split_name(one.name)[0] for one in found):
        model = build_model(base, num_classes=len(found[0].bundle.classes), **untrained)
        found.append(Measured(base, [model], bundles[model.image_size]))
    for model in (model for one in found for model in one.trainings):
        model.module.to(device).eval()
    return found


def table(subjects: list[Measured], options: AttentionOptions, device: torch.device) -> pd.DataFrame:
    """A line a model: means with 95 % intervals, and paired differences from the reference."""
    found = [[measure(model, one.bundle, device) for model in one.trainings] for one in subjects]
    place = next(i for i, one in enumerate(subjects) if one.name == options.reference)
    reference, lines = found[place], []
    for one, own in zip(subjects, found, strict=True):
        model = one.trainings[0]
        weights = ", ".join(training.provenance for training in one.trainings)
        patches = model.grid[0] * model.grid[1]
        line = {"model": one.name, "weights": weights, "patches": patches, "count": len(own[0])}
        for name in MEASURES:
            line |= _named(name, [training[name] for training in own])
            if model.grid == subjects[place].trainings[0].grid and len(own) == len(reference):
                pairs = zip(own, reference, strict=True)
                line |= _named(f"{name}_difference", [mine[name] - theirs[name] for mine, theirs in pairs])
        if max(map(len, found)) > 1:
            line["seeds"] = len(own)
        lines.append(line | {"dataset": one.bundle.provenance})
    return pd.DataFrame(lines).assign(commit=provenance.commit(), seed=options.seed)


def _named(name: str, trainings: list[pd.Series]) -> dict[str, float]:
    """Columns of a mean and its interval: over images of one training, over several trainings else."""
    if len(trainings) > 1:
        found = mean_over_seeds(name, np.array([values.mean() for values in trainings]))
        return {column: found[column] for column in found if column != "seeds"}
    found = bootstrap_mean(trainings[0].to_numpy())
    return {f"{name}_mean": found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def figure(models: list[BuiltModel], photographs: int, path: Path) -> None:
    """Figure 4: [CLS] maps of the last block, heads averaged and head by head, a row a photograph, two models a line.

    All maps share one scale, attention in multiples of a uniform map's, its colours by the square root.
    """
    drawn = []
    for model in models:
        pictures = load_gallery("photos", size=model.image_size, limit=photographs).images.images(range(photographs))
        device = next(model.module.parameters()).device
        maps = cls_maps(last_attention(model, pictures.to(device)), model.module.num_prefix_tokens).cpu()
        maps = torch.cat([maps.mean(dim=1, keepdim=True), maps], dim=1) * maps.shape[-1]  # (P, 1 + H, N)
        drawn.append(maps.reshape(photographs, -1, *model.grid).numpy())
    largest = max(model.image_size for model in models)
    shown = load_gallery("photos", size=largest, limit=photographs).images.images(range(photographs))
    pairs = [range(start, min(start + PER_LINE, len(models))) for start in range(0, len(models), PER_LINE)]
    most = max(sum(drawn[i].shape[1] for i in pair) for pair in pairs)
    left, right, gap = 0.05, 0.62, 0.08  # inches
    cell = (WIDTH - left - right - gap * PER_LINE) / (1 + most)
    block = HEAD + photographs * cell
    drawing = Figure(figsize=(WIDTH, len(pairs) * block))
    ceiling = float(np.quantile(np.concatenate([maps.ravel() for maps in drawn]), 0.99))
    scale, height = PowerNorm(0.5, vmin=0, vmax=ceiling), drawing.get_figheight()

    def place(x: float, y: float) -> Axes:
        return drawing.add_axes((x / WIDTH, y / height, 0.95 * cell / WIDTH, 0.95 * cell / height))

    for line, pair in enumerate(pairs):
        top = height - line * block
        for row in range(photographs):
            draw_picture(place(left, top - HEAD - (row + 1) * cell), shown[row], None)
        edge = left + cell + gap
        for index in pair:
            model, maps = models[index], drawn[index]
            title = f"{model.name}, {model.grid[0]} × {model.grid[1]} patches"
            middle = (edge + cell * maps.shape[1] / 2) / WIDTH
            drawing.text(middle, (top - 0.1) / height, title, fontsize=SMALL, ha="center", va="top")
            for row in range(photographs):
                for column, one in enumerate(maps[row]):
                    axes = place(edge + column * cell, top - HEAD - (row + 1) * cell)
                    image = axes.imshow(one, norm=scale, cmap="viridis", interpolation="nearest")
                    axes.set_axis_off()
                    if row == 0:
                        axes.set_title("mean" if column == 0 else f"head {column}", fontsize=SMALL, pad=3)
            edge += cell * maps.shape[1] + gap
    marks = [mark for mark in (0, 1, 2, 5, 10, 20, 50, 100) if mark <= ceiling]
    edge = (WIDTH - right + 0.1) / WIDTH
    scaled = drawing.add_axes((edge, 0.05 / height, 0.1 / WIDTH, photographs * cell / height))
    bar = drawing.colorbar(image, cax=scaled, extend="max", ticks=marks)
    bar.set_label("attention / uniform", fontsize=SMALL, labelpad=1)
    bar.ax.tick_params(labelsize=SMALL)
    save(drawing, path)


def run(options: AttentionOptions, console: Console) -> None:
    """Write table and figure and print the table."""
    device = prepare_torch(options)
    subjects = build_subjects(options, device)
    measured = table(subjects, options, device)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.csv").write_text(csv(measured, 5), encoding="utf-8")
    trained = [one.trainings[0] for one in subjects if "NOT TRAINED" not in one.trainings[0].provenance]
    figure(trained, options.photographs, options.out / "attention.png")
    devices = [provenance.device_name(device)]
    note_run(options.out, "python benchmarks/attention_maps.py", devices=devices, overwritten=True)
    shown = measured[["model", "weights", *(f"{name}_mean" for name in MEASURES)]]
    console.print(shown.to_string(index=False, float_format="%.4f"), highlight=False)
    console.print(f"table and figure: {options.out}", soft_wrap=True, highlight=False)
