import numpy as np
import pytest
import torch

from attacks.registry import UsageError
from fedmjp.metrics import BASELINES, baseline_reconstructions, mean_image, mse, other_image


def test_mean_image_is_numpys_mean_and_the_best_constant_guess(photographs):
    mean = mean_image(photographs)
    np.testing.assert_allclose(mean[0], photographs.numpy().astype("float64").mean(axis=0), atol=1e-7)
    assert mean.shape == (1, 3, 96, 96)
    assert mean.dtype == photographs.dtype
    best = mse(mean.expand_as(photographs), photographs).mean()
    for guess in (photographs[:1], 0.99 * mean, mean.flip(3)):
        assert best < mse(guess.expand_as(photographs), photographs).mean()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_other_image_uses_every_image_and_never_at_its_own_place(count):
    images = torch.arange(count, dtype=torch.float32).view(count, 1, 1, 1) / count
    for shift in range(1, count):
        others = other_image(images, shift)
        assert not (others == images).any()
        assert sorted(others.flatten().tolist()) == images.flatten().tolist()


def test_other_image_rolls_by_one(photographs):
    assert torch.equal(other_image(photographs), photographs[[2, 0, 1]])


def test_both_come_as_reconstructions(photographs):
    rows = baseline_reconstructions(photographs)
    assert tuple(rows) == BASELINES == ("mean_image", "other_image")
    assert all(row.shape == photographs.shape for row in rows.values())
    assert torch.equal(rows["mean_image"][2], mean_image(photographs)[0])
    apart = baseline_reconstructions(photographs[:2], reference=photographs[2:])
    assert torch.equal(apart["mean_image"][0], photographs[2])


def test_refuses_sets_that_have_no_other_image(photographs):
    with pytest.raises(UsageError, match="N >= 2"):
        other_image(photographs[:1])
    with pytest.raises(UsageError, match="N >= 1"):
        mean_image(photographs[:0])
    with pytest.raises(UsageError, match="N >= 1"):
        mean_image(photographs[0])
    with pytest.raises(UsageError, match="multiple of the 3"):
        other_image(photographs, shift=3)
    with pytest.raises(UsageError, match="differ in"):
        baseline_reconstructions(photographs, reference=photographs[..., :8])
