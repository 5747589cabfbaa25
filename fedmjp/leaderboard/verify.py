"""Verify a submission: its figures from its rows, and a random tenth of the attacked updates run again.

Checked in this order: the rows file is the one that the submission names; no row of a federation that was run is
missing (`fedmjp.leaderboard.coverage`); every figure follows from the rows; a tenth of the attacked updates (at least
one) is attacked again with the protocol's own list of attacks, and its rows are compared, among them those that the
submission lacks. Accuracy and cost are not run again. Equal machines give equal rows but for seconds; other ones round
differently, which `TOLERANCES` allows for.

A search that has not converged can end elsewhere after another rounding. A row that differs is therefore computed again
with other numbers of threads (`ROUNDINGS`), which split sums otherwise: where the figure changes with them by more than
the tolerance, the seed does not determine it, and the row is no difference unless it shows less leakage than every run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from attacks import UsageError
from fedmjp.audited_federation import run_or_resume
from fedmjp.leaderboard import measure, schema
from fedmjp.leaderboard.coverage import OWN, federation_of, uncovered
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
LESS_IS_CLOSER = ("lpips",)  # of `TOLERANCES`, the metrics that are low for a close reconstruction
KEY = ["round", "client", "image_id", "attack"]
ROUNDINGS = (2, 3)  # threads

Key = tuple[int, int, str, str]  # of a row, see KEY


@dataclass
class Comparison:
    """What the rows that were run again show.

    Attributes:
        compared: number of rows.
        differences: a line for each figure that is not as the submission says.
        undetermined: a line for each figure that rounding alone changes by more than the tolerance.
        rows: of which the figures in `undetermined` are: the federation in words, and the row's `KEY`.
    """

    compared: int = 0
    differences: list[str] = field(default_factory=list)
    undetermined: list[str] = field(default_factory=list)
    rows: set[tuple[str, Key]] = field(default_factory=set)


def compare(path: Path, seed: int, work: Path, console: Console, images: Path | None = None) -> Comparison:
    """What of a submission is not as it says.

    Args:
        path: of the submission's JSON file; its rows are beside it.
        seed: of the choice of updates.
        work: an empty folder for the federations that are run again.
        images: the folder of a submission on a user's own images.

    Raises:
        UsageError: no submission, one on a user's own images without `images`, or a defence that is not installed.
    """
    document = schema.read(path)
    if document["data"]["name"].startswith(OWN) and images is None:
        raise UsageError(f"{path.name} is on {document['data']['name']}; pass its images with --images")
    found = list(static_differences(document, path))
    if found:
        return Comparison(differences=found)
    rows = load_rows(path.parent / document["rows"]["file"], measure.ROWS)
    submission = Submission(document["entry"], track_of(document["track"]), work, path.parent, images)
    return _rerun(submission, rows, seed, console)


def record(path: Path, seed: int, found: Comparison) -> None:
    """Note in a submission's file that a tenth of its updates was run again here, without a difference."""
    document = schema.read(path)
    again = {"rows": found.compared, "undetermined": len(found.rows)}
    document["rerun"] = {"share": SHARE, "seed": seed, "commit": provenance.commit(), **again}
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode())


def static_differences(document: Mapping[str, Any], path: Path) -> Iterator[str]:
    """What can be checked without running anything.

    Raises:
        UsageError: see `coverage.uncovered`.
    """
    packed = path.parent / document["rows"]["file"]
    if not packed.is_file():
        yield f"{packed} is missing"
        return
    if hashlib.sha256(packed.read_bytes()).hexdigest() != document["rows"]["sha256"]:
        yield f"{packed.name} is not the file of the submission (SHA-256)"
        return
    rows = load_rows(packed, measure.ROWS)
    if len(rows) != document["rows"]["count"]:
        yield f"{packed.name} holds {len(rows)} rows, not {document['rows']['count']}"
    if rows.empty:
        return
    yield from uncovered(document, rows)
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


def _rerun(submission: Submission, rows: pd.DataFrame, seed: int, console: Console) -> Comparison:
    chosen = chosen_updates(rows, seed)
    parts = {(part.tier.name, part.model, part.prepared): part for part in submission.parts()}
    comparison = Comparison()
    place = [rows["tier"], rows["model"].map(base_of).rename("base"), federation_of(rows)]
    for (tier, base, attack), own in rows.groupby(place, sort=False):
        named = (chosen["tier"] == tier) & (chosen["base"] == base) & (chosen["federation"] == attack)
        own = own[own["client"].isin(chosen.loc[named, "client"])]
        if own.empty:
            continue
        part = parts[tier, base, tier_called(tier).prepared_for(attack)]

        def again(some: pd.DataFrame, threads: int, part: Part = part) -> pd.DataFrame:
            """These rows, each attack by its name."""
            names = tuple(name for name in dict.fromkeys(some["attack"]) if name not in BASELINES)
            return _again(part, some, names, threads, submission.work, console)

        suite = _again(part, own, _attacks_due(part, own), 1, submission.work, console)
        judge(own, suite, again, f"{tier} on {base}", comparison)
    console.print(f"{comparison.compared} of {len(rows)} rows run again (seed {seed})", highlight=False)
    return comparison


def _attacks_due(part: Part, rows: pd.DataFrame) -> tuple[str, ...]:
    """The attacks of a federation, without those that none of the rows' updates gets."""
    places = set(zip(rows["round"], rows["client"], strict=True))
    return tuple(name for name in part.config.audit.attacks if places & set(part.config.attacked(name)))


