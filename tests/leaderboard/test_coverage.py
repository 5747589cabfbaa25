"""What a submission's rows must hold: a committed one has all of it, and misses what is taken from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from attacks import Capability
from fedmjp.leaderboard import measure, protocol, schema
from fedmjp.leaderboard.coverage import uncovered
from fedmjp.leaderboard.tiers import TIERS
from fedmjp.leaderboard.verify import expected_rows
from fedmjp.records.rows import load_rows
from tests.leaderboard.test_submissions import COMMITTED, rows_beside

PLACE = "passive_several on vit_mini_64"
Tamper = Callable[[dict[str, Any], pd.DataFrame], pd.DataFrame]


@pytest.fixture(scope="module")
def submission() -> tuple[dict[str, Any], pd.DataFrame]:
    path = COMMITTED / "mjp-gamma_0.9.json"
    document = schema.read(path)
    return document, load_rows(rows_beside(path, document), measure.ROWS)


@pytest.mark.parametrize("name", ["quantise", "soteria"])
def test_an_attack_may_have_rows_of_some_updates_or_be_newer_than_the_submission(name: str) -> None:
    """The other committed ones: test_submissions."""
    path = COMMITTED / f"{name}.json"
    document = schema.read(path)
    assert list(uncovered(document, load_rows(rows_beside(path, document), measure.ROWS))) == []


def here(rows: pd.DataFrame) -> pd.Series:
    return (rows["tier"] == "passive_several") & rows["model"].str.startswith("vit_mini_64")


def without_unmix(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    for result in document["results"]:
        result["attacks"] = [line for line in result["attacks"] if not line["attack"].startswith("unmix")]
    return rows[~rows["attack"].str.startswith("unmix")]


def without_a_photograph(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~here(rows) | (rows["image_id"] != "coffee/train/0")]


def without_the_search(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["tier"] != "passive_one") | (rows["attack"] != protocol.SEARCH)]


def without_some_of_a_trap(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["attack"] != "imprint") | (rows["image_id"] != "coffee/train/0")]


def twice(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([rows, rows[here(rows) & (rows["attack"] == "unmix")][:1]], ignore_index=True)


def other_photographs(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(image_id=rows["image_id"].where(~here(rows), "coffee/train/3"))


def fewer_updates(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(round=rows["round"].where(~here(rows), 1))


def other_digests(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    document["data"]["images"]["coffee/train/0"] = "0" * 16
    return rows


def no_attack_that_knows_it(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    document["known_by"] = []
    return rows


def another_tier(document: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(model=rows["model"].where(~here(rows), "vit_ti"))


@pytest.mark.parametrize(
    ("tamper", "noticed"),
    [
        (without_unmix, f"{PLACE}: neither rows of unmix, unmix_rounds, nor a reason"),
        (without_a_photograph, f"{PLACE}, mean_image: rows are missing, of client 0"),
        (without_the_search, f"passive_one on vit_mini_64, {protocol.SEARCH}: rows are missing, of client 7"),
        (without_some_of_a_trap, "active_architecture on vit_mini_64, imprint: rows are missing, of client 0"),
        (twice, f"{PLACE}, unmix: several rows of one image"),
        (other_photographs, f"{PLACE}, unmix: rows of images that no client holds"),
        (fewer_updates, f"{PLACE}, unmix: rows of updates that it does not get"),
        (other_digests, "the images, or their digests, are not those of the list"),
        (no_attack_that_knows_it, "known_by is not what mjp:gamma=0.9 names"),
        (another_tier, "passive_several on vit_ti: rows of a federation that is none of the protocol"),
    ],
)
def test_what_is_taken_from_a_submission_is_noticed(submission, tamper: Tamper, noticed: str) -> None:
    document, rows = copy.deepcopy(submission[0]), submission[1]
    found = list(uncovered(document, tamper(document, rows)))
    assert any(line.startswith(noticed) for line in found), found


def test_a_tier_that_was_not_run_is_no_missing_row(submission) -> None:
    document, rows = copy.deepcopy(submission[0]), submission[1]
    document["results"] = [result for result in document["results"] if result["tier"] != "aggregate_only"]
    assert list(uncovered(document, rows[rows["tier"] != "aggregate_only"])) == []
    assert protocol.missing(document)


def test_own_images_have_no_digests_and_are_not_comparable(submission) -> None:
    document, rows = copy.deepcopy(submission[0]), submission[1].assign(dataset="folder:own")
    document["data"] = {"name": "folder:own", "images": dict.fromkeys(rows["image_id"], "")}
    assert list(uncovered(document, rows)) == ["folder:own on the small track is not comparable"]
    document["comparable"] = False
    (line, *_) = uncovered(document, rows[rows["image_id"] != rows["image_id"].iloc[0]])
    assert "not those of the list" in line


def test_rows_of_a_rerun_that_the_protocol_does_not_ask_for_are_left_out(submission, tmp_path) -> None:
    """A search gets one update, and the guesses of a tier of several federations stand in the first."""
    document, _ = submission
    parts = {(p.tier.name, p.model, p.prepared and p.prepared.attack): p for p in parts_of(document, tmp_path)}
    names = (protocol.SEARCH, "unmix", "mean_image")
    rows = pd.DataFrame([{"round": 1, "client": c, "image_id": "a", "attack": n} for c in (0, 7) for n in names])
    kept = expected_rows(parts["passive_one", "vit_mini_64", None], rows)
    assert list(zip(kept["client"], kept["attack"], strict=True)) == [
        (0, "unmix"),
        (0, "mean_image"),
        *((7, name) for name in names),
    ]
    rows = rows.assign(client=0).replace({"attack": {"unmix": "token_bins", protocol.SEARCH: "fishing"}})[:3]
    of = {
        name: expected_rows(parts["active_parameters", "vit_mini_64", name], rows) for name in ("fishing", "token_bins")
    }
    assert set(of["fishing"]["attack"]) == {"fishing", "mean_image"}
    assert set(of["token_bins"]["attack"]) == {"token_bins"}


def parts_of(document: dict[str, Any], out) -> list[protocol.Part]:
    """The federations of a submission."""
    return list(protocol.parts(document["entry"], protocol.track_of(document["track"]), out))


@pytest.mark.parametrize(
    ("knowing", "run"), [(("undo_policy", "patch_embedding"), False), (("unmix",), True), ((), False)]
)
def test_auxiliary_data_are_granted_where_an_attack_that_knows_the_defence_uses_them(
    knowing: tuple[str, ...], run: bool
) -> None:
    """`undo_policy` differs with several updates, not with public images."""
    tier = next(tier for tier in TIERS if Capability.AUXILIARY_DATA in tier.grants)
    assert (protocol.idle(tier, knowing) == "") == run
