"""The photographs that every submission is attacked on: by name, with the digest of their pixels.

They are crops of the photographs inside scikit-image (`fedmjp.data.photos`), the best view of each first. The digest is
SHA-256 of the crop's pixels at its own resolution, 8-bit RGB row by row, before any resizing: two machines that agree
in it attack the same images.
"""

from __future__ import annotations

import hashlib

from attacks import UsageError
from fedmjp.data.photos import crop_id, photo_crops, photograph

# Name -> the first 16 hexadecimal digits of SHA-256.
DIGESTS = {
    "astronaut/train/0": "aee1bf33bbf9e4f3",
    "chelsea/train/0": "af60976a9eda173e",
    "coffee/train/0": "b71c7dc98a1efdbe",
    "rocket/train/0": "b3b35a36d15baa38",
    "retina/train/0": "65d216a1a370733d",
    "hubble_deep_field/train/0": "9b29359a96ec5c87",
    "immunohistochemistry/train/0": "06faae6f231de89e",
    "stereo_motorcycle/train/0": "ff2dc271d2dad2ea",
    "astronaut/train/1": "0c1d668cd0472730",
    "chelsea/train/1": "72a23bdde1591adb",
    "coffee/train/1": "4eb4d3193219fe60",
    "rocket/train/1": "cfbd63868145078c",
    "retina/train/1": "7c794ac7aa3b37f2",
    "hubble_deep_field/train/1": "1e0c925317bc69bf",
    "immunohistochemistry/train/1": "af52737dda6e7e19",
    "stereo_motorcycle/train/1": "71b1213914426d1e",
    "astronaut/train/2": "e6b7acf120dfcbc8",
    "chelsea/train/2": "c97c70d82c391fc6",
    "coffee/train/2": "a92f1c77dd9dfab7",
    "rocket/train/2": "75e9664a9cd51405",
    "retina/train/2": "36263e347ba398a6",
    "hubble_deep_field/train/2": "285d58282afd2c27",
    "immunohistochemistry/train/2": "3634cf6680a4a1f9",
    "stereo_motorcycle/train/2": "9d0497b1bc067751",
    "astronaut/train/3": "9bbde9069cdac434",
    "chelsea/train/3": "fcfff07882d75141",
    "coffee/train/3": "22ee794ad30157c1",
    "rocket/train/3": "257daa8393dd43e8",
    "retina/train/3": "d2f02da646b6e440",
    "hubble_deep_field/train/3": "701db08a3967dbad",
    "immunohistochemistry/train/3": "3aa106438eafbee2",
    "stereo_motorcycle/train/3": "771226ab551dc7bf",
}


def listed(count: int) -> dict[str, str]:
    """The first `count` photographs of the list, name -> digest."""
    return dict(list(DIGESTS.items())[:count])


def fixed_images(count: int) -> dict[str, str]:
    """As `listed`, checked against the pixels that are installed here.

    Raises:
        UsageError: a photograph decodes to other pixels than those of the list.
    """
    expected = listed(count)
    for name, found in digests(count).items():
        if expected.get(name) != found:
            raise UsageError(
                f"the photograph {name} has other pixels here (digest {found}) than on the leaderboard "
                f"({expected.get(name)}); install scikit-image and Pillow from their wheels"
            )
    return expected


def digests(count: int) -> dict[str, str]:
    """Name -> digest of the first `count` crops as they decode here."""
    found = {}
    for crop in photo_crops("train")[:count]:
        pixels = photograph(crop.photo).crop(crop.box).convert("RGB").tobytes()
        found[crop_id(crop, "train")] = hashlib.sha256(pixels).hexdigest()[:16]
    return found
