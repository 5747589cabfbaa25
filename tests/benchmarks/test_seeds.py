"""Tables over seeds: paired differences against SciPy, verdicts, and what the Markdown shows."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from experiments.trainings.seeds import (
    change_cell,
    difference_cell,
    difference_points,
    markdown,
    mean_cell,
    mean_over_seeds,
    paired_difference,
    ratio_curves,
    seed_count,
    seeds_table,
)
from experiments.trainings.verdicts import established, p_value, signs_in_words, with_verdicts
from matplotlib.figure import Figure
from scipy import stats

NAN = math.nan


def rows(accuracy: dict[str, list[float]], gammas: tuple[float, ...] = (0.0, 0.5)) -> pd.DataFrame:
    """Rows of trainings whose every score is `accuracy` plus a hundredth of the masking ratio."""
    found = []
    for line, values in accuracy.items():
        for seed, value in enumerate(values):
            for gamma in gammas:
                row = {"line": line, "model": "vit", "defense": "none", "seed": seed, "gamma": gamma}
                for score in ("accuracy", "diff_norm", "diff_share", "consistency"):
                    at = value + gamma / 100
                    row |= {score: at, f"{score}_low": at - 2, f"{score}_high": at + 4}
                found.append(row)
    return pd.DataFrame(found)


def test_differences_are_scipys_paired_ones() -> None:
    rng = np.random.default_rng(0)
    plain, other = rng.normal(40, 3, 3), rng.normal(42, 3, 3)
    # Rows come in any order of seeds.
    table = seeds_table(rows({"A": list(plain), "E": list(other)}).sample(frac=1, random_state=1), {"E": "A"}, {})
    own = table.set_index(["line", "metric"]).loc[("E", "accuracy")]
    paired = stats.ttest_rel(other, plain)
    assert own["difference_mean"] == pytest.approx((other - plain).mean())
    assert (own["difference_low"], own["difference_high"]) == pytest.approx(tuple(paired.confidence_interval(0.95)))
    single = stats.ttest_1samp(other, 0).confidence_interval(0.95)
    assert (own["value_low"], own["value_high"]) == pytest.approx((single.low, single.high))
    assert own["one_seed_margin"] == pytest.approx(3)
    assert own["seeds"] == 3
    assert own["verdict"] == ""


def test_a_metric_that_rows_lack_is_left_out() -> None:
    """Of a line that has it not, cells are empty; of a table without it, so are the columns missing."""
    measured = rows({"A": [50, 51, 52], "J": [50, 52, 53]})
    assert "diff_norm_root" not in set(seeds_table(measured, {"J": "A"}, {})["metric"])
    plain = measured["line"] == "A"
    for end, shift in (("", 0), ("_low", -1), ("_high", 1)):
        measured[f"diff_norm_root{end}"] = (measured["accuracy"] + shift).where(plain)
    table = seeds_table(measured, {"J": "A"}, {})
    assert table[table["metric"] == "diff_norm_root"]["line"].tolist() == ["A"]
    shown = markdown(table, ("accuracy", "diff_norm_root", "consistency"))
    assert "not squared" in shown.splitlines()[0]
    assert shown.splitlines()[3].split("|")[4:6] == ["  ", "  "]
    without = markdown(table[table["metric"] != "diff_norm_root"], ("accuracy", "diff_norm_root"))
    assert "not squared" not in without


def test_seeds_that_one_line_lacks_are_left_out() -> None:
    table = seeds_table(rows({"A": [40.0, 41.0, 42.0], "E": [41.0, 42.5]}), {"E": "A"}, {"A": {}, "E": {}})
    own = table.set_index(["line", "metric"]).loc[("E", "accuracy")]
    assert own["difference_mean"] == pytest.approx(1.25)
    assert own["seeds"] == 2


def test_consistency_stands_at_one_half_and_accuracy_at_none() -> None:
    table = seeds_table(rows({"A": [40.0]}), {}, {}).set_index("metric")["value_mean"]
    assert table["accuracy"] == 40
    assert table["consistency"] == pytest.approx(40.005)


@pytest.mark.parametrize(
    ("paper", "differences", "expected"),
    [
        (0.5, [1.0, 1.1, 0.9], "agrees"),
        (-0.5, [-1.0, -1.1, -0.9], "agrees"),
        (0.5, [-1.0, -1.1, -0.9], "contradicts"),
        (0.0, [1.0, 1.1, 0.9], "contradicts"),
        (0.5, [1.0, 3.0, -1.0], "cannot tell"),
        (0.5, [0.0, 0.0, 0.0], "cannot tell"),
        (0.5, [2.0, 2.0, 2.0], "agrees"),
        (0.5, [1.0, 1.0], "cannot tell"),
        (0.5, [1.0, 1.1, NAN], "cannot tell"),
        (NAN, [1.0, 1.1, 0.9], ""),
    ],
)
def test_verdicts(paper: float, differences: list[float], expected: str) -> None:
    own, other = pd.Series(differences), pd.Series([0.0] * len(differences))
    assert with_verdicts(pd.DataFrame([paired_difference(own, other, paper)]))["verdict"].tolist() == [expected]


@pytest.mark.parametrize("seed", range(5))
def test_signs_are_established_as_the_closed_test_does(seed: int) -> None:
    """Holm's procedure is the closure of Bonferroni's: a sign counts if every set of signs with it is rejected."""
    rng = np.random.default_rng(seed)
    values = rng.normal(rng.exponential(3, (8, 1)), 1, (8, 4))
    found = np.array([p_value(own) for own in values])
    assert found == pytest.approx([stats.ttest_1samp(own, 0).pvalue for own in values])
    sets = [list(one) for size in range(1, 9) for one in combinations(range(8), size)]
    rejected = {tuple(one): found[one].min() <= 0.05 / len(one) for one in sets}
    closed = [all(verdict for one, verdict in rejected.items() if sign in one) for sign in range(8)]
    assert 0 < sum(closed) < 8
    assert established(np.append(found, NAN)).tolist() == [*closed, False]


def test_holms_procedure_by_hand() -> None:
    """The step-down bars of four are 0.0125, 0.0167, 0.025, 0.05; the first that fails ends it."""
    assert established(np.array([0.04, 0.012, 0.016, 0.026])).tolist() == [False, True, True, False]
    assert established(np.array([0.04])).tolist() == [True]
    assert established(np.array([NAN])).tolist() == [False]


def test_the_more_signs_a_table_has_the_more_each_needs() -> None:
    several = [paired_difference(pd.Series([1.0, 2.0, 1.2]), pd.Series([0.0, 0.0, 0.0]), 1.0)] * 3
    assert with_verdicts(pd.DataFrame(several[:1]))["verdict"].tolist() == ["agrees"]
    table = with_verdicts(pd.DataFrame(several))
    assert set(table["verdict"]) == {"cannot tell"}
    assert signs_in_words(table).startswith("3 signs were tested together at 5 %")
    assert signs_in_words(table[:1]).startswith("One sign was tested at 5 %;")
    assert signs_in_words(table.assign(paper_difference=NAN)) == ""


def test_no_verdict_on_two_seeds() -> None:
    """Two equal differences make an interval without width."""
    table = seeds_table(
        rows({"A": [40.0, 41.0], "E": [41.0, 42.0]}), {"E": "A"}, {"A": {"accuracy": 70.0}, "E": {"accuracy": 71.0}}
    )
    own = table.set_index(["line", "metric"]).loc[("E", "accuracy")]
    assert own["difference_low"] == own["difference_high"] == 1
    assert own["verdict"] == "cannot tell"


def test_markdown_and_figures() -> None:
    found = rows({"A": [40.0, 41.0, 42.0], "E": [41.0, 42.1, 43.0]})
    table = seeds_table(found, {"E": "A"}, {"A": {"accuracy": 79.8}, "E": {"accuracy": 79.2}})
    text = markdown(table, ("accuracy", "diff_norm"), {"E": "A + JP"}, {"step": {"E": "1.02"}})
    last = text.splitlines()[3]
    assert last.startswith("| E: A + JP | 42.0 [")
    assert "] (79.2) |" in last
    assert "(paper -0.6: contradicts)" in last
    assert last.endswith("| 1.02 |")
    assert "Means over 3 seeds" in text
    assert "± 3.0 points" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    panels = Figure().subplots(1, 2)
    ratio_curves(panels[0], found, "accuracy", {"A": "plain", "E": "jigsawed"})
    difference_points(panels[1], table, "accuracy", {"E": "A + JP"})
    assert panels[0].get_legend_handles_labels()[1] == ["plain", "jigsawed"]
    assert panels[1].get_legend_handles_labels()[1] == ["paper (ImageNet-1k)", "ours"]


def test_cells_are_over_seeds_or_say_that_there_is_one() -> None:
    several, other = pd.Series([40.0, 41.0, 42.0]), pd.Series([38.0, 38.5, 40.0])
    row = pd.Series(mean_over_seeds("accuracy", several) | paired_difference(several, other, 1.8))
    row = with_verdicts(row.to_frame().T).iloc[0]
    assert mean_cell(row, "accuracy") == "41.0 [38.5, 43.5]"
    assert change_cell(row) == "+2.2 [+1.4, +2.9]"
    assert difference_cell(row) == "+2.2 [+1.4, +2.9] (paper +1.8: agrees)"
    margins = {"one_seed_margin": 2.0, "difference_margin": 2.8}
    single = mean_over_seeds("accuracy", several[:1]) | paired_difference(several[:1], other) | margins
    single = with_verdicts(pd.DataFrame([single])).iloc[0]
    assert mean_cell(single, "accuracy") == "40.0 ± 2.0 (one seed)"
    assert difference_cell(single) == change_cell(single) == "+2.0 ± 2.8"
    alone = pd.Series(mean_over_seeds("accuracy", several))
    assert change_cell(alone) == difference_cell(alone) == ""
    assert [seed_count(seeds) for seeds in ([1], [3, 3], [1, 3])] == ["1 seed", "3 seeds", "1 to 3 seeds"]
