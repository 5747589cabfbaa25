"""Which pixels were attacked: a digest an image, so that no run is resumed on other pictures of the same names.

images.sha256 holds a line an image: the SHA-256 of its 8-bit pixels (C, H, W), then its name as a JSON string, with the
data set and the side in pixels before it. A word's digest is that of its samples, its side the number of its frames.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
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
        self._known = _digests(whole)

    def check(self, ids: Sequence[str], images: Tensor) -> None:
        """`check_contents` of images (B, C, H, W) in [0, 1], which are (H, W) of 8-bit pixels."""
        pixels = (images.float() * 255).round().byte().cpu().numpy()
        self.check_contents(ids, [image.tobytes() for image in pixels], images.shape[-1])

    def check_contents(self, ids: Sequence[str], contents: Sequence[bytes], side: int) -> None:
        """Compare images with their digests, and keep those of images that have none yet.

        Args:
            ids: names of the images.
            contents: as `ImageSet.contents` has them.
            side: of the images, in pixels.

        Raises:
            UsageError: an image is another one than when the folder was begun.
        """
        found: dict[str, str] = {}
        for name, content in zip(ids, contents, strict=True):
            key, digest = json.dumps(f"{self._dataset} {side} {name}"), hashlib.sha256(content).hexdigest()
            if (self._known | found).get(key, digest) != digest:
                raise UsageError(
                    f"image {name!r} of {self._dataset} is not the one that {self._path} was written for; restore the "
                    "data, or pass another --out"
                )
            found[key] = digest
        self._keep(found)

    def adopt(self, other: Path) -> None:
        """Take the digests of another folder of results, whose pictures this one's have to be.

        Raises:
            UsageError: the two were written for different pictures.
        """
        found = _digests((other / FILE).read_bytes().rpartition(b"\n")[0])
        for key, digest in found.items():
            if self._known.get(key, digest) != digest:
                raise UsageError(
                    f"image {key} is not the same in {self._path} and in {other / FILE}; delete the folder of the one "
                    "that was made from other data, or pass another --out"
                )
        self._keep(found)

    def _keep(self, found: Mapping[str, str]) -> None:
        fresh = {key: digest for key, digest in found.items() if key not in self._known}
        if not fresh:
            return
        with self._path.open("ab") as file:
            file.write("".join(f"{digest}  {key}\n" for key, digest in fresh.items()).encode())
            file.flush()
            os.fsync(file.fileno())
        self._known |= fresh


def _digests(lines: bytes) -> dict[str, str]:
    """Digest by name, from the lines of a file."""
    return dict(reversed(line.split("  ", 1)) for line in lines.decode("utf-8", "replace").split("\n") if "  " in line)
