"""The list of slow tests: made from a report, and of tests that there are."""

from __future__ import annotations

import re
import sys

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.durations import ROOT, main, measured, slow_tests

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_probe" name="test_fast" time="0.2"/>
<testcase classname="tests.test_probe" name="test_slow[a b]" time="1.5"/>
<testcase classname="tests.docs.test_docs" name="test_skipped" time="0.0"><skipped/></testcase>
<testcase classname="tests.docs.test_docs" name="test_skipped_too" time="0.0"><skipped/></testcase>
<testcase classname="tests.docs.test_docs.TestPage" name="test_it" time="12"/>
</testsuite></testsuites>"""


def test_slow_tests_are_listed_and_skipped_ones_stay(tmp_path) -> None:
    (tmp_path / "times.xml").write_text(REPORT)
    before = {"tests/docs/test_docs.py::test_skipped", "tests/test_probe.py::test_fast", "tests/gone.py::test_gone"}
    assert measured(tmp_path / "times.xml", before) == [
        "tests/docs/test_docs.py::TestPage::test_it",
        "tests/docs/test_docs.py::test_skipped",
        "tests/test_probe.py::test_slow[a b]",
    ]


def test_every_listed_test_exists() -> None:
    sources: dict[str, str] = {}
    assert len(slow_tests()) > 50
    for name in slow_tests():
        file, *_, test = name.split("::")
        text = sources.setdefault(file, (ROOT / file).read_text() if (ROOT / file).is_file() else "")
        assert re.search(rf"def {re.escape(test.partition('[')[0])}\(", text), (
            f"{name} is no more: see tests/durations.py"
        )


def test_listed_tests_are_marked_and_their_files_come_first(request) -> None:
    """What the tests of this run were given when they were collected."""
    items = request.session.items
    listed = slow_tests()
    marked = {item.nodeid for item in items if item.get_closest_marker("slow")}
    assert marked == {item.nodeid for item in items if item.nodeid in listed}
    own = next(item for item in items if item.nodeid.endswith("test_a_missing_report_is_one_line"))
    assert not own.get_closest_marker("slow")
    pytest_collection_modifyitems(twice := [own, replica(own, sorted(listed)[0])])
    assert twice[1] is own
    assert twice[0].get_closest_marker("slow")


def replica(item: pytest.Item, name: str) -> pytest.Function:
    """The same test under another name, in a file of its own."""
    file, _, test = name.partition("::")
    module = pytest.Module.from_parent(item.session, path=ROOT / file)
    return pytest.Function.from_parent(module, name=test, callobj=item.obj)


def test_a_missing_report_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["durations", str(tmp_path / "none.xml")])
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1
