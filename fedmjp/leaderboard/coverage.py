"""Whether a submission's rows are all those of the federations that it was run under.

A tier, or the federation of a prepared attack, may be lacking as a whole: `protocol.missing` says so. Of one that is
there, the guesses and the attacks that the protocol names have a row for each of their images. The suite chooses for
each update, so that its attacks may have rows of some updates only; of an update they have those of all images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from attacks import ATTACKS
from fedmjp.config import RunConfig
from fedmjp.defenses.chain import split_chain
from fedmjp.leaderboard import protocol
from fedmjp.leaderboard.gathering import base_of
from fedmjp.leaderboard.images import listed
from fedmjp.leaderboard.protocol import Part
from fedmjp.leaderboard.tiers import tier_called
from fedmjp.records.rows import BASELINES

OWN = "folder:"  # begins the name of a user's own images


def federation_of(rows: pd.DataFrame) -> pd.Series:
    """The attack for which the server prepared the federation of a row; "" where it is honest."""
    prepared = [tier_called(t).prepared_for(a) for t, a in zip(rows["tier"], rows["attack"], strict=True)]
    return pd.Series([one.attack if one else "" for one in prepared], rows.index, name="federation")


def uncovered(document: Mapping[str, Any], rows: pd.DataFrame) -> Iterator[str]:
    """What a submission's rows lack or hold beyond the protocol, a line each.

    Args:
        rows: of the submission, with the columns of `measure.ROWS`.

    Raises:
        UsageError: the defence is not installed, or a row of an unknown tier.
    """
    yield from _misnamed(document, rows)
    yield from _unexplained(document)
    track, own_images = protocol.track_of(document["track"]), document["data"]["name"].startswith(OWN)
    named = rows.assign(base=rows["model"].map(base_of), federation=federation_of(rows))
    federations = dict(list(named.groupby(["tier", "base", "federation"], sort=False)))
    for part in protocol.parts(document["entry"], track, Path()):
        attack = part.prepared.attack if part.prepared else ""
        own = federations.pop((part.tier.name, part.model, attack), None)
        if own is not None and (not attack or attack in set(own["attack"])):
            held = document["data"]["images"] if own_images else listed(part.config.data.train_limit)
            yield from _faults(part, own, held)
    for tier, base, _ in federations:
        yield f"{tier} on {base}: rows of a federation that is none of the protocol"


def required(part: Part) -> tuple[str, ...]:
    """The guesses and attacks that have a row of each update that the protocol leaves them.

    Of a tier of several federations, the guesses' rows are of the first.
    """
    guesses = [name for name in BASELINES if part.tier.prepared_for(name) == part.prepared]
    return (*guesses, *part.config.audit.named())


def _misnamed(document: Mapping[str, Any], rows: pd.DataFrame) -> Iterator[str]:
    """What a submission says of its defence and images that is not so."""
    entry, track, data = document["entry"], document["track"], document["data"]
    if document["known_by"] != list(RunConfig().defence(entry).known_by):
        yield f"known_by is not what {entry} names; run fedmjp-leaderboard add again"
    if [defence["name"] for defence in document["defences"]] != [name for name, _ in split_chain(entry)]:
        yield f"the defences are not those of {entry}"
    own_images = data["name"].startswith(OWN)
    if set(rows["dataset"]) != {data["name"]}:
        yield f"the rows are not all of {data['name']}"
    count = protocol.images_of(protocol.track_of(track))
    if data["images"] != (dict.fromkeys(rows["image_id"], "") if own_images else listed(count)):
        yield "the images, or their digests, are not those of the list"
    if document["comparable"] and (own_images or track not in protocol.COMPARED):
        yield f"{data['name']} on the {track} track is not comparable"


def _unexplained(document: Mapping[str, Any]) -> Iterator[str]:
    """The attacks that know the defence, and of which a tier has neither rows nor a reason why there are none."""
    for result in document["results"]:
        explained = {line["attack"] for line in result["attacks"]} | result["not_run"].keys()
        if lacking := [name for name in document["known_by"] if name in ATTACKS and name not in explained]:
            yield (
                f"{result['tier']} on {result['model']}: neither rows of {', '.join(lacking)}, nor a reason why there "
                "are none"
            )


def _faults(part: Part, rows: pd.DataFrame, held: Collection[str]) -> Iterator[str]:
    """What is wrong with the rows of a federation.

    Args:
        held: ids of the images that its clients hold.
    """
    where = f"{part.tier.name} on {part.model}"
    exact = required(part)
    for attack in dict.fromkeys([*exact, *rows["attack"]]):
        own = rows[rows["attack"] == attack]
        due = part.config.attacked(attack)
        lacking = _lacking(own, due, part.config.federation.batch_size * max(part.tier.group, 1), attack in exact)
        if lacking:
            yield f"{where}, {attack}: rows are missing, of client {', '.join(map(str, lacking))}"
        if own["image_id"].duplicated().any():
            yield f"{where}, {attack}: several rows of one image"
        if not set(own["image_id"]) <= set(held):
            yield f"{where}, {attack}: rows of images that no client holds"
        if not set(zip(own["round"], own["client"], strict=True)) <= set(due):
            yield f"{where}, {attack}: rows of updates that it does not get"


def _lacking(rows: pd.DataFrame, due: Collection[tuple[int, int]], images: int, exact: bool) -> list[int]:
    """The clients of which an attack lacks rows.

    Args:
        rows: of the attack.
        due: (round, client) of the updates that it gets. Of several rounds, an image has the row of one.
        images: in an update.
        exact: whether it has rows of every client, and not only of those that the suite chose it for.
    """
    counts = rows["client"].value_counts()
    return [
        client
        for client in sorted({client for _, client in due})
        if counts.get(client, 0) < images and (exact or client in counts)
    ]
