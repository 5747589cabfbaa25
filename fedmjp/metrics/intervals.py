"""Means with confidence intervals: bootstrap for many values, Student's t for a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats
from torch import Tensor

from attacks.registry import UsageError


class Interval(NamedTuple):
    """A mean, its confidence interval [low, high], and the number of values."""

    mean: float
    low: float
    high: float
    count: int


def bootstrap_mean(
    values: Sequence[float] | np.ndarray | Tensor, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the mean (Efron 1979).

    Args:
        values: (n,) numbers; NaN and infinities are dropped and not counted.
        confidence: in (0, 1).
        resamples: number of bootstrap samples, at least 1.
        seed: of the bootstrap.

    Returns:
        The interval; NaN with count 0 if no value is left. The interval of a single value has length 0.

    Raises:
        UsageError: `confidence` outside (0, 1), or `resamples` below 1.
    """
    return _bootstrap(values, lambda draws: draws.mean(axis=-1), confidence, resamples, seed)


def bootstrap_quantile(
    values: Sequence[float] | np.ndarray | Tensor,
    quantile: float,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a quantile; `mean` of the result holds the quantile itself.

    Of few values the interval of an outer quantile is too narrow: it never exceeds the largest value seen.

    Args:
        quantile: in [0, 1], between values by linear interpolation.
        values, confidence, resamples, seed: see `bootstrap_mean`.

    Raises:
        UsageError: see `bootstrap_mean`, or `quantile` outside [0, 1].
    """
    if not 0 <= quantile <= 1:
        raise UsageError(f"quantile {quantile} lies outside [0, 1]")
    return _bootstrap(values, lambda draws: np.quantile(draws, quantile, axis=-1), confidence, resamples, seed)


def _bootstrap(
    values: Sequence[float] | np.ndarray | Tensor,
    statistic: Callable[[np.ndarray], np.ndarray],
    confidence: float,
    resamples: int,
    seed: int,
) -> Interval:
    """`statistic` (over the last axis) of the finite values, and its percentile interval."""
    if not 0 < confidence < 1:
        raise UsageError(f"confidence {confidence} lies outside (0, 1)")
    if resamples < 1:
        raise UsageError(f"resamples {resamples} is below 1")
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if len(finite) == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    draws = np.random.default_rng(seed).integers(0, len(finite), size=(resamples, len(finite)))
    low, high = np.quantile(statistic(finite[draws]), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(statistic(finite)), float(low), float(high), len(finite))


def bootstrap_statistic(
    table: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Percentile bootstrap intervals of functions of means, such as ratios and paired differences.

    Args:
        table: (n, K), one row per image. Whole rows are resampled, so that measurements of the same image stay paired.
        statistic: maps means (..., K) to values (..., M).
        confidence: in (0, 1).
        resamples: number of bootstrap samples, at least 1.
        seed: of the bootstrap.

    Returns:
        The value, and the lower and upper end of its interval, (M,) each.

    Raises:
        UsageError: `confidence` outside (0, 1), `resamples` below 1, or no rows.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"confidence {confidence} lies outside (0, 1)")
    if resamples < 1 or len(table) == 0:
        raise UsageError(f"{resamples} resamples of {len(table)} images; both must be at least 1")
    generator, count = np.random.default_rng(seed), len(table)
    drawn = (np.bincount(generator.integers(0, count, count), minlength=count) for _ in range(resamples))
    means = np.stack([times @ table / count for times in drawn])  # (resamples, K)
    low, high = np.quantile(statistic(means), [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return statistic(table.mean(axis=0)), low, high


def t_interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of a few independent values, such as one per seed.

    For three values it extends 4.3 standard errors to each side. It assumes a normal distribution, which cannot be
    verified with three values.

    Args:
        values: (n,) numbers; NaN and infinities are dropped and not counted.
        confidence: in (0, 1).

    Returns:
        The interval; NaN with count 0 if no value is left, and an interval from -inf to inf for a single value.

    Raises:
        UsageError: `confidence` outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise UsageError(f"confidence {confidence} lies outside (0, 1)")
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    count = len(finite)
    if count == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    if count == 1:
        return Interval(float(finite[0]), float("-inf"), float("inf"), 1)
    reach = stats.t.ppf((1 + confidence) / 2, count - 1) * finite.std(ddof=1) / np.sqrt(count)
    return Interval(float(finite.mean()), float(finite.mean() - reach), float(finite.mean() + reach), count)


def wilson(share: np.ndarray, count: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 95 % interval of shares in [0, 1] of `count` independent cases (Wilson 1927)."""
    z = 1.959964
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return middle - reach, middle + reach
