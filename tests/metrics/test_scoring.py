"""Tests that hold for all metrics, from one table of cases: shape, batching, order, direction and errors."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from attacks.registry import UsageError
from fedmjp import metrics
from fedmjp.metrics import METRIC_DIRECTIONS, load_lpips, score

KEYS = ["mse", "psnr", "ssim", "fft2d", "fft2d_official", "lpips", "patch_recovery"]
METRICS = {
    "mse": metrics.mse,
    "psnr": metrics.psnr,
    "ssim": metrics.ssim,
    "fft2d": metrics.fft2d,
    "fft2d_official": metrics.fft2d_official,
    "patch_recovery": lambda rec, orig: metrics.patch_recovery(rec, orig, 16),
}
# A score of every results row that no table has as a column.
SCORES = METRICS | {"any_place": lambda rec, orig: metrics.any_place(rec, orig, 16)}
each_metric = pytest.mark.parametrize("metric", SCORES.values(), ids=SCORES)


@each_metric
def test_a_batch_has_the_scores_of_its_images_one_by_one(metric, noisy, photographs):
    together = metric(noisy, photographs)
    apart = torch.cat([metric(noisy[i : i + 1], photographs[i : i + 1]) for i in range(3)])
    assert together.shape == (3,)
    assert together.dtype == torch.float32
    np.testing.assert_allclose(together, apart, rtol=1e-6)


@each_metric
def test_scores_follow_a_permutation_of_the_batch(metric, noisy, photographs):
    order = [2, 0, 1]
    permuted = metric(noisy[order], photographs[order])
    np.testing.assert_allclose(permuted, metric(noisy, photographs)[order], rtol=1e-6)
    assert not torch.allclose(permuted, metric(noisy, photographs))


@each_metric
def test_scores_have_no_gradient_and_images_are_unchanged(metric, noisy, photographs):
    rec, before = noisy.clone().requires_grad_(), photographs.clone()
    assert not metric(rec, photographs).requires_grad
    assert torch.equal(rec.detach(), noisy)
    assert torch.equal(photographs, before)


@each_metric
def test_wrong_pairs_are_refused(metric, photographs):
    for wrong, reason in (
        (photographs[:2], "differ"),
        (photographs[:, :1], "differ"),
        (photographs[0], "B, C, H, W"),
        (photographs[:0], "non-empty"),
        ((photographs * 255).byte(), "uint8"),
        (photographs.to("meta"), "meta"),
    ):
        with pytest.raises(UsageError, match=reason):
            metric(wrong, photographs)
        with pytest.raises(UsageError, match=reason):
            metric(photographs, wrong)


@each_metric
def test_an_empty_batch_is_refused(metric, photographs):
    with pytest.raises(UsageError, match="non-empty"):
        metric(photographs[:0], photographs[:0])


@pytest.mark.parametrize("name", [name for name in METRICS if name != "patch_recovery"])
def test_a_nan_in_a_reconstruction_affects_its_own_score_only(name, noisy, photographs):
    broken = noisy.clone()
    broken[1, 0, 40, 40] = float("nan")
    assert torch.isnan(METRICS[name](broken, photographs)).tolist() == [False, True, False]


def test_a_nan_patch_is_not_recovered(photographs):
    broken = photographs.clone()
    broken[:, 0, 40, 40] = float("nan")
    np.testing.assert_allclose(metrics.patch_recovery(broken, photographs, 16), np.full(3, 35 / 36), rtol=1e-6)


def test_score_is_every_metric_in_the_order_of_the_table(noisy, photographs):
    scores = score(noisy, photographs, patch_size=16)
    assert list(scores) == list(METRIC_DIRECTIONS) == KEYS
    for name, metric in METRICS.items():
        assert torch.equal(scores[name], metric(noisy, photographs)), name
    assert torch.isnan(scores["lpips"]).tolist() == [True, True, True]


def test_score_with_lpips(noisy, photographs, lpips_weights):
    lpips = load_lpips("squeeze", lpips_weights)
    assert torch.equal(score(noisy, photographs, patch_size=16, lpips=lpips)["lpips"], lpips(noisy, photographs))
    small = score(noisy[..., :16, :16], photographs[..., :16, :16], patch_size=16, lpips=lpips)
    assert torch.isnan(small["lpips"]).all()
    assert torch.isfinite(small["ssim"]).all()


def test_small_images_have_all_scores_but_ssim(noisy, photographs):
    scores = score(noisy[..., :8, :8], photographs[..., :8, :8], patch_size=4)
    undefined = {name for name, values in scores.items() if torch.isnan(values).any()}
    assert undefined == {"ssim", "lpips"}


def test_noise_changes_the_scores_in_the_documented_direction(photographs, lpips_weights):
    noise = torch.randn(photographs.shape, generator=torch.Generator().manual_seed(2))
    lpips = load_lpips("squeeze", lpips_weights)
    near = score((photographs + 0.03 * noise).clamp(0, 1), photographs, patch_size=16, lpips=lpips)
    far = score((photographs + 0.3 * noise).clamp(0, 1), photographs, patch_size=16, lpips=lpips)
    for name, direction in METRIC_DIRECTIONS.items():
        assert (far[name].mean() > near[name].mean()).item() == direction.higher_is_more_private, name


def test_labels_contain_the_units():
    assert METRIC_DIRECTIONS["psnr"].label == "PSNR (dB)"
    assert "25 dB" in METRIC_DIRECTIONS["patch_recovery"].label
    assert len({direction.label for direction in METRIC_DIRECTIONS.values()}) == len(KEYS)


def test_importing_the_metrics_imports_nothing_heavy():
    heavy = ("flwr", "lpips", "torchmetrics", "torchvision", "breaching")
    code = f"import sys, fedmjp.metrics; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
