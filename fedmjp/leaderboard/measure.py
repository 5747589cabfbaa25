"""From a submission's rows to its figures: leakage under each attack, and the worst case by the audit's own rule.

High PSNR is leakage, so the worst decile of images is the 0.9 quantile of PSNR. An attack that returned no image has no
metric there; it is counted under `failed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedmjp.audit.verdict import Answer, judge
from fedmjp.metrics import bootstrap_mean
from fedmjp.metrics.intervals import wilson
from fedmjp.records.rows import BASELINES, RESULTS, Schema

WORST = 0.9  # quantile of PSNR: a tenth of the images leak more
RANK, TIER = "rank", "tier"
# A row of a submission: one of a federation, its tier, and the original's place among the candidates.
ROWS = Schema((*RESULTS.keys, TIER, RANK), (*RESULTS.identity, TIER), {**RESULTS.optional, RANK: None})
ORDER = (Answer.LEAKS, Answer.PARTLY, Answer.NOT_SHOWN, Answer.NOT_TESTED)


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
        (of them, without an image), psnr and patches (share of patches above 25 dB) each as mean, low, high,
        psnr_median, psnr_worst (dB, `WORST`), ssim, lpips (means), certified and reidentified (shares of images; None
        where not checked), seconds, diagnosis (the most common).
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
        **_mean("psnr", rows["psnr"]),
        "psnr_median": _number(rows["psnr"].median()),
        "psnr_worst": _number(rows["psnr"].quantile(WORST)),
        "ssim": _number(rows["ssim"].mean()),
        "lpips": _number(rows["lpips"].mean()),
        **_mean("patches", rows["patch_recovery"]),
        "certified": _number(certified.astype(float).mean()) if len(certified) else None,
        "reidentified": _number((ranks == 1).sum() / len(rows)) if len(ranks) else None,
        "seconds": _number(rows["seconds"].mean()),
        "diagnosis": diagnoses.value_counts().index[0] if len(diagnoses) else "",
    }


def worst_line(rows: pd.DataFrame, not_run: Mapping[str, str]) -> dict[str, Any]:
    """The verdict of `fedmjp.audit.verdict` on one tier and model, with the figures of the attack that decides."""
    verdict = judge(rows, not_run)
    own = rows[rows["attack"] == verdict.attack]
    return {
        "answer": str(verdict.answer),
        "headline": verdict.headline(),
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
        "adaptive_tried": sorted(set(verdict.knowing) & set(verdict.held)),
    }


def severity(result: Mapping[str, Any]) -> tuple[float, ...]:
    """Sort key of a tier's and model's result, the worst for the defence first.

    By the answer, the share of images recovered, then the strongest attack's gain over the best guess (dB).
    """
    worst = result["worst"]
    share = worst["recovered"] / worst["images"] if worst["images"] else 0.0
    gain = worst["gain_mean"] if worst["gain_mean"] is not None else -math.inf
    return (ORDER.index(Answer(worst["answer"])), -share, -gain)


def worst_of(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The worst case of a submission over its tiers and models."""
    return min(results, key=severity)


def line_of(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The line of the attack that decides a result, over all images that it was run on; None without one."""
    return next((line for line in result["attacks"] if line["attack"] == result["worst"]["attack"]), None)


def accuracy(share: float, images: int) -> dict[str, Any]:
    """A top-1 accuracy in [0, 1] with Wilson's 95 % interval over the test images."""
    low, high = wilson(share, images)
    return {"accuracy": share, "accuracy_low": float(low), "accuracy_high": float(high), "test_images": images}


def _mean(name: str, values: pd.Series) -> dict[str, float | None]:
    interval = bootstrap_mean(values.to_numpy(dtype=float))
    return {f"{name}_{part}": _number(getattr(interval, part)) for part in ("mean", "low", "high")}


def _number(value: Any) -> float | None:
    """A finite number with six significant digits, or None."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
