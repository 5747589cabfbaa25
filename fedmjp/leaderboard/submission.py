"""One submission: its federations run or taken up, its rows gathered, its figures written as one JSON file.

Rows are kept beside the file, so that every figure can be computed again (`results_of`) and rows can be run again
(`fedmjp.leaderboard.verify`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from attacks import UsageError
from fedmjp.audited_federation import run_or_resume
from fedmjp.before_start import check_before_start
from fedmjp.client import shared_task
from fedmjp.config import RunConfig
from fedmjp.defenses import Defense
from fedmjp.defenses.chain import Chain, split_chain
from fedmjp.leaderboard import measure, protocol
from fedmjp.leaderboard.cost import client_cost
from fedmjp.leaderboard.gathering import base_of, deciding_part, gather, picture
from fedmjp.leaderboard.images import fixed_images
from fedmjp.leaderboard.protocol import Part, Track
from fedmjp.leaderboard.schema import SCHEMA, check, load, read
from fedmjp.leaderboard.tiers import TIERS
from fedmjp.records import provenance
from fedmjp.records.files import write_whole
from fedmjp.records.rows import unpack_rows
from fedmjp.records.run_record import note_run
from fedmjp.report.words import defence_words
from fedmjp.workers.options import HERE, WorkerConfig

PROGRAM = "fedmjp-leaderboard"
NO_ADAPTIVE = "no adaptive attack"


@dataclass(frozen=True)
class Submission:
    """A defence on its way to the leaderboard.

    Attributes:
        entry: the defence, as --defense takes it.
        track: how much is run.
        work: folder of its federations.
        results: folder of the leaderboard.
        images: a user's own folder of images, or None for the fixed list.
        computing: where the attacks on its updates are computed.
        tiers: names of the threat tiers that are run; () for all.
    """

    entry: str
    track: Track
    work: Path
    results: Path
    images: Path | None = None
    computing: WorkerConfig = HERE
    tiers: tuple[str, ...] = ()

    @property
    def data(self) -> str:
        """The images, as --data takes them."""
        return protocol.IMAGES if self.images is None else f"folder:{self.images}"

    @property
    def name(self) -> str:
        """Of its files."""
        track = "" if self.track.name == protocol.COMPARED[0] else f"@{self.track.name}"
        own = "" if self.images is None else f"@{self.images.resolve().name}"
        return protocol.slug(self.entry) + track + own

    @property
    def path(self) -> Path:
        """Of its JSON file."""
        return self.results / f"{self.name}.json"

    @property
    def log(self) -> Path:
        """Its rows before they are packed, in the folder of the leaderboard."""
        return self.results / "rows" / f"{self.name}.jsonl"

    @property
    def packed(self) -> Path:
        """Its packed rows."""
        return self.log.with_suffix(".jsonl.gz")

    def parts(self) -> list[Part]:
        """Its federations under attack."""
        every = protocol.parts(self.entry, self.track, self.work, self.data)
        found = [part for part in every if not self.tiers or part.tier.name in self.tiers]
        return [replace(part, config=replace(part.config, computing=self.computing)) for part in found]

    def tuning(self) -> RunConfig:
        """Its fine-tuning federation."""
        return protocol.tuning(self.entry, self.track, self.work)


def add(submission: Submission, console: Console) -> Path:
    """Run what is not finished of a submission, and write its file, rows and picture.

    Returns:
        path of the JSON file.

    Raises:
        UsageError: an unknown defence or one that does not fit, other pixels than the list's, too few images of one's
            own, or a file there that holds more tiers than are asked for.
        ClientFailure: a client failed; what is finished is kept.
        Incomplete: attacks were given up in a federation, which would flatter the defence.
    """
    digests = _digests(submission)
    every, tuned = submission.parts(), submission.tuning()
    for config in (tuned, *(part.config for part in every)):
        check_before_start(config)
        _require_images(config, submission)
    _require_own(submission.path, submission.entry)
    _require_no_less(submission)
    run_or_resume(tuned, "accuracy", console)
    run_parts(every, console)
    console.print("cost and re-identification", style="bold", highlight=False)
    cost = _cached(submission.work / "cost.json", lambda: client_cost(tuned, submission.track.timed))
    submission.log.unlink(missing_ok=True)
    rows = gather(submission, every)
    measured = {"accuracy": _accuracy(tuned), "cost": dict(cost), "provenance": _provenance(rows), "rerun": None}
    not_run = not_run_of(every, {})
    document = _document(submission, rows, not_run, digests) | measured
    worst = document["worst"]
    document["picture"] = picture(submission, deciding_part(submission, worst), worst, rows)
    return write(submission, document, rows)


def extend(submission: Submission, console: Console) -> Path:
    """Run what the protocol has gained since a submission was made, and write its file again by the present rules.

    Its other rows, its accuracy and its cost stay as they are, and so does the picture unless the worst case is a new
    one.

    Returns:
        path of the JSON file.

    Raises:
        UsageError: no such submission, or as for `add`.
        ClientFailure: a client failed; what is finished is kept.
    """
    old, digests = read(submission.path), _digests(submission)
    _require_own(submission.path, submission.entry)
    if _digest(submission.packed) != old["rows"]["sha256"]:
        raise UsageError(f"{submission.packed} is not the file that {submission.path.name} names (SHA-256)")
    lacking = {(tier.name, prepared, model) for tier, prepared, model in protocol.missing(old)}
    new = [part for part in submission.parts() if (part.tier.name, part.prepared, part.model) in lacking]
    for part in new:
        check_before_start(part.config)
        _require_images(part.config, submission)
    run_parts(new, console)
    submission.log.unlink(missing_ok=True)
    unpack_rows(submission.log)
    rows = gather(submission, new)
    not_run = not_run_of(new, {(r["tier"], r["model"]): r["not_run"] for r in old["results"]})
    document = _document(submission, rows, not_run, digests)
    document |= {name: old[name] for name in ("accuracy", "cost", "picture", "rerun")}
    document["provenance"] = old["provenance"] | {"commits": sorted(set(rows["commit"]))}
    if new:
        document["rerun"] = None  # what was run again then is not a tenth of what there is now
    worst, deciding = document["worst"], ("tier", "model", "attack")
    if [worst[name] for name in deciding] != [old["worst"][name] for name in deciding]:
        part = deciding_part(submission, worst)
        run_parts([part] if part else [], console)  # an earlier one, of which nothing but the rows is kept
        document["picture"] = picture(submission, part, worst, rows)
    return write(submission, document, rows)


def run_parts(every: Sequence[Part], console: Console) -> None:
    """Run federations, or take them up."""
    for number, part in enumerate(every, 1):
        what = f"{part.tier.title}, {part.prepared.attack}" if part.prepared else part.tier.title
        run_or_resume(part.config, f"federation {number} of {len(every)}: {what}, {part.model}", console)


def write(submission: Submission, document: dict[str, Any], rows: pd.DataFrame) -> Path:
    """Check and write a submission's file beside its rows.

    Returns:
        its path.
    """
    packed = submission.packed
    document["rows"] = {"file": f"rows/{packed.name}", "sha256": _digest(packed), "count": len(rows)}
    check(document, submission.path.name)
    write_whole(submission.path, (json.dumps(document, indent=1) + "\n").encode())
    note_run(submission.results, PROGRAM, devices=set(rows["device"]), commits=set(rows["commit"]))
    return submission.path


def _digests(submission: Submission) -> dict[str, str]:
    """Of the list's images, by name; {} for a user's own."""
    return fixed_images(protocol.images_of(submission.track)) if submission.images is None else {}


def _require_images(config: RunConfig, submission: Submission) -> None:
    """Refuse a folder with fewer training images than a federation under attack uses."""
    task = shared_task(config.order(), submission.entry, config.client_entropy())
    held, needed = len(task.data.train), config.data.train_limit or 0
    if held < needed:
        track = submission.track.name
        raise UsageError(
            f"--images {submission.images} gives {held} training image{'s' * (held != 1)}, and the {track} track needs "
            f"{needed}: add images, or pass another --track"
        )


def _require_own(path: Path, entry: str) -> None:
    """Refuse to replace the file of another defence; one of another version may be replaced."""
    if path.exists() and load(path).get("entry") != entry:
        raise UsageError(f"{path} holds another defence; pass another --results")


def _require_no_less(submission: Submission) -> None:
    """Refuse to replace a file by one of fewer tiers."""
    if submission.tiers and submission.path.exists():
        held = {result["tier"] for result in read(submission.path)["results"]}
        if more := sorted(held - set(submission.tiers)):
            raise UsageError(
                f"{submission.path} holds {', '.join(more)} too: pass --only-missing to add --tiers to it, or another "
                "--results"
            )


def _cached(path: Path, make: Any) -> dict[str, Any]:
    """What `make` gives, from `path` where it was written before."""
    if not path.exists():
        write_whole(path, json.dumps(make()).encode())
    return json.loads(path.read_text(encoding="utf-8"))


def results_of(rows: pd.DataFrame, not_run: Mapping[tuple[str, str], Mapping[str, str]]) -> list[dict[str, Any]]:
    """The figures of every tier and model of a submission, from its rows alone.

    Args:
        rows: with the columns of `measure.ROWS`.
        not_run: (tier, model) -> registered attack that did not run -> reason.
    """
    found = []
    for (tier, base), own in rows.assign(base=rows["model"].map(base_of)).groupby([measure.TIER, "base"], sort=False):
        about = {"tier": tier, "model": base, "trained": own["model"].iloc[0], "weights": own["weights"].iloc[0]}
        grants = list(dict.fromkeys(grant for granted in own["threat_model"] for grant in granted))
        about |= {"grants": grants, "updates": int(own["round"].max())}
        found.append(about | measure.leakage(own, not_run.get((tier, base), {})))
    order = [tier.name for tier in TIERS]
    return sorted(found, key=lambda result: order.index(result["tier"]))


def _document(
    submission: Submission, rows: pd.DataFrame, not_run: Mapping[tuple[str, str], Mapping[str, str]], digests: Mapping
) -> dict[str, Any]:
    """All of the file that follows from the rows and from today's protocol and defences."""
    entry, track = submission.entry, submission.track
    defense = submission.tuning().defence(entry)
    results = results_of(rows, not_run)
    worst = measure.worst_of(results)
    document = {
        "schema": SCHEMA,
        "entry": entry,
        "name": defence_words(entry),
        "track": track.name,
        "comparable": track.name in protocol.COMPARED and submission.images is None,
        "defences": about(entry, defense),
        "parameters": defense.parameters(),
        "known_by": list(defense.known_by),
        "adaptive": ", ".join(defense.known_by) or ("" if type(defense) is Defense else NO_ADAPTIVE),
        "data": {"name": rows["dataset"].iloc[0], "images": dict(digests) or dict.fromkeys(rows["image_id"], "")},
        "protocol": _protocol(track),
        "results": results,
        "not_covered": [],
        "worst": {"tier": worst["tier"], "model": worst["model"], **worst["worst"]},
    }
    return document | {"not_covered": protocol.not_covered(document)}


