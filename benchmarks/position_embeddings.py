"""What do position embeddings learn?  Tables 7 and 8, Figures 1, 3 and 7 of the MJP paper.

    python benchmarks/position_embeddings.py                                     every shipped checkpoint
    python benchmarks/position_embeddings.py --model vit_mini_64 vit_ti=FILE.safetensors

Table 7 and Figure 3: the share of the position embeddings' variance in their first n principal components. Table 8: how
well a linear map reads a patch's place from its embedding, along the sequence (1-D) and in the grid (2-D), by 5-fold
cross-validation, as mean absolute error in units of patches. Figures 1 and 7: the embeddings in the plane of their
first two components, neighbours in the grid joined by lines (the paper projects by UMAP).

Departs from the paper: each architecture also stands with random weights, which is what "learned nothing" looks like.
The paper's +- is not explained; here it is the standard deviation over shuffles of the folds. Where an embedding has
more channels than the folds have places (always so here, and in the paper), the map is the one of least norm.

Writes explained_variance.csv, regression.csv, eigenvalues.png and projections.png to --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from attacks import UsageError
from fedmjp import provenance
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.models import build_model, split_name
from fedmjp.models.weights import classes_of, shipped_names
from fedmjp.report.figures import NORMAL, SMALL, save, style

HERE = Path(__file__).resolve().parent
FOLDS = 5


@dataclass(frozen=True)
class Options:
    """Explained variance, position regression and projections of learned position embeddings."""

    model: tuple[str, ...] = ()
    """MODEL for its shipped checkpoint, or MODEL=FILE (none given: every shipped checkpoint with position
    embeddings)."""
    dimensions: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 16, 32)
    """Numbers of principal components in the table of explained variance."""
    shuffles: int = 20
    """Times the folds of the regression are drawn anew."""
    seed: int = 0
    """Fixes the folds and the random weights."""
    out: Path = Path("runs/position_embeddings")
    """Folder of tables and figures (the committed ones stand in results/position_embeddings)."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not self.dimensions or min(self.dimensions) < 1 or self.shuffles < 1 or self.seed < 0:
            raise UsageError("--dimensions and --shuffles take numbers from 1, --seed from 0")


@dataclass(frozen=True)
class Embeddings:
    """Position embeddings of one model.

    Attributes:
        model, weights: for the tables.
        values: (N, D), one row a patch in raster order.
        grid: (rows, columns) with rows * columns = N.
    """

    model: str
    weights: str
    values: np.ndarray
    grid: tuple[int, int]

    @property
    def label(self) -> str:
        """For legends."""
        return f"{self.model}, {'random' if 'NOT TRAINED' in self.weights else 'trained'}"


def load(model: str, source: str, seed: int) -> Embeddings:
    """The position embeddings of `model` with weights from `source`.

    Raises:
        UsageError: a model without patch position embeddings, or weights that are not there.
    """
    built = build_model(model, num_classes=classes_of(model, source) or 1000, weights=source, dal="none", seed=seed)
    positions = built.module.patch_positions() if hasattr(built.module, "patch_positions") else None
    if positions is None:
        raise UsageError(f"{model} has no position embeddings to look at; name another model")
    return Embeddings(model, built.provenance, positions.detach().double().numpy(), built.grid)


def line_up(options: Options) -> list[Embeddings]:
    """Trained embeddings in the order asked for, then those of the same architectures with random weights.

    Raises:
        UsageError: a model without a checkpoint.
    """
    sources = dict(entry.split("=", 1) if "=" in entry else (entry, "auto") for entry in options.model)
    sources = sources or {name: "auto" for name in shipped_names() if not name.endswith("_nope")}
    if not sources:
        raise UsageError("no checkpoint with position embeddings ships; pass --model MODEL=FILE")
    for name, source in sources.items():
        split_name(name)
        if source == "auto" and name not in shipped_names():
            raise UsageError(f"no checkpoint of {name} ships; write {name}=FILE, or choose from: {shipped_names()}")
    trained = [load(name, source, options.seed) for name, source in sources.items()]
    bases = dict.fromkeys(split_name(name)[0] for name in sources)
    return trained + [load(base, "random", options.seed) for base in bases]


def explained_variance(values: np.ndarray) -> np.ndarray:
    """Share of the variance of (N, D) rows in the first 1, 2, ... principal components: (min(N, D),), rising to 1."""
    squares = np.linalg.svd(values - values.mean(axis=0), compute_uv=False) ** 2
    return squares.cumsum() / squares.sum()


def places_of(grid: tuple[int, int]) -> np.ndarray:
    """(N, 2): row and column of each patch, in units of patches."""
    return np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), axis=-1).reshape(-1, 2).astype(float)


