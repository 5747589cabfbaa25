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

import numpy as np
import pandas as pd
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from attacks import UsageError
from fedmjp.audited_federation import run_or_resume
from fedmjp.before_start import check_before_start
from fedmjp.client import shared_task
from fedmjp.config import RunConfig
from fedmjp.defenses import Defense
from fedmjp.defenses.chain import Chain, split_chain
from fedmjp.leaderboard import measure, protocol
from fedmjp.leaderboard.cost import client_cost
from fedmjp.leaderboard.images import fixed_images
from fedmjp.leaderboard.protocol import Part, Track
from fedmjp.leaderboard.reidentification import Lineup, lineup_of
from fedmjp.leaderboard.schema import SCHEMA, check
from fedmjp.records import provenance
from fedmjp.records.files import write_whole
from fedmjp.records.images import image_path
from fedmjp.records.rows import RowLog, load_rows, pack_rows
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
    """

    entry: str
    track: Track
    work: Path
    results: Path
    images: Path | None = None
    computing: WorkerConfig = HERE

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

    def parts(self) -> list[Part]:
        """Its federations under attack."""
        found = protocol.parts(self.entry, self.track, self.work, self.data)
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
            own.
        ClientFailure: a client failed; what is finished is kept.
        Incomplete: attacks were given up in a federation, which would flatter the defence.
    """
    digests = fixed_images(protocol.images_of(submission.track)) if submission.images is None else {}
    every, tuned = submission.parts(), submission.tuning()
    for config in (tuned, *(part.config for part in every)):
        check_before_start(config)
        _require_images(config, submission)
    path = submission.results / f"{submission.name}.json"
    _require_own(path, submission.entry)
    run_or_resume(tuned, "accuracy", console)
    for number, part in enumerate(every, 1):
        title = f"federation {number} of {len(every)}: {part.tier.title}, {part.model}"
        run_or_resume(part.config, title, console)
    console.print("cost and re-identification", style="bold", highlight=False)
    cost = _cached(submission.work / "cost.json", lambda: client_cost(tuned, submission.track.timed))
    packed = gather(submission, every)
    rows = load_rows(packed, measure.ROWS)
    document = _document(submission, every, rows, cost, digests)
    document["rows"] = {"file": f"rows/{packed.name}", "sha256": _digest(packed), "count": len(rows)}
    document["picture"] = _picture(submission, every, document["worst"], rows)
    check(document, path.name)
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode())
    note_run(submission.results, PROGRAM, devices=set(rows["device"]), commits=set(rows["commit"]))
    return path


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
    if path.exists() and json.loads(path.read_text(encoding="utf-8")).get("entry") != entry:
        raise UsageError(f"{path} holds another defence; pass another --results")


def _cached(path: Path, make: Any) -> dict[str, Any]:
    """What `make` gives, from `path` where it was written before."""
    if not path.exists():
        write_whole(path, json.dumps(make()).encode())
    return json.loads(path.read_text(encoding="utf-8"))


def gather(submission: Submission, every: Sequence[Part]) -> Path:
    """Write the rows of all federations, with their tier and the original's rank, into one packed log.

    Returns:
        path of the log.
    """
    log = submission.results / "rows" / f"{submission.name}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with RowLog(log, measure.ROWS) as written:
        for part, lineup in zip(every, _lineups(submission, every), strict=True):
            for row in ranked_rows(part, lineup, submission):
                written.append(row)
    return pack_rows(log)


def _lineups(submission: Submission, every: Sequence[Part]) -> list[Lineup | None]:
    """One for each part; parts whose images have the same size share it."""
    sizes: dict[str, int] = {}
    for part in every:
        if part.model not in sizes:
            sizes[part.model] = _read_image(next(part.config.out.glob("images/**/*_original.png"))).shape[-1]
    return [lineup_of(sizes[part.model], submission.track.candidates) for part in every]


def ranked_rows(part: Part, lineup: Lineup | None, submission: Submission) -> list[dict[str, Any]]:
    """The rows of a finished federation with the columns of `measure.ROWS`.

    Ranks are of the 8-bit pictures that the run wrote. A user's folder is named without its path. Of a client that is
    attacked in every round, an image has the rows of one round.
    """
    loaded = load_rows(part.config.out / "rows.jsonl")
    rows = (measure.best_round(loaded) if part.tier.batches else loaded).to_dict("records")
    for row in rows:
        row |= {measure.TIER: part.tier.name, measure.RANK: None}
        if submission.images is not None:
            row["dataset"] = f"folder:{submission.images.resolve().name}"
    pairs = [(row, _pictures(part, row)) for row in rows]
    shown = [(row, pictures) for row, pictures in pairs if pictures is not None]
    if shown and lineup is not None:
        originals, found = (torch.stack([pictures[i] for _, pictures in shown]) for i in (0, 1))
        ranks = lineup.ranks(originals, found, [row["image_id"] for row, _ in shown])
        for (row, _), rank in zip(shown, ranks, strict=True):
            row[measure.RANK] = rank
    return rows


