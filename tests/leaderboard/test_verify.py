"""Rows run again: what counts as a difference, and what rounding alone changes."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from fedmjp.leaderboard.verify import ROUNDINGS, Comparison, judge

EXACT = {"psnr": 100.0, "ssim": 1.0, "lpips": 0.0, "patch_recovery": 1.0}


def row(attack: str = "unmix", **figures: float) -> dict:
    return {"round": 1, "client": 0, "image_id": "photograph/0", "attack": attack, **EXACT, **figures}


def judged(given: list[dict], *runs: list[dict]) -> tuple[Comparison, list[int]]:
    """The comparison of rows with those of one run a number of threads, and the other numbers that were asked for."""
    asked, results = [], dict(zip(ROUNDINGS, runs[1:], strict=False))

    def again(rows: pd.DataFrame, threads: int) -> pd.DataFrame:
        asked.append(threads)
        return pd.DataFrame(results[threads])

    comparison = Comparison()
    judge(pd.DataFrame(given), pd.DataFrame(runs[0]), again, "here", comparison)
    return comparison, asked


def test_equal_rows_are_run_once() -> None:
    nan = math.nan
    comparison, asked = judged([row(), row("dlg", psnr=nan)], [row(psnr=63.0, lpips=0.04), row("dlg", psnr=nan)])
    assert (comparison.differences, comparison.undetermined, asked) == ([], [], [])
    assert comparison.compared == 2


@pytest.mark.parametrize(
    ("given", "found", "undetermined"),
    [
        ({"psnr": 33.0}, [24.0, 18.0, 14.0], True),  # rounding decides, and the submission shows more leakage
        ({"psnr": 20.0}, [24.0, 18.0, 14.0], True),
        ({"psnr": 12.0}, [24.0, 18.0, 14.0], False),  # less leakage than every run
        ({"psnr": 33.0}, [24.0, 24.2, 24.1], False),  # the figure is stable, and another one
        ({"psnr": 33.0}, [24.0, math.nan, 14.0], False),
        ({"psnr": math.nan}, [24.0, 18.0, 14.0], False),
    ],
)
def test_a_row_that_differs_is_excused_only_where_rounding_changes_it(given, found, undetermined: bool) -> None:
    comparison, asked = judged([row(**given)], *([row(psnr=psnr)] for psnr in found))
    assert asked == [*ROUNDINGS]
    assert (len(comparison.undetermined), len(comparison.rows)) == (undetermined, undetermined)
    assert len(comparison.differences) == 1 - undetermined
    (line,) = comparison.undetermined + comparison.differences
    assert line.startswith("here, round 1, client 0, photograph/0, unmix: psnr is ")
    assert f"and {found[0]:.3f}, " in line


def test_low_lpips_is_more_leakage() -> None:
    runs = [[row(lpips=lpips)] for lpips in (0.2, 0.5, 0.3)]
    assert len(judged([row(lpips=0.01)], *runs)[0].undetermined) == 1
    assert len(judged([row(lpips=0.9)], *runs)[0].differences) == 1


def test_rows_that_are_missing_and_guesses_that_differ_are_differences() -> None:
    comparison, asked = judged([row("mean_image", psnr=12.0)], [row("mean_image", psnr=14.0)])
    assert len(comparison.differences) == 1
    assert asked == []  # nothing that an attack computes
    comparison, _ = judged([row(), row("dlg")], [row()], [row()], [row()])
    assert comparison.differences == ["here, round 1, client 0, photograph/0, dlg: no such row when run again"]


def test_rows_that_a_submission_lacks_are_differences() -> None:
    """Of an attack, and of a photograph; the round of a row does not matter."""
    other = {"image_id": "photograph/1"}
    comparison, asked = judged([row("dlg")], [row("dlg"), row("dlg") | {"round": 2}, row(), row("dlg") | other])
    assert comparison.differences == [
        "here, client 0, photograph/0, unmix: the submission lacks this row",
        "here, client 0, photograph/1, dlg: the submission lacks this row",
    ]
    assert asked == []


@pytest.mark.parametrize(("given", "found"), [(16.0, [15.0, 40.0]), (math.nan, [math.nan, 40.0])])
def test_the_row_of_a_round_that_leaks_less_than_another_is_a_difference(given: float, found: list[float]) -> None:
    again = [row("fishing", psnr=psnr) | {"round": number} for number, psnr in enumerate(found, 1)]
    comparison, _ = judged([row("fishing", psnr=given)], *[again] * 3)
    (line,) = comparison.differences
    assert line.endswith("higher in another round when run again")
    best = judged([row("fishing", psnr=40.0) | {"round": 2}], *[again] * 3)[0]
    assert best.differences == []
