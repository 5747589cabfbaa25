"""A head of places: what its gradient holds, on small models in float64, and a photograph back from it in float32."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch

from attacks import Observation, find_tokenizer
from attacks.heads.context import read_context
from attacks.heads.encoder import Encoder
from attacks.heads.inversion import HeadSearch
from attacks.heads.pixel_head import PixelHead
from attacks.heads.place_rows import read_places
from attacks.heads.position_head import PositionHead, place_gradients
from attacks.linear.dense_head import find_dense_head
from attacks.mjp.patch_set import PatchSet
from attacks.mjp.token_patches import known_span
from fedmjp.models import build_model
from fedmjp.objectives import client_loss
from fedmjp.objectives.places import members, random_subsets
from tests.attacks.contract import psnr
from tests.conftest import observe, observe_under, photographs

SHAPE = (3, 32, 32)


def context_drawn(count: int) -> torch.Tensor:
    """(16,) bool, the context that MP3 draws first from the generator of `observe_under`."""
    generator = torch.Generator().manual_seed(1)
    return members(random_subsets(1, 16, count, generator, torch.device("cpu")), 16)[0]


def true_patches(observation: Observation) -> torch.Tensor:
    """(16, 192) normalised patches of the photograph, float64."""
    shape = (1, 3, 1, 1)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(shape) for v in (observation.mean, observation.std))
    return find_tokenizer(observation.model, SHAPE).patchify((photographs(32, 1).double() - mean) / std)[0]


@pytest.fixture(scope="module")
def exact():
    """An update in float64, and the true tokens that the head read, (16, 64), with half of the patches as context."""
    observation = observe_under("mp3:eta=0.5", "vit_micro8_32", photographs(32, 1).double())
    tokenizer, head = find_tokenizer(observation.model, SHAPE), find_dense_head(observation)
    patches = true_patches(observation)
    blind = torch.zeros(16).double().masked_fill(~context_drawn(8), -torch.inf)
    tokens = Encoder(observation.model, tokenizer, head.name)(patches, blind)
    return observation, tokenizer, head, patches, tokens


def test_the_fixed_point_gives_predictions_and_features(exact) -> None:
    _, _, head, _, tokens = exact
    read = read_places(head)
    assert read.change < 1e-12
    torch.testing.assert_close(
        read.probabilities, (tokens @ head.weight.T + head.bias).softmax(dim=1), atol=1e-10, rtol=0
    )
    torch.testing.assert_close(read.features, read.determined(tokens), atol=1e-9, rtol=0)


def test_the_head_gradient_of_the_true_tokens_is_the_one_sent(exact) -> None:
    """The forward formula against autograd's gradient, and with it the encoder with keys of the context alone."""
    observation, tokenizer, head, patches, tokens = exact
    d = place_gradients(tokens @ head.weight.T + head.bias)
    torch.testing.assert_close(d.T @ tokens, head.weight_gradient, atol=1e-12, rtol=0)
    torch.testing.assert_close(d.sum(dim=0), head.bias_gradient, atol=1e-12, rtol=0)
    everyone = Encoder(observation.model, tokenizer, head.name)(patches)
    assert float((everyone - tokens).abs().max()) > 1e-3


def test_the_patches_lie_in_the_span_of_the_projection(exact) -> None:
    observation, tokenizer, _, patches, _ = exact
    span = known_span(observation, tokenizer)
    difference = patches - span.rows
    assert len(span.basis) == 15
    torch.testing.assert_close(difference @ span.basis.T @ span.basis, difference, atol=1e-8, rtol=0)


@pytest.mark.parametrize(("eta", "count"), [("0.5", 8), ("0.75", 4)])
def test_the_values_of_the_first_attention_name_the_context(eta: str, count: int) -> None:
    observation = observe_under(f"mp3:eta={eta}", "vit_micro8_32", photographs(32, 1))
    tokenizer = find_tokenizer(observation.model, SHAPE)
    context = read_context(observation, tokenizer)
    assert context.count == count
    patches = true_patches(observation)
    assert torch.equal(context.members(patches), context_drawn(count))
    inside, outside = (context.misses(patches)[flags] for flags in (context_drawn(count), ~context_drawn(count)))
    assert float(inside.max()) < 1e-4 < 1e-2 < float(outside.min())


def test_all_tokens_as_context_need_no_search_for_it() -> None:
    observation = observe_under("mp3:eta=0", "vit_micro8_32", photographs(32, 1))
    assert read_context(observation, find_tokenizer(observation.model, SHAPE)) is None


