import numpy as np
import pytest
import torch

from attacks.registry import UsageError
from fedmjp.metrics import MEAN_IMAGE, OTHER_IMAGE, mean_image, mse, other_image


def test_mean_image_equals_numpys_mean_and_is_the_best_constant_guess(photographs):
    mean = mean_image(photographs)
    np.testing.assert_allclose(mean[0], photographs.numpy().astype("float64").mean(axis=0), atol=1e-7)
    assert mean.shape == (1, 3, 96, 96)
    assert mean.dtype == photographs.dtype
    best = mse(mean.expand_as(photographs), photographs).mean()
    for guess in (photographs[:1], 0.99 * mean, mean.flip(3)):
        assert best < mse(guess.expand_as(photographs), photographs).mean()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_other_image_is_a_permutation_without_fixed_points(count):
    images = torch.arange(count, dtype=torch.float32).view(count, 1, 1, 1) / count
    others = other_image(images)
    assert not (others == images).any()
    assert sorted(others.flatten().tolist()) == images.flatten().tolist()


def test_a_single_image_raises(photographs):
    with pytest.raises(UsageError, match="at least 2"):
        other_image(photographs[:1])


def test_names_equal_those_of_the_rows():
    assert (MEAN_IMAGE, OTHER_IMAGE) == ("mean_image", "other_image")
