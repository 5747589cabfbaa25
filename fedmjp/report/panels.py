"""Rows of the reconstructions figure, from the images that a run wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from fedmjp.audit.strongest import IMAGE, gains_over_guesses, image_numbers, ranked
from fedmjp.records.images import image_path
from fedmjp.records.rows import BASELINES
from fedmjp.report.grouping import each_group
from fedmjp.report.pictures import Panel, Reconstructed
from fedmjp.report.words import defence_words

MOST_PANELS, MOST_ATTACKS = 4, 4
PLACE = ["round", "client", "image"]
SHOWN = ["batch_size", "psnr", "diagnosis"]


def read_panels(out: Path, rows: pd.DataFrame) -> list[Panel]:
    """Audited images of every defence, `MOST_PANELS` in all, each with the strongest attacks on its defence.

    Of each defence the images are shown on which most of its `MOST_ATTACKS` strongest attacks (`verdict.ranked`) were
    run, the first ones of these; how well the attacks did on an image has no say in its choice.

    Args:
        out: the run's folder.
        rows: of the run, as `load_rows` gives them.
    """
    attacked = rows.loc[~rows["attack"].isin(BASELINES), [*PLACE, "defense", "attack", *SHOWN]]
    share = max(1, MOST_PANELS // max(1, attacked["defense"].nunique()))
    found = []
    for (defense,), own in each_group(attacked, ["defense"]):
        names = _strongest(rows.loc[rows["defense"] == defense, [*IMAGE, "attack", "psnr"]])
        shown = own[own["attack"].isin(names)]
        images = image_numbers(shown, PLACE)
        first, counts = np.unique(images, return_index=True, return_counts=True)[1:]
        for number in np.argsort(-counts, kind="stable")[:share]:
            place = tuple(int(value) for value in shown[PLACE].iloc[first[number]])
            found.append(_panel(out, defense, place, shown[images == number], names))
    return found[: 3 * MOST_PANELS]


def _strongest(rows: pd.DataFrame) -> list[str]:
    """Attacks on a defence, the strongest first; those that never returned an image come last."""
    names = ranked(gains_over_guesses(rows))
    ran = [name for name in dict.fromkeys(rows["attack"]) if name not in (*BASELINES, *names)]
    return [*names, *ran][:MOST_ATTACKS]


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
