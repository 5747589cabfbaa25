"""The page: parses, carries its pictures, fetches nothing, escapes everything, and says what the numbers say."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser

import pytest
from test_report_figures import make_panel

from attacks.registry import UsageError
from fedmjp.records.rows import load_rows
from fedmjp.report import render, summarise
from fedmjp.report.page import verdicts
from tests.records.sample_rows import REFUSAL, make_row, make_rows, write_run

VOID = {"meta", "img", "br", "link", "hr", "input"}
ATTACK = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
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
        "60 dB all but exact",
        "model weights, gradient",
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


def judged(tmp_path, **psnr: list[float | None]) -> dict[str, str]:
    rows = [
        make_row(attack=attack, client=i, psnr=value, **({} if value else dict.fromkeys(("mse", "ssim"))))
        for attack, values in psnr.items()
        for i, value in enumerate(values)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (verdict,) = verdicts(summarise(load_rows(tmp_path / "rows.jsonl")))
    return verdict


@pytest.mark.parametrize(
    ("psnr", "level", "words"),
    [
        ([65.0, 66.0, 67.0], "leak", "All but exact."),
        ([31.0, 30.0, 32.0], "leak", "A good copy."),
        ([11.0, 11.5, 12.0], "none", "Does not beat"),
        ([7.0, 13.0, 30.0], "unclear", "undecided"),
    ],
)
def test_verdict_follows_the_intervals(tmp_path, psnr, level, words):
    verdict = judged(tmp_path, mean_image=[12.0, 13.0, 14.0], other_image=[8.0, 9.0, 10.0], weak=[5.0], best=psnr)
    assert (verdict["attack"], verdict["level"]) == ("best", level)
    assert words in verdict["words"]
    assert "mean_image, has 13.0 dB" in verdict["words"]


def test_verdict_without_baselines_or_images(tmp_path):
    assert judged(tmp_path, best=[50.0])["level"] == "unclear"
    assert judged(tmp_path, best=[None])["words"].startswith("No attack returned an image")
