"""The thresholds of the statistics, and how they are calibrated from rounds of honest servers.

A statistic alarms above its threshold. The threshold is twice the largest value that was measured in calibration
rounds, but no further above it than half of what is left to the statistic's largest possible value, and no lower than
the statistic's own `least`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attacks.registry import UsageError
from fedmjp.detect.statistics import STATISTICS

MARGIN = 2.0

# From the calibration rounds of results/detect, by `benchmarks/detect.py` (a test computes them anew from its rows).
THRESHOLDS: dict[str, float] = {
    "row_norms": 0.509,
    "row_spread": 0.692,
    "dead_rows": 0.05,
    "bins": 0.2,
    "distance": 0.372,
    "bias_range": 0.3,
    "concentration": 0.765,
    "silent_images": 0.05,
}


def calibrate(honest: Mapping[str, Iterable[float | None]]) -> dict[str, float]:
    """The threshold of each statistic.

    Args:
        honest: by statistic, its values in calibration rounds; None for no statement.

    Returns:
        by statistic, rounded to three significant digits.

    Raises:
        UsageError: a statistic made no statement in any round.
    """
    found = {}
    for name, values in honest.items():
        stated = [value for value in values if value is not None]
        if not stated:
            raise UsageError(f"no calibration round has a value of {name}; pass rounds of which it makes a statement")
        statistic, largest = STATISTICS.get(name), max(stated)
        threshold = max(min(MARGIN * largest, (largest + statistic.most) / 2), statistic.least)
        found[name] = float(f"{threshold:.3g}")
    return found