def held_out_error(values: np.ndarray, targets: np.ndarray, generator: np.random.Generator) -> float:
    """Mean absolute error of a linear map (with intercept, of least norm) on patches that it was not fitted to.

    Args:
        values: (N, D).
        targets: (N, K).
        generator: draws the folds.
    """
    order = generator.permutation(len(values))
    errors = np.empty(targets.shape)
    for part in np.array_split(order, FOLDS):
        rest = np.setdiff1d(order, part)
        centre, middle = values[rest].mean(axis=0), targets[rest].mean(axis=0)
        fitted = np.linalg.lstsq(values[rest] - centre, targets[rest] - middle, rcond=None)[0]
        errors[part] = np.abs((values[part] - centre) @ fitted + middle - targets[part])
    return float(errors.mean())


def regression(found: Embeddings, shuffles: int, seed: int) -> dict[str, float]:
    """Table 8's two errors in patches, each mean and standard deviation over shuffles of the folds, and guessing's.

    Guessing answers with the mean place.
    """
    places = places_of(found.grid)
    targets = {"1d": np.arange(len(places), dtype=float)[:, None], "2d": places}
    line: dict[str, float] = {"patches": len(places), "channels": found.values.shape[1]}
    for space, target in targets.items():
        errors = [held_out_error(found.values, target, np.random.default_rng([seed, k])) for k in range(shuffles)]
        line[f"mae_{space}"] = float(np.mean(errors))
        line[f"mae_{space}_spread"] = float(np.std(errors))
        line[f"guess_{space}"] = float(np.abs(target - target.mean(axis=0)).mean())
    return line


def tables(found: list[Embeddings], options: Options) -> dict[str, pd.DataFrame]:
    """File name -> table; every line says whether it is ours or the paper's."""
    variance, errors = [], []
    for one in found:
        own = {"source": "measured", "model": one.model, "weights": one.weights}
        shares = explained_variance(one.values)
        variance += [
            own | {"dimension": n, "explained_variance": 100 * shares[n - 1]}
            for n in options.dimensions
            if n <= len(shares)
        ]
        errors.append(own | regression(one, options.shuffles, options.seed))
    paper = [pd.read_csv(HERE / "paper" / f"mjp_table{n}.csv").assign(source=f"paper, Table {n}") for n in (7, 8)]
    made = {
        "explained_variance.csv": pd.concat([pd.DataFrame(variance), paper[0]], ignore_index=True),
        "regression.csv": pd.concat([pd.DataFrame(errors), paper[1]], ignore_index=True),
    }
    return {
        name: frame.assign(commit=np.where(frame["source"] == "measured", provenance.commit(), ""))
        for name, frame in made.items()
    }


def eigenvalue_figure(found: list[Embeddings], path: Path) -> None:
    """Figure 3: accumulated eigenvalues against their number."""
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for index, one in enumerate(found):
        shares = 100 * explained_variance(one.values)
        look = style(index) | {"ms": 3, "lw": 1.3, "markevery": max(1, len(shares) // 12)}
        axes.plot(np.arange(1, len(shares) + 1) / len(shares), shares, label=one.label, **look)
    axes.set_xlabel("Share of the principal components", fontsize=NORMAL)
    axes.set_ylabel("Explained variance (%)", fontsize=NORMAL)
    axes.legend(fontsize=SMALL, frameon=False)
    _undress(axes)
    save(figure, path)


def projection_figure(found: list[Embeddings], path: Path) -> None:
    """Figures 1 and 7: embeddings in the plane of their first two principal components."""
    figure = Figure(figsize=(2.5 * len(found), 2.7), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        centred = one.values - one.values.mean(axis=0)
        plane = (centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T).reshape(*one.grid, 2)
        for line in (*plane, *plane.transpose(1, 0, 2)):
            axes.plot(line[:, 0], line[:, 1], color="#b5b5b5", lw=0.5, zorder=1)
        rows = np.repeat(np.arange(one.grid[0]), one.grid[1])
        axes.scatter(plane[..., 0], plane[..., 1], c=rows, s=9, cmap="viridis", zorder=2)
        axes.set_title(one.label, fontsize=SMALL)
        axes.set_xticks([])
        axes.set_yticks([])
        _undress(axes)
    save(figure, path)


def _undress(axes) -> None:
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)


def run(options: Options, console: Console) -> None:
    """Write tables and figures and print the tables."""
    options.validate()
    found = line_up(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, frame in tables(found, options).items():
        frame.to_csv(options.out / name, index=False, float_format="%.5g")
        console.print(frame.drop(columns="commit").to_string(index=False, na_rep="", float_format="%.3f"))
    eigenvalue_figure(found, options.out / "eigenvalues.png")
    projection_figure(found, options.out / "projections.png")
    console.print(f"tables and figures: {options.out}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = split_commas(parse(Options, "python benchmarks/position_embeddings.py", Options.__doc__, arguments))
    return guarded(lambda: run(options, terminal()), lambda: "nothing was kept; run it again")


if __name__ == "__main__":
    sys.exit(main())
