"""The page: parses, carries its pictures, fetches nothing, escapes everything, and says what the numbers say."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest
from test_report_figures import make_panel

from attacks.registry import UsageError
from fedmjp.report import render
from tests.records.sample_rows import REFUSAL, make_row, make_rows, write_run

pytestmark = pytest.mark.usefixtures("drawn")

VOID = {"meta", "img", "br", "link", "hr", "input"}
ATTACK = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.alternatives: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.settings = re.findall(r'<tr><th scope="row">(\w+)</th><td>([^<]*)</td></tr>', text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        self.alternatives += [value for name, value in attrs if name == "alt"]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    rows = make_rows() + [make_row(client=99, image_id=ATTACK, diagnosis=ATTACK, attack_parameters={ATTACK: ATTACK})]
    out = write_run(tmp_path_factory.mktemp("run"), rows, command=f"run {ATTACK}", finished=False)
    assert render(out, [make_panel(ATTACK)]) == out / "report.html"
    return out


@pytest.fixture(scope="module")
def page(run_folder):
    return Page((run_folder / "report.html").read_text(encoding="utf-8"))


def test_render_writes_every_file(run_folder):
    figures = [
        f"{name}.{end}" for name in ("leakage_by_round", "training", "reconstructions") for end in ("png", "pdf")
    ]
    for name in ["summary.csv", "summary.tex", "report.html", *figures]:
        assert (run_folder / name).stat().st_size > 200, name


def test_every_figure_is_embedded_and_nothing_is_fetched(run_folder, page):
    sources = [link for link in page.links if not link.startswith("#")]
    prefix = "data:image/png;base64,"
    assert all(source.startswith(prefix) for source in sources)
    embedded = {base64.b64decode(source.removeprefix(prefix)) for source in sources}
    assert embedded == {file.read_bytes() for file in run_folder.glob("*.png")}
    assert len(sources) == 3
    assert "script" not in page.tags
    text = (run_folder / "report.html").read_text(encoding="utf-8")
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text


def test_hostile_names_come_out_as_text(page):
    assert page.text.count(ATTACK) >= 4  # image id, diagnosis, command, parameters


def test_the_page_explains_itself(page):
    for words in (
        "Clients trained vit_tiny on faces",
        "This run is not finished",
        "59 dB as exact as 8 bits",
        "model weights, gradient",
        "What the updates leak",
        REFUSAL,
        "model.patch_size",
        "random, seed 7",
        "face_0009 (too small)",
        "scikit-image, public domain",
        "LPIPS was not computed",
        "12 of 12",
    ):
        assert words in page.text, words


def test_bare_run_still_gives_a_page(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "run.json").write_text("{}")
    assert "This run has no results yet." in Page(render(tmp_path, []).read_text(encoding="utf-8")).text


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_missing_or_damaged_run_json(tmp_path, content):
    (tmp_path / "rows.jsonl").touch()
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=r"run\.json"):
        render(tmp_path, [])


def test_the_verdicts_are_those_of_the_rule(page):
    assert "Leaks: 12 of 13 images above 25 dB (closed_form" in page.text
    assert "Leaks:" in page.text
    for word in ("safe", "secure", "private", "recovered"):
        assert not re.search(rf"\b{word}\b", page.text, re.IGNORECASE), word


def test_guesses_are_granted_nothing_and_parameters_are_words(page):
    assert "mean_image" not in {name for name, _ in page.settings}
    assert ("optimise_match", "steps 200") in page.settings


def test_registered_attacks_that_were_not_run_are_listed_with_their_reason(tmp_path):
    reasons = {"dlg": "takes about 30 s, beyond the budget", "idlg": "takes about 31 s, beyond the budget"}
    out = write_run(tmp_path, make_rows(), not_run={"none": reasons, "mjp": reasons | {"unmix": "needs one image"}})
    text = Page(render(out, []).read_text(encoding="utf-8")).text
    assert "dlg, idlg" in text
    assert "takes about 30 to 31 s, beyond the budget" in text
    assert "needs one image" in text


def test_tables_and_pictures_say_what_they_show(run_folder, page):
    text = (run_folder / "report.html").read_text(encoding="utf-8")
    heads = re.findall(r"<th\b[^>]*>", text)
    assert heads
    assert all("scope=" in head for head in heads)
    first, *_ = page.alternatives
    assert re.search(r"none: april_analytic reaches >59 dB \(8-bit exact\) at best", first)
    assert all(len(words) > 20 for words in page.alternatives)
