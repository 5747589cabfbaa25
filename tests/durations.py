"""Which tests are slow, as it was measured: `slow_tests.txt` lists those that took `LEAST` seconds and more.

    make test ARGS=--junitxml=times.xml && .venv/bin/python -m tests.durations times.xml

writes the list anew, best where nothing else runs. A test that was skipped stays as it was; one that did not run is
dropped. `conftest.py` gives the marker `slow` to the tests of the list.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("slow_tests.txt")
LEAST = 0.3  # seconds of set-up, call and tear-down


def slow_tests() -> set[str]:
    """Names of the listed tests, as pytest gives them."""
    return set(LIST.read_text(encoding="utf-8").splitlines()) if LIST.exists() else set()


def measured(report: Path, before: set[str], root: Path = ROOT) -> list[str]:
    """The list after a run of `make test`, sorted.

    Args:
        report: what `--junitxml` wrote.
        before: the list so far.
        root: files of tests are looked for here.
    """
    found = set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = name_of(case.get("classname", ""), case.get("name", ""), root)
        skipped = case.find("skipped") is not None
        if name in before if skipped else float(case.get("time", 0)) >= LEAST:
            found.add(name)
    return sorted(found)


def name_of(classname: str, test: str, root: Path) -> str:
    """`tests.room.test_file.TestClass`, `test_x[y]` -> `tests/room/test_file.py::TestClass::test_x[y]`."""
    parts = classname.split(".")
    for length in range(len(parts), 0, -1):
        path = Path(*parts[:length]).with_suffix(".py")
        if (root / path).is_file():
            return "::".join([path.as_posix(), *parts[length:], test])
    return "::".join([classname, test])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="what make test ARGS=--junitxml=FILE wrote")
    report = parser.parse_args().report
    if not report.is_file():
        print(f"error: no file {report}; run make test ARGS=--junitxml={report} first", file=sys.stderr)
        return 2
    names = measured(report, slow_tests())
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{len(names)} tests of {LEAST:g} s and more: {LIST.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
