"""What position embeddings learn: Tables 7 and 8, Figures 1, 3 and 7 of the MJP paper.

Departs from the paper: each architecture also stands with random weights, as the reference of an embedding that learned
nothing. The paper's +- is not explained; here it is the standard deviation over shuffles of the folds. Where an
embedding has more channels than the folds have places (always so here, and in the paper), linear regression takes the
map of least norm, which fits the places exactly; ridge regression stands beside it, its penalty chosen by leave-one-out
errors inside the fitted folds. The paper shows UMAP alone and without its parameters; ours are the package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from attacks import UsageError
from experiments.rendering import csv
from experiments.scaffold import PAPER
from experiments.trained_models.options import PROJECTIONS, PositionOptions
from experiments.trainings.seeds import difference_over_seeds, mean_over_seeds
from experiments.trainings.verdicts import with_verdicts
from fedmjp.models import build_model, split_name
from fedmjp.models.weights import classes_of
from fedmjp.records import provenance
from fedmjp.records.run_record import note_run
from fedmjp.report.styles import NORMAL, SMALL, WIDTH, dress, save, style

PER_LINE = 4  # models in a line of the figure of projections

FOLDS = 5
PENALTIES = np.logspace(-6, 6, 25)  # of ridge regression, in units of the embeddings' mean squared deviation


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


def load(options: PositionOptions, model: str, source: str) -> Embeddings:
    """The position embeddings of `model` with weights from `source`, at the size asked for.

    Raises:
        UsageError: a model without patch position embeddings, or weights that are not there.
    """
    asked = {"weights": source, "dal": "none", "seed": options.seed, "image_size": options.image_size}
    built = build_model(model, num_classes=classes_of(model, source) or 1000, **asked)
    positions = built.module.patch_positions() if hasattr(built.module, "patch_positions") else None
    if positions is None:
        raise UsageError(f"{model} has no position embeddings; name another model")
    return Embeddings(model, built.provenance, positions.detach().double().numpy(), built.grid)


def load_all(options: PositionOptions) -> list[Embeddings]:
    """Trained embeddings in the order asked for, then those of the same architectures with random weights.

    Raises:
        UsageError: see `load`.
    """
    subjects = options.subjects()
    trained = [load(options, name, source) for name, subject in subjects.items() for source in subject.sources]
    bases = dict.fromkeys(split_name(name)[0] for name in subjects)
    return trained + [load(options, base, "random") for base in bases]


def explained_variance(values: np.ndarray) -> np.ndarray:
    """Share of the variance of (N, D) rows in the first 1, 2, ... principal components: (min(N, D),), rising to 1."""
    squares = np.linalg.svd(values - values.mean(axis=0), compute_uv=False) ** 2
    return squares.cumsum() / squares.sum()


def places_of(grid: tuple[int, int]) -> np.ndarray:
    """(N, 2): row and column of each patch, in units of patches."""
    return np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), axis=-1).reshape(-1, 2).astype(float)


def held_out_error(
    values: np.ndarray, targets: np.ndarray, generator: np.random.Generator, penalised: bool = False
) -> float:
    """Mean absolute error of a linear map with intercept on patches that it was not fitted to.

    Args:
        values: (N, D).
        targets: (N, K).
        generator: draws the folds.
        penalised: ridge regression in place of the map of least norm.
    """
    from sklearn.linear_model import LinearRegression, RidgeCV
    from sklearn.model_selection import KFold, cross_val_predict

    scale = ((values - values.mean(axis=0)) ** 2).sum(axis=1).mean()
    line = RidgeCV(alphas=PENALTIES * scale) if penalised else LinearRegression()
    order = generator.permutation(len(values))
    # RidgeCV answers (N,) where it was fitted to (N, 1).
    read = cross_val_predict(line, values[order], targets[order], cv=KFold(FOLDS)).reshape(targets.shape)
    return float(np.abs(read - targets[order]).mean())


def regression(found: Embeddings, shuffles: int, seed: int) -> dict[str, float]:
    """Table 8's two errors in patches, each mean and standard deviation over shuffles of the folds.

    Beside them stand ridge regression's and those of guessing, which answers with the mean place.
    """
    places = places_of(found.grid)
    targets = {"1d": np.arange(len(places), dtype=float)[:, None], "2d": places}
    line: dict[str, float] = {"patches": len(places), "channels": found.values.shape[1]}
    for space, target in targets.items():
        for name, penalised in ((f"mae_{space}", False), (f"ridge_{space}", True)):
            draws = [np.random.default_rng([seed, k]) for k in range(shuffles)]
            errors = [held_out_error(found.values, target, draw, penalised) for draw in draws]
            line |= {f"{name}_mean": float(np.mean(errors)), f"{name}_spread": float(np.std(errors))}
        line[f"guess_{space}"] = float(np.abs(target - target.mean(axis=0)).mean())
    return line


def tables(found: list[Embeddings], options: PositionOptions) -> dict[str, pd.DataFrame]:
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
    paper = [pd.read_csv(PAPER / f"mjp_table{n}.csv").assign(source=f"paper, Table {n}") for n in (7, 8)]
    made = {
        "explained_variance.csv": pd.concat([pd.DataFrame(variance), paper[0]], ignore_index=True),
        "regression.csv": pd.concat([pd.DataFrame(errors), paper[1]], ignore_index=True),
    }
    if any(len(subject.sources) > 1 for subject in options.subjects().values()):
        made["over_trainings.csv"] = means_over_trainings(made).assign(source="measured")
    return {
        name: frame.assign(commit=np.where(frame["source"] == "measured", provenance.commit(), ""))
        for name, frame in made.items()
    }


def means_over_trainings(made: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Tables 7 and 8 over several trainings, a line a model and measure.

    Values and paired differences from the first model with Student's 95 % interval, and for an MJP model whether the
    differences have the signs of the paper's, of its MJP model with the nonlinear localisation loss; all signs are
    tested together.

    Args:
        made: the tables, a line a training.
    """
    variance, errors = made["explained_variance.csv"], made["regression.csv"]
    columns = [(f"first {n}", own, "explained_variance") for n, own in variance.groupby("dimension", sort=False)]
    columns += [(f"{space[:-1]}-D error", errors, f"mae_{space}_mean") for space in ("1d", "2d")]
    lines = []
    for measure, table, column in columns:
        trained = table[(table["source"] == "measured") & ~table["weights"].str.contains("NOT TRAINED", na=False)]
        ours = {model: own[column].to_numpy(float) for model, own in trained.groupby("model", sort=False)}
        theirs = table[table["source"] != "measured"]
        if "dal" in theirs:
            theirs = theirs[theirs["dal"].isin(["none", "nonlinear"])]
        printed = theirs.set_index("model")[column]
        gap = printed.get("deit_s_mjp", np.nan) - printed.get("deit_s", np.nan)
        plain = next(iter(ours))
        for model, values in ours.items():
            line = {"model": model, "measure": measure} | mean_over_seeds("value", values)
            if model != plain:
                line |= difference_over_seeds(values - ours[plain], gap if model.endswith("_mjp") else np.nan)
            lines.append(line)
    return with_verdicts(pd.DataFrame(lines))