def _pictures(part: Part, row: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Original and reconstruction of a row, (3, H, W) each; None where the attack returned none, and for guesses'."""
    place = part.config.out, row["defense"], row["round"], row["client"], row["image"]
    paths = [image_path(*place, what) for what in ("original", row["attack"])]
    return tuple(map(_read_image, paths)) if all(path.exists() for path in paths) else None


def _read_image(path: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1).float() / 255


def results_of(rows: pd.DataFrame, not_run: Mapping[tuple[str, str], Mapping[str, str]]) -> list[dict[str, Any]]:
    """The figures of every tier and model of a submission, from its rows alone.

    Args:
        rows: with the columns of `measure.ROWS`.
        not_run: (tier, model) -> registered attack that did not run -> reason.
    """
    found = []
    for (tier, base), own in rows.assign(base=rows["model"].map(base_of)).groupby([measure.TIER, "base"], sort=False):
        about = {"tier": tier, "model": base, "trained": own["model"].iloc[0], "weights": own["weights"].iloc[0]}
        grants = list(own["threat_model"].iloc[0])
        about |= {"grants": grants, "updates": int(own["round"].max())}
        found.append(about | measure.leakage(own, not_run.get((tier, base), {})))
    return found


def base_of(model: str) -> str:
    """The model that the protocol names, of which a defence trains the variant `model`."""
    from fedmjp.models import split_name

    return split_name(model)[0]


def _document(
    submission: Submission, every: Sequence[Part], rows: pd.DataFrame, cost: Mapping[str, Any], digests: Mapping
) -> dict[str, Any]:
    """All of the file but where rows and picture are."""
    entry, track = submission.entry, submission.track
    defense = submission.tuning().defence(entry)
    results = results_of(rows, {(part.tier.name, part.model): _not_run(part) for part in every})
    worst = measure.worst_of(results)
    return {
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
        "not_covered": [
            {"tier": tier.name, "title": tier.title, "reason": reason}
            for tier in protocol.TIERS
            if (reason := protocol.idle(tier, defense.known_by))
        ],
        "worst": {"tier": worst["tier"], "model": worst["model"], **worst["worst"]},
        "accuracy": _accuracy(submission.tuning()),
        "cost": dict(cost),
        "provenance": {
            "commits": sorted(set(rows["commit"])),
            "version": rows["version"].iloc[0],
            "versions": provenance.versions(),
            "device": rows["device"].iloc[0],
            "command": provenance.command(PROGRAM),
            "seed": protocol.SEED,
        },
        "rerun": None,
    }


def _protocol(track: Track) -> dict[str, Any]:
    """Budgets and settings of a track."""
    tuning = {"clients": track.tuning_clients, "batch_size": protocol.TUNING_BATCH, "rate": protocol.TUNING_RATE}
    return {
        "budget": track.budget,
        "search": {"attack": protocol.SEARCH, "passes": track.search_steps, "updates": track.search_updates},
        "slow": dict.fromkeys(protocol.SLOW, track.slow_updates),
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


def _not_run(part: Part) -> dict[str, str]:
    """Registered attack -> why it ran on no update of a federation."""
    described = json.loads((part.config.out / "run.json").read_text(encoding="utf-8"))
    return dict(described["not_run"].get(part.config.defense[0], {}))


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


SHOWN, SIDE = 4, 64  # images of a card's picture, and pixels of each


def _picture(submission: Submission, every: Sequence[Part], worst: Mapping[str, Any], rows: pd.DataFrame) -> str:
    """Write the originals, and below them what the deciding attack makes of them, as one picture.

    Of the images that the attack was run on, the first ones of the list; grey where it returned nothing.

    Returns:
        path of the PNG file in the folder of the leaderboard; "" for a user's own images, or without an attack.
    """
    if submission.images is not None or not worst["attack"]:
        return ""
    part = next(part for part in every if (part.tier.name, part.model) == (worst["tier"], worst["model"]))
    of_model = (rows[measure.TIER] == worst["tier"]) & (rows["model"].map(base_of) == worst["model"])
    own = rows[of_model & (rows["attack"] == worst["attack"])].set_index("image_id")
    shown = [image for image in fixed_images(protocol.images_of(submission.track)) if image in own.index][:SHOWN]
    sheet = Image.new("RGB", (SHOWN * SIDE, 2 * SIDE), (128, 128, 128))
    for column, image_id in enumerate(shown):
        row = own.loc[image_id]
        for line, what in enumerate(("original", worst["attack"])):
            path = image_path(part.config.out, row["defense"], row["round"], row["client"], row["image"], what)
            if path.exists():
                cell = Image.open(path).resize((SIDE, SIDE), Image.Resampling.NEAREST)
                sheet.paste(cell, (column * SIDE, line * SIDE))
    target = submission.results / "pictures" / f"{submission.name}.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(256).save(target, optimize=True)  # a quarter of the size
    return f"pictures/{target.name}"
