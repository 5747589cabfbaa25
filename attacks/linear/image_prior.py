"""The image prior that settles open directions: total variation, by iteratively reweighted least squares.

    minimise over c (N, k):  sum_pj precision_pj (c_pj - centre_pj)^2 / 2  +  STRENGTH sum_pixels |grad Y(c)|

Y is the image rows + c V_open rendered into luma and doubled chroma, whose six differences at a pixel (two directions,
three channels) go into one norm: edges of the channels belong together. Each round replaces |.| by the quadratic that
touches it at the present image (iterative reweighting; the first round has equal weights, which is the Gaussian prior
of natural images with spectrum 1/f^2), and solves for c by conjugate gradients, preconditioned patch by patch with the
equal-weight Hessian scaled by the patch's mean weight. Data and prior are both in units of negative log-likelihood, so
what the equations give with a known error enters with exactly that weight.

Two deviations say how far an answer may be off. The inverse of a patch's block of the last Hessian is the covariance of
its pixels given its neighbours. Neighbours are uncertain too, most of all together: an error that is the same in every
patch costs no more than the steps at their borders, and where every update hides the same direction that error is often
the largest. Its covariance is the inverse of the Hessian restricted to coefficients that all patches share. Both are
too small, because reweighting lowers the variance where it smooths; `attacks.linear.confidence` calibrates them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.linear.block_inverses import invert_blocks
from attacks.linear.normal_equations import Estimate
from attacks.tokenizer import Tokenizer

# RGB to luma and doubled chroma, rows of ITU-R BT.601.
LUMA_CHROMA = ((0.299, 0.587, 0.114), (-0.338, -0.662, 1.0), (1.0, -0.838, -0.162))


@dataclass(frozen=True)
class Settled:
    """Patches with every direction settled.

    Attributes:
        patches: (N, P) float64.
        deviation: (N,) rms deviation of a pixel given the neighbouring patches, in units of [0, 1]; not calibrated.
        shared: rms deviation of a pixel by an error that all patches share, likewise.
        gradient: (N,) mean norm of the image's gradient in a patch, in luma and doubled chroma of an image in [0, 1].
        open: number of directions that the equations left open.
    """

    patches: Tensor
    deviation: Tensor
    shared: float
    gradient: Tensor
    open: int


@dataclass(frozen=True, kw_only=True)
class VectorialVariation:
    """Total variation of luma and doubled chroma, all channels and both directions in one norm.

    Args:
        strength: weight of the norm of one pixel's gradient, for images in [0, 1]: the inverse of its typical size.
        smoothing: rounding of the norm at zero, one value a reweighting; None is the equal-weight start.
        iterations: conjugate-gradient steps a reweighting.
        tolerance: of the conjugate gradients, relative.
    """

    strength: float = 10.0
    smoothing: tuple[float | None, ...] = (None, 0.1, 0.03, 0.01, 0.01, 0.01)
    iterations: int = 60
    tolerance: float = 1e-3

    def settle(self, estimate: Estimate, tokenizer: Tokenizer, std: tuple[float, ...]) -> Settled:
        """Complete an estimate.

        Args:
            std: per-channel normalisation, to render in [0, 1].
        """
        if not len(estimate.open):
            nothing = estimate.rows.new_zeros(len(estimate.rows))
            return Settled(estimate.rows, nothing, 0.0, nothing, 0)
        scene = _Scene(tokenizer, std, estimate)
        shift = self.reweighted(scene, torch.zeros_like(estimate.centre))  # c - centre
        down, right = scene.gradient(shift)
        size = (down.square().sum(dim=0) + right.square().sum(dim=0)).sqrt()  # (H, W)
        return Settled(
            patches=estimate.patches(estimate.centre + shift),
            deviation=scene.deviation(),
            shared=scene.shared_deviation(self.weights((down, right), self.smoothing[-1])),
            gradient=tokenizer.patchify(size[None, None])[0].mean(dim=1),
            open=len(estimate.open),
        )

    def reweighted(self, scene: Scene, shift: Tensor) -> Tensor:
        """The coefficients of the least penalty, from `shift` on."""
        for smoothing in self.smoothing:
            weights = self.weights(scene.gradient(shift), smoothing)
            shift = scene.step(shift, weights, self.iterations, self.tolerance)
        return shift

    def weights(self, gradient: tuple[Tensor, Tensor], smoothing: float | None) -> Tensor:
        """(H, W): curvature of the norm at each pixel, for differences (C, H, W) in both directions."""
        down, right = gradient
        if smoothing is None:
            return torch.full_like(down[0], self.strength / 0.05)
        size = down.square().sum(dim=0) + right.square().sum(dim=0)  # (H, W)
        return self.strength * (size + smoothing**2).rsqrt()


class TouchingQuadratic:
    """The penalty of a whole image, and the quadratic that touches it there: x -> x^T K^T W K x / 2.

    Attributes:
        penalty: of the image, in negative log-likelihood.
        weights: (H, W), W.
        typical: mean of the diagonal of K^T W K.
    """

    def __init__(self, prior: VectorialVariation, image: Tensor, std: tuple[float, ...]) -> None:
        """Touch the penalty.

        Args:
            image: (1, C, H, W) float64, normalised.
            std: per-channel normalisation.
        """
        smoothing = prior.smoothing[-1]
        self.colour = colour_of(image.shape[1], std).to(image)
        down, right = self.gradient(image)
        size = down.square().sum(dim=0) + right.square().sum(dim=0)
        self.penalty = prior.strength * float((size + smoothing**2).sqrt().sum())
        self.weights = prior.weights((down, right), smoothing)
        # A pixel is in two differences of each direction.
        self.typical = 4 * float(self.weights.mean() * self.colour.square().sum()) / image.shape[1]

    def gradient(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """K x: downward and rightward differences of (1, C, H, W) in luma and chroma, both (C, H, W)."""
        return differences(torch.einsum("cd,dhw->chw", self.colour, image[0]))

    def adjoint(self, down: Tensor, right: Tensor) -> Tensor:
        """K^T of differences in both directions, (1, C, H, W)."""
        return torch.einsum("cd,chw->dhw", self.colour, adjoint(down, right))[None]

    def times(self, image: Tensor) -> Tensor:
        """K^T W K x of (1, C, H, W)."""
        down, right = self.gradient(image)
        return self.adjoint(self.weights * down, self.weights * right)

    def draw(self, generator: torch.Generator) -> Tensor:
        """(1, C, H, W) with the covariance K^T W K."""
        like = self.gradient(self.colour.new_zeros(1, len(self.colour), *self.weights.shape))
        down, right = (torch.randn(d.shape, generator=generator, dtype=torch.float64).to(d) for d in like)
        down[:, -1], right[..., -1] = 0.0, 0.0  # there is no difference at the far border
        root = self.weights.sqrt()
        return self.adjoint(root * down, root * right)


class Scene(Protocol):
    """An image as an affine function of some coefficients."""

    def gradient(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Downward and rightward differences of the image, both (C, H, W) with zeros at the far border."""

    def step(self, shift: Tensor, weights: Tensor, iterations: int, tolerance: float) -> Tensor:
        """Coefficients that minimise the squared differences under weights (H, W), by conjugate gradients."""


