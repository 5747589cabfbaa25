"""Figures 3 to 7 and 9 in kind: places by masking ratio, accuracy by setting, neighbours by block."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.mp3.options import BRIEF, DEFAULT, LINES, SCRATCH
from experiments.mp3.rows import START, TRAINED
from fedmjp.models import MODELS, split_name
from fedmjp.report.styles import GREY, NORMAL, SMALL, WIDTH, dress, error_bars, save, style

LOOK = {"ms": 4, "lw": 1.2}
PRETRAINED, FROM_SCRATCH = "MP3, then labels", "from scratch"
# Of each panel of accuracies: its axis, the column of the table that is on it, and the lines of its curves.
PANELS = (
    (
        "Epochs of MP3 (Fig. 4)",
        "pretraining_epochs",
        {PRETRAINED: (BRIEF, DEFAULT, "pretrained_longer")},
    ),
    (
        "Epochs with labels (Fig. 5)",
        "epochs",
        {
            PRETRAINED: ("mp3_shorter", DEFAULT, "mp3_longer"),
            FROM_SCRATCH: ("scratch_shorter", SCRATCH, "scratch_longer"),
        },
    ),
    ("η of MP3 (Fig. 6)", "eta", {PRETRAINED: ("eta_0", BRIEF, "eta_0.75", "eta_0.9")}),
    (
        "Side of a patch, pixels (Fig. 7)",
        "patch",
        {
            PRETRAINED: ("mp3_patch_4", BRIEF, "mp3_patch_16"),
            FROM_SCRATCH: ("scratch_patch_4", SCRATCH, "scratch_patch_16"),
        },
    ),
)


def curves(table: pd.DataFrame, places: pd.DataFrame, structure: pd.DataFrame, path: Path) -> None:
    """Draw the panels; bars are Student's intervals over seeds where there are several, else of accuracies those over
    the test images of the one training.

    Args:
        table, places, structure: of `experiments.mp3.render`.
        path: the .png to write; a .pdf is written too.
    """
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    first, *middle, last = figure.subplots(2, 3).flat
    model = places.iloc[0]["model"]
    for index, (_, group) in enumerate(places[places["model"] == model].groupby("line", sort=False)):
        label = f"{group['eta'].iloc[0]:g}, {group['pretraining_epochs'].iloc[0]} epochs"
        error_bars(first, group["eta_test"], group, "places", label=label, **style(index) | LOOK)
    first.axhline(100 / places.iloc[0]["patches"], color=GREY, lw=0.8, ls=":")
    _label(first, "η at test (Fig. 3)", "Places (%), chance dotted", "η of MP3", 0.7)
    patches = {name: MODELS.get(split_name(name)[0]).patch_size for name in table["model"]}
    own = table.assign(patch=table["model"].map(patches)).set_index("line")
    for axes, (words, column, lines) in zip(middle, PANELS, strict=True):
        for index, (label, names) in enumerate(lines.items()):
            shown = own.loc[[name for name in names if name in own.index]]
            error_bars(axes, shown[column], _bounded(shown), "accuracy", label=label, **style(index) | LOOK)
        _label(axes, words, "Top-1 (%)", "", 0.25)
    _neighbours(last, structure)
    save(figure, path)


def _neighbours(axes: Axes, structure: pd.DataFrame) -> None:
    """Nearest neighbours by block, after MP3, with random weights, and after labels from scratch (Figure 9)."""
    own = structure[structure["measure"] == "neighbours"]
    encoders = own[own["after"] == "encoder"]
    parts = {
        "random weights": encoders[(encoders["line"] == DEFAULT) & (encoders["network"] == START)],
        FROM_SCRATCH: own[(own["after"] == "labels") & (own["line"] == SCRATCH)],
    }
    for name in (DEFAULT, "eta_0", BRIEF, "eta_0.75"):
        words = f"MP3, η = {LINES[name].eta:g}{'' if LINES[name].pretraining == 1 else ', shorter'}"
        parts[words] = encoders[(encoders["line"] == name) & (encoders["network"] == TRAINED)]
    for index, (label, group) in enumerate(parts.items()):
        if len(group):
            error_bars(axes, group["layer"], group, "value", label=label, **style(index) | LOOK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axes, "Block (Fig. 9)", "20 nearest neighbours (%)", "", 0.75)


def _bounded(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines of one seed with their interval over test images instead of an infinite one over seeds."""
    single, mean, margin = lines["seeds"] == 1, lines["accuracy_mean"], lines["one_seed_margin"]
    low, high = (
        lines[f"accuracy_{end}"].mask(single, mean + sign * margin) for end, sign in (("low", -1), ("high", 1))
    )
    return lines.assign(accuracy_low=low, accuracy_high=high)


def _label(axes: Axes, across: str, up: str, title: str, room: float) -> None:
    """Name the axes, and leave a share `room` of the height free above for the legend."""
    axes.set_xlabel(across, fontsize=NORMAL)
    axes.set_ylabel(up, fontsize=NORMAL)
    dress(axes)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + room * (high - low))
    axes.legend(loc="upper right", fontsize=SMALL - 1, frameon=False, title=title or None, title_fontsize=SMALL - 1)
