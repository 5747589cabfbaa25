"""What a submission's file holds: its keys, and what must be true of them. A file of another version is refused.

All that the table, the list and the verification read is checked here, so that a damaged file is answered in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attacks import UsageError
from fedmjp.leaderboard.measure import ORDER
from fedmjp.leaderboard.protocol import track_of
from fedmjp.leaderboard.tiers import tier_called

SCHEMA = 2
REAL = (int, float)
NUMBER = (*REAL, type(None))
# Key -> type, at the top and in each nested object.
TOP = {
    "schema": int,
    "entry": str,
    "name": str,
    "track": str,
    "comparable": bool,
    "defences": list,
    "parameters": dict,
    "known_by": list,
    "adaptive": str,
    "data": dict,
    "protocol": dict,
    "results": list,
    "not_covered": list,
    "worst": dict,
    "accuracy": dict,
    "cost": dict,
    "provenance": dict,
    "rows": dict,
    "picture": str,
    "rerun": (dict, type(None)),
}
WORST = {
    **dict.fromkeys(("answer", "headline", "attack"), str),
    **dict.fromkeys(("images", "recovered"), int),
    **dict.fromkeys(("psnr_median", "gain_mean"), NUMBER),
    **dict.fromkeys(("held", "adaptive_ran", "adaptive_tried"), list),
}
NESTED = {
    "data": {"name": str, "images": dict},
    "protocol": {"budget": str, "search": dict, "rounds": int, "candidates": int, "tuning": dict},
    "worst": {"tier": str, "model": str, **WORST},
    "accuracy": {
        **dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high"), REAL),
        "test_images": int,
        "model": str,
        "weights": str,
        "rounds": int,
    },
    "cost": {
        **dict.fromkeys(("seconds_step", "seconds_step_none", "ratio", "repeats"), REAL),
        **dict.fromkeys(("bits", "bits_none", "peak_bytes", "peak_bytes_none"), int),
    },
    "provenance": {
        "commits": list,
        "version": str,
        "versions": dict,
        "device": str,
        "command": str,
        "seed": int,
    },
    "rows": {"file": str, "sha256": str, "count": int},
}
SEARCH = {"attack": str, "passes": int, "updates": int}
RERUN = {"share": REAL, "seed": int, "commit": str, "rows": int, "undetermined": int}
DEFENCE = {"name": str, "paper": str, "random": bool, "known_by": list}
RESULT = {
    "tier": str,
    "model": str,
    "weights": str,
    "grants": list,
    "updates": int,
    "attacks": list,
    "worst": dict,
    "not_run": dict,
}
MEASURES = ("psnr_mean", "psnr_median", "psnr_worst", "ssim", "lpips", "patches", "certified", "reidentified")
ENDS = ("", "_low", "_high")  # of the names of a figure and its interval
ATTACK = {
    "attack": str,
    "guess": bool,
    "passes": (int, type(None)),
    "count": int,
    "failed": int,
    **{f"{name}{end}": NUMBER for name in MEASURES for end in ENDS},
    "seconds": NUMBER,
    "diagnosis": str,
}


def check(document: Mapping[str, Any], name: str) -> None:
    """Check the keys, types and values of a submission.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: another version, a key that is missing or unknown, a value of another type, an unknown track, tier
            or answer, no result, a worst case that is none of the results, or a cost of nothing without a defence.
    """
    if document.get("schema") != SCHEMA:
        raise UsageError(
            f"{name} is of schema {document.get('schema')}, not {SCHEMA}; run fedmjp-leaderboard add again"
        )
    _check(document, TOP, name, exact=True)
    for key, keys in NESTED.items():
        _check(document[key], keys, f"{name}, {key}")
    _check(document["protocol"]["search"], SEARCH, f"{name}, search")
    if document["rerun"] is not None:
        _check(document["rerun"], RERUN, f"{name}, rerun")
    for defence in document["defences"]:
        _check(defence, DEFENCE, f"{name}, defences")
    for result in document["results"]:
        _check_result(result, name)
    _check_worst(document["worst"], f"{name}, worst")
    _check_values(document, name)


def load(path: Path) -> dict[str, Any]:
    """The object in a submission's file, of whatever version.

    Raises:
        UsageError: there is no file, or it holds no JSON object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"no submission {path} ({error.strerror}); fedmjp-leaderboard list names those there are"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no object")
    return document


def read(path: Path) -> dict[str, Any]:
    """A submission's file.

    Raises:
        UsageError: see `load` and `check`.
    """
    document = load(path)
    check(document, path.name)
    return document


def _check_result(result: Any, name: str) -> None:
    """A tier and model."""
    _check(result, RESULT, f"{name}, results")
    where = f"{name}, {result['tier']} on {result['model']}"
    _check_worst(result["worst"], where)
    for line in result["attacks"]:
        _check(line, ATTACK, f"{where}, attacks", exact=True)
        if partial := [one for one in MEASURES if len({line[one + end] is None for end in ENDS}) > 1]:
            raise UsageError(f"{where}, {line['attack']}: {', '.join(partial)} without an interval")


def _check_worst(worst: Mapping[str, Any], where: str) -> None:
    """The verdict on a tier and model."""
    _check(worst, WORST, where)
    if worst["answer"] not in ORDER:
        raise UsageError(f"{where}: unknown answer {worst['answer']!r}; it is one of {', '.join(ORDER)}")
    _check_names(worst, [key for key, kind in WORST.items() if kind is list], where)


def _check_values(document: Mapping[str, Any], name: str) -> None:
    """What types do not say, of the keys at the top."""
    _check_names(document, ["known_by"], name)
    try:
        track_of(document["track"])
        for result in document["results"]:
            tier_called(result["tier"])
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    worst = document["worst"]["tier"], document["worst"]["model"]
    if worst not in [(result["tier"], result["model"]) for result in document["results"]]:
        raise UsageError(f"{name}: no result of the worst case, {worst[0]} on {worst[1]}")
    if nothing := [key for key in ("bits_none", "peak_bytes_none") if document["cost"][key] <= 0]:
        raise UsageError(f"{name}, cost: {', '.join(nothing)} must be positive")


def _check_names(values: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Lists of names."""
    for key in keys:
        if not all(isinstance(one, str) for one in values[key]):
            raise UsageError(f"{where}: {key} holds something else than names")


def _check(values: Any, keys: Mapping[str, Any], where: str, *, exact: bool = False) -> None:
    """An object's keys and the types of its values."""
    if not isinstance(values, dict):
        raise UsageError(f"{where}: {values!r} is no object")
    missing = [key for key in keys if key not in values]
    unknown = [key for key in values if key not in keys] if exact else []
    if missing or unknown:
        raise UsageError(f"{where}: missing keys {missing}, unknown keys {unknown}")
    for key, kind in keys.items():
        if not isinstance(values[key], kind):
            raise UsageError(f"{where}: {key} is {type(values[key]).__name__}, not {kind}")
