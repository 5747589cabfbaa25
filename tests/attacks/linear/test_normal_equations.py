"""The accumulated equations against stacked least squares, and what must not change the answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks.linear.normal_equations import NormalEquations

N, P = 5, 12


def draw(seed: int, hidden: list[int]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Patches, and for each update rows that are wrong along a random basis of the given dimension."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, P, generator=generator, dtype=torch.float64)
    updates = []
    for k in hidden:
        basis = torch.linalg.qr(torch.randn(P, k, generator=generator, dtype=torch.float64))[0].T
        updates.append((x + torch.randn(N, k, generator=generator, dtype=torch.float64) @ basis, basis))
    return x, updates


def accumulate(updates) -> NormalEquations:
    equations = NormalEquations(N, P)
    for rows, basis in updates:
        equations.add(rows, basis)
    return equations


@settings(max_examples=25, deadline=None)
@given(hidden=st.lists(st.integers(0, 7), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_agrees_with_stacked_least_squares(hidden: list[int], seed: int) -> None:
    x, updates = draw(seed, hidden)
    projections = [np.eye(P) - (b.T @ b).numpy() for _, b in updates]
    left = np.vstack(projections)
    right = np.vstack([q @ rows.numpy().T for q, (rows, _) in zip(projections, updates, strict=True)])
    oracle, _, rank, _ = np.linalg.lstsq(left, right, rcond=1e-9)
    estimate = accumulate(updates).solve()
    if np.linalg.svd(left)[1][rank - 1] > 0.05:  # no direction that random bases hide almost, but not quite
        assert len(estimate.open) == P - rank
        np.testing.assert_allclose(estimate.patches().numpy(), oracle.T, atol=1e-8)
    if rank == P:
        np.testing.assert_allclose(estimate.patches().numpy(), x.numpy(), atol=1e-6)


def test_open_directions_are_those_that_every_update_hides() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, P, generator=generator, dtype=torch.float64)
    axes = torch.eye(P, dtype=torch.float64)
    equations = NormalEquations(N, P)
    for hidden in ([0, 1, 2], [1, 2, 3], [2, 1, 7]):
        equations.add(x, axes[hidden])
    estimate = equations.solve()
    torch.testing.assert_close(estimate.open.T @ estimate.open, torch.diag(axes[1] + axes[2]))
    assert not estimate.precision.any()
    torch.testing.assert_close(estimate.patches(x @ estimate.open.T), x)


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(4)), again=st.lists(st.integers(0, 3), max_size=4), split=st.integers(1, 3))
def test_order_repetition_and_merging_change_nothing(order, again, split) -> None:
    x, updates = draw(0, [3, 5, 2, 4])
    shuffled = [updates[i] for i in [*order, *again]]
    equations = accumulate(shuffled[:split])
    equations.merge(accumulate(shuffled[split:]))
    torch.testing.assert_close(equations.solve().patches(), x, atol=1e-9, rtol=0)
    assert equations.updates == len(shuffled)


def test_misfit_is_the_sum_of_the_equations() -> None:
    x, updates = draw(1, [3, 4])
    wrong = x + 0.1
    expected = sum((d - d @ b.T @ b).square().sum(dim=1) for d, b in ((wrong - rows, b) for rows, b in updates))
    torch.testing.assert_close(accumulate(updates).misfit(wrong), expected)


def test_noise_is_read_off_the_misfit() -> None:
    x, updates = draw(2, [2] * 30)
    generator = torch.Generator().manual_seed(3)
    noisy = [(rows + 1e-3 * torch.randn(N, P, generator=generator, dtype=torch.float64), b) for rows, b in updates]
    estimate = accumulate(noisy).solve()
    assert estimate.noise == pytest.approx(1e-3, rel=0.1)
    assert float((estimate.patches() - x).square().mean().sqrt()) < 3e-4


def test_a_tilted_basis_does_not_speak_of_what_every_update_hides() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(N, P, generator=generator, dtype=torch.float64)
    hidden = torch.eye(P, dtype=torch.float64)[0]
    plain, aware = NormalEquations(N, P), NormalEquations(N, P)
    for _ in range(10):
        tilted = hidden + 1e-3 * torch.randn(P, generator=generator, dtype=torch.float64)
        tilted = (tilted / tilted.norm())[None]
        rows = x - x @ torch.diag(hidden)
        plain.add(rows, tilted)
        aware.add(rows, tilted, tilt=torch.tensor([1e-6 * (P - 1)]))
    assert len(plain.solve().open) == 0
    estimate = aware.solve()
    assert (len(estimate.open), float(estimate.precision.sum())) == (1, 0.0)


def test_refuses_what_does_not_fit() -> None:
    equations = NormalEquations(N, P)
    with pytest.raises(ValueError, match="no update"):
        equations.solve()
    with pytest.raises(ValueError, match="do not fit"):
        equations.add(torch.zeros(N, P + 1), torch.zeros(0, P + 1))
    with pytest.raises(ValueError, match="does not fit"):
        equations.merge(NormalEquations(N, P + 1))


def test_what_a_distrusted_direction_explains_is_no_noise() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, P, generator=generator, dtype=torch.float64)
    equations = NormalEquations(N, P)
    for turn in (0.0, 0.05):  # the updates do tell of the first axis, but their bases are said to be less exact
        basis = torch.zeros(1, P, dtype=torch.float64)
        basis[0, 0], basis[0, 1] = np.cos(turn), np.sin(turn)
        noise = 1e-4 * torch.randn(N, P, generator=generator, dtype=torch.float64)
        equations.add(x + noise, basis, tilt=torch.tensor([0.1]))
    estimate = equations.solve()
    assert len(estimate.open) == 1
    assert estimate.noise == pytest.approx(1e-4, rel=0.5)
