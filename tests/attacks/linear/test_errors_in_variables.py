"""Systems with known errors against slow oracles: finite differences, dense covariances, scipy's bounded solvers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares, linprog, lsq_linear

from attacks import ATTACKS
from attacks.linear.errors_in_variables import LEAST_VARIANCE, RoundedSystem, correct, information, marginal_misfit
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.intervals import bounds_of
from attacks.tokenizer import find_tokenizer
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.conftest import observe, photographs


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BOTH_INVERSES = pytest.mark.parametrize("patches", [3, 6])  # fewer and more than the values of one


def rounded_case(step: float, patches: int = 3) -> tuple[RoundedSystem, torch.Tensor]:
    """Patches of four values and a constant pixel in seven channels, both sides rounded to a grid."""
    x, g = drawn(0, patches, 4), drawn(1, patches, 7)
    s = g.T @ torch.cat([x, x.new_ones(patches, 1)], dim=1)
    on_grid = [(t / step).round() * step for t in (g, s)]
    bounds = [torch.full_like(t, step / 2) for t in on_grid]
    return RoundedSystem(on_grid[0], bounds[0], on_grid[1], bounds[1]), x


@BOTH_INVERSES
def test_the_misfit_is_that_of_the_dense_covariance_and_its_gradient_that_of_the_factors(patches: int) -> None:
    system, x = rounded_case(0.05, patches)
    near = x + 0.02 * drawn(2, patches, 4)
    found, gradient = marginal_misfit(system, near)
    extended = torch.cat([near, near.new_ones(patches, 1)], dim=1)
    variance = 0.05**2 / 12
    covariance = variance * (torch.eye(5) + extended.T @ extended)  # the same for all channels
    rest = system.products - system.factors.T @ extended
    assert found == pytest.approx(float((rest @ torch.linalg.inv(covariance) * rest).sum()) / 2, rel=1e-5)

    def least(values: np.ndarray) -> float:
        """The minimum over the factors, by scipy."""
        y = np.concatenate([values.reshape(-1, 4), np.ones((patches, 1))], axis=1)
        total = 0.0
        for g, s in zip(system.factors.T.numpy(), system.products.numpy(), strict=True):
            stacked = np.concatenate([y.T, np.eye(patches)]) / variance**0.5
            total += np.linalg.lstsq(stacked, np.concatenate([s, g]) / variance**0.5, rcond=None)[1][0] / 2
        return total

    assert least(near.numpy().ravel()) == pytest.approx(found, rel=1e-5)
    flat, shift = near.numpy().ravel(), 1e-5
    numeric = [(least(flat + shift * e) - least(flat - shift * e)) / (2 * shift) for e in np.eye(len(flat))]
    np.testing.assert_allclose(gradient.numpy().ravel(), numeric, rtol=2e-3, atol=1e-2)


@BOTH_INVERSES
def test_the_information_is_that_of_factors_and_patches_together_less_what_the_factors_take(patches: int) -> None:
    system, x = rounded_case(0.05, patches)
    spread = torch.rand(7, patches + 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    uneven = dataclasses.replace(
        system,
        factor_bounds=0.1 * spread[:, :patches].T,
        product_bounds=0.02 * spread[:, patches:],
        factors=drawn(1, patches, 7),
    )

    def whitened(unknowns: torch.Tensor) -> torch.Tensor:
        """What both sides should be, in units of their deviations, from patches (N, 4) and factors (N, 7)."""
        y, g = unknowns[: x.numel()].view(-1, 4), unknowns[x.numel() :].view(-1, 7)
        products = g.T @ torch.cat([y, y.new_ones(patches, 1)], dim=1)
        sides = (products / uneven.product_bounds, g / uneven.factor_bounds)
        return 3**0.5 * torch.cat([side.flatten() for side in sides])

    unknowns, own = torch.cat([x.flatten(), uneven.factors.flatten()]), x.numel()
    jacobian = torch.autograd.functional.jacobian(whitened, unknowns)
    joint = jacobian.T @ jacobian
    expected = joint[:own, :own] - joint[:own, own:] @ torch.linalg.inv(joint[own:, own:]) @ joint[own:, :own]
    torch.testing.assert_close(information(uneven, x), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("step", [0.01, 0.1])
def test_without_a_prior_it_is_total_least_squares(step: float) -> None:
    """Where all errors have one size: the last singular vectors (Golub and Van Loan 1980), and scipy's search."""
    tokenizer = find_tokenizer(build_model("vit_mini_32", num_classes=4, weights="random").module, (3, 32, 32))
    tokenizer = dataclasses.replace(tokenizer, grid=(2, 2), patch_size=1)  # four patches of one pixel
    x, g = drawn(3, 4, 3), drawn(4, 4, 12)
    s = g.T @ x
    g, s = ((t / step).round() * step for t in (g, s))
    system = RoundedSystem(g, torch.full_like(g, step / 2), s, torch.full_like(s, step / 2))
    prior = VectorialVariation(strength=1e-9, smoothing=(0.1,) * 12, tolerance=1e-10)
    start = torch.linalg.lstsq(g.T, s).solution
    found = correct([system], start, tokenizer, (1.0, 1.0, 1.0), prior)
    vectors = torch.linalg.svd(torch.cat([g.T, s], dim=1)).Vh.T[:, 4:]  # (7, 3)
    oracle = -vectors[:4] @ torch.linalg.inv(vectors[4:])
    torch.testing.assert_close(found.patches, oracle, rtol=0, atol=2e-5)

    def rest(values: np.ndarray) -> np.ndarray:
        y, factors = values[:12].reshape(4, 3), values[12:].reshape(4, 12)
        return np.concatenate([(factors.T @ y - s.numpy()).ravel(), (factors - g.numpy()).ravel()])

    searched = least_squares(rest, np.concatenate([start.numpy().ravel(), g.numpy().ravel()]), xtol=1e-14, ftol=1e-14)
    np.testing.assert_allclose(found.patches.numpy().ravel(), searched.x[:12], atol=1e-4)
    assert (found.patches - x).norm() < 1.05 * (start - x).norm()


