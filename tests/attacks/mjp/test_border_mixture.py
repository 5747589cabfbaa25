"""The mixture of borders: its ratio against densities of torch.distributions, noise, windows, neighbours, its file."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from attacks import UsageError
from attacks.mjp.border_mixture import DEPTH, GREY, HALF, LEVELS, BorderMixture, fit_borders, read_mixture, windows
from attacks.mjp.piece_predictor import PiecePredictor
from attacks.mjp.placement import Placement
from tests.attacks.mjp.test_placement import pieces_of
from tests.conftest import photographs


def density(mixture: BorderMixture, variance: float, part: slice) -> MixtureSameFamily:
    """Of some of the values of a window, float64."""
    roots = mixture.roots.double()
    covariances = (roots @ roots.mT + variance * torch.eye(2 * HALF))[:, part, part]
    zero = covariances.new_zeros(covariances.shape[:2])
    return MixtureSameFamily(Categorical(mixture.weights.double()), MultivariateNormal(zero, covariances))


def test_the_ratio_is_that_of_the_densities() -> None:
    mixture, variance = read_mixture(""), 0.01
    draws = torch.Generator().manual_seed(0)
    pieces = pieces_of(photographs(64, 1)[0], 8)[:5] + 0.1 * torch.randn(5, 3, 8, 8, generator=draws)
    found = mixture.right(pieces, variance)
    both, one, other = (density(mixture, variance, part) for part in (slice(None), slice(HALF), slice(HALF, None)))
    for i, j in ((0, 1), (3, 2), (4, 4)):
        left = (pieces[i, :, :, -DEPTH:].double() - GREY).flatten()
        right = (pieces[j, :, :, :DEPTH].flip(2).double() - GREY).flatten()
        ratio = both.log_prob(torch.cat([left, right])) - one.log_prob(left) - other.log_prob(right)
        assert float(found[i, j]) == pytest.approx(float(ratio), rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("level", [0.0, 1e-3, 1e-2])
def test_the_noise_is_found(level: float) -> None:
    pieces = pieces_of(photographs(64, 3)[2], 8)
    noisy = pieces + level**0.5 * torch.randn(pieces.shape, generator=torch.Generator().manual_seed(0))
    assert level in LEVELS
    assert read_mixture("").variance(noisy) == pytest.approx(level, abs=1e-4)


@pytest.mark.parametrize(("side", "starts"), [(8, [0]), (12, [0, 4]), (16, [0, 8]), (20, [0, 6, 12])])
def test_windows_cover_the_border(side: int, starts: list[int]) -> None:
    pieces = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    for start, (one, other) in zip(starts, windows(pieces), strict=True):
        rows = pieces[:, :, start : start + 8] - GREY
        assert torch.equal(one.view(2, 3, 8, DEPTH), rows[..., -DEPTH:])
        assert torch.equal(other.view(2, 3, 8, DEPTH)[..., -1], rows[..., 0])  # the last column is at the border


def test_small_pieces_are_enlarged() -> None:
    assert [one.shape for one, _ in windows(torch.rand(4, 3, 4, 4))] == [(4, HALF)]


def test_under_noise_neighbours_are_surer_than_by_their_borders() -> None:
    """Right neighbours named at first guess at 20 dB, four photographs in 64 pieces."""
    within, count = torch.arange(64).view(8, 8)[:, :-1].flatten(), 0
    shares = dict.fromkeys(("border", "learned", "both"), 0.0)
    for image in photographs(64, 4):
        pieces = pieces_of(image.double(), 8)
        pieces = pieces + 0.1 * torch.randn(pieces.shape, generator=torch.Generator().manual_seed(0))
        everywhere, count = torch.ones(64, dtype=torch.bool), count + 1
        for solver in shares:
            costs = Placement(solver=solver).costs((8, 8), pieces, everywhere).right.fill_diagonal_(torch.inf)
            shares[solver] += float((costs.argmin(dim=1)[within] == within + 1).double().mean())
    assert min(shares["learned"], shares["both"]) > 1.5 * shares["border"]


def test_a_fit_knows_the_direction_of_edges_and_its_file_gives_it_back(tmp_path) -> None:
    """Images of stripes across the border: what continues is likelier than what does not."""
    draws = torch.Generator().manual_seed(0)
    images = (255 * torch.rand(40, 3, 24, 24, generator=draws)).to(torch.uint8)
    images[::2] = images[::2, :, :1]
    images[1::2] = images[1::2, :, :, :1]
    mixture = fit_borders(images, 2, count=2000, iterations=3, seed=0)
    stripes = torch.rand(6, 3, 8, 1, generator=draws).expand(-1, -1, -1, 8)
    ratio = mixture.right(stripes, 1e-3)
    assert torch.equal(ratio.argmax(dim=1), torch.arange(6))
    mixture.save(tmp_path / "own.safetensors")
    again = BorderMixture.load(tmp_path / "own.safetensors").right(stripes, 1e-3)
    torch.testing.assert_close(again, ratio, rtol=2e-2, atol=0.5)  # stored in half precision


def test_mistakes_are_named(tmp_path) -> None:
    everywhere = torch.ones(4, dtype=torch.bool)
    PiecePredictor(16, 1).save(tmp_path / "other.safetensors")
    for file in ("none", "other.safetensors"):
        with pytest.raises(UsageError, match="holds no mixture of borders; fit one with benchmarks/border_mixture.py"):
            Placement(solver="learned", mixture=str(tmp_path / file)).place((2, 2), torch.rand(4, 3, 8, 8), everywhere)
    with pytest.raises(UsageError, match="100 windows are too few for 2 components"):
        fit_borders(torch.zeros(1, 3, 24, 24, dtype=torch.uint8), 2, count=100, iterations=1, seed=0)