def _again(
    part: Part, rows: pd.DataFrame, attacks: tuple[str, ...], threads: int, work: Path, console: Console
) -> pd.DataFrame:
    """The rows that these attacks give on the updates of some rows, of those that the submission should have."""
    clients, rounds = (tuple(sorted(set(map(int, rows[name])))) for name in ("client", "round"))
    config = replace(for_rows(part, clients, rounds, attacks, work / f"threads_{threads}"), threads=threads)
    run_or_resume(config, f"again: {part.tier.title}, {part.model}, {threads} threads", console)
    return expected_rows(part, load_rows(config.out / "rows.jsonl"))


def expected_rows(part: Part, rows: pd.DataFrame) -> pd.DataFrame:
    """Of rows that were run again, those that a submission has: without guesses that stand in another federation of
    the tier, and attacks on updates that the protocol does not leave them."""
    due = {name: set(part.config.attacked(name)) for name in set(rows["attack"])}
    kept = [
        (number, client) in due[name] and part.tier.prepared_for(name) == part.prepared
        for number, client, _, name in _keys(rows)
    ]
    return rows[kept]


def judge(
    rows: pd.DataFrame,
    suite: pd.DataFrame,
    again: Callable[[pd.DataFrame, int], pd.DataFrame],
    where: str,
    comparison: Comparison,
) -> None:
    """Compare rows of one federation with those of another run, and add what is found to `comparison`.

    Args:
        rows: of the submission.
        suite: what the protocol's attacks give on the same updates, with one thread.
        again: computes rows again with this many threads.
        where: the federation, in words.
    """
    comparison.compared += len(rows)
    runs, given = [_figures(suite)], _figures(rows)
    differing = [
        key
        for key, own in given.items()
        if any(_differs(own, runs[0].get(key), name) for name in TOLERANCES) or _nearer_elsewhere(key, own, runs)
    ]
    searched = rows[[key in differing and key[-1] not in BASELINES for key in _keys(rows)]]
    if len(searched):
        runs += [_figures(again(searched, threads)) for threads in ROUNDINGS]
    for key in differing:
        _compare(key, given[key], runs, where, comparison)
    held = {key[1:] for key in given}  # of several rounds, an image has the row of one
    for client, image, attack in dict.fromkeys(key[1:] for key in runs[0] if key[1:] not in held):
        comparison.differences.append(f"{where}, client {client}, {image}, {attack}: the submission lacks this row")


def _compare(
    key: Key, given: Mapping[str, float], runs: Sequence[Mapping[Key, Mapping[str, float]]], where: str, to: Comparison
) -> None:
    """Add to a comparison what a row differs from the runs in."""
    named = f"{where}, round {key[0]}, client {key[1]}, {key[2]}, {key[3]}"
    found = [run[key] for run in runs if key in run]
    if not found:
        to.differences.append(f"{named}: no such row when run again")
        return
    for metric in TOLERANCES:
        if not _differs(given, found[0], metric):
            continue
        line = f"{named}: {metric} is {given[metric]:.3f}, and {_listed(found, metric)} when run again"
        if _undetermined(given, found, metric):
            to.undetermined.append(line)
            to.rows.add((where, key))
        else:
            to.differences.append(line)
    if _nearer_elsewhere(key, given, runs):
        to.differences.append(f"{named}: psnr is {given['psnr']:.3f}, and higher in another round when run again")


def _nearer_elsewhere(key: Key, given: Mapping[str, float], runs: Sequence[Mapping[Key, Mapping[str, float]]]) -> bool:
    """Whether every run has the attack nearer to the image in another round than in that of the submission's row."""
    if key[-1] in BASELINES:
        return False
    own = -math.inf if math.isnan(given["psnr"]) else given["psnr"]
    others = [[run[one]["psnr"] for one in run if one[1:] == key[1:] and one != key] for run in runs]
    return all(any(psnr > own + TOLERANCES["psnr"] for psnr in values) for values in others)


def _keys(rows: pd.DataFrame) -> list[Key]:
    return list(rows[KEY].itertuples(index=False, name=None))


def _figures(rows: pd.DataFrame) -> dict[Key, dict[str, float]]:
    """What is compared of each row; decibels above `BEYOND` count as that many."""
    records = rows[list(TOLERANCES)].to_dict("records")
    return {
        key: {name: min(float(value), BEYOND) for name, value in record.items()}
        for key, record in zip(_keys(rows), records, strict=True)
    }


def _differs(given: Mapping[str, float], own: Mapping[str, float] | None, metric: str) -> bool:
    """Whether a figure is not that of a row computed again; a row that is not there differs in every figure."""
    if own is None or math.isnan(given[metric]) != math.isnan(own[metric]):
        return True
    return abs(given[metric] - own[metric]) > TOLERANCES[metric]


def _undetermined(given: Mapping[str, float], found: Sequence[Mapping[str, float]], metric: str) -> bool:
    """Whether rounding changes a figure, and the one that was given shows no less leakage than every run."""
    values, tolerance = [run[metric] for run in found], TOLERANCES[metric]
    if math.isnan(given[metric]) or any(map(math.isnan, values)) or max(values) - min(values) <= tolerance:
        return False
    if metric in LESS_IS_CLOSER:
        return given[metric] <= max(values) + tolerance
    return given[metric] >= min(values) - tolerance


def _listed(found: Sequence[Mapping[str, float]], metric: str) -> str:
    return ", ".join(f"{run[metric]:.3f}" for run in found)