def test_bounds_add_little_to_their_variance() -> None:
    """Three rounded equations an unknown: the middle of what the bounds leave is no nearer than least squares.

    The oracle solves two linear programmes an unknown, and bounded least squares from its box.
    """
    errors = {"squares": 0.0, "bounds": 0.0}
    for seed in range(12):
        g, x = drawn(100 + seed, 6, 18).numpy(), drawn(200 + seed, 6).numpy()
        s, half = np.round(g.T @ x / 0.2) * 0.2, 0.1
        rows, limits = np.concatenate([g.T, -g.T]), np.concatenate([s + half, half - s])
        ends = [[linprog(sign * e, rows, limits, bounds=(None, None)).fun for sign in (1, -1)] for e in np.eye(6)]
        low, high = np.array([[lowest, -highest] for lowest, highest in ends]).T
        assert ((low - 1e-9 <= x) & (x <= high + 1e-9)).all()
        squares = np.linalg.lstsq(g.T, s, rcond=None)[0]
        boxed = lsq_linear(g.T, s, bounds=(low - 1e-9, high + 1e-9)).x
        assert np.linalg.norm(boxed - x) < 1.5 * np.linalg.norm(squares - x)
        errors["squares"] += np.square(squares - x).sum()
        errors["bounds"] += np.square((low + high) / 2 - x).sum()
    assert 0.6 < errors["bounds"] / errors["squares"] < 1.7


def test_shapes_that_do_not_fit() -> None:
    system, x = rounded_case(0.1)
    tokenizer = find_tokenizer(build_model("vit_mini_32", num_classes=4, weights="random").module, (3, 32, 32))
    with pytest.raises(ValueError, match="they do not fit"):
        correct([dataclasses.replace(system, factors=system.factors[:, :2])], x, tokenizer, (1.0,) * 3, None)
    with pytest.raises(ValueError, match="no system"):
        correct([], x, tokenizer, (1.0,) * 3, None)
    assert LEAST_VARIANCE < 1


@pytest.mark.parametrize(("change", "least", "gain"), [("bfloat16", 38.0, 3.0), ("int8", 28.0, 1.0)])
def test_a_photograph_from_a_rounded_message(change: str, least: float, gain: float) -> None:
    model, image = build_model("vit_mini_64", num_classes=200, weights="auto"), photographs(64, 1)
    view = observe(model, image)
    sent = {}
    for name, gradient in view.gradients.items():
        rows = gradient.flatten(1) if gradient.dim() in (2, 4) else gradient.reshape(-1, gradient.shape[-1])
        step = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        grid = ((rows / step).round() * step).reshape(gradient.shape) if gradient.dim() > 1 else gradient
        sent[name] = gradient.bfloat16().float() if change == "bfloat16" else grid
    rounded = dataclasses.replace(view, gradients=sent)
    found, plain = (ATTACKS.get("patch_embedding")(intervals=known)([rounded]) for known in (True, False))
    assert float(psnr(found.images, image)) > max(least, float(psnr(plain.images, image)) + gain)
    wrong = (found.images - image).square().mean(dim=1, keepdim=True)
    patches = torch.nn.functional.avg_pool2d(wrong, 8)[found.known[..., ::8, ::8]]
    assert len(patches)
    assert float((patches < 10**-2.5).double().mean()) > 0.95
    assert float(bounds_of(sent["pos_embed"]).max()) > 0
