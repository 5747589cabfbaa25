"""Which pixels were attacked: a digest an image, so that no run is resumed on other pictures of the same names.

images.sha256 holds a line an image: the SHA-256 of its 8-bit pixels (C, H, W), then its name as a JSON string, with the
data set and the side in pixels before it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from attacks.registry import UsageError
from fedmjp.records.files import write_whole

FILE = "images.sha256"


class ImageDigests:
    """The digests of a folder of results.

    Args:
        out: the folder.
        dataset: name of the data set, which becomes part of the names.
    """

    def __init__(self, out: Path, dataset: str) -> None:
        self._path, self._dataset = out / FILE, dataset
        content = self._path.read_bytes() if self._path.exists() else b""
        whole, newline, torn = content.rpartition(b"\n")
        if torn:  # a process was killed while it wrote the last line
            write_whole(self._path, whole + newline)
        lines = whole.decode("utf-8", "replace").split("\n") if whole else []
        self._known = dict(reversed(line.split("  ", 1)) for line in lines if "  " in line)

    def check(self, ids: Sequence[str], images: Tensor) -> None:
        """Compare images with their digests, and keep those of images that have none yet.

        Args:
            ids: names of the images.
            images: (B, C, H, W) in [0, 1].

        Raises:
            UsageError: an image is another one than when the folder was begun.
        """
        fresh: dict[str, str] = {}
        for name, image in zip(ids, images, strict=True):
            pixels = (image.float() * 255).round().byte().cpu().numpy().tobytes()
            key, digest = json.dumps(f"{self._dataset} {image.shape[-1]} {name}"), hashlib.sha256(pixels).hexdigest()
            if (self._known | fresh).get(key, digest) != digest:
                raise UsageError(
                    f"image {name!r} of {self._dataset} is not the one that {self._path} was written for; restore the "
                    "data, or pass another --out"
                )
            if key not in self._known:
                fresh[key] = digest
        if not fresh:
            return
        with self._path.open("ab") as file:
            file.write("".join(f"{digest}  {key}\n" for key, digest in fresh.items()).encode())
            file.flush()
            os.fsync(file.fileno())
        self._known |= fresh
