"""Pixels of a photograph lie in [0, 1]: what lies outside bounds the error of a patch from below."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.mjp.token_patches import PlacedPatches

SCALE, SHIFT = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64), torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64)


def placed(pixels: torch.Tensor, deviation: list[float], found: list[bool]) -> PlacedPatches:
    """Patches (S, 3) with these pixels."""
    stated = torch.tensor(deviation, dtype=torch.float64)
    return PlacedPatches((pixels - SHIFT) / SCALE, stated, torch.tensor(found), torch.ones_like(stated))


def test_a_patch_outside_the_range_is_not_vouched_for_and_without_a_certificate_dropped() -> None:
    pixels = torch.full((5, 3), 0.5, dtype=torch.float64)
    pixels[1:4] = 1.0 + 0.1
    pixels[4] = 1.0 + VOUCHED_DEVIATION / 2
    found = [True, True, True, False, False]
    before = placed(pixels, [0.01, 0.01, 0.3, torch.inf, torch.inf], found)
    after = before.in_range(SCALE, SHIFT)
    torch.testing.assert_close(after.deviation[:3], torch.tensor([0.01, 0.1, 0.3], dtype=torch.float64))
    assert after.found.tolist() == found
    assert after.patches.isnan().all(dim=1).tolist() == [False, False, False, True, False]
    kept = [0, 1, 2, 4]
    torch.testing.assert_close(after.patches[kept], before.patches[kept])


def test_a_missing_patch_stays_missing() -> None:
    after = placed(torch.full((1, 3), torch.nan, dtype=torch.float64), [torch.inf], [False]).in_range(SCALE, SHIFT)
    assert after.patches.isnan().all()
    assert after.deviation.isinf().all()


@given(st.integers(0, 10**6), st.floats(0.0, 2.0))
def test_no_image_is_nearer_than_the_bound(seed: int, error: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(8, 3, generator=generator, dtype=torch.float64)
    pixels = truth + error * torch.randn(8, 3, generator=generator, dtype=torch.float64)
    after = placed(pixels, [0.0] * 8, [True] * 8).in_range(SCALE, SHIFT)
    assert (after.deviation <= (pixels - truth).square().mean(dim=1).sqrt() + 1e-12).all()
