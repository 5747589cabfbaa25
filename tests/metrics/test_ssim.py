import numpy as np
import pytest
import torch
from skimage.metrics import structural_similarity
from torchmetrics.functional.image import structural_similarity_index_measure

from attacks.registry import UsageError
from fedmjp.metrics import ssim


def reference(rec: torch.Tensor, orig: torch.Tensor) -> list[float]:
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "win_size": 11}
    return [
        structural_similarity(o, r, data_range=1, channel_axis=0, **options)
        for r, o in zip(rec.double().numpy(), orig.double().numpy(), strict=True)
    ]


def test_agrees_with_scikit_image(noisy, photographs):
    np.testing.assert_allclose(ssim(noisy, photographs), reference(noisy, photographs), atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(11, 11), (11, 40), (32, 17)])
def test_agrees_with_scikit_image_on_small_and_oblong_images(noisy, photographs, height, width):
    rec, orig = noisy[..., :height, :width], photographs[..., :height, :width]
    np.testing.assert_allclose(ssim(rec, orig), reference(rec, orig), atol=1e-6)


def test_agrees_with_the_inside_of_torchmetrics_map(noisy, photographs):
    _, full = structural_similarity_index_measure(
        noisy, photographs, data_range=1.0, reduction="none", return_full_image=True
    )
    inside = full[..., 5:-5, 5:-5].mean(dim=(1, 2, 3))
    np.testing.assert_allclose(ssim(noisy, photographs), inside, atol=1e-5)


def test_flat_images_agree_with_the_luminance_term():
    rec, orig = torch.full((1, 3, 16, 16), 0.2), torch.full((1, 3, 16, 16), 0.8)
    expected = (2 * 0.2 * 0.8 + 1e-4) / (0.2**2 + 0.8**2 + 1e-4)
    assert ssim(rec, orig).item() == pytest.approx(expected, abs=1e-6)


def test_images_below_the_window_are_refused(photographs):
    small = photographs[..., :10, :]
    with pytest.raises(UsageError, match="at least 11"):
        ssim(small, small)
