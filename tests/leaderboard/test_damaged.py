"""Damaged submission files: one line and exit code 2, in whatever is asked of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attacks import UsageError
from fedmjp.leaderboard import schema
from fedmjp.leaderboard.cli import main
from fedmjp.leaderboard.submission import _require_own
from tests.leaderboard.test_submissions import COMMITTED

Document = dict[str, Any]


@pytest.fixture
def document() -> Document:
    return schema.load(COMMITTED / "lora.json")


def put(*keys: str | int, value: Any) -> Callable[[Document], None]:
    """Puts a value in the place that the keys lead to."""

    def damage(document: Document) -> None:
        place: Any = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return damage


def without(*keys: str | int) -> Callable[[Document], None]:
    """Leaves out what the keys lead to."""

    def damage(document: Document) -> None:
        place: Any = document
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]

    return damage


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (put("results", value=[1]), "results: 1 is no object"),
        (put("results", value=[]), "no result of the worst case"),
        (put("results", 0, "attacks", value=["dlg"]), "attacks: 'dlg' is no object"),
        (put("results", 0, "attacks", 0, "psnr_mean_low", value=None), "psnr_mean without an interval"),
        (put("results", 0, "tier", value="nosuch"), "unknown tier 'nosuch'"),
        (put("results", 0, "worst", "answer", value="safe"), "unknown answer 'safe'"),
        (put("results", 0, "worst", "held", value=[1]), "held holds something else than names"),
        (without("results", 0, "worst", "recovered"), "missing keys ['recovered']"),
        (without("worst", "images"), "missing keys ['images']"),
        (put("worst", "model", value="vit_b"), "no result of the worst case"),
        (put("cost", "peak_bytes_none", value=0), "peak_bytes_none must be positive"),
        (put("cost", "bits_none", value=0), "bits_none must be positive"),
        (put("cost", "ratio", value=None), "ratio is NoneType"),
        (put("accuracy", "accuracy", value=None), "accuracy is NoneType"),
        (put("track", value="nosuch"), "unknown track 'nosuch'"),
        (put("known_by", value=[1]), "known_by holds something else than names"),
        (put("defences", value=["lora"]), "defences: 'lora' is no object"),
        (put("rerun", value={}), "rerun: missing keys"),
        (put("protocol", "search", value={}), "search: missing keys"),
    ],
)
def test_a_damaged_file_is_answered_in_one_line(
    document: Document, tmp_path: Path, capsys, damage: Callable[[Document], None], complaint: str
) -> None:
    damage(document)
    (tmp_path / "lora.json").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text("<!-- leaderboard -->\n<!-- /leaderboard -->\n")
    results = ["--results", str(tmp_path)]
    for command in (["list", *results], ["render", *results, "--pages", str(page)]):
        assert main(command) == 2
        error = capsys.readouterr().err.strip()
        assert complaint in error
        assert len(error.splitlines()) == 1


def test_a_submission_whose_strongest_attack_returned_no_image_is_listed(
    document: Document, tmp_path: Path, capsys
) -> None:
    for worst in (document["worst"], document["results"][0]["worst"]):
        worst |= {"attack": "imprint", "psnr_median": None}
    (tmp_path / "lora.json").write_text(json.dumps(document))
    assert main(["list", "--results", str(tmp_path)]) == 0
    assert "no image" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_holds_no_object_is_not_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lora.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="lora.json (is not JSON|holds no object)"):
        _require_own(path, "lora")


def test_a_file_of_another_version_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lora.json"
    path.write_text(json.dumps({"schema": 1, "entry": "lora"}))
    _require_own(path, "lora")
    with pytest.raises(UsageError, match="holds another defence"):
        _require_own(path, "none")
