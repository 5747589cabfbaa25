"""Updates whose first layers were not trained: the tokens of a later block, the places they have, and the image."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attacks import ATTACKS, Observation, find_tokenizer
from attacks.features.block_encoder import BlockEncoder
from attacks.features.later_block import _sure, first_sent_block, known_patches, read_mlp_block
from attacks.features.noise_images import PlaceLikelihood, noise_images, place_likelihood
from attacks.features.placed_tokens import NONE, PlacedTokens
from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.mjp.mlp_spans import MLPBlock
from attacks.mjp.optima import Optima
from attacks.mjp.token_duals import normalised
from attacks.mjp.token_search import TokenSearch
from attacks.mjp.unmix import TOKEN_ERROR
from fedmjp.defenses.parameter_groups import belongs
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from tests.attacks.contract import small
from tests.conftest import observe, photographs

FIRST_BLOCK = ("positions", "first_block")


def sixteen(variant: str = "") -> BuiltModel:
    """Sixteen patches of 8 x 8 pixels in 64 channels, three blocks."""
    return build_model(f"vit_micro8_32{variant}", num_classes=5, weights="random")


def without(view: Observation, *groups: str) -> Observation:
    """The update without some parameters."""
    return dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if not belongs(n, groups)})


def later(image: Tensor, *groups: str) -> Observation:
    """The update of an image without positions, first block, and more."""
    return without(observe(sixteen(), image), *FIRST_BLOCK, *groups)


@pytest.fixture(scope="module")
def image() -> Tensor:
    return photographs(32, 1)


@pytest.fixture(scope="module")
def view(image: Tensor) -> Observation:
    return later(image)


@pytest.fixture(scope="module")
def truth(view: Observation, image: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised patches (1, N, P) and tokens (N', D) at the second block's second norm, by the module's own hook."""
    module = sixteen().module.double()
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (view.mean, view.std))
    received: list[Tensor] = []
    module.blocks[1].norm2.register_forward_hook(lambda _, inputs, output: received.append(inputs[0][0].detach()))
    images = (image.double() - mean) / std
    module(images)
    return find_tokenizer(module, view.image_shape).patchify(images), normalised(received[0])


def likelihood_of(view: Observation) -> PlaceLikelihood:
    tokenizer = find_tokenizer(view.model, view.image_shape)
    return place_likelihood(
        BlockEncoder(view.model, tokenizer, 1, torch.float32), view, *known_patches(view, tokenizer)
    )


@pytest.mark.parametrize(
    ("groups", "block"),
    [(FIRST_BLOCK, 2), (("positions", "first_attention"), 1), (("cls_token", "positions", "blocks.0.*", "norms"), 2)],
)
def test_recovers_a_photograph(image: Tensor, groups: tuple[str, ...], block: int) -> None:
    found = ATTACKS.get("later_block")()([without(observe(sixteen(), image), *groups)])
    assert found.diagnosis == ""
    assert found.details["block"] == block
    assert found.known.float().mean() >= 15 / 16  # a right patch may be a suspect, by the processor's roundings
    assert psnr(found.images, image)[0] > 60


def test_noised_messages_are_not_vouched_for(view: Observation) -> None:
    generator, sent = torch.Generator().manual_seed(0), {}
    for name, gradient in view.gradients.items():
        size = 3e-6 * gradient.square().mean().sqrt()
        sent[name] = gradient + size * torch.randn(gradient.shape, generator=generator)
    found = ATTACKS.get("later_block")()([dataclasses.replace(view, gradients=sent)])
    assert found.diagnosis == ""
    assert not found.known.any()


