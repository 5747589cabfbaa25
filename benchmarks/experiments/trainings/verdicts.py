"""Whether differences over seeds have the signs that a paper reports, all signs of a table tested together.

The verdict on a difference is "agrees" or "contradicts" where its sign is established, and "cannot tell" otherwise,
also where there are fewer than three seeds. A paper's difference of 0 can only be contradicted. A sign is established
by Student's two-sided test of the paired differences after the step-down correction of Holm (A Simple Sequentially
Rejective Multiple Test Procedure, 1979): the chance that the luck of seeds alone makes any of a table's words wrong is
at most `LEVEL`. Intervals are not corrected, so that one may exclude 0 where the word is "cannot tell".
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.05
LEAST_SEEDS = 3
AGREES, CONTRADICTS, UNDECIDED = "agrees", "contradicts", "cannot tell"


def p_value(differences: np.ndarray) -> float:
    """Student's two-sided p of a mean difference of 0, of one value a seed; NaN for fewer than `LEAST_SEEDS`."""
    values = differences[np.isfinite(differences)]
    if len(values) < LEAST_SEEDS:
        return float("nan")
    if np.ptp(values) == 0:  # two shares of the same images are often equal to the last digit
        return float(values[0] == 0)
    return float(stats.ttest_1samp(values, 0).pvalue)


def established(p_values: np.ndarray) -> np.ndarray:
    """(n,) bool: the hypotheses that Holm's step-down procedure rejects at `LEVEL`; NaN is not tested."""
    tested = np.flatnonzero(~np.isnan(p_values))
    order = tested[np.argsort(p_values[tested], kind="stable")]
    bars = LEVEL / np.arange(len(order), 0, -1)
    passed = np.logical_and.accumulate(p_values[order] <= bars)
    found = np.zeros(len(p_values), dtype=bool)
    found[order[passed]] = True
    return found


def with_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its column `verdict`, "" in lines without a paper's difference.

    Args:
        table: with columns difference_mean, difference_p (`p_value`) and paper_difference (NaN where the paper gives
            none); a table without differences is returned as it is.
    """
    if "difference_p" not in table:
        return table
    printed = table["paper_difference"].notna() & table["difference_mean"].notna()
    found = established(table["difference_p"].where(printed).to_numpy(float))
    same = table["paper_difference"] * table["difference_mean"] > 0
    words = np.where(found, np.where(same, AGREES, CONTRADICTS), UNDECIDED)
    return table.assign(verdict=np.where(printed, words, ""))


def signs_in_words(table: pd.DataFrame) -> str:
    """How many signs lie behind the words of a table of `with_verdicts`, a sentence; "" where none was tested."""
    if "difference_p" not in table:
        return ""
    count = int((table["difference_p"].notna() & table["paper_difference"].notna()).sum())
    if not count:
        return ""
    signs = "One sign was tested" if count == 1 else f"{count} signs were tested together"
    correction = "" if count == 1 else ", corrected by Holm's procedure"
    return (
        f"{signs} at {100 * LEVEL:g} %{correction}; brackets are not corrected and may exclude 0 beside *{UNDECIDED}*."
    )
