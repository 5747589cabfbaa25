"""Which attack is the strongest on some updates: its gain over the best guess that needs no gradient, image by image.

Any two attacks are compared on the images that both were run on. The strongest is chosen on one half of the updates and
reported on the other, so that its figure is not the maximum of several noisy ones (with fewer than `LEAST_TO_SPLIT`
updates one half does both, and the verdict says so).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedmjp.metrics import bootstrap_mean
from fedmjp.records.rows import BASELINES

EXACT_GAIN = 40.0  # dB over the best guess; an attack that gains more is not stronger for it
LEAST_TO_SPLIT = 8  # updates
IMAGE = ["seed", "round", "client", "image", "image_id"]  # what tells the images of one line of a table apart


def gains_over_guesses(rows: pd.DataFrame, metric: str = "psnr", index: list[str] = IMAGE) -> pd.DataFrame:
    """How much better attacks are than the best guess without a gradient, image by image.

    Args:
        rows: as `load_rows` gives them, attacks and guesses.
        metric: of which higher is nearer to the original.
        index: columns that tell images apart.

    Returns:
        images x attacks that returned an image at least once, in the metric's unit (dB for psnr); 0 where one returned
        none, NaN where it was not run. Where no guess was scored, the values themselves.
    """
    values = by_image(rows, metric, index).dropna(axis=1, how="all")
    guesses = [name for name in BASELINES if name in values]
    attacks = [name for name in values if name not in BASELINES]
    floor = values[guesses].max(axis=1) if guesses else pd.Series(0.0, index=values.index)
    gains = values[attacks].sub(floor.fillna(floor.mean()), axis=0)
    for name in attacks:
        ran = pd.MultiIndex.from_frame(rows.loc[rows["attack"] == name, index])
        gains.loc[gains.index.isin(ran) & gains[name].isna(), name] = 0.0
    return gains[gains.notna().any(axis=1)]


def ranked(gains: pd.DataFrame) -> list[str]:
    """Attacks, the strongest first; any two are compared on the images that both were run on.

    An attack is better than another if its mean gain, of which `EXACT_GAIN` dB count at most, is higher there by an
    interval that excludes 0 (on one image, if it is higher). The strongest is better than most others; of equals the
    one that was run on more images comes first, then the one with the higher mean.

    Args:
        gains: images x attacks, as `gains_over_guesses` gives them.
    """
    counted = gains.dropna(axis=1, how="all").clip(upper=EXACT_GAIN)
    wins = {name: sum(_better(counted[name], counted[other]) for other in counted) for name in counted}
    key = {name: (wins[name], int(counted[name].count()), float(counted[name].mean())) for name in counted}
    return sorted(counted, key=key.__getitem__, reverse=True)


def strongest(gains: pd.DataFrame) -> tuple[str, list, bool]:
    """The strongest attack, the images to report it on, and whether it was chosen on other updates than those.

    Args:
        gains: images x attacks, as `gains_over_guesses` gives them; the index has the levels `IMAGE`.
    """
    compared = gains.dropna(axis=1, how="all")
    if compared.empty:
        return "", [], False
    updates = _update_of(compared.index)
    chosen_on = _first_half(compared, updates)
    if len(set(updates)) >= LEAST_TO_SPLIT and compared.shape[1] > 1:
        best = ranked(compared[chosen_on])[0]
        own = compared[best].notna().to_numpy()
        if len(set(updates[own])) >= LEAST_TO_SPLIT:
            return best, list(compared.index[own & ~chosen_on]), True
    best = ranked(compared)[0]
    return best, list(compared.index[compared[best].notna()]), False


def _first_half(gains: pd.DataFrame, updates: np.ndarray) -> np.ndarray:
    """(images,) bool: half of the updates of every attack, as nearly as it can be; attacks with few updates first."""
    half: dict[Any, bool] = {}
    for name in gains.count().sort_values(kind="stable").index:
        own = dict.fromkeys(updates[gains[name].notna().to_numpy()])
        for update in own:
            if update not in half:
                sides = [half[u] for u in own if u in half]
                half[update] = 2 * sum(sides) <= len(sides)
    return np.array([half[update] for update in updates])


def _update_of(images: pd.MultiIndex) -> np.ndarray:
    """The update of each image, as text. Campaigns tell clients apart by their image alone."""
    frame = images.to_frame(index=False)
    batches = frame.groupby(["seed", "round", "client"])["image"].transform("max") > 0
    alone = frame["image_id"].mask(batches, "")
    return frame[["seed", "round", "client"]].assign(alone=alone).astype(str).agg("\x1f".join, axis=1).to_numpy()


def _better(one: pd.Series, other: pd.Series) -> bool:
    both = (one - other).dropna()
    if both.empty:
        return bool(one.mean() > other.mean())
    interval = bootstrap_mean(both.to_numpy())
    return interval.low > 0 if interval.count > 1 else interval.mean > 0


def by_image(rows: pd.DataFrame, metric: str, index: list[str] = IMAGE) -> pd.DataFrame:
    """images x attacks and guesses: the metric, NaN where there is no image."""
    values = rows.groupby([*index, "attack"], sort=False, dropna=False)[metric].max().unstack("attack")
    values.index = pd.MultiIndex.from_frame(values.index.to_frame())  # of one column too, as pandas 2 needs it
    images = pd.MultiIndex.from_frame(rows[index].drop_duplicates())
    return values.reindex(index=images, columns=list(dict.fromkeys(rows["attack"]))).astype(float)
