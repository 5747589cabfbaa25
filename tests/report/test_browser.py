"""The page in a real browser: readable on a phone and on a desk, accessible, and alone with its own bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_report_figures import make_panel

from fedmjp.report import render
from tests.records.sample_rows import make_row, make_rows, write_run

pytestmark = pytest.mark.usefixtures("drawn")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LONG = "an_attack_with_a_name_that_is_longer_than_any_other"
WIDTHS = {"phone": (390, 844), "desk": (1400, 900)}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: test)")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=list(OPTIONS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    rows = make_rows() + [make_row(attack=LONG, defense="mjp:gamma=0.1", client=c, image_id=f"{c}") for c in range(3)]
    rows += [make_row(attack="unsure", defense="mjp", diagnosis="no solution: " + 12 * "the system is singular, ")]
    reasons = {LONG: "takes about 30 s, beyond the budget of 10 s an update (--budget)"}
    out = write_run(tmp_path_factory.mktemp("run"), rows, not_run={"none": reasons, "mjp": reasons}, command="x" * 300)
    return render(out, [make_panel(), make_panel("none, round 1, client 0")])


@pytest.fixture(params=[(size, scheme) for size in WIDTHS for scheme in ("light", "dark")], ids="-".join)
def opened(request, browser, page_file):
    """The page, opened at one width in one colour scheme, with all that it asked for and complained of."""
    size, scheme = request.param
    width, height = WIDTHS[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(page_file.as_uri())
    for details in page.query_selector_all("details"):
        details.evaluate("element => element.open = true")
    yield page, messages, requests
    context.close()


def test_nothing_is_fetched_and_nothing_complains(opened, page_file) -> None:
    _, messages, requests = opened
    assert messages == []
    assert requests[0] == page_file.as_uri()
    assert all(address.startswith("data:image/png") for address in requests[1:])


def test_the_page_does_not_scroll_sideways(opened) -> None:
    page, _, _ = opened
    inner, whole = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
    assert whole <= inner
    # Wide tables scroll inside their own box, which the keyboard can reach.
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every(box => box.tabIndex === 0)")


def test_the_verdict_is_read_first(opened) -> None:
    page, _, _ = opened
    first = page.query_selector(".verdict p")
    assert first.inner_text().startswith("Leaks:")
    assert first.bounding_box()["y"] < page.viewport_size["height"] / 2
    colours = page.eval_on_selector_all(".verdict .chip", "chips => chips.map(c => getComputedStyle(c).color)")
    for colour in colours:
        red, green, blue = map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))
        assert green <= max(red, blue)


def test_no_rule_of_axe_is_broken(opened) -> None:
    """Contrast among them, in both colour schemes."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page, _, _ = opened
    found = axe.Axe().run(page).response
    broken = {rule["id"]: [node["html"][:120] for node in rule["nodes"]] for rule in found["violations"]}
    assert broken == {}
    assert "color-contrast" in {rule["id"] for rule in found["passes"]}
