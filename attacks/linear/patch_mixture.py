"""A prior learned from photographs: a mixture of Gaussians of free scale on small overlapping patches.

After EPLL (Zoran and Weiss, "From learning models of natural image patches to whole image restoration", ICCV 2011): the
image of least sum, over all patches u of SIDE x SIDE pixels, of -log p(u). Departs from it in three ways. The mixture
is on the shape of a patch alone: its mean is taken out, channel by channel, and each component k has a covariance S_k
of patches of unit contrast whose scale is free, so that the penalty is a norm,

    strength d |u|_k,      |u|_k^2 = u' S_k^-1 u / d,

for the component that fits best with its scale at the best value. Patches lie in luma and doubled chroma, as those of
`attacks.linear.image_prior`. And the image is not denoised and projected in turns but solved for along the directions
that the equations leave open, by the reweighting of `image_prior`: components and norms at the present image, then
conjugate gradients; it starts from the least total variation.

What this adds to total variation is how edges and gradients go on across the border of two patches, which is where the
unknown levels of both are compared. It needs public photographs (`Capability.AUXILIARY_DATA`). The mixture that ships
was fitted to the photographs of scikit-image alone (benchmarks/patch_mixture.py, which fits others).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.linear.gaussian_mixture import fit_gaussians
from attacks.linear.image_prior import LUMA_CHROMA, Settled, VectorialVariation, colour_of, conjugate_gradients
from attacks.linear.learned_file import read_learned, write_learned
from attacks.linear.normal_equations import Estimate
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

SHIPPED = Path(__file__).with_name("patch_mixture.safetensors")
SIDE, STRIDE = 4, 2
CHANNELS = 3
# A patch whose contrast (rms in [0, 1]) is below this has no shape but noise.
FLAT = 0.006
# Added to the variances of patches of unit contrast: rounding to 8 bits at a contrast of about 0.02.
FLOOR = 2e-4


@dataclass(frozen=True)
class PatchMixture:
    """A mixture on mean-free patches of unit contrast, D = CHANNELS SIDE^2 values, d = D - CHANNELS of them free.

    Attributes:
        weights: (K,), sum to 1.
        factors: (K, d, D), rows that whiten a patch of component k: S_k^-1 = factors[k]' factors[k].
    """

    weights: Tensor
    factors: Tensor

    def save(self, path: Path) -> None:
        """Write as safetensors, in half precision."""
        write_learned({"weights": self.weights, "factors": self.factors}, path)

    @classmethod
    def load(cls, path: Path) -> PatchMixture:
        """Read what `save` wrote.

        Raises:
            UsageError: no such file, or one that holds something else.
        """
        how = "fit one with benchmarks/patch_mixture.py"
        mixture = read_learned(path, lambda found: cls(found["weights"], found["factors"]), "mixture", how)
        if mixture.factors.shape[1:] != (CHANNELS * (SIDE**2 - 1), CHANNELS * SIDE**2):
            raise UsageError(f"{path} is of other patches than {SIDE} x {SIDE} pixels of {CHANNELS} channels")
        return mixture

    def to(self, device: torch.device) -> PatchMixture:
        """The same mixture on a device."""
        return PatchMixture(self.weights.to(device), self.factors.to(device))

    def norms(self, patches: Tensor) -> Tensor:
        """|u|_k^2 of patches (D, L), as (K, L)."""
        return torch.stack([(factor @ patches).square().mean(dim=0) for factor in self.factors])

    def best(self, norms: Tensor, rounding: float) -> Tensor:
        """(L,) int64, the likeliest component at its best scale, of `norms` (K, L) rounded at zero."""
        free = self.factors.shape[1]
        volume = torch.stack([torch.linalg.svdvals(factor).log().sum() for factor in self.factors])  # -log|S_k| / 2
        score = self.weights.log() + volume - free / 2 * (norms + rounding**2).log().T
        return score.argmax(dim=1)


@lru_cache(maxsize=4)
def read_mixture(path: str) -> PatchMixture:
    """The mixture in a file, or the shipped one for ""; see `PatchMixture.load`."""
    return PatchMixture.load(Path(path) if path else SHIPPED)


def fit_mixture(images: Tensor, components: int, *, patches: int, iterations: int, seed: int) -> PatchMixture:
    """Fit a mixture by expectation and maximisation, from random responsibilities.

    Args:
        images: (B, 3, H, W) in [0, 1].
        components: K.
        patches: number of patches drawn from all images; flat ones are left out.
        iterations: of expectation and maximisation.
        seed: of the draw and the start.

    Raises:
        UsageError: fewer patches with contrast than free values in all components.
    """
    generator = torch.Generator().manual_seed(seed)
    colour = torch.tensor(LUMA_CHROMA, dtype=images.dtype)
    drawn = []
    for image in images:
        found = F.unfold(torch.einsum("ij,jhw->ihw", colour, image)[None], SIDE)[0].T  # (L, D)
        drawn.append(found[torch.randperm(len(found), generator=generator)[: -(-patches // len(images))]])
    shapes = torch.cat(drawn).double().unflatten(1, (CHANNELS, -1))
    shapes = (shapes - shapes.mean(dim=2, keepdim=True)).flatten(1)
    contrast = shapes.square().mean(dim=1, keepdim=True).sqrt()
    shapes = (shapes / contrast)[contrast[:, 0] > FLAT]
    if len(shapes) < components * CHANNELS * (SIDE**2 - 1):
        raise UsageError(f"{len(shapes)} patches with contrast are too few for {components} components")
    basis = mean_free_basis()  # (d, D)
    points = shapes @ basis.T  # (n, d)
    start = torch.randint(components, (len(points),), generator=generator)
    shares = 0.2 * F.one_hot(start, components).double() + 0.8 / components
    weights, roots = fit_gaussians(points, shares, iterations, FLOOR)
    factors = torch.linalg.solve_triangular(roots, basis.expand(components, -1, -1), upper=False)
    return PatchMixture(weights.float(), factors.float())


def mean_free_basis() -> Tensor:
    """(d, D) orthonormal rows, the patches without a mean in any channel."""
    values = SIDE**2
    means = torch.ones(values, 1, dtype=torch.float64)
    free = torch.linalg.qr(torch.cat([means, torch.eye(values, dtype=torch.float64)[:, 1:]], dim=1))[0][:, 1:].T
    return torch.block_diag(*[free] * CHANNELS)


@dataclass(frozen=True, kw_only=True)
class MixturePrior(VectorialVariation):
    """Total variation, then the mixture; deviations are those of total variation.

    Args:
        mixture: file of a `PatchMixture`; "" for the one that ships.
        mixture_strength: weight of a patch's norm a free value, for images in [0, 1].
        rounding: of that norm at zero, one value a reweighting.
    """

    mixture: str = ""
    mixture_strength: float = 30.0
    rounding: tuple[float, ...] = (0.1, 0.03, 0.01, 0.003, 0.003)

    def settle(self, estimate: Estimate, tokenizer: Tokenizer, std: tuple[float, ...]) -> Settled:
        """See `VectorialVariation.settle`.

        Raises:
            UsageError: images without three channels, or no such mixture.
        """
        first = super().settle(estimate, tokenizer, std)
        if not first.open:
            return first
        if tokenizer.channels != CHANNELS:
            raise UsageError(f"the mixture is of {CHANNELS} channels, the images have {tokenizer.channels}")
        mixture = read_mixture(self.mixture).to(estimate.rows.device)
        scene = _Scene(mixture, estimate, tokenizer, std)
        shift = ((first.patches - estimate.patches()) @ estimate.open.T).float()  # (N, k)
        for rounding in self.rounding:
            patches = scene.cut(shift)
            norms = mixture.norms(patches)  # (K, L)
            chosen = mixture.best(norms, rounding)
            norm = norms.gather(0, chosen[None])[0]
            weights = self.mixture_strength * (STRIDE / SIDE) ** 2 * (norm + rounding**2).rsqrt()  # (L,)
            shift = scene.step(shift, chosen, weights, self.iterations, self.tolerance)
        return replace(first, patches=estimate.patches(estimate.centre + shift.double()))


class _Scene:
    """The patches of the image as a function of the coefficients' shift from the centre."""

    def __init__(self, mixture: PatchMixture, estimate: Estimate, tokenizer: Tokenizer, std: tuple[float, ...]) -> None:
        self.mixture, self.tokenizer = mixture, tokenizer
        self.colour = colour_of(CHANNELS, std).to(estimate.rows)
        self.precision = estimate.precision.expand_as(estimate.centre).float()
        self.start, self.painted = self._paint(estimate.patches()), self._paint(estimate.open)
        self.size = (tokenizer.grid[0] * tokenizer.patch_size, tokenizer.grid[1] * tokenizer.patch_size)
        self.hessian = self._interior_hessian()

    def _paint(self, patches: Tensor) -> Tensor:
        """(n, P) normalised -> (n, P) luma and chroma, float32."""
        return (self.colour @ patches.unflatten(1, (CHANNELS, -1))).flatten(1).float()

    def _unfold(self, painted: Tensor) -> Tensor:
        """(N, P) -> (D, L), the small patches of the image."""
        return F.unfold(self.tokenizer.unpatchify(painted[None]), SIDE, stride=STRIDE)[0]

    def cut(self, shift: Tensor) -> Tensor:
        """(D, L) of the image with coefficients (N, k)."""
        return self._unfold(self.start + shift @ self.painted)

    def _interior_hessian(self) -> Tensor:
        """(k, k): second derivative of one patch among fixed neighbours, under the mean of all components."""
        side = self.tokenizer.patch_size
        tile = F.pad(self.painted.unflatten(1, (CHANNELS, side, side)), [SIDE - STRIDE] * 4)
        cut = F.unfold(tile, SIDE, stride=STRIDE)  # (k, D, l)
        pairs = zip(self.mixture.weights, self.mixture.factors, strict=True)
        responses = [(weight.sqrt() * (factor @ cut)).flatten(1) for weight, factor in pairs]
        return sum(r @ r.T for r in responses)

    def step(self, shift: Tensor, chosen: Tensor, weights: Tensor, iterations: int, tolerance: float) -> Tensor:
        """Coefficients that minimise the patches' squared norms under their components (L,) and weights (L,)."""
        groups = [(chosen == k).nonzero()[:, 0] for k in range(len(self.mixture.factors))]

        def pull(patches: Tensor) -> Tensor:
            """S^-1 of each of the patches (D, L), weighted, back along the open directions: (N, k)."""
            out = torch.empty_like(patches)
            for factor, own in zip(self.mixture.factors, groups, strict=True):
                out[:, own] = factor.T @ ((factor @ patches[:, own]) * weights[own])
            image = F.fold(out[None], self.size, SIDE, stride=STRIDE)
            return self.tokenizer.patchify(image)[0] @ self.painted.T

        def hessian(x: Tensor) -> Tensor:
            """Second derivative of the weighted problem, applied to x (N, k)."""
            return pull(self._unfold(x @ self.painted)) + self.precision * x

        places = [(side - SIDE) // STRIDE + 1 for side in self.size]
        mean = F.adaptive_avg_pool2d(weights.view(1, 1, *places), self.tokenizer.grid).flatten()  # (N,)
        blocks = mean[:, None, None] * self.hessian + torch.diag_embed(self.precision)
        factors = torch.linalg.cholesky(blocks.double()).float()
        return conjugate_gradients(
            hessian,
            -pull(self._unfold(self.start)),
            shift,
            lambda x: torch.cholesky_solve(x[..., None], factors)[..., 0],
            iterations,
            tolerance,
        )
