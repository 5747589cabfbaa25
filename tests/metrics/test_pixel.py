import numpy as np
import pytest
import scipy.optimize
import torch
from skimage import metrics as skimage_metrics

from attacks.registry import UsageError
from fedmjp.metrics import any_place, mse, patch_recovery, psnr, psnr_in_words
from fedmjp.metrics.pixel import EXACT_8_BIT


def test_mse_and_psnr_agree_with_scikit_image(noisy, photographs):
    pairs = list(zip(noisy.double().numpy(), photographs.double().numpy(), strict=True))
    expected_mse = [skimage_metrics.mean_squared_error(o, r) for r, o in pairs]
    expected_psnr = [skimage_metrics.peak_signal_noise_ratio(o, r, data_range=1) for r, o in pairs]
    np.testing.assert_allclose(mse(noisy, photographs), expected_mse, rtol=1e-6)
    np.testing.assert_allclose(psnr(noisy, photographs), expected_psnr, rtol=1e-6)


def test_identical_images_have_the_documented_maximum(photographs):
    assert mse(photographs, photographs).tolist() == [0.0, 0.0, 0.0]
    assert psnr(photographs, photographs).tolist() == [120.0, 120.0, 120.0]


def test_a_constant_error_of_a_tenth_is_twenty_decibels():
    original = torch.full((2, 3, 8, 8), 0.5)
    np.testing.assert_allclose(psnr(original + 0.1, original), [20.0, 20.0], rtol=1e-5)


def test_as_exact_as_eight_bits_is_what_rounding_to_them_leaves() -> None:
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    rounded = float(psnr((image * 255).round() / 255, image))
    assert EXACT_8_BIT - 0.3 < rounded < EXACT_8_BIT
    assert psnr_in_words(rounded) == f"{rounded:.1f} dB"
    assert psnr_in_words(120.0) == ">59 dB (8-bit exact)"


def test_patch_recovery_agrees_with_scikit_image_on_each_patch(photographs):
    # The noise grows from left to right, so that patches lie on both sides of the threshold.
    noise = torch.randn(photographs.shape, generator=torch.Generator().manual_seed(1))
    rec = (photographs + noise * torch.linspace(0.01, 0.15, 96)).clamp(0, 1)
    shares = patch_recovery(rec, photographs, 16)
    for image, (r, o) in enumerate(zip(rec.double().numpy(), photographs.double().numpy(), strict=True)):
        decibels = [
            skimage_metrics.peak_signal_noise_ratio(
                o[:, y : y + 16, x : x + 16], r[:, y : y + 16, x : x + 16], data_range=1
            )
            for y in range(0, 96, 16)
            for x in range(0, 96, 16)
        ]
        assert 0 < shares[image] < 1
        assert shares[image].item() == pytest.approx(np.mean(np.array(decibels) > 25.0))


def test_patch_recovery_counts_patches_of_a_rectangular_image():
    original = torch.zeros(1, 1, 4, 12)
    rec = original.clone()
    rec[..., 0:4, 4:8] = 0.5
    assert patch_recovery(rec, original, 4).item() == pytest.approx(2 / 3)
    rec[..., 3, 11] = 1.0
    assert patch_recovery(rec, original, 4).item() == pytest.approx(1 / 3)
    assert patch_recovery(rec, original, 4, threshold_db=5.0).item() == 1.0


def test_psnr_equal_to_the_threshold_is_not_recovered():
    original = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    rec = torch.full_like(original, 0.5)
    exact = -10 * torch.log10(torch.tensor(0.25, dtype=torch.float64)).item()
    assert patch_recovery(rec, original, 2, threshold_db=exact).item() == 0.0
    assert patch_recovery(rec, original, 2, threshold_db=exact - 1e-9).item() == 1.0


@pytest.mark.parametrize("patch_size", [0, -16, 7, 97])
def test_a_patch_size_that_does_not_divide_is_refused(photographs, patch_size):
    with pytest.raises(UsageError, match="do not divide into patches"):
        patch_recovery(photographs, photographs, patch_size)


def test_patches_in_any_place_are_those_of_the_best_assignment(photographs):
    noise = torch.randn(photographs.shape, generator=torch.Generator().manual_seed(1))
    rec = (photographs + noise * torch.linspace(0.01, 0.15, 96)).clamp(0, 1)
    for image, share in enumerate(any_place(rec, photographs, 8)):
        ours, true = (
            images[image].double().unfold(1, 8, 8).unfold(2, 8, 8).permute(1, 2, 0, 3, 4).reshape(144, -1).numpy()
            for images in (rec, photographs)
        )
        alike = [[-10 * np.log10(max(np.square(a - b).mean(), 1e-12)) > 25 for b in true] for a in ours]
        pairs = scipy.optimize.linear_sum_assignment(np.array(alike), maximize=True)
        assert share.item() == pytest.approx(np.array(alike)[pairs].mean())
        assert share >= patch_recovery(rec, photographs, 8)[image]


def test_patches_in_any_place_know_no_order(photographs):
    pieces = torch.nn.functional.unfold(photographs, 16, stride=16)
    order = torch.randperm(36, generator=torch.Generator().manual_seed(3))
    shuffled = torch.nn.functional.fold(pieces[:, :, order], 96, 16, stride=16)
    assert patch_recovery(shuffled, photographs, 16).max() < 0.5
    assert any_place(shuffled, photographs, 16).tolist() == [1.0, 1.0, 1.0]
    # One flat patch is not all flat patches of the other.
    grey = torch.full((1, 3, 8, 8), 0.5)
    one = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    one[..., :4, :4] = 0.5
    assert any_place(one, grey, 4).tolist() == any_place(grey, one, 4).tolist() == [0.25]
