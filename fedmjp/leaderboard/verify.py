"""Verify a submission: its figures from its rows, and a random tenth of the attacked updates run again.

Checked in this order: the rows file is the one that the submission names; every figure follows from the rows; of a
tenth of the attacked updates (at least one), all rows are computed again and compared. Accuracy and cost are not run
again. Equal machines give equal rows but for seconds; other ones round differently, which `TOLERANCES` allows for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from attacks import UsageError
from fedmjp.audited_federation import run_or_resume
from fedmjp.leaderboard import measure, schema
from fedmjp.leaderboard.gathering import base_of
from fedmjp.leaderboard.protocol import Part, for_rows, track_of
from fedmjp.leaderboard.submission import Submission, results_of
from fedmjp.leaderboard.tiers import tier_called
from fedmjp.records import provenance
from fedmjp.records.files import write_whole
from fedmjp.records.rows import BASELINES, load_rows

SHARE = 0.1  # of the attacked updates
BEYOND = 60.0  # dB; a reconstruction above it is exact but for rounding
TOLERANCES = {"psnr": 1.0, "ssim": 0.05, "lpips": 0.05, "patch_recovery": 0.05}
KEY = ["round", "client", "image_id", "attack"]


def differences(path: Path, seed: int, work: Path, console: Console, images: Path | None = None) -> list[str]:
    """What of a submission is not as it says; nothing if all is.

    Args:
        path: of the submission's JSON file; its rows are beside it.
        seed: of the choice of updates.
        work: an empty folder for the federations that are run again.
        images: the folder of a submission on a user's own images.

    Raises:
        UsageError: no submission, one on a user's own images without `images`, or a defence that is not installed.
    """
    document = schema.read(path)
    if document["data"]["name"].startswith("folder:") and images is None:
        raise UsageError(f"{path.name} is on {document['data']['name']}; pass its images with --images")
    found = list(static_differences(document, path))
    if found:
        return found
    rows = load_rows(path.parent / document["rows"]["file"], measure.ROWS)
    submission = Submission(document["entry"], track_of(document["track"]), work, path.parent, images)
    return list(_rerun(submission, rows, seed, console))


def record(path: Path, seed: int) -> None:
    """Note in a submission's file that a tenth of its updates was run again here, without a difference."""
    document = schema.read(path)
    document["rerun"] = {"share": SHARE, "seed": seed, "commit": provenance.commit()}
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode())


def static_differences(document: Mapping[str, Any], path: Path) -> Iterator[str]:
    """What can be checked without running anything."""
    packed = path.parent / document["rows"]["file"]
    if not packed.is_file():
        yield f"{packed} is missing"
        return
    if hashlib.sha256(packed.read_bytes()).hexdigest() != document["rows"]["sha256"]:
        yield f"{packed.name} is not the file of the submission (SHA-256)"
        return
    rows = load_rows(packed, measure.ROWS)
    not_run = {(r["tier"], r["model"]): r["not_run"] for r in document["results"]}
    results = results_of(rows, not_run)
    for given, own in zip(document["results"], results, strict=False):
        if given != own:
            yield f"the figures of {own['tier']} on {own['model']} do not follow from the rows"
    if len(results) != len(document["results"]):
        yield "tiers or models are missing"
    worst = measure.worst_of(results)
    if document["worst"] != {"tier": worst["tier"], "model": worst["model"], **worst["worst"]}:
        yield "the worst case does not follow from the rows"


def chosen_updates(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """A random tenth of the attacked updates, at least one: tier, base, federation, client."""
    named = rows.assign(base=rows["model"].map(base_of), federation=federation_of(rows))
    updates = named[["tier", "base", "federation", "client"]].drop_duplicates()
    count = max(1, math.ceil(SHARE * len(updates)))
    return updates.iloc[sorted(np.random.default_rng(seed).permutation(len(updates))[:count])]


def federation_of(rows: pd.DataFrame) -> pd.Series:
    """The attack for which the server prepared the federation of a row; "" where it is honest."""
    prepared = [tier_called(t).prepared_for(a) for t, a in zip(rows["tier"], rows["attack"], strict=True)]
    return pd.Series([one.attack if one else "" for one in prepared], rows.index, name="federation")


def _rerun(submission: Submission, rows: pd.DataFrame, seed: int, console: Console) -> Iterator[str]:
    chosen = chosen_updates(rows, seed)
    parts = {(part.tier.name, part.model, part.prepared): part for part in submission.parts()}
    compared = 0
    place = [rows["tier"], rows["model"].map(base_of).rename("base"), federation_of(rows)]
    for (tier, base, attack), own in rows.groupby(place, sort=False):
        named = (chosen["tier"] == tier) & (chosen["base"] == base) & (chosen["federation"] == attack)
        own = own[own["client"].isin(chosen.loc[named, "client"])]
        if own.empty:
            continue
        again = _again(parts[tier, base, tier_called(tier).prepared_for(attack)], own, submission.work, console)
        compared += len(own)
        for line in _compared(own, again):
            yield f"{tier} on {base}, {line}"
    console.print(f"{compared} of {len(rows)} rows run again (seed {seed})", highlight=False)


def _again(part: Part, rows: pd.DataFrame, work: Path, console: Console) -> pd.DataFrame:
    """The same rows, computed again."""
    attacks = tuple(name for name in dict.fromkeys(rows["attack"]) if name not in BASELINES)
    clients, rounds = (tuple(sorted(set(map(int, rows[name])))) for name in ("client", "round"))
    config = for_rows(part, clients, rounds, attacks, work)
    run_or_resume(config, f"again: {part.tier.title}, {part.model}", console)
    return load_rows(config.out / "rows.jsonl")


def _compared(rows: pd.DataFrame, again: pd.DataFrame) -> Iterator[str]:
    """A line for each row that is missing or differs."""
    found = again.set_index(KEY)
    for row in rows.to_dict("records"):
        key = tuple(row[name] for name in KEY)
        named = f"round {row['round']}, client {row['client']}, {row['image_id']}, {row['attack']}"
        if key not in found.index:
            yield f"{named}: no such row when run again"
            continue
        for metric, tolerance in TOLERANCES.items():
            given, own = (min(float(value), BEYOND) for value in (row[metric], found.loc[key, metric]))
            if math.isnan(given) != math.isnan(own) or abs(given - own) > tolerance:
                yield f"{named}: {metric} is {given:.3f}, and {own:.3f} when run again"
