import math

import numpy as np
import pytest
import torch
from scipy import stats

from attacks.registry import UsageError
from fedmjp.metrics import Interval, bootstrap_mean, bootstrap_statistic, intervals, t_interval
from fedmjp.metrics.intervals import bootstrap_quantile

SKEWED = np.random.default_rng(5).exponential(scale=10.0, size=60)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_agrees_with_scipy(confidence):
    ours = bootstrap_mean(SKEWED, confidence=confidence, resamples=20_000)
    scipys = stats.bootstrap(
        (SKEWED,), np.mean, confidence_level=confidence, n_resamples=20_000, method="percentile", rng=1
    )
    # Both use different random numbers: allow three standard errors of a quantile, each about 3 % of the mean's
    # standard deviation.
    tolerance = 0.1 * scipys.standard_error
    assert ours.mean == pytest.approx(SKEWED.mean())
    assert ours.low == pytest.approx(scipys.confidence_interval.low, abs=tolerance)
    assert ours.high == pytest.approx(scipys.confidence_interval.high, abs=tolerance)
    assert ours.count == 60


@pytest.mark.parametrize("at_once", [1, 7 * 60, 10**6])
def test_resamples_do_not_depend_on_how_many_are_held_at_a_time(monkeypatch, at_once):
    monkeypatch.setattr(intervals, "DRAWN", at_once)
    draws = np.random.default_rng(0).integers(0, 60, size=(500, 60))
    low, high = np.quantile(SKEWED[draws].mean(axis=1), [0.025, 0.975])
    assert bootstrap_mean(SKEWED, resamples=500) == Interval(SKEWED.mean(), low, high, 60)


MANY_VALUES = {
    "normal": lambda draw: draw.normal(30, 10, 12_000),
    "skewed": lambda draw: draw.lognormal(-4, 1, 12_000),  # as squared errors are
    "share": lambda draw: (draw.random(12_000) < 0.02).astype(float),
    "rare": lambda draw: (draw.random(12_000) < 0.0001).astype(float),  # too skewed for the limit: resampled
    "constant": lambda draw: np.full(12_000, 0.25),
}


@pytest.mark.parametrize("name", MANY_VALUES)
def test_of_many_values_the_limit_agrees_with_resampling(monkeypatch, name):
    values = MANY_VALUES[name](np.random.default_rng(1))
    drawn: list[int] = []
    resampled = intervals._resampled
    monkeypatch.setattr(intervals, "_resampled", lambda *given: drawn.append(given[2]) or resampled(*given))
    found = bootstrap_mean(values)
    assert drawn == ([2000] if name == "rare" else [])
    means = np.array([values[np.random.default_rng(s).integers(0, 12_000, 12_000)].mean() for s in range(2000)])
    tolerance = 0.18 * means.std() + 1e-12  # three standard errors of a quantile of 2000 means
    assert np.quantile(means, 0.025) == pytest.approx(found.low, abs=tolerance)
    assert np.quantile(means, 0.975) == pytest.approx(found.high, abs=tolerance)
    assert values.min() <= found.low <= found.mean <= found.high


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_quantiles_agree_with_scipy(quantile):
    def own(values, axis=-1):
        return np.quantile(values, quantile, axis=axis)

    ours = bootstrap_quantile(SKEWED, quantile, resamples=5_000)
    scipys = stats.bootstrap((SKEWED,), own, n_resamples=5_000, method="percentile", rng=1)
    assert ours.mean == pytest.approx(own(SKEWED))
    tolerance = 0.5 * scipys.standard_error  # quantiles of few values move in steps
    assert ours.low == pytest.approx(scipys.confidence_interval.low, abs=tolerance)
    assert ours.high == pytest.approx(scipys.confidence_interval.high, abs=tolerance)
    with pytest.raises(UsageError, match="quantile 2 lies outside"):
        bootstrap_quantile(SKEWED, 2)


def test_coverage_is_close_to_the_confidence():
    samples = np.random.default_rng(0).normal(3.0, 2.0, size=(300, 40))
    intervals = [bootstrap_mean(sample, resamples=500, seed=i) for i, sample in enumerate(samples)]
    covered = np.mean([interval.low <= 3.0 <= interval.high for interval in intervals])
    assert 0.90 < covered < 0.98


def test_values_that_are_not_finite_are_not_counted():
    with_gaps = np.insert(SKEWED, [0, 20, 60], [np.nan, np.inf, np.nan])
    assert bootstrap_mean(with_gaps) == bootstrap_mean(SKEWED)


def test_the_interval_of_one_value_has_length_zero_and_of_none_is_nan():
    assert bootstrap_mean([2.5, float("nan")]) == Interval(2.5, 2.5, 2.5, 1)
    nothing = bootstrap_mean([float("nan")])
    assert nothing.count == 0
    assert all(math.isnan(value) for value in (nothing.mean, nothing.low, nothing.high))
    assert bootstrap_mean([]).count == 0


def test_the_seed_determines_the_interval():
    assert bootstrap_mean(SKEWED, seed=4) == bootstrap_mean(SKEWED, seed=4)
    assert bootstrap_mean(SKEWED, seed=4).low != bootstrap_mean(SKEWED, seed=5).low


def test_takes_tensors_and_lists():
    values = torch.tensor(SKEWED, requires_grad=True)
    assert bootstrap_mean(values) == bootstrap_mean(SKEWED.tolist())


@pytest.mark.parametrize(
    "options", [{"confidence": 0.0}, {"confidence": 1.0}, {"confidence": 95.0}, {"resamples": 0}], ids=str
)
def test_invalid_options_raise(options):
    with pytest.raises(UsageError, match="confidence|resamples"):
        bootstrap_mean(SKEWED, **options)


def test_ratio_of_paired_means_agrees_with_scipy():
    generator = np.random.default_rng(0)
    first = generator.exponential(size=80)
    pairs = np.stack([first, 2 * first + 0.1 * generator.normal(size=80)], axis=1)
    value, low, high = bootstrap_statistic(pairs, lambda means: means[..., 1:] / means[..., :1], resamples=10_000)
    theirs = stats.bootstrap(
        (pairs[:, 0], pairs[:, 1]),
        lambda a, b, axis: b.mean(axis=axis) / a.mean(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=1,
    )
    assert value == pytest.approx([pairs[:, 1].mean() / pairs[:, 0].mean()])
    assert low == pytest.approx([theirs.confidence_interval.low], abs=0.1 * theirs.standard_error)
    assert high == pytest.approx([theirs.confidence_interval.high], abs=0.1 * theirs.standard_error)
    with pytest.raises(UsageError, match="0 images"):
        bootstrap_statistic(pairs[:0], lambda means: means)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_students_interval_agrees_with_scipy(confidence):
    values = SKEWED[:3]
    ours = t_interval([*values, math.nan], confidence)
    scipys = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    assert ours == pytest.approx((values.mean(), scipys.low, scipys.high, 3))


def test_students_interval_of_too_few_values():
    assert t_interval([2.0]) == Interval(2.0, -math.inf, math.inf, 1)
    assert t_interval([math.nan]).count == 0
    with pytest.raises(UsageError, match="outside"):
        t_interval([1.0, 2.0], 1.0)
