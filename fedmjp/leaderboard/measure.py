"""From a submission's rows to its figures: leakage under each attack, and the worst case by the audit's own rule.

High PSNR is leakage, so the worst decile of images is the 0.9 quantile of PSNR. An attack that returned no image has no
metric there; it is counted under `failed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedmjp.audit.strongest import EXACT_GAIN
from fedmjp.audit.verdict import Answer, judge
from fedmjp.metrics import Interval, bootstrap_mean
from fedmjp.metrics.intervals import bootstrap_quantile, wilson
from fedmjp.records.rows import BASELINES, RESULTS, Schema

WORST = 0.9  # quantile of PSNR: a tenth of the images leak more
RANK, TIER = "rank", "tier"
# A row of a submission: one of a federation, its tier, and the original's place among the candidates.
ROWS = Schema((*RESULTS.keys, TIER, RANK), (*RESULTS.identity, TIER), {**RESULTS.optional, RANK: None})
# Where nothing was found: attacks that take the defence into account were run and say that their assumptions fail; or
# none was run well enough to find anything.
INCONCLUSIVE, UNTESTED = "inconclusive", "not tested by an attack that knows it"
# The worst first: a defence has "no leak shown" if an attack that knows it was run in every tier.
ORDER = (
    *map(str, (Answer.LEAKS, Answer.PARTLY)),
    INCONCLUSIVE,
    UNTESTED,
    *map(str, (Answer.NOT_SHOWN, Answer.NOT_TESTED)),
)
ENOUGH = 0.5  # of the images of a tier and model that an attack must have answered to be called a test


def leakage(rows: pd.DataFrame, not_run: Mapping[str, str]) -> dict[str, Any]:
    """Figures of one tier and model.

    Args:
        rows: with the columns of `ROWS`.
        not_run: registered attacks that did not run -> reason.

    Returns:
        "attacks": a line for each attack and guess; "worst": the verdict and the strongest attack's figures.
    """
    lines = [attack_line(name, own) for name, own in rows.groupby("attack", sort=False)]
    return {"attacks": lines, "worst": worst_line(rows, not_run), "not_run": dict(not_run)}


def attack_line(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    """Leakage under one attack, or of a guess that needs no gradient.

    Returns:
        attack, guess (bool), passes (forward and backward, of attacks that search; else None), count (images), failed
        (of them, without an image), seconds, diagnosis (the most common), and with a 95 % interval over images each
        (NAME, NAME_low, NAME_high; None where nothing was measured): psnr_mean, psnr_median, psnr_worst (dB, `WORST`),
        ssim, lpips, patches (mean share of patches above 25 dB), certified, reidentified (shares of `count`).
    """
    returned, ranks = rows[rows["psnr"].notna()], rows[RANK].dropna()
    certified, settings = rows["certified"].dropna(), rows["attack_parameters"].iloc[0]
    diagnoses = rows.loc[rows["diagnosis"] != "", "diagnosis"]
    return {
        "attack": name,
        "guess": name in BASELINES,
        "passes": settings["steps"] * settings.get("restarts", 1) if "steps" in settings else None,
        "count": len(rows),
        "failed": len(rows) - len(returned),
        **_interval("psnr_mean", bootstrap_mean(rows["psnr"].to_numpy(dtype=float))),
        **_interval("psnr_median", bootstrap_quantile(rows["psnr"].to_numpy(dtype=float), 0.5)),
        **_interval("psnr_worst", bootstrap_quantile(rows["psnr"].to_numpy(dtype=float), WORST)),
        **_interval("ssim", bootstrap_mean(rows["ssim"].to_numpy(dtype=float))),
        **_interval("lpips", bootstrap_mean(rows["lpips"].to_numpy(dtype=float))),
        **_interval("patches", bootstrap_mean(rows["patch_recovery"].to_numpy(dtype=float))),
        **_share("certified", int(certified.astype(bool).sum()) if len(certified) else None, len(rows)),
        **_share("reidentified", int((ranks == 1).sum()) if len(ranks) else None, len(rows)),
        "seconds": _number(rows["seconds"].mean()),
        "diagnosis": diagnoses.value_counts().index[0] if len(diagnoses) else "",
    }


def best_round(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each image of a client that was attacked in several rounds, the rows of the round in which an attack came
    nearest to it (of none that returned it, the first)."""
    attacked = rows[~rows["attack"].isin(BASELINES)]
    scores = attacked.assign(psnr=attacked["psnr"].fillna(-math.inf)).reset_index(drop=True)
    image = ["client", "image_id"]
    best = scores.loc[scores.groupby(image, sort=False)["psnr"].idxmax(), [*image, "round"]]
    return rows.merge(best, on=[*image, "round"])


