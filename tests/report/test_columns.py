"""One naming of columns in every CSV file, and the page that lists them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedmjp.report.columns import COUNTS, KEYS, QUANTITIES, STATISTICS, check_columns, split_column

ROOT = Path(__file__).resolve().parent.parent.parent
COMMITTED = sorted([*(ROOT / "results").rglob("*.csv"), *(ROOT / "benchmarks" / "paper").glob("*.csv")])


def header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_committed_table_names_its_columns_alike(path: Path) -> None:
    check_columns(header(path))


def test_no_name_is_kept_that_no_table_has() -> None:
    used = {split_column(column)[0].removeprefix("paper_") for path in COMMITTED for column in header(path)}
    assert {name for name in (*KEYS, *COUNTS, *QUANTITIES) if name not in used} == set()
    statistics = {split_column(column)[1] for path in COMMITTED for column in header(path)}
    assert statistics == {"", *STATISTICS}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["model", "mean", "low", "high"], "no table has a column 'mean'"),
        (["batch"], "no table has a column 'batch'"),
        (["accuracy", "accuracy_low", "accuracy_high"], "stands without accuracy_mean"),
        (["psnr_mean", "psnr_low"], "psnr_low stands without psnr_mean and psnr_high"),
        (["ratio", "ratio_q25", "ratio_q75"], "stands without ratio_median"),
        (["model", "model"], "two columns of one name"),
        (["difference_of_psnr"], "no table has a column"),
    ],
)
def test_another_naming_is_refused(columns: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_columns(columns)


def test_a_column_is_a_quantity_and_a_statistic() -> None:
    assert split_column("psnr_first_decile") == ("psnr", "first_decile")
    assert split_column("entropy_difference_low") == ("entropy_difference", "low")
    assert split_column("paper_mce") == ("paper_mce", "")
    assert split_column("error_severity_3") == ("error", "severity_3")
    assert split_column("certified") == ("certified", "")