def _provenance(rows: pd.DataFrame) -> dict[str, Any]:
    """What produced the rows."""
    return {
        "commits": sorted(set(rows["commit"])),
        "version": rows["version"].iloc[0],
        "versions": provenance.versions(),
        "device": rows["device"].iloc[0],
        "command": provenance.command(PROGRAM),
        "seed": protocol.SEED,
    }


def _protocol(track: Track) -> dict[str, Any]:
    """Budgets and settings of a track."""
    tuning = {"clients": track.tuning_clients, "batch_size": protocol.TUNING_BATCH, "rate": protocol.TUNING_RATE}
    return {
        "budget": track.budget,
        "search": {"attack": protocol.SEARCH, "passes": track.search_steps, "updates": track.search_updates},
        "rounds": track.rounds,
        "candidates": track.candidates,
        "tuning": tuning,
    }


def about(entry: str, defense: Defense) -> list[dict[str, Any]]:
    """For each defence of an entry its name, what its module says it is and where it is from, and what knows it."""
    kinds = [part for _, part in defense.parts] if isinstance(defense, Chain) else [defense]
    found = []
    for (name, _), kind in zip(split_chain(entry), kinds, strict=True):
        text = "" if type(kind) is Defense else sys.modules[type(kind).__module__].__doc__ or type(kind).__doc__ or ""
        paper = " ".join(text.split("\n\n")[0].split())
        found.append({"name": name, "paper": paper, "random": kind.random, "known_by": list(kind.known_by)})
    return found