@pytest.mark.parametrize("eta", [0.0, 0.75])
def test_a_photograph_comes_back(eta: float) -> None:
    image = photographs(32, 1)
    found = PositionHead()([observe_under(f"mp3:eta={eta}", "vit_micro8_32", image)])
    assert found.diagnosis == ""
    assert found.known.all()
    assert psnr(found, image) > 40


def test_a_search_that_stops_short_vouches_for_nothing() -> None:
    found = PositionHead(steps=5)([observe_under("mp3:eta=0.5", "vit_micro8_32", photographs(32, 1))])
    assert "unexplained after" in found.diagnosis
    assert not found.known.any()


def test_a_context_that_leads_away_is_given_up(exact) -> None:
    """With the tokens that are not in the context taken for it, the search goes back to log-weights."""
    observation, tokenizer, head, _, _ = exact
    encoder, span = Encoder(observation.model, tokenizer, head.name), known_span(observation, tokenizer)
    search = HeadSearch(head, place_gradients, encoder, span, read_context(observation, tokenizer))
    search._search_context(60)
    search.members = ~context_drawn(8)
    before = search.residual
    search._check_context(2)
    assert search.members is None
    assert search.residual == before


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("droppos:decoder_width=64,tau=inf", "rank .* of 15: it was asked for some places only"),
        ("mst:local_crops=0,outputs=16,hidden=16,bottleneck=8", "the batch holds 2 images"),
    ],
)
def test_other_objectives_are_refused_with_the_reason(objective: str, words: str) -> None:
    observation = observe_under(objective, "vit_micro8_32", photographs(32, 1))
    found = PositionHead()([observation])
    assert found.images is None
    assert re.search(words, found.diagnosis)
    assert PositionHead().obstacle([observation]) == found.diagnosis


def test_a_head_of_pixels_and_a_head_over_one_token_are_refused(mini) -> None:
    decoder = observe_under("mst:local_crops=0,outputs=16,hidden=16,bottleneck=8", "vit_micro8_32", photographs(32, 1))
    one = dataclasses.replace(decoder, num_examples=1)
    assert "has 192 rows, and there are 16 places of the patches: its rows are none of them" in PositionHead().obstacle(
        [one]
    )
    assert "rank one: a head over one token" in PositionHead().obstacle([observe(mini, photographs(64, 1))])


@pytest.mark.parametrize("dal", ["linear", "nonlinear"])
def test_the_localisation_term_of_mjp_is_named(dal: str) -> None:
    """Its map is the last linear layer, but reads position embeddings, whether its loss is in the update or not."""
    model = build_model("vit_micro_32_mjp", num_classes=8, weights="random", dal=dal)
    loss = client_loss(model, photographs(32, 1), torch.tensor([1]), None, {"dal": 1.0})
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    without = observe(model, photographs(32, 1))
    for view in (without, dataclasses.replace(without, gradients=dict(zip(names, gradients, strict=True)))):
        words = PositionHead().obstacle([view])
        assert "a regression of the two coordinates of a place from its position embedding" in words
        assert "has no row for each place, and its gradient holds no token of the image" in words


def test_a_head_of_several_classes_is_refused() -> None:
    """As of a segmentation: five classes for every token, whose labels the server does not have."""
    sent = observe_under("mp3:eta=0.5", "vit_micro8_32", photographs(32, 1))
    draws = torch.Generator().manual_seed(0)
    model = copy.deepcopy(sent.model)
    model.pretext = torch.nn.Linear(64, 5)
    head = {"pretext.weight": torch.randn(5, 64, generator=draws), "pretext.bias": torch.randn(5, generator=draws)}
    classes = dataclasses.replace(sent, model=model, gradients=dict(sent.gradients) | head)
    for attack, rows in ((PositionHead(), "16 places of the patches"), (PixelHead(), "192 values of a patch")):
        words = f"5 rows, and there are {rows}: .* depends on labels that the server does not have"
        assert re.search(words, attack.obstacle([classes]))


def test_a_batch_is_refused() -> None:
    observation = observe_under("mp3:eta=0", "vit_micro8_32", photographs(32, 2))
    assert "the batch holds 2 images" in PositionHead()([observation]).diagnosis


def test_patch_set_leaves_a_head_of_places_to_this_attack() -> None:
    observation = observe_under("mp3:eta=0", "vit_micro8_32", photographs(32, 1))
    assert "position_head finds the patches and their order" in PatchSet().obstacle([observation])