def eigenvalue_figure(found: list[Embeddings], path: Path) -> None:
    """Figure 3: accumulated eigenvalues against their number, a panel for trained and for random weights.

    Each line is of one training's embeddings, not a mean: there is no interval.
    """
    models = list(dict.fromkeys(one.model for one in found))
    groups = {"trained": [], "random": []}
    for one in found:
        groups["random" if "NOT TRAINED" in one.weights else "trained"].append(one)
    groups = {words: group for words, group in groups.items() if group}
    figure = Figure(figsize=(0.6 + 3.1 * len(groups), 3.2), layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (words, group) in zip(panels, groups.items(), strict=True):
        for place, one in enumerate(group):
            shares = 100 * explained_variance(one.values)
            marks = {"ms": 3, "lw": 1.3, "markevery": max(1, len(shares) // 12)}
            x = np.arange(1, len(shares) + 1) / len(shares)
            label = None if one.model in [other.model for other in group[:place]] else one.model
            axes.plot(x, shares, label=label, **style(models.index(one.model)) | marks)
        axes.set_title(f"{words} weights", fontsize=NORMAL)
        axes.set_xlabel("Share of the principal components", fontsize=NORMAL)
        axes.legend(fontsize=SMALL, frameon=False)
        dress(axes)
    panels[0].set_ylabel("Explained variance (%)", fontsize=NORMAL)
    save(figure, path)


def project(values: np.ndarray, way: str, seed: int) -> np.ndarray:
    """(N, 2): rows of (N, D) in the plane of their first two principal components, or as UMAP places them."""
    if way == "pca":
        centred = values - values.mean(axis=0)
        return centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    from umap import UMAP  # takes seconds to import

    return UMAP(random_state=seed, n_jobs=1).fit_transform(values)


def _projected(axes: Axes, found: Embeddings, plane: np.ndarray) -> None:
    """Points (N, 2), colour and lines after rows of the grid."""
    points = plane.reshape(*found.grid, 2)
    for line in (*points, *points.transpose(1, 0, 2)):
        axes.plot(line[:, 0], line[:, 1], color="#b5b5b5", lw=0.5, zorder=1)
    rows = np.repeat(np.arange(found.grid[0]), found.grid[1])
    axes.scatter(points[..., 0], points[..., 1], c=rows, s=8, cmap="viridis", zorder=2, linewidths=0)
    axes.set_xticks([])
    axes.set_yticks([])
    dress(axes)


def projection_figure(found: list[Embeddings], ways: Sequence[str], seed: int, path: Path) -> None:
    """Figures 1 and 7: a column a model, four a line, below each other the ways of projecting."""
    per_line, ways = min(PER_LINE, len(found)), list(ways)
    lines = -(-len(found) // per_line)
    side = WIDTH / PER_LINE
    figure = Figure(figsize=(side * per_line, 0.3 + side * lines * len(ways)), layout="constrained")
    panels = figure.subplots(lines * len(ways), per_line, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for number, one in enumerate(found):
        line, column = divmod(number, per_line)
        for row, way in enumerate(ways, start=line * len(ways)):
            axes = panels[row, column]
            axes.set_axis_on()
            _projected(axes, one, project(one.values, way, seed))
            if row == line * len(ways):
                axes.set_title(one.label.replace(", ", ",\n"), fontsize=SMALL)
            if column == 0:
                axes.set_ylabel(PROJECTIONS[way], fontsize=NORMAL)
    words = "a point a patch, coloured by its row in the grid; lines join neighbours in the grid"
    figure.supxlabel(words, fontsize=SMALL)
    save(figure, path)


def run(options: PositionOptions, console: Console) -> None:
    """Write tables and figures and print the tables."""
    found = load_all(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, frame in tables(found, options).items():
        (options.out / name).write_text(csv(frame, 5), encoding="utf-8")
        console.print(frame.drop(columns="commit").to_string(index=False, na_rep="", float_format="%.3f"))
    eigenvalue_figure(found, options.out / "eigenvalues.png")
    first = list({one.label: one for one in reversed(found)}.values())[::-1]  # of several trainings the first
    projection_figure(first, options.projections, options.seed, options.out / "projections.png")
    devices = [provenance.device_name(torch.device("cpu"))]
    note_run(options.out, "python benchmarks/position_embeddings.py", devices=devices, overwritten=True)
    console.print(f"tables and figures: {options.out}", soft_wrap=True, highlight=False)
