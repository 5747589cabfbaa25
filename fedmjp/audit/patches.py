"""Which attack brings most patches above the bar: in their own places, or in any where their order was a guess.

An update may hold all patches and not their order: that of a model without position embedding is the same for every
order, and MJP's masked patches share one embedding. The answer then says that its order was a guess (the flag
`order_guessed`), and its patches count wherever they lie (`fedmjp.metrics.any_place`), against the guesses' patches
counted in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from attacks.observation import ORDER_GUESSED
from fedmjp.audit.strongest import ByImage
from fedmjp.metrics import Interval, bootstrap_mean
from fedmjp.records.rows import ANY_PLACE, BASELINES

IN_PLACE = "patch_recovery"
NEGLIGIBLE_SHARE = 0.05  # of patches; an interval that reaches further cannot support "no leak shown"
CLEAR_GAIN = 3.0  # dB over the best guess that on a single image no attack reaches by luck
# The same of the share of patches, of one image among many; searches of 60 steps on random weights had 6 % once in 32.
CLEAR_SHARE = 0.2


def order_guessed(rows: pd.DataFrame) -> pd.Series:
    """Whether each answer says that the order of its patches was a guess."""
    return pd.Series([ORDER_GUESSED in flags for flags in rows["flags"]], index=rows.index, dtype=bool)


def patch_gains(by_image: ByImage) -> tuple[pd.DataFrame, Mapping[str, str]]:
    """The share of patches that attacks bring above the bar, over that of the best guess, image by image.

    Args:
        by_image: rows of attacks and guesses.

    Returns:
        images x attacks as `gains_over_guesses` gives them, and attack -> the column that its gains are of: `IN_PLACE`,
        or `ANY_PLACE` where an answer's order was a guess and more is gained so. Rows of guesses that were not scored
        in any place leave every attack in place.
    """
    rows, gains = by_image.rows, by_image.gains(IN_PLACE)
    columns = dict.fromkeys(gains, IN_PLACE)
    guessed = order_guessed(rows)
    if not guessed.any() or rows.loc[rows["attack"].isin(BASELINES), ANY_PLACE].isna().any():
        return gains, columns
    anywhere = by_image.gains(ANY_PLACE)
    for name in rows["attack"][guessed].unique():
        if name in anywhere and anywhere[name].mean() > gains[name].mean():
            gains[name], columns[name] = anywhere[name], ANY_PLACE
    return gains, columns


def most_patches(gains: pd.DataFrame, psnr: pd.DataFrame) -> str:
    """The attack that brought most patches above the bar, if more than the best guess or possibly so; else "".

    Args:
        gains: in the share of patches, as `patch_gains` gives them.
        psnr: gains in PSNR, as `gains_over_guesses` gives them.
    """
    found = {name: bootstrap_mean(gains[name].to_numpy()) for name in gains}

    def counts(name: str, share: Interval) -> bool:
        """Whether it may be more than a few patches, or is surely some of an answer nearer than the guesses."""
        low, high = (share.low, share.high) if share.count > 1 else (share.mean, share.mean)
        nearer = name in psnr and psnr[name].mean() > 0
        return share.mean > 0 and (high > NEGLIGIBLE_SHARE or (low > 0 and nearer))

    shown = {name: share for name, share in found.items() if counts(name, share)}
    return max(shown, key=lambda name: (shown[name].low, shown[name].mean), default="")


def partly_shown(patches: pd.DataFrame, gains: pd.DataFrame) -> pd.DataFrame:
    """images x attacks bool: clearly nearer than every guess, with a clear share more of its patches above the bar.

    Such an image is *partly* shown however many others are attacked beside it.

    Args:
        patches: gains in the share of patches, as `patch_gains` gives them.
        gains: in PSNR, as `gains_over_guesses` gives them.
    """
    both = [name for name in patches if name in gains]
    return (patches.reindex(gains.index)[both] > CLEAR_SHARE) & (gains[both] > CLEAR_GAIN)
