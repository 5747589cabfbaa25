"""Rows and picture of a submission, from the folders of its finished federations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from PIL import Image

from fedmjp.leaderboard import measure, protocol
from fedmjp.leaderboard.images import fixed_images
from fedmjp.leaderboard.protocol import Part
from fedmjp.leaderboard.reidentification import lineup_of
from fedmjp.leaderboard.tiers import tier_called
from fedmjp.metrics.reidentification import Lineup
from fedmjp.records.images import image_path, read_image, read_pair
from fedmjp.records.rows import BASELINES, RowLog, load_rows, pack_rows

if TYPE_CHECKING:
    from fedmjp.leaderboard.submission import Submission

SHOWN, SIDE = 4, 64  # images of a card's picture, and pixels of each


def gather(submission: Submission, every: Sequence[Part]) -> pd.DataFrame:
    """Add the rows of federations, with their tier and the original's rank, to a submission's log, and pack it.

    Of a tier of several federations, a photograph has the guesses' rows of the first one.

    Returns:
        all rows of the log.
    """
    submission.log.parent.mkdir(parents=True, exist_ok=True)
    with RowLog(submission.log, measure.ROWS) as written:
        guessed = {_guess(row) for row in written.rows()}
        for part, lineup in zip(every, _lineups(submission, every), strict=True):
            for row in ranked_rows(part, lineup, submission):
                if part.prepared is None or row["attack"] not in BASELINES or _guess(row) not in guessed:
                    written.append(row)
                    guessed.add(_guess(row))
    return load_rows(pack_rows(submission.log), measure.ROWS)


def _guess(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a guess of a photograph from others."""
    return row[measure.TIER], base_of(row["model"]), row["attack"], row["image_id"]


def _lineups(submission: Submission, every: Sequence[Part]) -> list[Lineup | None]:
    """One for each part; parts whose images have the same size share it."""
    sizes: dict[str, int] = {}
    for part in every:
        if part.model not in sizes:
            sizes[part.model] = read_image(next(part.config.out.glob("images/**/*_original.png"))).shape[-1]
    return [lineup_of(sizes[part.model], submission.track.candidates) for part in every]


def ranked_rows(part: Part, lineup: Lineup | None, submission: Submission) -> list[dict[str, Any]]:
    """The rows of a finished federation with the columns of `measure.ROWS`.

    Ranks are of the 8-bit pictures that the run wrote. A user's folder is named without its path. Of a client that is
    attacked in every round, an image has the rows of one round.
    """
    loaded = load_rows(part.config.out / "rows.jsonl")
    rows = (measure.best_round(loaded) if part.prepared else loaded).to_dict("records")
    for row in rows:
        row |= {measure.TIER: part.tier.name, measure.RANK: None}
        if submission.images is not None:
            row["dataset"] = f"folder:{submission.images.resolve().name}"
    pairs = [(row, read_pair(part.config.out, row)) for row in rows]
    shown = [(row, pictures) for row, pictures in pairs if pictures is not None]
    if shown and lineup is not None:
        originals, found = (torch.stack([pictures[i] for _, pictures in shown]) for i in (0, 1))
        ranks = lineup.ranks(originals, found, [row["image_id"] for row, _ in shown])
        for (row, _), rank in zip(shown, ranks, strict=True):
            row[measure.RANK] = rank
    return rows


def base_of(model: str) -> str:
    """The model that the protocol names, of which a defence trains the variant `model`."""
    from fedmjp.models import split_name

    return split_name(model)[0]


def deciding_part(submission: Submission, worst: Mapping[str, Any]) -> Part | None:
    """The federation of a submission's worst case; None where no attack returned an image."""
    prepared = tier_called(worst["tier"]).prepared_for(worst["attack"])
    place = (worst["tier"], worst["model"], prepared)
    parts = (part for part in submission.parts() if (part.tier.name, part.model, part.prepared) == place)
    return next(parts) if worst["attack"] else None


def picture(submission: Submission, part: Part | None, worst: Mapping[str, Any], rows: pd.DataFrame) -> str:
    """Write the originals, and below them what the deciding attack makes of them, as one picture.

    Of the images that the attack was run on, the first ones of the list; grey where it returned nothing.

    Args:
        part: the finished federation of the worst case.

    Returns:
        path of the PNG file in the folder of the leaderboard; "" for a user's own images, or without an attack.
    """
    if submission.images is not None or part is None:
        return ""
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
