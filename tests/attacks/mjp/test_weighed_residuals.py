"""Residuals of tokens weighed by what the noise of the message explains, and tokens beside known ones."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad

from attacks import find_tokenizer
from attacks.mjp.mlp_spans import FirstBlock, read_first_block
from attacks.mjp.mlp_tokens import CONSISTENT, DETERMINED, TokenFamily, TokenSearch, cone, normalised
from attacks.mjp.optima import Optima
from attacks.mjp.token_duals import Removed, coordinates
from fedmjp.models import build_model
from tests.conftest import observe, photographs


@pytest.fixture(scope="module")
def hazy() -> tuple[FirstBlock, torch.Tensor]:
    """The first block of a message in float32 of a photograph with little contrast above, and its tokens (N', D)."""
    model, image = build_model("vit_mini_64", num_classes=8, weights="random"), photographs(64, 1)
    image[..., :32, :] = 0.7 + 0.2 * (image[..., :32, :] - 0.5)
    view = observe(model, image)
    tokenizer = find_tokenizer(view.model, view.image_shape)
    block, patches = read_first_block(view, tokenizer), tokenizer.patchify(model.normalise(image))[0].double()
    with torch.no_grad():
        tokens = block.tokens(patches, torch.zeros(len(patches), dtype=torch.bool))
        return block, normalised(tokens + block.attend(tokens))


def distances(y: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """From each of y (S, D) to the nearest of the others, in lengths of a token."""
    return torch.cdist(y, others).amin(dim=1) / y.shape[1] ** 0.5


def test_gradients_of_the_ratio_agree_with_automatic_differentiation(hazy) -> None:
    block, truth = hazy
    generator = torch.Generator().manual_seed(0)
    y = truth[3:5] + 0.1 * torch.randn(2, truth.shape[1], generator=generator, dtype=torch.float64)
    family = TokenFamily(block, torch.randn(3, truth.shape[1], generator=generator, dtype=torch.float64))
    losses, explained = family.losses(y)
    found = family.gradients(y, losses / explained)

    def ratio(u: torch.Tensor, i: int) -> torch.Tensor:
        left, noise = family.losses(y[i : i + 1] + u @ family.directions)
        return (left / noise)[0]

    for i in range(2):
        expected = grad(ratio)(torch.zeros(3, dtype=torch.float64), i) * explained[i] / 2
        torch.testing.assert_close(found[i], expected)


def test_the_least_ratio_is_nearer_to_the_token_than_the_least_residual(hazy) -> None:
    """From the true tokens on, in an area of little contrast."""
    block, truth = hazy
    family, flat = TokenFamily(block, cone(block)), truth[1:33]
    ratio, residual = family.refine_weighed(flat, 40), family.refined(flat, 40, below=0.0)
    moved = [(normalised(one.y) - flat).norm(dim=1).median() for one in (ratio, residual)]
    assert float(moved[0]) < 0.6 * float(moved[1])
    assert float(ratio.ratios.max()) < CONSISTENT
    assert bool((residual.losses < ratio.losses).all())


def hidden_tokens(truth: torch.Tensor) -> torch.Tensor:
    """(N',) bool, every third one of the lower half."""
    places = torch.arange(len(truth))
    return (places > 32) & (places % 3 == 0)


def test_duals_of_known_tokens_leave_the_others(hazy) -> None:
    block, truth = hazy
    hidden = hidden_tokens(truth)
    removed = Removed.of(block, truth[~hidden])
    rows = coordinates(block, truth[hidden])
    assert removed.left().shape == (int(hidden.sum()), len(truth))
    outside = rows - rows @ removed.left().T @ removed.left()
    assert float((outside.norm(dim=1) / rows.norm(dim=1)).median()) < 0.02


def test_a_token_that_is_found_again_replaces_the_one_it_repeats_once(hazy) -> None:
    block, truth = hazy
    coarse = truth[40:44] + 0.01 * torch.randn(4, truth.shape[1], generator=torch.Generator().manual_seed(0)).double()
    removed = Removed.of(block, coarse)
    assert removed.renewed_by(truth[50:52]) is removed
    renewed = removed.renewed_by(truth[41:42])
    torch.testing.assert_close(renewed.y[1], truth[41])
    torch.testing.assert_close(renewed.y[[0, 2, 3]], coarse[[0, 2, 3]])
    torch.testing.assert_close(renewed.duals[1], Removed.of(block, truth[41:42]).duals[0])
    assert renewed.renewed_by(truth[41:42]) is renewed
    assert len(renewed.extended(truth)) == len(truth)


def test_tokens_are_found_beside_known_ones(hazy) -> None:
    block, truth = hazy
    family, hidden = TokenFamily(block, cone(block)), hidden_tokens(truth)
    found = TokenSearch(rounds=12, starts=1).beside(block, Optima(truth[~hidden], *family.losses(truth[~hidden])))
    assert len(found) >= int(hidden.sum()) - 1
    assert int((distances(truth[hidden], found.y) < 1e-2).sum()) >= 8


def test_points_that_noise_explains_but_leaves_open_are_no_tokens(hazy) -> None:
    """In the whole span there are some, with the least ratio of all."""
    block, truth = hazy
    family, hidden = TokenFamily(block, cone(block)), hidden_tokens(truth)
    optima = family.refine_weighed(family.draw(40, torch.Generator().manual_seed(1)), 40)
    low = optima[optima.ratios < CONSISTENT]
    far = distances(low.y, truth) > 5e-2
    assert int(far.sum()) > 0
    known = Optima(truth[~hidden], *family.losses(truth[~hidden]))
    found = TokenSearch(rounds=12, starts=1).beside(block, known)
    assert float(distances(found.y, truth).max()) < 5e-2
    assert float(family.errors(low[far]).min()) > DETERMINED**2
