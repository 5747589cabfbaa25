"""What a submission's file holds: its keys, and what must be true of them. A file of another version is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attacks import UsageError

SCHEMA = 2
NUMBER = (int, float, type(None))
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
NESTED = {
    "data": {"name": str, "images": dict},
    "protocol": {"budget": str, "search": dict, "rounds": int, "candidates": int, "tuning": dict},
    "worst": {"tier": str, "model": str, "answer": str, "attack": str},
    "accuracy": {
        "accuracy": NUMBER,
        "accuracy_low": NUMBER,
        "accuracy_high": NUMBER,
        "test_images": int,
        "model": str,
        "weights": str,
        "rounds": int,
    },
    "cost": {
        **dict.fromkeys(("seconds_step", "seconds_step_none", "ratio", "repeats"), NUMBER),
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
ATTACK = {
    "attack": str,
    "guess": bool,
    "passes": (int, type(None)),
    "count": int,
    "failed": int,
    **{f"{name}{end}": NUMBER for name in MEASURES for end in ("", "_low", "_high")},
    "seconds": NUMBER,
    "diagnosis": str,
}


def check(document: Mapping[str, Any], name: str) -> None:
    """Check the keys and types of a submission.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: another version, a key that is missing or unknown, or a value of another type.
    """
    if document.get("schema") != SCHEMA:
        raise UsageError(
            f"{name} is of schema {document.get('schema')}, not {SCHEMA}; run fedmjp-leaderboard add again"
        )
    _check(document, TOP, name, exact=True)
    for key, keys in NESTED.items():
        _check(document[key], keys, f"{name}, {key}")
    for result in document["results"]:
        where = f"{name}, {result.get('tier')} on {result.get('model')}"
        _check(result, RESULT, where)
        for line in result["attacks"]:
            _check(line, ATTACK, f"{where}, {line.get('attack')}", exact=True)


def read(path: Path) -> dict[str, Any]:
    """A submission's file.

    Raises:
        UsageError: there is none, it is no JSON, or not as `check` wants it.
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
    check(document, path.name)
    return document


def _check(values: Mapping[str, Any], keys: Mapping[str, Any], where: str, *, exact: bool = False) -> None:
    missing = [key for key in keys if key not in values]
    unknown = [key for key in values if key not in keys] if exact else []
    if missing or unknown:
        raise UsageError(f"{where}: missing keys {missing}, unknown keys {unknown}")
    for key, kind in keys.items():
        if not isinstance(values[key], kind):
            raise UsageError(f"{where}: {key} is {type(values[key]).__name__}, not {kind}")
