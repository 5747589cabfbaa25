"""Means with confidence intervals: bootstrap for many values, Student's t for a few."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import stats
from torch import Tensor

from attacks.registry import UsageError

MANY = 10_000  # values, from which on the interval of a mean is the limit that the bootstrap tends to
MOST_SKEWED = 0.3  # skewness of the mean up to which that limit is taken
DRAWN = 2**20  # values that are resampled at a time


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

    From `MANY` values on, where resampling takes seconds, the interval is the limit of many resamples: the
    Cornish-Fisher expansion of the bootstrap distribution to the order of its skewness (Hall, The Bootstrap and
    Edgeworth Expansion, 1992, section 2.5), whose error is below that of 2000 resamples. Means that are more skewed
    than `MOST_SKEWED` are resampled all the same.

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
    return _bootstrap(values, lambda draws: draws.mean(axis=-1), confidence, resamples, seed, limit=_limit_of_mean)


def _limit_of_mean(values: np.ndarray, tails: np.ndarray) -> np.ndarray | None:
    """Quantiles `tails` of the bootstrap distribution of a mean, or None where they have to be resampled."""
    if len(values) < MANY:
        return None
    mean, deviation = values.mean(), values.std()
    if deviation == 0:
        return np.full(len(tails), mean)
    skewness = (((values - mean) / deviation) ** 3).mean() / np.sqrt(len(values))
    if abs(skewness) > MOST_SKEWED:
        return None
    normal = stats.norm.ppf(tails)
    expanded = mean + deviation / np.sqrt(len(values)) * (normal + skewness / 6 * (normal**2 - 1))
    return expanded.clip(values.min(), values.max())


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
    limit: Callable[[np.ndarray, np.ndarray], np.ndarray | None] = lambda values, tails: None,
) -> Interval:
    """`statistic` (over the last axis) of the finite values, and its percentile interval.

    Args:
        limit: quantiles of the statistic's bootstrap distribution from (values, shares), or None for resampling.
    """
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
    tails = np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    bounds = limit(finite, tails)
    if bounds is None:
        bounds = np.quantile(_resampled(finite, statistic, resamples, seed), tails)
    low, high = bounds
    return Interval(float(statistic(finite)), float(low), float(high), len(finite))


def _resampled(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], resamples: int, seed: int
) -> np.ndarray:
    """(resamples,) `statistic` of values drawn with replacement; no more than about `DRAWN` are held at a time."""
    if resamples * len(values) <= DRAWN:
        return statistic(values[_drawn_once(len(values), resamples, seed)])
    return np.concatenate([statistic(values[draws]) for draws in _draws(len(values), resamples, seed)])


def _draws(count: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of `count` values, (resamples, count) in all, in parts of about `DRAWN`."""
    generator, at_once = np.random.default_rng(seed), max(1, DRAWN // count)
    for start in range(0, resamples, at_once):
        yield generator.integers(0, count, size=(min(at_once, resamples - start), count))


@lru_cache(maxsize=4)
def _drawn_once(count: int, resamples: int, seed: int) -> np.ndarray:
    """All of `_draws`, kept for the next values: one table has many means over as many images."""
    (draws,) = _draws(count, resamples, seed)
    return draws


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
