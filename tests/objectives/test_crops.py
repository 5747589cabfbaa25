"""Crops and colours of MST's views: where they lie, and colours against torchvision."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms import functional as TF

from fedmjp.objectives.crops import FIRST, Colours, blur, change_colours, jitter, random_crops
from tests.conftest import photographs
from tests.objectives.test_position_prediction import draw


def test_crops_lie_in_the_image_and_have_the_area() -> None:
    """On a picture of its own coordinates the corners of a crop can be read off."""
    height, width, count = 40, 60, 300
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    picture = torch.stack([y / height, x / width, torch.zeros_like(x)]).expand(count, -1, -1, -1)
    crops = random_crops(picture, (20, 20), (0.2, 0.6), draw())
    inner = crops[:, :, 2:18, 2:18]  # the filter of the edge bends the ramp
    tall = (inner[:, 0, 15, 8] - inner[:, 0, 0, 8]) * 20 / 15
    wide = (inner[:, 1, 8, 15] - inner[:, 1, 8, 0]) * 20 / 15
    area, aspect = tall * wide.abs(), wide.abs() * width / (tall * height)
    free = (tall < 0.99) & (wide.abs() < 0.99)  # a crop that does not fit is cut
    assert area.min() > 0.19 * 0.75
    assert area.max() < 0.61
    assert area[free].mean() == pytest.approx(0.4, abs=0.04)
    assert 0.74 < aspect[free].min() < aspect[free].max() < 1.35
    assert float((wide < 0).float().mean()) == pytest.approx(0.5, abs=0.15)
    assert crops.min() >= 0
    assert crops.max() <= 1
    assert (crops[:, 0].flatten(1).amin(1) > crops[:, 0].flatten(1).amin(1).min()).any()  # not all at one place


def test_colours_against_torchvision() -> None:
    images = photographs(32, 3)
    torch.testing.assert_close(jitter(images, torch.full((4, 3), 0.5)), images, atol=2e-6, rtol=0)
    for row, adjust, reach in (
        (0, TF.adjust_brightness, 0.4),
        (1, TF.adjust_contrast, 0.4),
        (2, TF.adjust_saturation, 0.2),
    ):
        u = torch.full((4, 3), 0.5)
        u[row] = torch.tensor([0.1, 0.6, 0.9])
        wanted = torch.stack([adjust(i, 1 + (2 * float(s) - 1) * reach) for i, s in zip(images, u[row], strict=True)])
        torch.testing.assert_close(jitter(images, u), wanted, atol=2e-3, rtol=0)
    sigma = torch.tensor([0.5, 1.0, 2.0])
    wanted = torch.stack([TF.gaussian_blur(i, [13, 13], [float(s)] * 2) for i, s in zip(images, sigma, strict=True)])
    torch.testing.assert_close(blur(images, sigma), wanted, atol=1e-5, rtol=0)
    turned = jitter(0.25 + images / 2, torch.tensor([0.5, 0.5, 0.5, 0.8])[:, None].expand(4, 3))
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    torch.testing.assert_close((turned * weights).sum(1), ((0.25 + images / 2) * weights).sum(1), atol=2e-3, rtol=0)
    assert (turned - 0.25 - images / 2).abs().max() > 0.05


def test_solarisation_and_grey_have_their_probabilities() -> None:
    images = torch.rand(400, 3, 8, 8, generator=draw())
    grey = change_colours(images, Colours(0.0, 0.0), 8, draw())
    share = ((grey.amax(dim=1) - grey.amin(dim=1)).flatten(1).amax(dim=1) < 1e-3).float().mean()
    assert float(share) == pytest.approx(0.2, abs=0.08)
    bright = torch.full((400, 3, 4, 4), 0.75)
    dark = change_colours(bright, Colours(0.0, 1.0), 8, draw()).flatten(1).mean(dim=1)
    assert dark.max() <= 0.5
    assert torch.equal(change_colours(images, FIRST, 8, draw()), change_colours(images, FIRST, 8, draw()))