class _Scene:
    """The image as a function of the coefficients' shift from the centre, its differences, and their adjoints."""

    def __init__(self, tokenizer: Tokenizer, std: tuple[float, ...], estimate: Estimate) -> None:
        self.tokenizer, self.channels = tokenizer, tokenizer.channels
        self.precision = estimate.precision  # (k,), (N, k) or (N, k, k)
        self.colour = colour_of(self.channels, std).to(estimate.rows)  # (C, C), from normalised channels
        self.start = self._paint(estimate.patches())  # (N, P)
        self.painted = self._paint(estimate.open)  # (k, P)
        flat = estimate.open.reshape(len(estimate.open), self.channels, -1)
        self.pixel = flat * estimate.rows.new_tensor(std)[:, None]  # (k, C, p p)
        self.hessian = self._interior_hessian()  # (k, k)

    def _paint(self, patches: Tensor) -> Tensor:
        """(n, P) normalised -> (n, P) luma and chroma."""
        return (self.colour @ patches.unflatten(1, (self.channels, -1))).flatten(1)

    def _assemble(self, painted: Tensor) -> Tensor:
        """(N, P) -> (C, H, W)."""
        return self.tokenizer.unpatchify(painted[None])[0]

    def gradient(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Downward and rightward differences of the image, both (C, H, W) with zeros at the far border."""
        return differences(self._assemble(self.start + shift @ self.painted))

    def _weighed(self, x: Tensor) -> Tensor:
        """Each patch's coefficients (N, k) times its precision."""
        return (self.precision @ x[..., None])[..., 0] if self.precision.dim() == 3 else self.precision * x

    def _pull(self, down: Tensor, right: Tensor) -> Tensor:
        """Adjoint of the differences and of the rendering: (N, k)."""
        return self.tokenizer.patchify(adjoint(down, right)[None])[0] @ self.painted.T

    def step(self, shift: Tensor, weights: Tensor, iterations: int, tolerance: float) -> Tensor:
        """See `Scene.step`; keeps the preconditioner, the inverses of the patches' blocks, for `deviation`."""

        def hessian(x: Tensor) -> Tensor:
            """Second derivative of the weighted problem, applied to x (N, k)."""
            down, right = differences(self._assemble(x @ self.painted))
            return self._pull(weights * down, weights * right) + self._weighed(x)

        down, right = self.gradient(torch.zeros_like(shift))
        target = -self._pull(weights * down, weights * right)
        mean = self.tokenizer.patchify(weights[None, None])[0].mean(dim=1)  # (N,)
        self.blocks = invert_blocks(mean, self.hessian, self.precision)
        return conjugate_gradients(hessian, target, shift, self.blocks.solve, iterations, tolerance)

    def deviation(self) -> Tensor:
        """(N,) root mean square of a pixel's posterior deviation after the last step, in [0, 1]."""
        pixels = self.pixel.flatten(1)  # (k, P)
        return (self.blocks.traces(pixels @ pixels.T) / pixels.shape[1]).sqrt()

    def shared_deviation(self, weights: Tensor) -> float:
        """Root mean square of a pixel's posterior deviation, in [0, 1], if all patches have the same coefficients.

        Args:
            weights: (H, W), curvature of the norm at each pixel.
        """
        (rows, columns), side = self.tokenizer.grid, self.tokenizer.patch_size
        down, right = weights.clone(), weights.clone()
        down[-1], right[:, -1] = 0.0, 0.0  # there is no difference at the far border
        known = self.precision if self.precision.dim() == 3 else self.precision.expand(len(self.start), -1)
        hessian = known.sum(dim=0) if known.dim() == 3 else torch.diag(known.sum(dim=0))  # (k, k)
        tile = self.painted.unflatten(1, (self.channels, side, side))
        for axis, weight in ((2, down), (3, right)):
            folded = weight.reshape(rows, side, columns, side).sum(dim=(0, 2))  # (p, p), over all patches
            steps = ((tile.roll(-1, axis) - tile) * folded.sqrt()).flatten(1)
            hessian = hessian + steps @ steps.T
        pixels = self.pixel.flatten(1)  # (k, P)
        covariance = torch.linalg.pinv(hessian, hermitian=True)
        return float((covariance * (pixels @ pixels.T)).sum().clamp(min=0) / pixels.shape[1]) ** 0.5

    def _interior_hessian(self) -> Tensor:
        """Equal-weight Hessian of one patch among fixed neighbours."""
        v = self.painted.unflatten(1, (self.channels, *[self.tokenizer.patch_size] * 2))
        sides = (v[:, :, 1:] - v[:, :, :-1], v[..., 1:] - v[..., :-1])
        borders = (v[:, :, 0], v[:, :, -1], v[..., 0], v[..., -1])
        return sum(d.flatten(1) @ d.flatten(1).T for d in (*sides, *borders))


def colour_of(channels: int, std: tuple[float, ...]) -> Tensor:
    """(C, C): normalised channels to luma and doubled chroma in [0, 1]; other than three channels stay themselves."""
    colour = torch.tensor(LUMA_CHROMA) if channels == 3 else torch.eye(channels)
    return colour.double() * torch.tensor(std, dtype=torch.float64)


def differences(image: Tensor) -> tuple[Tensor, Tensor]:
    """Downward and rightward differences of (C, H, W), zeros at the far border."""
    return F.pad(image.diff(dim=1), (0, 0, 0, 1)), F.pad(image.diff(dim=2), (0, 1))


def adjoint(down: Tensor, right: Tensor) -> Tensor:
    """Adjoint of `differences`."""
    image = -(down + right)
    image[:, 1:] += down[:, :-1]
    image[..., 1:] += right[..., :-1]
    return image


def conjugate_gradients(
    hessian: Callable[[Tensor], Tensor],
    target: Tensor,
    start: Tensor,
    precondition: Callable[[Tensor], Tensor],
    iterations: int,
    tolerance: float,
) -> Tensor:
    """Solve hessian(x) = target from `start`."""
    x = start
    residual = target - hessian(x)
    direction = whitened = precondition(residual)
    size = (residual * whitened).sum()
    enough = tolerance**2 * (target * precondition(target)).sum()
    for _ in range(iterations):
        if size <= enough:
            break
        image = hessian(direction)
        step = size / (direction * image).sum()
        x, residual = x + step * direction, residual - step * image
        whitened = precondition(residual)
        size, previous = (residual * whitened).sum(), size
        direction = whitened + (size / previous) * direction
    return x
