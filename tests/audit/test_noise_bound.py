"""The bound on the error of noisy equations, against the mean error of a maximum-likelihood estimate."""

from __future__ import annotations

import pytest
import torch

from fedmjp.audit.noise_bound import least_error


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_maximum_likelihood_reaches_the_bound_at_low_noise() -> None:
    """Total least squares with one exact column, by alternating its two normal equations, over 300 draws of noise."""
    x, g, sigma = drawn(0, 3, 4), [drawn(1, 3, 20), drawn(2, 3, 20)], [1e-3, 2e-3]
    extended = torch.cat([x, x.new_ones(3, 1)], dim=1)
    errors = []
    for seed in range(300):
        rows, products, weights = [], [], []
        for t, (own, s) in enumerate(zip(g, sigma, strict=True)):
            noise = s * drawn(10 + 2 * seed + 1000 * t, 20, 8)
            rows.append(own.T + noise[:, :3])
            products.append(own.T @ extended + noise[:, 3:])
            weights.append(torch.full((20, 1), 1 / s, dtype=torch.float64))
        a, b, w = torch.cat(rows), torch.cat(products), torch.cat(weights)
        guess = x.clone()
        for _ in range(20):
            y = torch.cat([torch.eye(3).double(), guess, x.new_ones(3, 1)], dim=1)  # (3, 8)
            true = torch.cat([a, b], dim=1) @ y.T @ torch.linalg.inv(y @ y.T)  # the factors of least error
            guess = torch.linalg.lstsq(w * true, w * b[:, :4]).solution
        errors.append((guess - x).square().mean())
    bound = least_error(g, sigma, x, float("inf"))
    assert float(torch.stack(errors).mean()) == pytest.approx(bound, rel=0.1)


def test_more_updates_and_less_noise_lower_it_and_the_prior_ends_it() -> None:
    x, g = drawn(0, 3, 4), [drawn(1, 3, 20), drawn(2, 3, 20)]
    one, two = least_error(g[:1], [0.1], x, 1.0), least_error(g, [0.1, 0.1], x, 1.0)
    assert two < one < least_error(g[:1], [0.2], x, 1.0) < 1.0
    assert least_error(g[:1], [1e6], x, 0.5) == pytest.approx(0.5, rel=1e-6)
    # Of two equal updates the bound is that of one with half the variance.
    assert least_error([g[0], g[0]], [0.1, 0.1], x, 1.0) == pytest.approx(
        least_error(g[:1], [0.1 / 2**0.5], x, 1.0), rel=1e-9
    )


@pytest.mark.parametrize("noises", [[], [0.0], [1.0, 1.0]])
def test_every_update_needs_its_noise(noises: list[float]) -> None:
    with pytest.raises(ValueError, match="each needs one above 0"):
        least_error([drawn(0, 3, 5)], noises, drawn(1, 3, 4), 1.0)