def test_patches_are_vouched_for_by_the_errors_of_their_tokens() -> None:
    """Three places, the last of which has no token, and a pixel's deviation of 0.1 for a token's of 1."""
    placed = SimpleNamespace(
        places=torch.tensor([1, 0, NONE]),
        suspects=torch.zeros(3, dtype=torch.bool),
        residuals=torch.zeros(3),
        likelihood=SimpleNamespace(directions=0.1 * torch.eye(4), complete=True),
    )
    least = VOUCHED_DEVIATION / (0.1 * TOKEN_ERROR)
    errors = torch.tensor([1.1 * least, 0.9 * least]).square()
    assert _sure(placed, errors, torch.ones(4)).tolist() == [True, False, False]


def test_without_the_projection_the_values_that_no_token_tells_are_guessed(image: Tensor) -> None:
    """192 values of a patch in 64 channels: the tokens are met, nothing is vouched for, and the answer says so."""
    found = ATTACKS.get("later_block")()([later(image, "patch_projection")])
    assert found.details["residual"] < 1e-4
    assert "tells 63 of the 192 values" in found.diagnosis
    assert not found.known.any()


def test_tokens_of_a_later_block_are_those_of_the_forward_pass(view: Observation, truth: tuple[Tensor, Tensor]) -> None:
    tokenizer = find_tokenizer(view.model, view.image_shape)
    assert first_sent_block(view) == 1
    block = read_mlp_block(view, tokenizer, 1)
    with torch.no_grad():
        found = TokenSearch()(block, block.spans[0].directions[:0, :-1])
        encoded = BlockEncoder(view.model, tokenizer, 1)(truth[0])[0]
    assert len(found) >= 16
    assert torch.cdist(found.y, truth[1]).min(dim=1).values.max() < 1e-2 * 64**0.5
    torch.testing.assert_close(encoded, truth[1], atol=1e-9, rtol=0)


def test_noise_images_have_the_spectrum_of_photographs() -> None:
    """Mean power falls with the square of the frequency."""
    images = noise_images(64, (3, 32, 32), torch.Generator().manual_seed(0))
    assert images.shape == (64, 3, 32, 32)
    assert images.min() >= 0
    assert images.max() <= 1
    power = torch.fft.fft2(images - images.mean(dim=(2, 3), keepdim=True)).abs().square().mean(dim=(0, 1))
    slope = (power[0, 8] / power[0, 2]).log() / torch.tensor(4.0).log()
    assert -2.3 < float(slope) < -1.5


def test_expected_patches_are_those_of_a_normal_distribution(view: Observation) -> None:
    """cov(c, y) cov(y)^-1 (y - mean), with both covariances assembled from the parts."""
    found = likelihood_of(view)
    y = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places = torch.arange(5) + 1
    covariance = torch.linalg.inv(found.whitening @ found.whitening.T)
    cross = covariance @ found.gain  # cov(y, c), (D, k)
    expected = torch.linalg.solve(covariance, (y - found.tokens[places]).T).T @ cross
    torch.testing.assert_close(found.coefficients(y, places), expected, atol=1e-8, rtol=1e-6)
    distance = y[2] - found.tokens[3]
    expected_cost = distance @ torch.linalg.solve(covariance, distance)
    torch.testing.assert_close(found.costs(y)[3, 2], expected_cost, atol=1e-6, rtol=1e-6)
    variances = (cross.T @ torch.linalg.solve(covariance, cross)).diagonal()
    assert (variances <= found.spread.square() * 1.001).all()  # what a token tells of a patch is no more than there is


def test_tokens_in_wrong_places_are_exchanged(view: Observation, truth: tuple[Tensor, Tensor]) -> None:
    """Three tokens a place further on, and one that is lacking."""
    tokenizer = find_tokenizer(view.model, view.image_shape)
    with torch.no_grad():
        tokens = truth[1][:-1]
        placed = PlacedTokens(BlockEncoder(view.model, tokenizer, 1), likelihood_of(view), tokens)
        prefix = len(truth[1]) - 16
        placed.places = torch.cat([torch.arange(15) + prefix, torch.tensor([NONE])])
        placed.places[[2, 7, 11]] = placed.places[[7, 11, 2]]
        placed.coefficients = placed._expected(torch.arange(16), placed.places)
        placed.residuals = placed._residuals(placed.coefficients, placed.places)
        placed.run(1500)
    assert placed.exchanged >= 2
    assert placed.places[:15].tolist() == [i + prefix for i in range(15)]
    assert placed.suspects.nonzero().flatten().tolist() == [15]
    assert (placed.patches() - truth[0][0])[:15].abs().max() < 0.05


