"""fft2d equals the cosine of pixels (Parseval); fft2d_official has the values computed as its script does."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine

from fedmjp.metrics import fft2d, fft2d_official


def lattice(offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The images (1, 3, 8, 8) on which the official numbers below were computed."""
    n = np.arange(192).reshape(1, 3, 8, 8)
    return torch.from_numpy(n * 37 % 101 / 101.0), torch.from_numpy((n * 53 + offset) % 97 / 97.0)


def half_turn(images: torch.Tensor) -> torch.Tensor:
    """images(-n mod (H, W)): the rotation by 180 degrees that keeps pixel (0, 0) in place."""
    return images.flip((2, 3)).roll((1, 1), dims=(2, 3))


def test_fft2d_is_the_cosine_distance_of_the_pixels(noisy, photographs):
    pairs = zip(noisy.double().flatten(1).numpy(), photographs.double().flatten(1).numpy(), strict=True)
    np.testing.assert_allclose(fft2d(noisy, photographs), [cosine(r, o) for r, o in pairs], rtol=1e-5)


# Computed as in the script by numpy 1.24.4's fft2, then scipy 1.9.3's spatial.distance.cosine on the flattened complex
# spectra, which later versions of SciPy refuse.
@pytest.mark.parametrize(("offset", "expected"), [(0, 0.03175396576652656), (11, 0.058417464301039)])
def test_official_agrees_with_scipy_1_9_3(offset, expected):
    assert fft2d_official(*lattice(offset)).item() == pytest.approx(expected, rel=1e-6)


def test_official_is_clamped_as_scipy_clamped_it():
    # scipy 1.9.3 gives exactly 2.0 on this pair.
    rec, orig = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
    rec[..., 1, 1], rec[..., 3, 3] = 1.0, 0.01
    orig[..., 3, 3], orig[..., 1, 1] = 1.0, 0.01
    assert fft2d_official(rec, orig).item() == 2.0
    assert fft2d_official(rec, rec).item() == pytest.approx(0.0, abs=1e-6)


def test_official_equals_its_formula_in_pixels(noisy, photographs):
    rec, orig = noisy.double(), photographs.double()
    overlap = (rec * half_turn(orig)).sum((1, 2, 3))
    norm = ((rec * half_turn(rec)).sum((1, 2, 3)) * (orig * half_turn(orig)).sum((1, 2, 3))).sqrt()
    np.testing.assert_allclose(fft2d_official(noisy, photographs), (1 - overlap / norm).abs(), rtol=1e-4, atol=1e-7)


def test_the_two_differ_on_photographs_and_agree_on_images_with_the_symmetry(noisy, photographs):
    assert ((fft2d(noisy, photographs) - fft2d_official(noisy, photographs)).abs() > 1e-4).any()
    rec, orig = noisy + half_turn(noisy), photographs + half_turn(photographs)
    np.testing.assert_allclose(fft2d(rec, orig), fft2d_official(rec, orig), rtol=1e-5)


def test_brightness_has_no_effect(photographs):
    np.testing.assert_allclose(fft2d(0.3 * photographs, photographs), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(fft2d_official(0.3 * photographs, photographs), np.zeros(3), atol=1e-6)


@pytest.mark.parametrize("metric", [fft2d, fft2d_official])
def test_black_images_have_a_documented_distance(metric, photographs):
    black = torch.zeros_like(photographs)
    assert metric(black, photographs).tolist() == [1.0, 1.0, 1.0]
    assert metric(black, black).tolist() == [0.0, 0.0, 0.0]


def test_official_is_defined_where_the_script_divides_rounding_errors():
    # For a single bright pixel that is no fixed point of the rotation, sum F^2 is zero.
    rec, orig = torch.zeros(1, 1, 8, 8), torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    rec[..., 1, 2] = 1.0
    assert fft2d_official(rec, orig).item() == 1.0
    assert fft2d_official(rec, rec).item() == 0.0
