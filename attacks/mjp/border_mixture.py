"""How likely two noisy pieces are side by side: a mixture of Gaussians on the pixels at both sides of a border.

In a photograph the pixels [a, b] of a window across a line, a at its one side and b at the other, are taken for a draw
of a mixture of Gaussians (as in EPLL, Zoran and Weiss, ICCV 2011), whose marginals are those of a and b alone. Noise of
variance v adds v to every variance, so that one fit serves every level of noise. The logarithm of

    p(a, b; v) / (p(a; v) p(b; v))

says how much likelier the pair is among neighbours than among pieces of different places; of a border it is the mean
over windows along it, times its length in windows. Of a component with the covariance L L^T, L^-1 [a, b] is a sum of
two terms, so that all pairs of pieces take one matrix product. The level is that of a grid under which the strips of
all pieces are likeliest.

It needs public photographs (`Capability.AUXILIARY_DATA`). The file that ships is described beside it
(border_mixture.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.linear.gaussian_mixture import fit_gaussians, log_densities
from attacks.linear.learned_file import read_learned, write_learned
from attacks.mjp.piece_predictor import CHANNELS, SIDE, to_side
from attacks.registry import UsageError

SHIPPED = Path(__file__).with_name("border_mixture.safetensors")
DEPTH = 2  # pixels of a window at each side of the border; along the border it is SIDE long
HALF = CHANNELS * SIDE * DEPTH  # values of a strip
GREY = 0.5
FLOOR = 1e-5  # added to the variances of pixels in [0, 1]
LEVELS = (0.0, *(10 ** (-level / 10) for level in (45, 40, 35, 32.5, 30, 27.5, 25, 22.5, 20, 17.5, 15, 12.5, 10)))
SCALES = (1.0, 1.0, 1.75, 0.75)  # to which images are resized for the fit, in equal parts


@dataclass(frozen=True)
class Noisy:
    """A mixture with noise.

    Attributes:
        weights: (K,).
        both: (K, 2 HALF, 2 HALF), lower Cholesky factors of the covariances.
        one, other: (K, HALF, HALF), those of the strips at each side.
    """

    weights: Tensor
    both: Tensor
    one: Tensor
    other: Tensor


@dataclass(frozen=True, eq=False)
class BorderMixture:
    """The mixture without noise.

    Attributes:
        weights: (K,), sum to 1.
        roots: (K, 2 HALF, 2 HALF), lower Cholesky factors of the covariances.
    """

    weights: Tensor
    roots: Tensor

    def save(self, path: Path) -> None:
        """Write as safetensors, in half precision."""
        write_learned({"weights": self.weights, "roots": self.roots}, path)

    @classmethod
    def load(cls, path: Path) -> BorderMixture:
        """Read what `save` wrote.

        Raises:
            UsageError: no such file, or one that holds something else.
        """
        how = "fit one with benchmarks/border_mixture.py"
        mixture = read_learned(path, lambda found: cls(found["weights"], found["roots"]), "mixture of borders", how)
        if mixture.roots.shape[1:] != (2 * HALF, 2 * HALF):
            raise UsageError(f"{path} is of other windows than {2 * DEPTH} x {SIDE} pixels of {CHANNELS} channels")
        return mixture

    def variance(self, pieces: Tensor) -> float:
        """That of the noise in pieces (N, 3, p, p), the likeliest of `LEVELS`."""
        strips = torch.cat([own for turned in (pieces, pieces.mT) for own, _ in windows(turned)])

        def likelihood(level: float) -> float:
            """Of all strips."""
            noisy = with_noise(self, level, pieces.device)
            return float(log_densities(strips, noisy.weights, noisy.one).logsumexp(dim=1).sum())

        return max(LEVELS, key=likelihood)

    def right(self, pieces: Tensor, variance: float) -> Tensor:
        """(N, N): log-ratio of piece j to the right of piece i, of pieces (N, 3, p, p) with noise of `variance`."""
        noisy = with_noise(self, variance, pieces.device)
        ratios = [self._ratio(noisy, one, other) for one, other in windows(pieces)]
        return torch.stack(ratios).mean(dim=0) * max(pieces.shape[-1] / SIDE, 1.0)

    def _ratio(self, noisy: Noisy, one: Tensor, other: Tensor) -> Tensor:
        """(n, m) of strips (n, HALF) and (m, HALF)."""
        joint = []
        for weight, root in zip(noisy.weights, noisy.both, strict=True):
            left = torch.linalg.solve_triangular(root, F.pad(one, (0, HALF)).T, upper=False)  # (2 HALF, n)
            right = torch.linalg.solve_triangular(root, F.pad(other, (HALF, 0)).T, upper=False)
            square = left.square().sum(dim=0)[:, None] + right.square().sum(dim=0) + 2 * left.T @ right
            joint.append(weight.log() - root.diagonal().log().sum() - square / 2)
        alone = (
            log_densities(strips, noisy.weights, roots).logsumexp(dim=1)
            for strips, roots in ((one, noisy.one), (other, noisy.other))
        )
        first, second = alone
        return torch.stack(joint).logsumexp(dim=0) - first[:, None] - second


@lru_cache(maxsize=len(LEVELS))
def with_noise(mixture: BorderMixture, variance: float, device: torch.device) -> Noisy:
    """The mixture with noise of a variance."""
    roots = mixture.roots.to(device)
    covariances = roots @ roots.mT + variance * torch.eye(2 * HALF, device=device)
    parts = covariances, covariances[:, :HALF, :HALF], covariances[:, HALF:, HALF:]
    return Noisy(mixture.weights.to(device), *map(torch.linalg.cholesky, parts))


@lru_cache(maxsize=4)
def read_mixture(path: str) -> BorderMixture:
    """The mixture in a file, or the shipped one for ""; see `BorderMixture.load`."""
    return BorderMixture.load(Path(path) if path else SHIPPED)


def windows(pieces: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Strips (N, HALF) at the right and at the left border of pieces (N, 3, p, p), window by window along it.

    Windows overlap where SIDE does not divide p; smaller pieces are enlarged to SIDE.
    """
    if pieces.shape[-1] < SIDE:
        pieces = to_side(pieces[None])[0]
    side = pieces.shape[-1]
    count = math.ceil(side / SIDE)
    for number in range(count):
        start = round(number * (side - SIDE) / max(count - 1, 1))
        rows = pieces[..., start : start + SIDE, :].float() - GREY
        yield rows[..., -DEPTH:].flatten(1), rows[..., :DEPTH].flip(-1).flatten(1)


