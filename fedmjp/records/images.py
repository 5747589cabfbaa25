"""The pictures of a run: where each stands in its folder, and how it is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

QUICK = 1  # compression of PNG files: a tenth larger than the best one's, in a third of the time


def image_path(out: Path, defense: str, round: int, client: int, image: int, what: str) -> Path:
    """The file of one audited image in a run's folder.

    Args:
        image: its place in the client's batch.
        what: "original", "seen", an attack's name, or that name with "_known" for the pixels it vouches for.
    """
    return out / "images" / defense / f"round{round:03d}_client{client:03d}_image{image}_{what}.png"


def save_image(image: Tensor, path: Path) -> None:
    """Write one image (C, H, W) in [0, 1] as a PNG file: three channels, the first three, or the first of fewer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = image[:3] if len(image) >= 3 else image[:1]
    pixels = (shown.clamp(0, 1) * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()
    Image.fromarray(pixels).save(path, compress_level=QUICK)
