"""The linear solve and the prior against independent oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attacks.affine import solve_rows
from attacks.priors import least_variation, quietness, total_variation


def test_agrees_with_numpy_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(20, 30, generator=generator, dtype=torch.float64)
    x = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    found = solve_rows(g[None], (g.T @ x)[None])[0]
    oracle = np.linalg.lstsq(g.T.numpy(), (g.T @ x).numpy(), rcond=None)[0]
    np.testing.assert_allclose(found.rows.numpy(), oracle, atol=1e-10)
    torch.testing.assert_close(found.rows, x)
    assert (found.rank, found.free.shape[1]) == (20, 0)
    assert found.condition == pytest.approx(np.linalg.cond(g.numpy()))
    assert found.residual < 1e-12


def test_names_the_free_directions() -> None:
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    found = solve_rows(g[None], (g.T @ x)[None])[0]
    assert found.free.shape == (12, 4)
    assert float((g.T @ found.free).norm()) < 1e-12
    # The truth differs from the solution of least norm by free directions only.
    rest = x - found.rows
    torch.testing.assert_close(found.free @ (found.free.T @ rest), rest)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="B or D differ"):
        solve_rows(torch.zeros(1, 3, 4), torch.zeros(1, 5, 6))


def test_total_variation_of_a_step() -> None:
    image = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    image[..., 2:] = 1
    assert float(total_variation(image, 0.0)) == pytest.approx(4.0)


def test_quiet_surroundings_weigh_more() -> None:
    image = torch.zeros(1, 3, 20, 20, dtype=torch.float64)
    image[..., 12:] = torch.rand(1, 3, 20, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for weights in quietness(image):
        assert weights[..., :8].min() > 10 * weights[..., -6:].max()


def test_least_variation_finds_the_offset_of_a_flat_image() -> None:
    pattern = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    pattern[..., 1:3, 2:5] = 1
    found = least_variation(lambda c: 0.3 + pattern * (c - 0.7), torch.zeros(1, dtype=torch.float64))
    assert float(found) == pytest.approx(0.7, abs=1e-3)