def test_a_patch_without_token_is_told_by_the_others_and_not_vouched_for(
    view: Observation, image: Tensor, truth: tuple[Tensor, Tensor]
) -> None:
    place, prefix = 6, len(truth[1]) - 16

    class Blind(TokenSearch):
        """Does not see one token."""

        def __call__(self, block: MLPBlock, guess: Tensor) -> Optima:
            found = super().__call__(block, guess)
            return found[torch.cdist(found.y, truth[1][[prefix + place]]).flatten() > 0.1]

    found = dataclasses.replace(ATTACKS.get("later_block")(), search=Blind())([view])
    tokenizer = find_tokenizer(view.model, view.image_shape)
    patches, originals = tokenizer.patchify(found.images)[0], tokenizer.patchify(image)[0]
    assert len(truth[1]) - 3 <= found.details["tokens"] < len(truth[1])
    assert (
        (patches - originals)[place].square().mean().sqrt()
        < 0.1
        < 0.5 * (originals[place] - 0.5).square().mean().sqrt()
    )
    known = tokenizer.patchify(found.known.float().expand(1, 3, -1, -1))[0].mean(dim=1)
    assert known[place] == 0
    assert known.mean() >= 13 / 16


def test_a_completed_patch_is_kept_unless_tokens_are_missed_more(
    view: Observation, truth: tuple[Tensor, Tensor]
) -> None:
    """The true patch replaces a wild one, and is not replaced by a wild one."""
    tokenizer = find_tokenizer(view.model, view.image_shape)
    with torch.no_grad():
        placed = PlacedTokens(BlockEncoder(view.model, tokenizer, 1), likelihood_of(view), truth[1][:-1])
        placed.places = torch.cat([torch.arange(15) + len(truth[1]) - 16, torch.tensor([NONE])])
        placed.coefficients = placed._expected(torch.arange(16), placed.places)
        placed.coefficients[15] = 3 * placed.likelihood.spread
        placed.residuals = placed._residuals(placed.coefficients, placed.places)
        wild = placed.patches()
        placed.complete(truth[0][0])
        kept = placed.patches()
        placed.complete(wild)
    assert (wild - truth[0][0])[15].square().mean() > 0.5
    assert (kept - truth[0][0])[15].square().mean() < 1e-3
    torch.testing.assert_close(placed.patches(), kept)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda image: without(observe(sixteen("_nope"), image), "first_block"), "nothing tells a patch's place"),
        (lambda image: without(observe(sixteen("_mjp"), image), *FIRST_BLOCK), "positions of this model may be masked"),
        (lambda image: later(image.repeat(2, 1, 1, 1)), "the batch holds 2 images"),
        (lambda image: later(image, "blocks.?.mlp.fc2.bias"), "no block's whole MLP"),
        (lambda image: observe(sixteen(), image), "patch_embedding uses them"),
        (lambda image: without(observe(sixteen(), image), "positions"), "unmix uses them"),
    ],
)
def test_what_stands_in_the_way(image: Tensor, make, words: str) -> None:
    assert words in ATTACKS.get("later_block")().obstacle([make(image)])


def test_the_last_block_of_a_class_token_does_not_tell(image: Tensor) -> None:
    """No other token of its MLP reaches the loss."""
    found = ATTACKS.get("later_block")()(
        [without(observe(small(), photographs(64, 1)), *FIRST_BLOCK, "blocks.[1234].*")]
    )
    assert found.images is None
    assert "in the last block" in found.diagnosis
