"""The pictures of a run: where each stands in its folder, how it is written, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def read_image(path: Path) -> Tensor:
    """A picture that `save_image` wrote, (3, H, W) float32 in [0, 1], to 8 bits."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1).float() / 255


def read_pair(out: Path, row: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Original and reconstruction of a row of a run, (3, H, W) each; None where there is none, as of guesses.

    Args:
        out: the run's folder.
        row: with defense, round, client, image and attack.
    """
    place = out, row["defense"], row["round"], row["client"], row["image"]
    paths = [image_path(*place, what) for what in ("original", row["attack"])]
    return (read_image(paths[0]), read_image(paths[1])) if all(path.exists() for path in paths) else None
