"""One table of styles for all figures: an attack, a guess and a defence have the same colour and marker everywhere.

Matplotlib's object-oriented interface only, so drawing in a long run leaves no state behind. Colours are those of Okabe
and Ito (2008), which common colour blindness does not confuse, and darker ones for searches; markers differ too, for
print in grey. Figures are at most 7 inches wide, so that their letters can be read at 700 pixels.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmjp.report.words import defence_words

DPI = 200
SMALL, NORMAL = 8, 9  # points
WIDTH = 7.0  # inches
MOST_LINES = 6  # attacks in one panel

BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK, VIOLET = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6BB1",
)
GREY, LIGHT_GREY, GRID = "#404040", "#9a9a9a", "#e3e3e3"
_COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK, VIOLET)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", "-.")

# Attack -> colour and marker. The adapters of the breaching package take those of the attack that they repeat, hollow.
ATTACKS = {
    "patch_embedding": (BLUE, "o"),
    "april": (VERMILION, "s"),
    "batch_rounds": (SKY, "D"),
    "mjp_subspace": (GREEN, "^"),
    "mjp_rounds": (PINK, "v"),
    "patch_set": ("#4D4D4D", "p"),
    "unmix": (ORANGE, "P"),
    "token_inverse": ("#9C5A00", "P"),
    "later_block": ("#9C5A00", "d"),
    "feature_decoder": ("#9C5A00", "v"),
    "unmix_rounds": (BLACK, "X"),
    "noisy_rounds": ("#00593F", "h"),
    "sparse_rounds": ("#00593F", "d"),
    "known_draws": ("#00593F", "8"),
    "lora_span": ("#1B7F8C", "p"),
    "undo_policy": ("#1B7F8C", "P"),
    "fishing": ("#7A2F5C", ">"),
    "feature_fishing": ("#7A2F5C", "<"),
    "imprint": ("#1F4E79", "s"),
    "token_bins": ("#1F4E79", "D"),
    "adapter_trap": ("#5E3C99", "^"),
    "lora_trap": ("#5E3C99", "v"),
    "inverting_gradients": (VIOLET, "*"),
    "gradvit": ("#A6761D", "h"),
    "see_through_gradients": ("#1B7F8C", ">"),
    "april_optimisation": ("#B0307A", "<"),
    "dlg": ("#7F7F00", "p"),
    "idlg": ("#6A3D1E", "d"),
}
GUESSES = {
    "mean_image": {"color": GREY, "ls": ":"},
    "other_image": {"color": LIGHT_GREY, "ls": (0, (1, 3))},
}
# Defence -> colours from its weakest to its strongest setting; those between are mixed.
DEFENCES = {
    "none": (BLUE,),
    "nope": (SKY,),
    "mjp": ("#F2A900", "#D1495B", "#46146B"),
    "noise": ("#66C2A4", "#00593F"),
    "spp": ("#CC79A7", "#7A2F5C"),
    "frozen_positions": (VIOLET,),
    "withheld": ("#5E3C99",),
    "lora": ("#1B7F8C",),
    "adapters": ("#6FB7BF",),
    "topk": ("#A6761D",),
    "quantise": ("#7F7F00",),
    "dp_sgd": ("#004D40",),
    "soteria": ("#B0307A",),
    "precode": ("#6A3D1E",),
    "ats": ("#4D4D4D",),
}
OBJECTIVES = {"supervised": BLUE, "mp3": "#D55E00", "droppos": "#F2A900", "mst": "#00593F"}
_SCALES = {"gamma": (0.0, 1.0), "noise_multiplier": (-5.0, -1.0), "spp_probability": (0.0, 1.0)}  # of log10 for noise


def style(index: int) -> dict[str, Any]:
    """Colour, marker and dash pattern of line number `index`, where lines are neither attacks nor defences.

    Colours and markers run out together after eight; the dash pattern distinguishes the next eight.
    """
    turn, place = divmod(index, len(_COLOURS))
    return {"color": _COLOURS[place], "marker": _MARKERS[place], "ls": _DASHES[turn % len(_DASHES)]}


def attack_style(name: str) -> dict[str, Any]:
    """Colour, marker and dash pattern of an attack; of a guess, colour and dash pattern.

    An attack of another package takes a colour and a marker that follow from its name.
    """
    if name in GUESSES:
        return dict(GUESSES[name])
    repeated = name.removeprefix("breaching_")
    if repeated in ATTACKS:
        colour, marker = ATTACKS[repeated]
        return {"color": colour, "marker": marker} | (
            {"ls": "-"} if repeated == name else {"ls": "--", "markerfacecolor": "white"}
        )
    number = zlib.crc32(name.encode())
    marker = _MARKERS[number // len(_COLOURS) % len(_MARKERS)]
    return {"color": _COLOURS[number % len(_COLOURS)], "marker": marker, "ls": "-."}


def attack_order(names: Any) -> list[str]:
    """Names in the order of the table of styles, others after them and guesses last."""
    known = [*ATTACKS, *(f"breaching_{name}" for name in ATTACKS)]
    rank = {name: place for place, name in enumerate(known)} | {name: len(known) + 1 for name in GUESSES}
    return sorted(dict.fromkeys(names), key=lambda name: rank.get(name, len(known)))


def defence_colour(name: str, strength: tuple[str, float] | None = None) -> str:
    """Colour of a defence, darker with its strength.

    Args:
        name: such as "mjp".
        strength: the option that says how strong it is and its value, such as ("gamma", 0.5).
    """
    if name not in DEFENCES:
        return _COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]
    stops = np.array([mpl.colors.to_rgb(colour) for colour in DEFENCES[name]])  # (stops, 3)
    if strength is None or strength[0] not in _SCALES:
        return DEFENCES[name][-1]
    option, value = strength
    low, high = _SCALES[option]
    place = np.log10(max(value, 1e-12)) if option == "noise_multiplier" else value
    share = (len(stops) - 1) * float(np.clip((place - low) / (high - low), 0, 1))
    return mpl.colors.to_hex([np.interp(share, np.arange(len(stops)), channel) for channel in stops.T])


def label_colour(label: str) -> str:
    """Colour of a defence by its label, such as "mjp:gamma=0.1"; a chain has one of its own."""
    words = defence_words(label)
    if " + " in words:
        return defence_colour(words)
    name, *settings = (part.strip() for part in words.split(","))
    for setting in settings:
        option, _, value = setting.rpartition(" ")
        if option in _SCALES:
            return defence_colour(name, (option, float(value)))
    return defence_colour(name)


def dress(axes: Axes, grid: Literal["", "y", "both"] = "") -> None:
    """Small ticks and no upper or right frame, as in every figure of the project, with grid lines where asked for."""
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)


def error_bars(axes: Axes, x: Any, table: pd.DataFrame, name: str = "", **changes: Any) -> None:
    """Draw means with their intervals, a point each.

    Args:
        x: (n,) coordinates.
        table: n lines with the mean and the bounds of its interval: `name`_mean, `name`_low and `name`_high; mean, low
            and high where `name` is empty.
        changes: keyword arguments of `Axes.errorbar`.
    """
    columns = [f"{name}_{part}" if name else part for part in ("mean", "low", "high")]
    mean, low, high = (np.asarray(table[column], dtype=float) for column in columns)
    error = np.nan_to_num(np.stack([mean - low, high - mean]).clip(min=0), posinf=0)
    axes.errorbar(x, mean, yerr=error, **{"elinewidth": 0.8, "capsize": 2} | changes)


def save(figure: Figure, path: str | os.PathLike[str], dpi: float = DPI) -> None:
    """Write a figure as PNG and PDF; equal figures give equal files."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Type 42 keeps the text selectable and is what publishers accept; no date, so equal data gives equal files.
    with mpl.rc_context({"pdf.fonttype": 42}):
        figure.savefig(path, dpi=dpi, facecolor="white", metadata={"Software": None})
        figure.savefig(path.with_suffix(".pdf"), facecolor="white", metadata={"CreationDate": None})
