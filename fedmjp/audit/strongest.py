"""Which attack is the strongest on some updates: its gain over the best guess that needs no gradient, image by image.

Any two attacks are compared on the images that both were run on. The strongest is chosen on one half of the updates and
reported on the other, so that its figure is not the maximum of several noisy ones (with fewer than `LEAST_TO_SPLIT`
updates one half does both, and the verdict says so).
"""

from __future__ import annotations

from dataclasses import dataclass
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
    return ByImage.of(rows, index).gains(metric)


@dataclass(frozen=True)
class ByImage:
    """Rows by image and attack.

    Attributes:
        rows: as `load_rows` gives them, attacks and guesses.
        places: (rows,) the number of each row's image, from 0.
        images: what tells each image apart.
        attacks: (rows,) the number of each row's attack, from 0.
        names: of attacks and guesses.
    """

    rows: pd.DataFrame
    places: np.ndarray
    images: pd.MultiIndex
    attacks: np.ndarray
    names: list[str]

    @classmethod
    def of(cls, rows: pd.DataFrame, index: list[str] = IMAGE) -> ByImage:
        """Of `rows`, where the columns `index` tell images apart."""
        places = image_numbers(rows, index)
        attacks, names = pd.factorize(rows["attack"].to_numpy(object))
        first = np.unique(places, return_index=True)[1]
        return cls(rows, places, pd.MultiIndex.from_frame(rows[index].iloc[first]), attacks, list(names))

    def values(self, metric: str) -> pd.DataFrame:
        """images x attacks and guesses: the metric, of several rows the largest; NaN where there is no image."""
        return pd.DataFrame(self._table(metric), index=self.images, columns=self.names)

    def gains(self, metric: str) -> pd.DataFrame:
        """See `gains_over_guesses`."""
        values = self._table(metric)
        returned = ~np.isnan(values).all(axis=0)
        guesses = [self.names.index(name) for name in BASELINES if name in self.names]
        guesses = [number for number in guesses if returned[number]]
        chosen = [number for number, name in enumerate(self.names) if returned[number] and name not in BASELINES]
        floor = np.fmax.reduce(values[:, guesses], axis=1) if guesses else np.zeros(len(values))
        floor = np.where(np.isnan(floor), pd.Series(floor).mean(), floor)
        ran = np.zeros(values.shape, dtype=bool)
        ran[self.places, self.attacks] = True
        gains = values[:, chosen] - floor[:, None]
        gains[np.isnan(gains) & ran[:, chosen]] = 0.0
        some = ~np.isnan(gains).all(axis=1)
        return pd.DataFrame(gains[some], index=self.images[some], columns=[self.names[number] for number in chosen])

    def _table(self, metric: str) -> np.ndarray:
        values = np.full((len(self.images), len(self.names)), np.nan)
        np.fmax.at(values, (self.places, self.attacks), self.rows[metric].to_numpy(float))
        return values


def ranked(gains: pd.DataFrame) -> list[str]:
    """Attacks, the strongest first; any two are compared on the images that both were run on.

    An attack is better than another if its mean gain, of which `EXACT_GAIN` dB count at most, is higher there by an
    interval that excludes 0 (on one image, if it is higher). The strongest is better than most others; of equals the
    one that was run on more images comes first, then the one with the higher mean.

    Args:
        gains: images x attacks, as `gains_over_guesses` gives them.
    """
    counted = gains.dropna(axis=1, how="all").clip(upper=EXACT_GAIN)
    wins, values = dict.fromkeys(counted, 0), {name: counted[name].to_numpy() for name in counted}
    means = {name: float(counted[name].mean()) for name in counted}
    for one, other in combinations(counted, 2):
        better = _better(values[one] - values[other], means[one] - means[other])
        if better:
            wins[one if better > 0 else other] += 1
    key = {name: (wins[name], int(counted[name].count()), means[name]) for name in counted}
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


def _better(differences: np.ndarray, of_means: float) -> int:
    """1 if one attack is better than another, -1 if the other is, 0 if neither can be said.

    Args:
        differences: of their gains, image by image; NaN where one was not run.
        of_means: difference of their mean gains, which decides where no image is shared.
    """
    both = differences[~np.isnan(differences)]
    if not len(both):
        return int(np.sign(np.nan_to_num(of_means)))
    interval = bootstrap_mean(both)
    low, high = (interval.low, interval.high) if interval.count > 1 else (interval.mean, interval.mean)
    return int(low > 0) - int(high < 0)


def image_numbers(rows: pd.DataFrame, index: list[str] = IMAGE) -> np.ndarray:
    """The number of each row's image, from 0 in order of first appearance; `index` tells images apart."""
    numbers = np.zeros(len(rows), dtype=np.int64)
    for name in index:
        codes = pd.factorize(rows[name], use_na_sentinel=False)[0]
        numbers = pd.factorize(numbers * (codes.max(initial=0) + 1) + codes)[0]
    return numbers
