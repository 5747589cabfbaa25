"""Tables over seeds: paired differences against SciPy, verdicts, and what the Markdown shows."""

from __future__ import annotations

import math

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
    verdict,
)
from matplotlib.figure import Figure
from scipy import stats

from fedmjp.metrics import Interval

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
    ("paper", "low", "high", "expected"),
    [
        (0.5, 0.1, 2.0, "agrees"),
        (-0.5, -2.0, -0.1, "agrees"),
        (0.5, -2.0, -0.1, "contradicts"),
        (-0.5, 0.1, 2.0, "contradicts"),
        (0.0, 0.1, 2.0, "contradicts"),
        (0.5, -0.1, 2.0, "cannot tell"),
        (0.5, 0.0, 0.0, "cannot tell"),
        (0.0, -1.0, 1.0, "cannot tell"),
        (0.5, -math.inf, math.inf, "cannot tell"),
        (NAN, 0.1, 2.0, ""),
    ],
)
def test_verdicts(paper: float, low: float, high: float, expected: str) -> None:
    assert verdict(paper, Interval((low + high) / 2, low, high, 3)) == expected


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
    assert mean_cell(row, "accuracy") == "41.0 [38.5, 43.5]"
    assert change_cell(row) == "+2.2 [+1.4, +2.9]"
    assert difference_cell(row) == "+2.2 [+1.4, +2.9] (paper +1.8: agrees)"
    margins = {"one_seed_margin": 2.0, "difference_margin": 2.8}
    single = pd.Series(mean_over_seeds("accuracy", several[:1]) | paired_difference(several[:1], other) | margins)
    assert mean_cell(single, "accuracy") == "40.0 ± 2.0 (one seed)"
    assert difference_cell(single) == change_cell(single) == "+2.0 ± 2.8"
    alone = pd.Series(mean_over_seeds("accuracy", several))
    assert change_cell(alone) == difference_cell(alone) == ""
    assert [seed_count(seeds) for seeds in ([1], [3, 3], [1, 3])] == ["1 seed", "3 seeds", "1 to 3 seeds"]
