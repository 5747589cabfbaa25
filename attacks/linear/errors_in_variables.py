"""The linear system G^T X = S where every entry of G and of S has a known error: rounded, quantised, or not sent.

`attacks.linear.least_squares` measures one noise level and gives it to S. In a message of low precision the errors are
known entry by entry (`attacks.linear.intervals`) and those of G are as large as those of S, so that this is a problem
with errors in the variables (Golub and Van Loan 1980, total least squares; here every entry has its own weight, as in
Markovsky and Van Huffel 2007). For channel d, with X extended by the constant pixel where dL/db was sent,

    S_d = X^T g_d + e_d,     G_d = g_d + f_d,     var e_dp = s_dp,  var f_dn = v_dn,

and g_d is eliminated: the residual r_d = S_d - X^T G_d has the covariance C_d = diag(s_d) + X^T diag(v_d) X, so that

    minimise over X:  sum_d r_d^T C_d^-1 r_d / 2  +  prior(X).

The errors of G lie within the span of the patches, most of them along the patches' mean, those of S do not: pixels'
differences are known much better than their mean, which one noise level for all cannot express. By variable projection
(Golub and Pereyra 1973) the gradient of the first term is -sum_d g_d (C_d^-1 r_d)^T with

    g_d = G_d + diag(v_d) X C_d^-1 r_d,

the most probable true factors; at fixed g_d and C_d its second derivative is sum_d g_d g_d^T x C_d^-1. Each
reweighting of the image prior (`attacks.linear.image_prior`) is one such Gauss-Newton step, solved by conjugate
gradients. One inverse is kept a channel, of the smaller size: of C_d itself where patches have fewer values than there
are patches, else of the N x N matrix of Woodbury's identity.

*Masked updates.* Where the factors of some rows are hidden (MJP), nothing is known of them but their size: their bounds
are that wide, and their patches are unknowns like the others. Any number of updates of one image add up. Rows of single
updates (`attacks.linear.masked_update`) cannot be joined instead: where a message is rounded, many combinations of
patches sink below its noise, and the error of the hidden span, divided by small singular values, reaches every row.

Uniform errors are taken for normal ones of the same variance. With at most five equations an unknown the bounds
themselves add next to nothing: the error of an estimate from three uniform errors is 0.33 of their bound by least
squares and 0.32 by the middle of the interval that the bounds leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.linear.image_prior import VectorialVariation, adjoint, colour_of, conjugate_gradients, differences
from attacks.tokenizer import Tokenizer

# Least variance of an entry, relative to the mean of its channel's: what was sent exactly has the round-off of sums.
LEAST_VARIANCE = 1e-3
# Added to the diagonal of the N x N systems, relative to it.
JITTER = 1e-9
# Misfit above which the variance of S is multiplied by it for a step.
FAR = 2.0
# Error of a normalised pixel along what the prior alone settles, where it settles everything; less where it settles
# less. Its own deviation says little of it.
SHRUNK = 0.6


@dataclass(frozen=True)
class RoundedSystem:
    """G^T X = S with the largest error of every entry.

    Attributes:
        factors, factor_bounds: G and its bounds, (N, D) float64.
        products, product_bounds: S and its bounds, (D, P) or, with the constant pixel, (D, P + 1) float64.
        hidden: (N,) bool, rows of `factors` of which nothing but the size is known; None for none.
        channels: number of channels that the system stands for, where its D rows are a rotation of more of them; 0 for
            the D that it has.
    """

    factors: Tensor
    factor_bounds: Tensor
    products: Tensor
    product_bounds: Tensor
    hidden: Tensor | None = None
    channels: int = 0


@dataclass(frozen=True)
class Corrected:
    """The patches of a rounded system.

    Attributes:
        patches: (N, P) float64, normalised pixels.
        deviation: (N,) rms deviation of a pixel by equations and prior, in units of [0, 1]; not calibrated.
        misfit: sum_d r_d^T C_d^-1 r_d over the number of equations less unknowns; about 1 where the system holds.
    """

    patches: Tensor
    deviation: Tensor
    misfit: float


def correct(
    systems: Sequence[RoundedSystem],
    start: Tensor,
    tokenizer: Tokenizer,
    std: tuple[float, ...],
    prior: VectorialVariation,
) -> Corrected:
    """The most probable patches of one image.

    Args:
        systems: of the updates that show it.
        start: (N, P) normalised patches, such as those of the plain solve.
        std: per-channel normalisation, to render in [0, 1].
        prior: of the image.

    Raises:
        ValueError: there is no system, or shapes do not fit.
    """
    if not systems:
        raise ValueError("no system was given")
    for system in systems:
        (n, d), (channels, width) = system.factors.shape, system.products.shape
        if channels != d or n != len(start) or width - start.shape[1] not in (0, 1):
            raise ValueError(f"G is {(n, d)}, S {(channels, width)}, X {tuple(start.shape)}: they do not fit")
    scene = _Scene([_Term(system) for system in systems], start, tokenizer, std)
    shift = prior.reweighted(scene, torch.zeros_like(scene.origin))
    return Corrected(scene.origin + shift, scene.deviation(), scene.misfit(scene.origin + shift))


def marginal_misfit(system: RoundedSystem, patches: Tensor) -> tuple[float, Tensor]:
    """sum_d r_d^T C_d^-1 r_d / 2 at patches (N, P), and its gradient (N, P) at fixed C_d by variable projection."""
    at = _Linearised(_Term(system), patches)
    return at.misfit / 2, -at.score


def information(system: RoundedSystem, patches: Tensor) -> Tensor:
    """Fisher information of the patches, with the factors eliminated: sum_d g_d g_d^T (x) C_d^-1.

    The error of every unbiased estimate from this system has at least its inverse as covariance (Cramer 1946, Rao
    1945), for normal errors of the variances that the system names. An image prior is a bias: where the system says
    little, an estimate with one can be better.

    Args:
        system: with the true factors, not the rounded ones; its products are not used.
        patches: (N, P), the true ones.

    Returns:
        (N P, N P) float64, by patch and pixel.
    """
    term = _Term(system)
    inverses, (n, p) = _Linearised(term, patches).inverses(), patches.shape
    squares = term.factors[:, :, None] * term.factors[:, None]  # (D, N, N)
    squares = squares.sum(dim=0, keepdim=True) if term.alike else squares
    summed = squares.flatten(1).T @ inverses[:, :p, :p].flatten(1)
    return summed.view(n, n, p, p).transpose(1, 2).reshape(n * p, n * p)


class _Term:
    """A system, a channel a row, with the variances of its entries."""

    def __init__(self, system: RoundedSystem) -> None:
        self.factors, self.products = system.factors.T, system.products  # (D, N), (D, Q)
        nothing = torch.zeros_like(system.factors[:, 0], dtype=torch.bool)
        self.seen = ~(nothing if system.hidden is None else system.hidden)  # (N,)
        self.of_factors = _variance(system.factor_bounds.T, self.seen)
        self.of_products = _variance(system.product_bounds)
        self.channels = system.channels or len(system.products)
        parts = (self.of_factors, self.of_products)
        self.alike = all(bool((part == part[:1]).all()) for part in parts)  # one covariance for all channels

    @property
    def equations(self) -> int:
        """Of all channels together."""
        return self.channels * self.products.shape[1]

    def extended(self, patches: Tensor) -> Tensor:
        """[x, 1], (N, Q), or x alone."""
        return torch.cat([patches, patches.new_ones(len(patches), self.products.shape[1] - patches.shape[1])], dim=1)


def _variance(bounds: Tensor, sent: Tensor | slice = slice(None)) -> Tensor:
    """Of entries in rows of one channel each, (D, n).

    Args:
        sent: the columns whose bounds are those of what was sent; that of a hidden factor is its size.
    """
    variance = bounds.double().square() / 3
    typical = variance[:, sent].mean(dim=1, keepdim=True)
    return variance.maximum(LEAST_VARIANCE * typical).clamp(min=LEAST_VARIANCE**2 * float(typical.mean()))


class _Linearised:
    """A data term around some patches: factors, weights and the Gauss-Newton operator."""

    def __init__(self, term: _Term, patches: Tensor, inflation: float = 1.0) -> None:
        self.term, self.width, v = term, patches.shape[1], term.of_factors
        self.extended = term.extended(patches)  # (N, Q)
        different = slice(1) if term.alike else slice(None)
        products = inflation * term.of_products[different]  # (D, Q) or (1, Q)
        self.inverse, self.direct = 1 / products, products.shape[1] < len(patches)
        if self.direct:  # (D, Q, Q) or (1, Q, Q), of C_d
            inner = torch.stack([(self.extended.T * row) @ self.extended for row in v[different]])
            inner.diagonal(dim1=1, dim2=2).add_(products)
        else:  # (D, N, N) or (1, N, N)
            inner = torch.stack([(self.extended * row) @ self.extended.T for row in self.inverse])
            diagonal = inner.diagonal(dim1=1, dim2=2)
            diagonal.add_(1 / v[different] + JITTER * (diagonal + diagonal.mean(dim=1, keepdim=True)))
        self.inner = torch.cholesky_inverse(torch.linalg.cholesky(inner))
        rest = term.products - term.factors @ self.extended  # r, (D, Q)
        weighted = self.whiten(rest)
        self.misfit = float((rest * weighted).sum())
        self.factors = term.factors + v * (weighted @ self.extended.T)  # (D, N)
        self.score = (self.factors.T @ weighted)[:, : self.width]  # (N, P)

    def whiten(self, rows: Tensor) -> Tensor:
        """C_d^-1 applied to each row of (D, Q)."""
        if self.direct:
            return self._inner(rows)
        scaled = self.inverse * rows
        return scaled - self.inverse * (self._inner(scaled @ self.extended.T) @ self.extended)

    def _inner(self, rows: Tensor) -> Tensor:
        """Each of D rows by its own matrix, from the left: the other way, the product reads memory half as fast."""
        return rows @ self.inner[0] if self.term.alike else torch.bmm(rows[:, None], self.inner)[:, 0]

    def inverses(self) -> Tensor:
        """C_d^-1, (D, Q, Q) or, where they are alike, (1, Q, Q)."""
        if self.direct:
            return self.inner
        scaled = self.inverse[:, None] * self.extended  # (D, N, Q)
        return torch.diag_embed(self.inverse) - scaled.mT @ self.inner @ scaled

    def hessian(self, x: Tensor) -> Tensor:
        """sum_d g_d g_d^T x C_d^-1 applied to (N, P)."""
        moved = torch.nn.functional.pad(self.factors @ x, (0, self.extended.shape[1] - self.width))
        return self.factors.T @ self.whiten(moved)[:, : self.width]


class _Scene:
    """The image as the shift of patches from a start, with the data terms linearised anew at every step."""

    def __init__(self, terms: Sequence[_Term], start: Tensor, tokenizer: Tokenizer, std: tuple[float, ...]) -> None:
        self.terms, self.tokenizer, self.std = terms, tokenizer, std
        self.origin = start.double()
        self.colour = colour_of(tokenizer.channels, std).to(self.origin)  # (C, C)

    def gradient(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scene.gradient`."""
        return differences(self._paint(self.origin + shift))

    def step(self, shift: Tensor, weights: Tensor, iterations: int, tolerance: float) -> Tensor:
        """See `Scene.step`."""
        patches = self.origin + shift
        data = [self._around(patches, term) for term in self.terms]

        def smooth(x: Tensor) -> Tensor:
            """The prior's part of the product with the Hessian."""
            down, right = differences(self._paint(x))
            return self._pull(weights * down, weights * right)

        def hessian(x: Tensor) -> Tensor:
            """The product with the whole Hessian."""
            return sum((one.hessian(x) for one in data), smooth(x))

        self._prepare(data, patches, weights)
        target = sum((one.score for one in data), -smooth(patches))
        return shift + conjugate_gradients(
            hessian, target, torch.zeros_like(target), self._precondition, iterations, tolerance
        )

    def _around(self, patches: Tensor, term: _Term) -> _Linearised:
        """A term around some patches; where they are far off, S is believed as far as it fits, or steps lead astray."""
        found = _Linearised(term, patches)
        misfit = found.misfit / term.equations
        return found if misfit < FAR else _Linearised(term, patches, misfit)

    def _prepare(self, data: Sequence[_Linearised], patches: Tensor, weights: Tensor) -> None:
        """Eigenvectors of the factors' and of the residuals' second moments, which nearly diagonalise the Hessian.

        Beside them, for the expected error, what G shows above the largest singular values that its own errors have.
        """
        n, p = patches.shape
        moments, raw = patches.new_zeros(n, n), patches.new_zeros(n, n)
        own, covariance = patches.new_zeros(n), patches.new_zeros(p, p)
        for one in data:
            seen, s = one.term.seen, one.term.of_products  # (N,), (D, Q)
            v = one.term.of_factors * seen  # hidden rows spoil few directions, and are left out here
            inverse = 1 / (s.mean(dim=1) + (v * one.extended.square().mean(dim=1)).sum(dim=1))  # (D,)
            moments += (one.factors.T * inverse) @ one.factors
            read = one.term.factors * seen
            raw += (read.T * inverse) @ read
            channels = one.term.channels
            own += (1 + (n / channels) ** 0.5) ** 2 * channels / len(v) * (v.T @ inverse)
            error = (patches.T * v.mean(dim=0)) @ patches + torch.diag(s[:, :p].mean(dim=0))
            covariance += error * inverse.mean() / len(data)
        strengths, self.left = torch.linalg.eigh(moments)
        errors, self.right = torch.linalg.eigh(covariance)
        errors = errors.clamp(min=1e-9 * float(errors[-1]))
        self.known = strengths.clamp(min=0)[:, None] / errors  # (N, P)
        sure = (self.left * (raw @ self.left)).sum(dim=0) - (own[:, None] * self.left.square()).sum(dim=0)
        self.sure = sure.clamp(min=0)[:, None] / errors
        # A pixel has four neighbours; the colour matrix mixes channels and renders.
        mixing = 4 * float(self.colour.square().sum()) / len(self.colour)
        self.smooth = mixing * self.tokenizer.patchify(weights[None, None])[0].mean(dim=1)  # (N,)

    def _precondition(self, x: Tensor) -> Tensor:
        turned = (self.left.T @ x @ self.right) / (self.known + self.smooth.mean())
        return self.left @ turned @ self.right.T

    def deviation(self) -> Tensor:
        """See `Corrected.deviation`."""
        smooth = self.smooth[:, None, None]
        total = self.sure + smooth  # (N, N, P)
        shrunk = (smooth / total).square()
        variance = 1 / total + shrunk * (SHRUNK * shrunk.mean()).square()
        variance = (self.left.square()[:, :, None] * variance).sum(dim=1).mean(dim=1)  # (N,)
        return variance.sqrt() * sum(self.std) / len(self.std)

    def misfit(self, patches: Tensor) -> float:
        """See `Corrected.misfit`."""
        found = sum(_Linearised(term, patches).misfit for term in self.terms)
        return found / max(sum(term.equations for term in self.terms) - patches.numel(), 1)

    def _paint(self, patches: Tensor) -> Tensor:
        """(N, P) normalised -> (C, H, W) luma and chroma."""
        painted = self.colour @ patches.unflatten(1, (self.tokenizer.channels, -1))
        return self.tokenizer.unpatchify(painted.flatten(1)[None])[0]

    def _pull(self, down: Tensor, right: Tensor) -> Tensor:
        """Adjoint of differences and painting: (N, P)."""
        cut = self.tokenizer.patchify(adjoint(down, right)[None])[0].unflatten(1, (self.tokenizer.channels, -1))
        return (self.colour.T @ cut).flatten(1)