def not_run_of(
    every: Sequence[Part], known: Mapping[tuple[str, str], Mapping[str, str]]
) -> dict[tuple[str, str], dict[str, str]]:
    """(tier, model) -> registered attack -> why it ran in no federation of them.

    Args:
        every: federations that are finished.
        known: the same of earlier federations.
    """
    found = {place: dict(reasons) for place, reasons in known.items()}
    for part in every:
        described = json.loads((part.config.out / "run.json").read_text(encoding="utf-8"))
        own = described["not_run"].get(part.config.defense[0], {})
        earlier = found.get((part.tier.name, part.model), own)
        found[part.tier.name, part.model] = {name: reason for name, reason in earlier.items() if name in own}
    return found


def _accuracy(config: RunConfig) -> dict[str, Any]:
    """Accuracy after the last round of the fine-tuning."""
    described = json.loads((config.out / "run.json").read_text(encoding="utf-8"))
    rounds = pd.read_csv(config.out / "rounds.csv")
    last = rounds[rounds["round"] == config.federation.rounds].iloc[-1]
    model, weights = next(iter(described["weights"].items()))
    found = measure.accuracy(float(last["accuracy"]), described["data"]["test_images"])
    return found | {"model": model, "weights": weights, "rounds": config.federation.rounds, "data": config.data.data}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
