"""The committed submissions are of the schema, name the protocol's images, and hold what their rows give."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fedmjp.config import RunConfig
from fedmjp.defenses import DEFENSES
from fedmjp.leaderboard import measure, page, protocol, schema
from fedmjp.leaderboard.gathering import base_of
from fedmjp.leaderboard.images import DIGESTS
from fedmjp.leaderboard.submission import results_of
from fedmjp.leaderboard.verify import static_differences
from fedmjp.records.rows import load_rows

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "results" / "leaderboard"
FILES = sorted(path for path in COMMITTED.glob("*.json") if path.name != "run.json")


def test_every_built_in_defence_has_an_entry_or_the_page_says_why_not() -> None:
    entered = {defence["name"] for path in FILES for defence in schema.read(path)["defences"]}
    own = {name for name in DEFENSES.names() if DEFENSES.get(name).__module__.startswith("fedmjp.")}
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    assert all(f"**Not here: `{name}`.**" in text for name in own - entered)
    assert {name for name in own if f"**Not here: `{name}`.**" in text} == own - entered


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_committed_submissions_are_what_the_schema_wants(path: Path) -> None:
    document = schema.read(path)
    assert document["comparable"], "only comparable submissions are committed"
    assert path.stem == protocol.slug(document["entry"]) + {"small": ""}.get(document["track"], f"@{document['track']}")
    lacking = {(tier.name, model, prepared) for tier, prepared, model in protocol.missing(document)}
    track = protocol.track_of(document["track"])
    assert document["data"]["images"] == dict(list(DIGESTS.items())[: protocol.images_of(track)])
    assert document["known_by"] == list(RunConfig().defence(document["entry"]).known_by)
    run = {(result["tier"], result["model"]) for result in document["results"]}
    parts = {(part.tier.name, part.model) for part in protocol.parts(document["entry"], track, Path("x"))}
    assert run <= parts
    assert run == parts or lacking
    assert document["rows"]["sha256"] == hashlib.sha256(rows_beside(path, document).read_bytes()).hexdigest()
    assert not document["picture"] or (path.parent / document["picture"]).is_file()
    noted = json.loads((COMMITTED / "run.json").read_text())
    assert document["provenance"]["command"] in noted["commands"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_worst_case_of_a_committed_submission_follows_from_its_rows(path: Path) -> None:
    """The other figures: the slow test below."""
    document = schema.read(path)
    worst = page.worst_result(document)
    rows = load_rows(rows_beside(path, document), measure.ROWS)
    own = rows[(rows["tier"] == worst["tier"]) & (rows["model"].map(base_of) == worst["model"])]
    assert results_of(own, {(worst["tier"], worst["model"]): worst["not_run"]}) == [worst]
    assert document["worst"] == {"tier": worst["tier"], "model": worst["model"], **worst["worst"]}
    assert worst == measure.worst_of(document["results"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_figure_of_a_committed_submission_follows_from_its_rows(path: Path) -> None:
    assert list(static_differences(schema.read(path), path)) == []


def rows_beside(path: Path, document: dict) -> Path:
    """The packed rows of a submission."""
    return path.parent / document["rows"]["file"]
