"""Undo ATS' transformations (`attacks.transformations`) of which the policy is known and the random signs are not.

What can be undone is: inversion, brightness, contrast, saturation and sharpness but for clipping and rounding; shifts
and rotations but for what left the frame; shears but for interpolation. What cannot is left as it is: equalised
histograms, automatic contrast, lost bits, and what solarisation put on the same value. That keeps the image consistent,
because these give the same image when they are applied again.

Pixels that a stronger contrast, saturation or brightness has clipped are bounded and not exact. A guess at the signs is
tested by applying the policy again: shifts and rotations leave a frame at the side that they came from, and a wrong
factor leaves clipped values, or grey levels that the right one would have left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from PIL import Image

from attacks.registry import UsageError
from attacks.transformations import OPERATIONS

LARGEST_SIDE = 255  # coordinates pass through 8 bits
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13  # of PIL's sharpness
SHARPENINGS = 40  # steps of the iteration that undoes it
GONE, CLIPPED, EXACT = 0, 1, 2  # states of a pixel
LUMA = np.array([0.299, 0.587, 0.114])

Policy = Sequence[tuple[str, int]]


@dataclass(frozen=True, eq=False)
class Undone:
    """An image before a policy, under one guess at the policy and its signs.

    Attributes:
        pixels: (H, W, 3) float64 in [0, 255]; where not `seen` the mean of the rest.
        seen: (H, W) bool, False where the policy moved the pixel out of the frame.
        exact: (H, W) bool, seen and not clipped.
        residual: rms difference, in [0, 1], between the given image and the policy applied to `pixels`.
    """

    pixels: np.ndarray
    seen: np.ndarray
    exact: np.ndarray
    residual: float


def undo_policies(pixels: np.ndarray, policies: Sequence[Policy]) -> list[Undone]:
    """The image before each policy with each choice of signs, the most consistent first.

    Args:
        pixels: (H, W, 3) uint8, after one of the policies.
        policies: each a sequence of (name in `OPERATIONS`, level).

    Raises:
        UsageError: a side is longer than 255 pixels.
    """
    if max(pixels.shape[:2]) > LARGEST_SIDE:
        raise UsageError(f"policies are undone on images of at most {LARGEST_SIDE} pixels a side")
    found = [_undo(pixels, policy, signs) for policy in policies for signs in _signs(policy)]
    return sorted(found, key=lambda one: one.residual)


def _signs(policy: Policy) -> Iterator[tuple[int, ...]]:
    """Every choice of the random signs of a policy; 1 where there is none."""
    return product(*((1, -1) if OPERATIONS[name].signed else (1,) for name, _ in policy))


def _undo(pixels: np.ndarray, policy: Policy, signs: Sequence[int]) -> Undone:
    found, state = pixels.astype(float), np.full(pixels.shape[:2], EXACT, dtype=np.uint8)
    for (name, level), sign in reversed(list(zip(policy, signs, strict=True))):
        found, state = _undo_one(name, level, sign, found, state)
    found = fill(found.clip(0, 255), state > GONE)
    again = Image.fromarray(found.round().astype(np.uint8))
    for (name, level), sign in zip(policy, signs, strict=True):
        again = OPERATIONS[name](again, level, sign)
    gap = (np.asarray(again, dtype=float) - pixels) / 255
    return Undone(found, state > GONE, state == EXACT, float(np.sqrt((gap**2).mean())))


def _undo_one(name: str, level: int, sign: int, pixels: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (H, W, 3) before one transformation, and the state of each."""
    factor = 1 + OPERATIONS[name].argument(level) * sign
    if name == "invert":
        return 255 - pixels, state
    if name in ("rotate", "translate_x", "translate_y"):
        return _moved_back(name, level, sign, pixels, state)
    if name == "shear_y":
        return _applied(name, level, -sign, pixels, state)
    undone = _uncoloured(name, factor, pixels, state > GONE)
    if undone is None:
        return pixels, state
    clipped = ((pixels <= 0) | (pixels >= 255)).any(axis=-1) & (factor > 1)
    return undone, np.where(clipped & (state == EXACT), np.uint8(CLIPPED), state)


def _uncoloured(name: str, factor: float, pixels: np.ndarray, seen: np.ndarray) -> np.ndarray | None:
    """Pixels before an enhancement by a factor; None for transformations that are left as they are."""
    if name == "brightness":
        return pixels / factor
    if name == "contrast":
        mean = (pixels[seen] @ LUMA).mean()
        return mean + (pixels - mean) / factor
    if name == "color":
        grey = (pixels @ LUMA)[..., None]
        return grey + (pixels - grey) / factor
    return _unsharpened(pixels, factor) if name == "sharpness" else None


def _moved_back(
    name: str, level: int, sign: int, pixels: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Every pixel at the place that it came from, which an image of coordinates shows after the same move."""
    rows, columns = np.indices(state.shape)
    places = np.stack([rows, columns, np.full(state.shape, 255)], axis=-1).astype(np.uint8)
    came = np.asarray(OPERATIONS[name](Image.fromarray(places), level, sign))
    inside = (came[..., 2] == 255) & (state > GONE)
    found, before = np.zeros_like(pixels), np.zeros_like(state)
    found[came[inside, 0], came[inside, 1]] = pixels[inside]
    before[came[inside, 0], came[inside, 1]] = state[inside]
    return found, before


def _applied(name: str, level: int, sign: int, pixels: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same transformation with another sign, of pixels and of their state."""
    found = OPERATIONS[name](Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8)), level, sign)
    flags = Image.fromarray(np.repeat(state[..., None] * np.uint8(127), 3, axis=-1))
    moved = np.asarray(OPERATIONS[name](flags, level, sign))[..., 0]
    return np.asarray(found, dtype=float), (moved // 127).clip(GONE, EXACT)


def _unsharpened(pixels: np.ndarray, factor: float) -> np.ndarray:
    """x with f x + (1 - f) S x = y, S PIL's smoothing, by iterations; its eigenvalues lie between 0.4 and 1.6."""
    found = pixels.copy()
    for _ in range(SHARPENINGS):
        found += pixels - (factor * found + (1 - factor) * _smoothed(found))
    return found


def _smoothed(pixels: np.ndarray) -> np.ndarray:
    """PIL's SMOOTH filter: the mean of 3 x 3 pixels, the middle one five times; the border stays."""
    height, width = pixels.shape[:2]
    found = pixels.copy()
    found[1:-1, 1:-1] = sum(
        SMOOTH[i, j] * pixels[i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)
    )
    return found


def fill(pixels: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The image with unseen pixels at the mean of the seen ones, (H, W, 3)."""
    return np.where(seen[..., None], pixels, pixels[seen].mean(axis=0)) if seen.any() else pixels
