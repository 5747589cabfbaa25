"""Three photographs and three noise levels: the pairs on which every metric is compared with another package."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from skimage import data

LPIPS_WEIGHTS = Path(__file__).parents[2].parent / "shared" / "weights" / "lpips_squeeze.pt"


@pytest.fixture(scope="session")
def photographs() -> torch.Tensor:
    """(3, 3, 96, 96) float32 in [0, 1]: astronaut, chelsea, coffee."""
    loaded = (data.astronaut(), data.chelsea(), data.coffee())
    cropped = torch.stack([torch.from_numpy(image[:300, :300]).permute(2, 0, 1) for image in loaded])
    return F.interpolate(cropped.float() / 255, size=96, mode="area")


@pytest.fixture(scope="session")
def noisy(photographs: torch.Tensor) -> torch.Tensor:
    """The photographs with Gaussian noise of 0.02, 0.1 and 0.3, clamped to [0, 1]."""
    noise = torch.randn(photographs.shape, generator=torch.Generator().manual_seed(0))
    return (photographs + noise * torch.tensor([0.02, 0.1, 0.3]).view(3, 1, 1, 1)).clamp(0, 1)


@pytest.fixture(scope="session")
def lpips_weights() -> Path:
    if not LPIPS_WEIGHTS.is_file():
        pytest.skip("no ../shared/weights/lpips_squeeze.pt beside the checkout: LPIPS is not compared")
    return LPIPS_WEIGHTS
