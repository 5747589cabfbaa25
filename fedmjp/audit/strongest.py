"""Which attack is the strongest on some updates: its gain over the best guess that needs no gradient, image by image.

Any two attacks are compared on the images that both were run on. The strongest is chosen on one half of the updates and
reported on the other, so that its figure is not the maximum of several noisy ones (with fewer than `LEAST_TO_SPLIT`
updates one half does both, and the verdict says so).
"""

from __future__ import annotations

from itertools import combinations

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
    values, ran = _by_image(rows, metric, index)
    values = values.dropna(axis=1, how="all")
    guesses = [name for name in BASELINES if name in values]
    attacks = [name for name in values if name not in BASELINES]
    floor = values[guesses].max(axis=1) if guesses else pd.Series(0.0, index=values.index)
    gains = values[attacks].sub(floor.fillna(floor.mean()), axis=0)
    gains = gains.mask(gains.isna() & ran[attacks], 0.0)
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
    wins = dict.fromkeys(counted, 0)
    for one, other in combinations(counted, 2):
        better = _better(counted[one], counted[other])
        if better:
            wins[one if better > 0 else other] += 1
    key = {name: (wins[name], int(counted[name].count()), float(counted[name].mean())) for name in counted}
    return sorted(counted, key=key.__getitem__, reverse=True)


def strongest(gains: pd.DataFrame) -> tuple[str, pd.MultiIndex, bool]:
    """The strongest attack, the images to report it on, and whether it was chosen on other updates than those.

    An attack on a single image is none where others were run on several: a search that comes first on one of eight
    images says nothing of the other seven.

    Args:
        gains: images x attacks, as `gains_over_guesses` gives them; the index has the levels `IMAGE`.
    """
    compared = gains.dropna(axis=1, how="all")
    if compared.empty:
        return "", compared.index[:0], False
    several = [name for name in compared if compared[name].count() > 1] or list(compared)
    updates = _update_of(compared.index)
    chosen_on = _first_half(compared, updates)
    if len(set(updates)) >= LEAST_TO_SPLIT and compared.shape[1] > 1:
        best = next((name for name in ranked(compared[chosen_on]) if name in several), several[0])
        own = compared[best].notna().to_numpy()
        if len(set(updates[own])) >= LEAST_TO_SPLIT:
            return best, compared.index[own & ~chosen_on], True
    best = next(name for name in ranked(compared) if name in several)
    return best, compared.index[compared[best].notna()], False


def above_guesses(gains: pd.DataFrame) -> str:
    """The attack that is surely better than the best guess on its own images, the one with the highest lower bound; "".

    The intervals' level is corrected for the number of attacks (Bonferroni). Over one image there is no interval.

    Args:
        gains: images x attacks, as `gains_over_guesses` gives them.
    """
    tried = [name for name in gains if gains[name].count() > 1]
    lows = {n: bootstrap_mean(gains[n].to_numpy(), confidence=1 - 0.05 / len(tried)).low for n in tried}
    return max((name for name in lows if lows[name] > 0), key=lows.__getitem__, default="")


def _first_half(gains: pd.DataFrame, updates: np.ndarray) -> np.ndarray:
    """(images,) bool: half of the updates of every attack, as nearly as it can be; attacks with few updates first."""
    half = np.full(updates.max(initial=-1) + 1, -1)  # of each update 1, 0, or -1 where that is not decided
    for name in gains.count().sort_values(kind="stable").index:
        own = list(dict.fromkeys(updates[gains[name].notna().to_numpy()].tolist()))
        decided = half[own]
        chosen, count = int((decided == 1).sum()), int((decided >= 0).sum())
        for update in own:
            if half[update] < 0:
                half[update] = 2 * chosen <= count
                chosen, count = chosen + int(half[update]), count + 1
    return half[updates] == 1


def _update_of(images: pd.MultiIndex) -> np.ndarray:
    """A number for the update of each image. Campaigns tell clients apart by their image alone."""
    frame = images.to_frame(index=False)
    batches = frame.groupby(["seed", "round", "client"])["image"].transform("max") > 0
    alone = frame["image_id"].astype(object).mask(batches, "")
    keys = ["seed", "round", "client", "alone"]
    return frame.assign(alone=alone).groupby(keys, sort=False, dropna=False).ngroup().to_numpy()


def _better(one: pd.Series, other: pd.Series) -> int:
    """1 if `one` is better, -1 if `other` is, 0 if neither can be said."""
    both = (one - other).dropna()
    if both.empty:
        return int(np.sign(np.nan_to_num(one.mean() - other.mean())))
    interval = bootstrap_mean(both.to_numpy())
    low, high = (interval.low, interval.high) if interval.count > 1 else (interval.mean, interval.mean)
    return int(low > 0) - int(high < 0)


def by_image(rows: pd.DataFrame, metric: str, index: list[str] = IMAGE) -> pd.DataFrame:
    """images x attacks and guesses: the metric, NaN where there is no image."""
    return _by_image(rows, metric, index)[0]


def _by_image(rows: pd.DataFrame, metric: str, index: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(images x attacks and guesses: the metric, of several rows the largest; whether there is a row at all)."""
    places = image_numbers(rows, index)
    attacks, names = pd.factorize(rows["attack"].astype(object))
    first = np.unique(places, return_index=True)[1]
    values = np.full((len(first), len(names)), np.nan)
    np.fmax.at(values, (places, attacks), rows[metric].to_numpy(float))
    ran = np.zeros(values.shape, dtype=bool)
    ran[places, attacks] = True
    images = pd.MultiIndex.from_frame(rows[index].iloc[first])
    return tuple(pd.DataFrame(table, index=images, columns=list(names)) for table in (values, ran))


def image_numbers(rows: pd.DataFrame, index: list[str] = IMAGE) -> np.ndarray:
    """The number of each row's image, from 0 in order of first appearance; `index` tells images apart."""
    return rows.groupby(index, sort=False, dropna=False, observed=True).ngroup().to_numpy()
