"""Residuals of tokens weighed by what the noise of the message explains, and tokens beside known ones."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad

from attacks import find_tokenizer
from attacks.mjp.mlp_spans import UNITS, FirstBlock, read_first_block
from attacks.mjp.mlp_tokens import CONSISTENT, TokenFamily, cone
from attacks.mjp.optima import FOUND
from attacks.mjp.token_duals import Removed, coordinates, normalised
from attacks.mjp.token_search import ATTRACTS, TokenSearch
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
    """(N',) bool, every third one of the lower half; the class token is the first."""
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


def test_a_part_of_the_hidden_units_gives_duals_as_well(hazy) -> None:
    block, truth = hazy
    hidden = hidden_tokens(truth)
    few, every = (Removed.of(one, truth[~hidden]) for one in (block.thinned, block))
    agree = torch.nn.functional.cosine_similarity(few.duals, every.duals).abs()
    assert float(agree.median()) > 0.99
    torch.testing.assert_close(
        Removed(few.y[:2], few.duals[:2]).joined(Removed(few.y[2:], few.duals[2:])).duals, few.duals
    )


def test_a_part_of_the_hidden_units_puts_the_same_conditions_on_tokens(hazy) -> None:
    block, truth = hazy
    part = block.thinned
    units = len(part.module.mlp.fc1.weight)
    assert units == UNITS * block.count < len(block.module.mlp.fc1.weight)
    assert part.thinned is part  # which has not twice as many
    kept = (block.module.mlp.fc1.weight[:, None] == part.module.mlp.fc1.weight).all(dim=2).nonzero()[:, 0]
    assert len(kept) == units
    for layer, rows, columns in ((0, kept, slice(None)), (1, slice(None), torch.cat([kept, torch.tensor([-1])]))):
        few, every = part.spans[layer], block.spans[layer]
        gradient = every.columns @ every.factor @ every.directions
        torch.testing.assert_close(few.columns @ few.factor @ few.directions, gradient[rows][:, columns])
    # The noise explains what tokens leave, and a start as far off as the difference of two tokens leaves far more.
    family = TokenFamily(part, truth[:2])
    ratios = [losses / explained for losses, explained in map(family.losses, (truth, truth.flip(1)))]
    assert float(ratios[0][1:].median()) < FOUND
    assert float(ratios[1].min()) > ATTRACTS


@pytest.fixture(scope="module")
def beside(hazy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden tokens (S, D), those found beside the others and the class token, and points between the rest."""
    block, truth = hazy
    hidden = hidden_tokens(truth)
    known = truth[1:][~hidden[1:]]
    found, between = TokenSearch(rounds=16, starts=1).beside(block, Removed.of(block.thinned, known), truth[:1])
    return truth[hidden], found.y, between


def test_tokens_are_found_beside_known_ones_and_those_aside_are_not_repeated(hazy, beside) -> None:
    hidden, found, between = beside
    assert len(found) <= len(hidden)
    assert len(found) + len(between) in (len(found), len(hidden))
    assert int((distances(hidden, found) < 1e-2).sum()) >= len(hidden) - 3
    assert float(distances(found, hazy[1][:1]).min()) > 1e-2


def test_points_stand_for_tokens_that_are_not_told_apart(hazy) -> None:
    """Without a round of the search nothing is found: the points are all in what the known tokens leave."""
    block, truth = hazy
    hidden = hidden_tokens(truth)
    known = truth[1:][~hidden[1:]]
    found, between = TokenSearch(rounds=0).beside(block, Removed.of(block.thinned, known), truth[:1])
    assert not len(found)
    assert len(between) == int(hidden.sum())
    assert float(distances(between, truth[hidden]).max()) < float(distances(between, known).min())


def test_there_is_no_search_beside_all_tokens(hazy) -> None:
    block, truth = hazy
    found, between = TokenSearch().beside(block, Removed.of(block.thinned, truth[1:]), truth[:1])
    assert not len(found) + len(between)


def test_points_between_tokens_are_told_by_the_duals(hazy) -> None:
    block, truth = hazy
    tokens = truth[1:][~hidden_tokens(truth)[1:]].clone()
    tokens[[3, 20]] = normalised(tokens[[4, 21]] + tokens[[5, 22]] - tokens[[6, 23]])
    removed = Removed.of(block.thinned, tokens)
    assert removed.mixtures(block).nonzero()[:, 0].tolist() == [3, 20]
    assert removed.mixtures(block, sure=4).nonzero()[:, 0].tolist() == [20]
    assert len(removed[~removed.mixtures(block)]) == len(tokens) - 2


def test_points_that_noise_explains_in_the_whole_span_are_no_tokens(hazy, beside) -> None:
    """There are some, with the least ratio of all; in what known tokens leave there are none."""
    block, truth = hazy
    family = TokenFamily(block, cone(block))
    optima = family.refine_weighed(family.draw(40, torch.Generator().manual_seed(1)), 40)
    low = optima[optima.ratios < CONSISTENT]
    assert int((distances(low.y, truth) > 5e-2).sum()) > 0
    assert float(distances(beside[1], truth).max()) < 5e-2
