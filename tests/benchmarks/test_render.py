"""Committed tables and pages are what the committed rows give, and the check notices where they are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import render
from experiments.batches.render import BATCHES
from experiments.leakage.render import LEAKAGE
from experiments.pages import protocol
from experiments.scaffold import RESULTS

ROOT = RESULTS.parent
README = "before\n<!-- batches -->\n{}\n<!-- /batches -->\nafter\n"


@pytest.mark.long
def test_committed_tables_and_pages_are_what_the_rows_give() -> None:
    assert render.main(["--check"]) == 0


def test_pages_show_the_committed_tables() -> None:
    assert [one.what for one in protocol.differing_pages(ROOT, protocol.renderings())] == []


def test_a_committed_table_comes_out_of_its_rows_byte_for_byte() -> None:
    folder = RESULTS / "april_attack"
    rendered = LEAKAGE.files(folder)
    assert set(rendered) == {
        *("table.csv", "table_april.md", "table_april.tex", "table_standard.md", "table_standard.tex"),
    }
    for name, text in rendered.items():
        assert (folder / name).read_bytes() == text.encode(), name


def test_every_results_folder_has_a_run_json_and_every_block_a_room() -> None:
    folders = {path.parent for path in RESULTS.rglob("*.csv")} | {path.parent for path in RESULTS.rglob("rows.jsonl*")}
    assert [str(f.relative_to(RESULTS)) for f in sorted(folders) if not (f / "run.json").is_file()] == []
    every = protocol.renderings()
    names = [name for one in every for name in one.blocks]
    assert len(names) == len(set(names))
    assert {one.folder.split("/")[0] for one in every} <= {path.name for path in RESULTS.iterdir()}


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A root with one results folder and a page that shows its block."""
    shutil.copytree(RESULTS / "batch_rounds", tmp_path / "results" / "batch_rounds")
    (tmp_path / "docs" / "more").mkdir(parents=True)
    for page in ("README.md", "docs/more/page.md"):
        (tmp_path / page).write_text(README.format(BATCHES.blocks["batches"](tmp_path / "results" / "batch_rounds")))
    monkeypatch.setattr(protocol, "renderings", lambda: [BATCHES])
    assert render.main(["--check", "--root", str(tmp_path)]) == 0
    return tmp_path


def other_digit(path: Path) -> None:
    """Change the last digit of a file."""
    text = path.read_text()
    place = max(i for i, letter in enumerate(text) if letter.isdigit())
    path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("results/batch_rounds/table.csv", "results/batch_rounds/table.csv"),
        ("README.md", "README.md, block batches"),
        ("docs/more/page.md", "docs/more/page.md, block batches"),
    ],
)
def test_a_changed_digit_is_noticed_named_and_repaired(copy, capsys, file: str, named: str) -> None:
    before = (copy / file).read_bytes()
    other_digit(copy / file)
    changed = (copy / file).read_bytes()
    assert changed != before
    capsys.readouterr()
    assert render.main(["--check", "--root", str(copy)]) == 1
    complaint = capsys.readouterr().err
    assert named in complaint.splitlines()
    assert (copy / file).read_bytes() == changed  # a check writes nothing
    assert render.main(["--root", str(copy)]) == 0
    assert (copy / file).read_bytes() == before
    assert render.main(["--check", "--root", str(copy)]) == 0


def test_a_block_without_a_room_and_a_missing_folder_are_mistakes(copy, capsys) -> None:
    (copy / "docs" / "other.md").write_text("<!-- unheard_of -->\n1\n<!-- /unheard_of -->\n")
    assert render.main(["--check", "--root", str(copy)]) == 2
    assert "renders a block called 'unheard_of'" in capsys.readouterr().err
    assert render.main(["--check", "--root", str(copy / "docs")]) == 2
    assert "run the command that writes it" in capsys.readouterr().err