def fit_borders(images: Tensor, components: int, *, count: int, iterations: int, seed: int) -> BorderMixture:
    """Fit a mixture by expectation and maximisation, in float32, from components by contrast.

    Args:
        images: (n, 3, H, W) uint8, larger than a window at all `SCALES`.
        components: K.
        count: windows that are drawn.
        iterations: of expectation and maximisation.
        seed: of the draws and the start.

    Raises:
        UsageError: fewer windows than values in all components.
    """
    if count < 2 * HALF * components:
        raise UsageError(f"{count} windows are too few for {components} components of {2 * HALF} values")
    generator = torch.Generator().manual_seed(seed)
    points = _draw_windows(images, count, generator)
    contrast = points.std(dim=1)
    cuts = torch.quantile(contrast, torch.linspace(0, 1, components + 1)[1:-1])
    random = torch.rand(len(points), components, generator=generator)
    shares = F.one_hot(torch.bucketize(contrast, cuts), components) + 2 * random / components
    return BorderMixture(*fit_gaussians(points, shares / shares.sum(dim=1, keepdim=True), iterations, FLOOR))


def _draw_windows(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """About `count` windows (n, 2 HALF) at random places of images of all `SCALES`, turned and mirrored at random."""
    found = []
    for scale in SCALES:
        for turned in (False, True):
            chosen = torch.randint(len(images), (count // len(SCALES) // 2,), generator=generator)
            for part in chosen.split(1000):
                drawn = images[part].float() / 255
                drawn = (
                    F.interpolate(drawn, scale_factor=scale, mode="bilinear", antialias=True) if scale != 1 else drawn
                )
                found.append(_one_window_each(drawn.mT if turned else drawn, generator))
    points = torch.cat(found)
    for axis in (-1, -2):
        mirrored = torch.rand(len(points), generator=generator) < 0.5
        points = torch.where(mirrored.view(-1, 1, 1, 1), points.flip(axis), points)
    halves = points[..., :DEPTH], points[..., DEPTH:].flip(-1)
    return torch.cat([half.flatten(1) for half in halves], dim=1) - GREY


def _one_window_each(images: Tensor, generator: torch.Generator) -> Tensor:
    """(B, 3, SIDE, 2 DEPTH) of images (B, 3, H, W)."""
    every = images.unfold(2, SIDE, 1).unfold(3, 2 * DEPTH, 1)  # (B, 3, rows, columns, SIDE, 2 DEPTH)
    row, column = (torch.randint(every.shape[k], (len(images),), generator=generator) for k in (2, 3))
    return every[torch.arange(len(images)), :, row, column]
