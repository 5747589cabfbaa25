"""Which images a client holds, by their labels; needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np

from attacks.registry import UsageError

Labels = Literal["distinct", "equal", "mixed"]


def draw_batches(labels: Sequence[int], size: int, kind: Labels, clients: int, seed: int) -> list[list[int]]:
    """The images of each client, as indices, no image with two clients.

    Args:
        labels: of all images.
        size: images of a client.
        kind: whether they all have different labels, the same one, or whichever come.
        clients: how many.
        seed: of the random choice.

    Raises:
        UsageError: there are not so many images, or not of so many labels.
    """
    order = np.random.default_rng(seed).permutation(len(labels)).tolist()
    by_label: dict[int, list[int]] = defaultdict(list)
    for index in order:
        by_label[int(labels[index])].append(index)
    if kind == "mixed":
        batches = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
    elif kind == "equal":
        batches = [
            own[start : start + size] for own in by_label.values() for start in range(0, len(own) - size + 1, size)
        ]
    else:
        batches = _distinct(by_label, size, clients)
    if len(batches) < clients:
        raise UsageError(
            f"{clients} clients with {size} images of {kind} labels each need more images or labels than the "
            f"{len(order)} images of {len(by_label)} labels here; pass fewer, or other --images"
        )
    return batches[:clients]


def _distinct(by_label: dict[int, list[int]], size: int, clients: int) -> list[list[int]]:
    """Batches of one image a label; the labels with most images left come first."""
    left = {label: list(own) for label, own in by_label.items()}
    batches: list[list[int]] = []
    while len(batches) < clients:
        labels = sorted((label for label, own in left.items() if own), key=lambda label: -len(left[label]))[:size]
        if len(labels) < size:
            break
        batches.append([left[label].pop() for label in labels])
    return batches
