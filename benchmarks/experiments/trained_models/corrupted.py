"""Test images under the corruptions of ImageNet-C (Hendrycks and Dietterich, 2019), by the package
imagecorruptions-imaug.

The package draws from NumPy's global generator, from one that it is handed (impulse noise) and from numba's (glass
blur); here image, corruption and severity give a seed that fixes all three, so that every model sees the same pictures,
in whatever order and however often the run is taken up again.

Departs from ImageNet-C: the constants are those made for 224-pixel images, applied to whatever size the model takes;
Tiny-ImageNet-C, the published 64-pixel version, has milder ones. Pictures stay in memory, without its JPEG storage.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from attacks import UsageError

PACKAGE = "imagecorruptions-imaug"
SMALLEST = 32  # pixels, by the package
_SEEDED = ("impulse_noise", "glass_blur")


def load_package() -> tuple[ModuleType, str]:
    """The package and its name with its version.

    Raises:
        UsageError: it is not installed, or does not import.
    """
    try:
        words = f"{PACKAGE} {version(PACKAGE)}"
        import cv2
        import imagecorruptions
    except ImportError as error:  # also a system library that OpenCV misses
        raise UsageError(f"corruptions need {PACKAGE} ({error}); pip install 'fedmjp[tables]'") from error
    cv2.setNumThreads(1)  # such small pictures gain nothing from threads
    return imagecorruptions, words


def seed_of(image_id: str, corruption: str, severity: int, seed: int) -> int:
    """A 32-bit seed for one picture."""
    words = [seed, zlib.crc32(image_id.encode()), zlib.crc32(corruption.encode()), severity]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def corrupt(images: Tensor, ids: Sequence[str], corruption: str, severity: int, seed: int) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] -> the same, corrupted and rounded down to 8 bits; severity 0 leaves them alone.

    Raises:
        UsageError: the package is missing, or images smaller than it takes.
    """
    if severity == 0:
        return images
    package, _ = load_package()
    if min(images.shape[-2:]) < SMALLEST:
        raise UsageError(f"corruptions need images of at least {SMALLEST} pixels, got {tuple(images.shape[-2:])}")
    pictures = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()  # (B, H, W, 3)
    before, made = np.random.get_state(), []
    try:
        for picture, image_id in zip(pictures, ids, strict=True):
            drawn = seed_of(image_id, corruption, severity, seed)
            np.random.seed(drawn)
            more = {"seed": drawn} if corruption in _SEEDED else {}
            with redirect_stdout(io.StringIO()):  # it prints where a zoomed picture is a pixel short
                made.append(package.corrupt(picture, severity=severity, corruption_name=corruption, **more))
    finally:
        np.random.set_state(before)
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float() / 255
