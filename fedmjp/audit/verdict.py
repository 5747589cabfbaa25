"""The one rule that turns scored attacks into a verdict: leaks, partly, no leak shown, or not tested.

Terminal, page, tables and flags all use it. An attack counts as far as it is better than the best guess that needs no
gradient (mean image or another image, whichever is nearer to the original), image by image; where it returned no image
the adversary is left with that guess, so its gain there is 0.

1. *leaks*: at least one attack brought at least one image above `RECOGNISABLE` dB, nearer to the original than any
   guess.
2. *partly*: no whole image, but the strongest attack is better than the guesses by an interval that excludes 0, or
   single patches are above that PSNR more often than in the guesses.
3. *no leak shown*: attacks whose assumptions held were run and none of this was found. That is a statement on those
   attacks under those grants, not on the defence; attacks that did not run are listed with their reasons.
4. *not tested*: no attack's assumptions held on any update.

Where the originals are not known (a running app of somebody else), nothing can be scored: then *leaks* means that an
answer is certified (it reproduces the update), *partly* that an attack vouches for pixels.

The strongest attack is chosen by its mean gain on one half of the updates that all compared attacks were run on, and
reported on the other half, so that its figure is not the maximum of several noisy ones (with fewer than
`LEAST_TO_SPLIT` such updates one half does both, and the verdict says so). Intervals are 95 % bootstrap intervals over
images; over one image there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import pandas as pd

from fedmjp.metrics import Interval, bootstrap_mean
from fedmjp.records.rows import BASELINES

RECOGNISABLE = 25.0  # dB
LEAST_TO_SPLIT = 8  # updates
IMAGE = ["seed", "round", "client", "image", "image_id"]  # what tells the images of one line of a table apart


class Answer(StrEnum):
    """The four verdicts. There is no word for "safe"."""

    LEAKS = "leaks"
    PARTLY = "partly"
    NOT_SHOWN = "no leak shown"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Verdict:
    """What the attacks on one model under one defence amount to.

    Attributes:
        answer: see the module.
        attack: the strongest attack, which the figures are of; "" where none returned an image.
        images: number of images that any attack was run on.
        recovered: images that at least one attack brought above `RECOGNISABLE` dB.
        certified: images whose reconstruction reproduces the update.
        psnr: median of the strongest attack on the reported half, dB.
        gain: dB of the strongest attack over the best guess, on the reported half.
        patches: share of patches above `RECOGNISABLE` dB by the strongest attack, on the reported half.
        split: the strongest attack was chosen on other images than those that `gain` is of.
        held: attacks whose assumptions held on at least one update.
        failed: attacks that ran and whose assumptions failed on every update -> their diagnosis.
        not_run: registered attacks that did not run -> reason.
        grants: what the adversary was granted.
        scored: the originals were known; if not, `recovered` counts the images for which an attack vouches.
    """

    answer: Answer
    attack: str = ""
    images: int = 0
    recovered: int = 0
    certified: int = 0
    psnr: float = float("nan")
    gain: Interval = Interval(float("nan"), float("nan"), float("nan"), 0)
    patches: Interval = Interval(float("nan"), float("nan"), float("nan"), 0)
    split: bool = False
    held: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    not_run: Mapping[str, str] = field(default_factory=dict)
    grants: tuple[str, ...] = ()
    scored: bool = True

    def headline(self) -> str:
        """The answer with its figures, one line."""
        if not self.scored and self.answer is Answer.LEAKS:
            return (
                f"leaks: {self.certified} of {_images(self.images)} certified, they reproduce the update "
                f"({self.attack}); the originals are not known"
            )
        if not self.scored and self.answer is Answer.PARTLY:
            return (
                f"partly: {self.attack} vouches for pixels of {self.recovered} of {_images(self.images)}, but no "
                "answer is certified, and the originals are not known"
            )
        if self.answer is Answer.LEAKS:
            sure = f", {self.certified} certified" if self.certified else ""
            return (
                f"leaks: {self.recovered} of {_images(self.images)} above {RECOGNISABLE:.0f} dB{sure} ({self._best()})"
            )
        if self.answer is Answer.PARTLY:
            share = _interval(self.patches, 100, "{:.0f}") + " %"
            return f"partly: no image as a whole, but {share} of patches above {RECOGNISABLE:.0f} dB ({self._best()})"
        if self.answer is Answer.NOT_SHOWN:
            number = f"{len(self.held)} attack{'s' * (len(self.held) != 1)}"
            return f"no leak shown by {number} ({', '.join(self.held)}) on {_images(self.images)}"
        return "not tested: no attack's assumptions held on any update"

    def details(self) -> list[str]:
        """What stands behind the headline, one sentence a line."""
        lines = []
        if self.attack and self.scored:
            chosen = (
                "chosen on one half of the updates and reported on the other"
                if self.split
                else ("chosen on the same images, so its figure is slightly too high" if len(self.held) > 1 else "")
            )
            lines.append(f"Strongest attack: {self._best()}" + (f"; {chosen}." if chosen else "."))
        if self.grants:
            lines.append(f"Granted to the adversary: {', '.join(self.grants)}.")
        for name, diagnosis in self.failed.items():
            lines.append(f"{name} ran, but its assumptions failed: {diagnosis}.")
        for name, reason in self.not_run.items():
            lines.append(f"{name} was not run: {reason}.")
        return lines

    def _best(self) -> str:
        gain = _interval(self.gain, 1, "{:+.1f}")
        return f"{self.attack}, median {self.psnr:.1f} dB, {gain} dB against the best guess without a gradient"


def judge(rows: pd.DataFrame, not_run: Mapping[str, str] | None = None) -> Verdict:
    """The verdict on one line of a table: one model, block and defence.

    Args:
        rows: as `load_rows` gives them, the guesses' rows among them.
        not_run: registered attacks that did not run -> reason.
    """
    attacked = rows[~rows["attack"].isin(BASELINES)]
    if len(attacked) == len(rows) and rows["psnr"].isna().all() and rows["known"].notna().any():
        return _judge_unscored(rows, not_run or {})
    ran = list(dict.fromkeys(attacked["attack"]))
    grants = tuple(dict.fromkeys(g for granted in attacked["threat_model"] for g in granted))
    held = tuple(n for n in ran if _held(attacked[attacked["attack"] == n]).any())
    failed = {n: attacked.loc[attacked["attack"] == n, "diagnosis"].mode().iloc[0] for n in ran if n not in held}
    shared = {"held": held, "failed": failed, "not_run": dict(not_run or {}), "grants": grants}
    gains, psnr = _gains(rows)
    images = len(gains)
    recovered = ((psnr > RECOGNISABLE) & (gains > 0)).any(axis=1) if images else pd.Series(dtype=bool)
    certified = (
        attacked[attacked["certified"].eq(True)].drop_duplicates(IMAGE) if "certified" in attacked else attacked[:0]
    )
    shared |= {"images": images, "recovered": int(recovered.sum()), "certified": len(certified)}
    attack, reported, split = strongest(gains)
    if not attack:
        return Verdict(Answer.NOT_TESTED if not held else Answer.NOT_SHOWN, **shared)
    own = attacked[attacked["attack"] == attack].set_index(IMAGE).loc[reported]
    gain = bootstrap_mean(gains.loc[reported, attack].to_numpy())
    patches = bootstrap_mean(own["patch_recovery"].to_numpy())
    figures = {"attack": attack, "psnr": float(own["psnr"].median()), "gain": gain, "patches": patches, "split": split}
    guessed = rows[rows["attack"].isin(BASELINES)]["patch_recovery"].max()
    if recovered.any():
        answer = Answer.LEAKS
    elif _above(gain, 0.0) or _more_patches(patches, 0.0 if np.isnan(guessed) else guessed):
        answer = Answer.PARTLY
    else:
        answer = Answer.NOT_SHOWN if held else Answer.NOT_TESTED
    return Verdict(answer, **shared, **figures)


def _judge_unscored(rows: pd.DataFrame, not_run: Mapping[str, str]) -> Verdict:
    """The verdict on attacks whose answers could not be compared with originals; see the module."""
    trusted = rows["known"].notna() & (rows["diagnosis"] == "")
    certified, vouched = rows[rows["certified"].eq(True)], rows[trusted & (rows["known"] > 0)]
    held = tuple(dict.fromkeys(rows.loc[trusted, "attack"]))
    others = rows[~rows["attack"].isin(held)].groupby("attack", sort=False)["diagnosis"]
    if len(certified):
        answer = Answer.LEAKS
    elif len(vouched):
        answer = Answer.PARTLY
    else:
        answer = Answer.NOT_SHOWN if held else Answer.NOT_TESTED
    best = (certified if len(certified) else vouched)["attack"]
    return Verdict(
        answer,
        attack=best.mode().iloc[0] if len(best) else "",
        images=len(rows.drop_duplicates(IMAGE)),
        recovered=len(vouched.drop_duplicates(IMAGE)),
        certified=len(certified.drop_duplicates(IMAGE)),
        held=held,
        failed={name: diagnoses.mode().iloc[0] for name, diagnoses in others},
        not_run=dict(not_run),
        grants=tuple(dict.fromkeys(g for granted in rows["threat_model"] for g in granted)),
        scored=False,
    )


def strongest(gains: pd.DataFrame) -> tuple[str, list, bool]:
    """The strongest attack, the images to report it on, and whether those are others than it was chosen on.

    Args:
        gains: images x attacks, dB over the best guess, NaN where an attack was not run on an image.
    """
    compared = gains.dropna(axis=1, how="all")
    if compared.empty:
        return "", [], False
    common = compared.dropna()
    if common.empty:  # no image that all of them were run on: each is measured on its own
        best = compared.mean().idxmax()
        return str(best), list(compared[best].dropna().index), False
    split = len(common) >= LEAST_TO_SPLIT
    chosen_on, reported = (common[::2], common[1::2]) if split else (common, common)
    return str(chosen_on.mean().idxmax()), list(reported.index), split


def _gains(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(gains over the best guess, PSNR), images x attacks in dB; NaN in the gains where an attack was not run."""
    psnr = rows.pivot_table(index=IMAGE, columns="attack", values="psnr", aggfunc="max", dropna=False, sort=False)
    psnr = psnr.reindex(index=_index(rows), columns=list(dict.fromkeys(rows["attack"])))
    guesses = [name for name in BASELINES if name in psnr]
    attacks = [name for name in psnr if name not in BASELINES]
    floor = psnr[guesses].max(axis=1) if guesses else pd.Series(0.0, index=psnr.index)
    gains = psnr[attacks].sub(floor, axis=0)
    for name in attacks:  # run without an image: the adversary is left with the guess
        ran = pd.MultiIndex.from_frame(rows.loc[rows["attack"] == name, IMAGE])
        gains.loc[gains.index.isin(ran) & gains[name].isna(), name] = 0.0
    any_attack = gains.notna().any(axis=1)
    return gains[any_attack], psnr.loc[any_attack, attacks]


def _index(rows: pd.DataFrame) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows[IMAGE].drop_duplicates())


def _held(rows: pd.DataFrame) -> pd.Series:
    """Whether the attack returned an image without a diagnosis, a row each."""
    return rows["psnr"].notna() & (rows["diagnosis"] == "")


def _above(interval: Interval, level: float) -> bool:
    """Whether the interval excludes everything up to `level`; one value alone has no interval and excludes nothing."""
    return interval.count > 1 and interval.low > level


def _more_patches(patches: Interval, guessed: float) -> bool:
    """Whether more patches are above `RECOGNISABLE` than in the guesses; of one image the share itself is compared."""
    return _above(patches, guessed) or (patches.count == 1 and patches.mean > guessed)


def _interval(interval: Interval, scale: float, shape: str) -> str:
    """A mean with its interval; over one image the value alone."""
    mean, low, high = (shape.format(scale * v) for v in interval[:3])
    return mean if interval.count <= 1 else f"{mean} [{low}, {high}]"


def _images(count: int) -> str:
    return f"{count} image{'s' * (count != 1)}"
