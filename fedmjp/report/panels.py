"""Rows of the reconstructions figure, from the images that a run wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from fedmjp.audit.strongest import gains_over_guesses, ranked
from fedmjp.records.rows import BASELINES
from fedmjp.records.run_folder import image_path
from fedmjp.report.pictures import Panel, Reconstructed
from fedmjp.report.words import defence_words

MOST_PANELS, MOST_ATTACKS = 4, 4


def read_panels(out: Path, rows: pd.DataFrame) -> list[Panel]:
    """Audited images of every defence, `MOST_PANELS` in all, each with the strongest attacks on its defence.

    Of each defence the images are shown on which most of its `MOST_ATTACKS` strongest attacks (`verdict.ranked`) were
    run, the first ones of these; how well the attacks did on an image has no say in its choice.

    Args:
        out: the run's folder.
        rows: of the run, as `load_rows` gives them.
    """
    attacked = rows[~rows["attack"].isin(BASELINES)]
    share = max(1, MOST_PANELS // max(1, attacked["defense"].nunique()))
    found = []
    for defense, own in attacked.groupby("defense", sort=False):
        names = _strongest(rows[rows["defense"] == defense], own)
        shown = own[own["attack"].isin(names)]
        images = list(shown.groupby(["round", "client", "image"], sort=False))
        images.sort(key=lambda image: -len(image[1]))  # a stable sort
        found += [_panel(out, defense, place, group, names) for place, group in images[:share]]
    return found[: 3 * MOST_PANELS]


def _strongest(rows: pd.DataFrame, attacked: pd.DataFrame) -> list[str]:
    """Attacks on a defence, the strongest first; those that never returned an image come last."""
    names = ranked(gains_over_guesses(rows))
    return [*names, *(name for name in attacked["attack"].unique() if name not in names)][:MOST_ATTACKS]


def _panel(out: Path, defense: str, place: tuple[int, int, int], rows: pd.DataFrame, names: list[str]) -> Panel:
    def picture(what: str) -> np.ndarray | None:
        """A saved picture, (C, H, W) in [0, 1]; None where there is none."""
        path = image_path(out, defense, *place, what)
        return np.asarray(Image.open(path)).transpose(2, 0, 1) / np.float32(255) if path.exists() else None

    cells = {}
    for name, psnr, diagnosis in rows[["attack", "psnr", "diagnosis"]].itertuples(index=False):
        known = picture(f"{name}_known")
        image = None if np.isnan(psnr) else picture(name)
        cells[name] = Reconstructed(image, psnr, diagnosis, None if known is None else known[0] > 0.5)
    round, client, image = place
    title = f"{defence_words(defense)}, round {round}, client {client}"
    if rows["batch_size"].iloc[0] > 1:
        title += f", image {image}"
    ordered = {name: cells[name] for name in names if name in cells}
    return Panel(title, picture("original"), picture("seen"), ordered)
