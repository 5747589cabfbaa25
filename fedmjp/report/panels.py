"""Rows of the reconstructions figure, from the images that a run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from fedmjp.records.rows import BASELINES
from fedmjp.records.run_folder import image_path
from fedmjp.report.figures import Panel, Reconstructed

MOST_PANELS = 8


def read_panels(out: Path, rows: pd.DataFrame) -> list[Panel]:
    """The first audited images of every defence, `MOST_PANELS` in all, with every attack's reconstruction.

    Args:
        out: the run's folder.
        rows: of the run, as `load_rows` gives them.
    """
    attacked = rows[~rows["attack"].isin(BASELINES)]
    share = max(1, MOST_PANELS // max(1, attacked["defense"].nunique()))
    found = []
    for defense, own in attacked.groupby("defense", sort=False):
        images = own.groupby(["round", "client", "image"], sort=False)
        found += [_panel(out, defense, place, group) for place, group in list(images)[:share]]
    return found


def _panel(out: Path, defense: str, place: tuple[int, int, int], rows: pd.DataFrame) -> Panel:
    def picture(what: str) -> np.ndarray:
        pixels = np.asarray(Image.open(image_path(out, defense, *place, what)))
        return pixels.transpose(2, 0, 1) / np.float32(255)

    reconstructions: dict[str, Any] = {}
    for name, psnr, diagnosis in rows[["attack", "psnr", "diagnosis"]].itertuples(index=False):
        reconstructions[name] = Reconstructed(None if np.isnan(psnr) else picture(name), psnr, diagnosis)
    round, client, image = place
    title = f"{defense}, round {round}, client {client}"
    if rows["batch_size"].iloc[0] > 1:
        title += f", image {image}"
    return Panel(title, picture("original"), picture("seen"), reconstructions)