def by_photograph(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in which a photograph that several federations hold is one image: of one round and client.

    Attacks on it are then compared with each other. Of a batch all images come from one update, which is too few to
    choose the strongest attack on one half and report it on the other.
    """
    places = rows[["image_id", "round", "client", "image"]].drop_duplicates()
    if not places["image_id"].duplicated().any():
        return rows
    return rows.assign(round=0, client=0, image=pd.factorize(rows["image_id"])[0])


def worst_line(rows: pd.DataFrame, not_run: Mapping[str, str]) -> dict[str, Any]:
    """The verdict of `fedmjp.audit.verdict` on one tier and model, with the figures of the attack that decides.

    Where the verdict finds nothing under a defence, the answer is `UNTESTED` unless an attack that knows it was run
    (`ran_enough`), and `INCONCLUSIVE` where the assumptions of all those failed.
    """
    verdict = judge(by_photograph(rows), not_run)
    ran = ran_enough(rows, verdict.knowing)
    tried = sorted(set(ran) & set(verdict.held))
    found = verdict.answer in (Answer.LEAKS, Answer.PARTLY)
    answer, headline = str(verdict.answer), verdict.headline()
    if set(rows["defense"].astype(str)) != {"none"} and not found and not tried:
        answer = INCONCLUSIVE if ran else UNTESTED
        why = f"the assumptions of {', '.join(ran)} failed" if ran else verdict.reason()
        headline = f"{answer}: nothing was found, {why}"
    own = rows[rows["attack"] == verdict.attack]
    return {
        "answer": answer,
        "headline": headline,
        "details": verdict.summary(),
        "attack": verdict.attack,
        "chosen_on_other_images": verdict.split,
        "images": verdict.images,
        "recovered": verdict.recovered,
        "certified": verdict.certified,
        "psnr_median": _number(verdict.psnr),
        "psnr_worst": _number(own["psnr"].quantile(WORST)) if len(own) else None,
        **dict(zip(("gain_mean", "gain_low", "gain_high"), map(_number, verdict.gain[:3]), strict=True)),
        **dict(zip(("patches_mean", "patches_low", "patches_high"), map(_number, verdict.patches[:3]), strict=True)),
        "count": verdict.gain.count,
        "held": list(verdict.held),
        "failed": dict(verdict.failed),
        "adaptive_ran": ran,
        "adaptive_tried": tried,
    }


def ran_enough(rows: pd.DataFrame, knowing: Sequence[str]) -> list[str]:
    """The attacks among `knowing` that answered at least `ENOUGH` of the images, with as many updates as they want.

    Args:
        rows: of one tier and model. Clients take part in every round, so that a round's number is that of updates.
    """
    from attacks import ATTACKS

    attacked = rows[~rows["attack"].isin(BASELINES)]
    answered = attacked.dropna(subset="psnr").groupby("attack")["image_id"].nunique()
    images, updates = attacked["image_id"].nunique(), attacked.groupby("attack")["round"].max()
    known = [name for name in knowing if name in answered.index and name in ATTACKS]
    return sorted(
        name
        for name in known
        if answered[name] >= ENOUGH * images and updates[name] >= ATTACKS.get(name).updates_wanted
    )


def severity(result: Mapping[str, Any]) -> tuple[float, ...]:
    """Sort key of a tier's and model's result, the worst for the defence first.

    By the answer, the share of images recovered, where nothing was found the number of attacks that know the defence
    and ran, then the strongest attack's gain over the best guess (dB), of which `EXACT_GAIN` count at most.
    """
    worst = result["worst"]
    ran = 0 if worst["answer"] in ORDER[:2] else len(worst["adaptive_ran"])
    share = worst["recovered"] / worst["images"] if worst["images"] else 0.0
    gain = worst["gain_mean"] if worst["gain_mean"] is not None else -math.inf
    return (ORDER.index(worst["answer"]), -share, -ran, -min(gain, EXACT_GAIN))


def worst_of(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The worst case of a submission over tiers and models; of equal ones the first, which asks least of a server."""
    return min(results, key=severity)


def line_of(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The line of the attack that decides a result, over all images that it was run on; None without one."""
    return next((line for line in result["attacks"] if line["attack"] == result["worst"]["attack"]), None)


def images_of(line: Mapping[str, Any]) -> str:
    """How many images an attack was run on, and for how many of them it returned one where that is not for all."""
    answered = line["count"] - line["failed"]
    return f"{answered} of {line['count']}" if line["failed"] else str(answered)


def accuracy(share: float, images: int) -> dict[str, Any]:
    """A top-1 accuracy in [0, 1] with Wilson's 95 % interval over the test images."""
    low, high = wilson(share, images)
    return {"accuracy": share, "accuracy_low": float(low), "accuracy_high": float(high), "test_images": images}


def _interval(name: str, interval: Interval) -> dict[str, float | None]:
    return {name: _number(interval.mean), f"{name}_low": _number(interval.low), f"{name}_high": _number(interval.high)}


def _share(name: str, hits: int | None, count: int) -> dict[str, float | None]:
    """A share of `count` images with Wilson's 95 % interval; None where it was not measured."""
    if hits is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    low, high = wilson(hits / count, count)
    return _interval(name, Interval(hits / count, float(low), float(high), count))


def _number(value: Any) -> float | None:
    """A finite number with six significant digits, or None."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
