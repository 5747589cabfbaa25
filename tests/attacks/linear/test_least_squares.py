"""The linear solve and the prior against independent oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attacks.linear.image_prior import VectorialVariation
from attacks.linear.least_squares import solve_rows
from attacks.linear.null_space import settle_rows
from attacks.tokenizer import Tokenizer


def test_agrees_with_numpy_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(20, 30, generator=generator, dtype=torch.float64)
    x = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    found = solve_rows(g[None], (g.T @ x)[None])[0]
    oracle = np.linalg.lstsq(g.T.numpy(), (g.T @ x).numpy(), rcond=None)[0]
    np.testing.assert_allclose(found.rows.numpy(), oracle, atol=1e-10)
    torch.testing.assert_close(found.rows, x)
    assert (found.rank, found.free, found.weak.shape[1]) == (20, 0, 0)
    assert found.condition == pytest.approx(np.linalg.cond(g.numpy()))
    assert found.residual < 1e-12


def test_names_the_free_directions() -> None:
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    found = solve_rows(g[None], (g.T @ x)[None])[0]
    assert found.weak.shape == (12, 4)
    assert found.free == 4
    assert found.deviation.isinf().all()
    assert float((g.T @ found.weak).norm()) < 1e-12
    # The truth differs from the solution of least norm by free directions only.
    rest = x - found.rows
    torch.testing.assert_close(found.weak @ (found.weak.T @ rest), rest)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="B or D differ"):
        solve_rows(torch.zeros(1, 3, 4), torch.zeros(1, 5, 6))


@pytest.mark.parametrize("noise", [1e-8, 1e-5, 1e-3, 1e-1])
def test_the_noise_is_found_and_every_error_foretold(noise: float) -> None:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    u, v = torch.linalg.qr(draw(40, 40))[0], torch.linalg.qr(draw(100, 40))[0]
    sigma = torch.logspace(0, -9, 40, dtype=torch.float64)
    g, x = (u * sigma) @ v.T, draw(40, 300)
    s = g.T @ x + noise * draw(100, 300)
    found = solve_rows(g[None], s[None])[0]
    assert found.rank == int((sigma > noise).sum()) or abs(found.rank - int((sigma > noise).sum())) <= 1
    raw = (v.T @ s) / sigma[:, None]
    errors = (raw - u.T @ x).square().mean(dim=1).sqrt()  # the true error of each combination, (40,)
    weak = errors > 2e-3
    expected = found.deviation[-int(weak.sum()) :]
    torch.testing.assert_close(expected, errors[weak], rtol=0.25, atol=0)
    # Shrunk, no combination is worse than saying nothing; cut off or not, some would be.
    assert float((found.rows - x).square().mean()) < 1.0
    lstsq = torch.linalg.pinv(g.T) @ s
    assert float((found.rows - x).norm()) <= 1.05 * float((lstsq - x).norm())


SCENE = Tokenizer("", None, None, 0, 4, (4, 4), 3, 16)


def smooth_image() -> torch.Tensor:
    place = torch.linspace(0, 3, 16, dtype=torch.float64)
    image = torch.stack(
        [place.sin()[:, None] + place.cos(), place[:, None] * place / 9, place.cos()[:, None] + 0 * place]
    )
    return image[None] / 4 + 0.5


@pytest.mark.parametrize("free", [1, 3, 8])
def test_the_prior_settles_what_is_free_and_leaves_the_rest(free: int) -> None:
    x = SCENE.patchify(smooth_image())[0]  # (16, 48)
    generator = torch.Generator().manual_seed(3)
    g = torch.randn(16, 16 - free, generator=generator, dtype=torch.float64)
    found = solve_rows(g[None], (g.T @ x)[None])[0]
    assert found.free == free
    settled = settle_rows(found, SCENE, (1.0, 1.0, 1.0), VectorialVariation())
    torch.testing.assert_close(g.T @ settled, g.T @ x, atol=1e-6, rtol=0)
    before, after = (float((rows - x).square().mean().sqrt()) for rows in (found.rows, settled))
    assert after < 0.2 * before


def test_the_prior_minimises_what_it_says() -> None:
    x = SCENE.patchify(smooth_image())[0]
    g = torch.randn(16, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = solve_rows(g[None], (g.T @ x)[None])[0]
    prior = VectorialVariation(smoothing=(0.05,) * 40, iterations=300, tolerance=1e-10)
    settled = settle_rows(found, SCENE, (1.0, 1.0, 1.0), prior)
    c = (found.weak.T @ (settled - found.rows)).requires_grad_()
    with torch.enable_grad():
        image = SCENE.unpatchify((found.rows + found.weak @ c)[None])[0]
        colour = torch.tensor([[0.299, 0.587, 0.114], [-0.338, -0.662, 1.0], [1.0, -0.838, -0.162]]).to(image)
        painted = torch.einsum("dc,chw->dhw", colour, image)
        down = torch.nn.functional.pad(painted.diff(dim=1), (0, 0, 0, 1))
        right = torch.nn.functional.pad(painted.diff(dim=2), (0, 1))
        penalty = (down.square().sum(dim=0) + right.square().sum(dim=0) + 0.05**2).sqrt().sum()
        gradient = torch.autograd.grad(penalty, c)[0]
    assert float(gradient.abs().max()) < 1e-4
