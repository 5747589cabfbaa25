"""A head of pixels under an L1 loss: its gradient in float64 against the client's own pass, and both views back."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attacks import Observation, find_tokenizer
from attacks.closed_form.batch_step import read_step
from attacks.heads.arrangement import Arrangement
from attacks.heads.one_bit import WIDTHS, fit_signs, likeliest
from attacks.heads.pixel_head import PixelHead, Views
from attacks.heads.sign_tokens import read_sign_tokens, sign_vectors
from attacks.linear.dense_head import VALUES
from fedmjp.audit.observe import observe_step
from fedmjp.metrics import psnr
from fedmjp.objectives import Draws
from tests.conftest import learner_under, observe_under, photographs

MST = "mst:local_crops=0,outputs=16,hidden=16,bottleneck=8"
SHAPE = (3, 32, 32)


@dataclasses.dataclass(frozen=True)
class Known:
    """A step on one photograph, and what its client computed: true features, patches (32, .) and masks (32,)."""

    observation: Observation
    features: Tensor
    patches: Tensor
    hidden: Tensor
    fed: Tensor


def step_on(image: Tensor) -> Known:
    """The client's own pass, in the image's type: what the head and the encoder read is kept on the way."""
    learner = learner_under(MST, "vit_micro8_32")
    for module in (learner.model.module, learner.local):
        module.to(image.dtype)
    features, tokens, network = [], [], learner.model.module
    hooks = [
        network.pretext.decoder.predict.register_forward_pre_hook(lambda _, i: features.append(i[0][0].flatten(1).T)),
        network.pos_drop.register_forward_pre_hook(lambda _, i: tokens.append(i[0][0, 1:])),
    ]
    observation, fed = observe_step(learner, image, Draws.seeded(0, 1))
    for hook in hooks:
        hook.remove()
    masked_at = network.pretext.mask_token + network.pos_embed[0, 1:]
    hidden = torch.cat([(own - masked_at).abs().amax(dim=1) < 1e-6 for own in tokens])
    shape = (1, 3, 1, 1)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(shape) for v in (observation.mean, observation.std))
    patches = find_tokenizer(network, SHAPE).patchify((fed.double() - mean) / std).flatten(0, 1)
    return Known(observation, torch.cat(features).detach(), patches, hidden, fed)


@pytest.fixture(scope="module")
def exact() -> Known:
    return step_on(photographs(32, 8)[7:].double())


@pytest.fixture(scope="module")
def views(exact: Known) -> Views:
    tokenizer = find_tokenizer(exact.observation.model, SHAPE)
    head = VALUES.find(exact.observation, tokenizer)
    return Views(exact.observation, tokenizer, head, read_sign_tokens(head), read_step(exact.observation))


@pytest.fixture(scope="module")
def true_tokens(exact: Known, views: Views) -> Tensor:
    """(32,) the token that was read, for each place of each view."""
    return torch.cdist(exact.features, views.read.features).argmin(dim=1)


def test_features_and_signs_are_those_of_the_client(exact: Known, views: Views, true_tokens: Tensor) -> None:
    read = views.read
    assert len(set(true_tokens.tolist())) == 32
    torch.testing.assert_close(read.features[true_tokens], exact.features, atol=1e-8, rtol=0)
    above = (read.outputs[true_tokens] - exact.patches).sign()
    assert torch.equal(read.signs[true_tokens], above)
    assert read.scale == pytest.approx(0.6 / 2 / above[:16].numel(), rel=1e-9)  # lambda_2, mean over views and values


def test_signs_are_found_in_their_span() -> None:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(12, 96, generator=generator, dtype=torch.float64).sign()
    mixed = signs.T @ torch.randn(12, 12, generator=generator, dtype=torch.float64)
    found = sign_vectors(torch.linalg.qr(mixed).Q)
    assert {tuple(v) for v in (signs * signs[:, :1]).tolist()} == {tuple(v) for v in found.tolist()}


def test_masked_places_have_no_rows_and_others_keep_their_equations(exact: Known, views: Views) -> None:
    assert exact.hidden.any()
    assert torch.equal(views.masked, exact.hidden[:16] | exact.hidden[16:])
    difference = (exact.patches - views.step.rows.repeat(2, 1))[~exact.hidden]
    basis = views.step.basis
    torch.testing.assert_close(difference @ basis.T @ basis, difference, atol=1e-7, rtol=0)


def test_true_patches_have_the_tokens_that_were_read(exact: Known, views: Views, true_tokens: Tensor) -> None:
    """Encoder, decoder and masked patches computed forward, against the client's own pass."""
    patches = torch.where(exact.hidden[:, None], views.replaced, exact.patches)
    torch.testing.assert_close(views.decoder(patches), exact.features, atol=1e-9, rtol=0)
    known = Arrangement(true_tokens, exact.hidden)
    swapped = Arrangement(true_tokens.roll(1), exact.hidden)
    assert views.difference(known) < 0.1 * views.difference(swapped)


def test_likeliest_coefficients_are_those_of_automatic_differentiation(views: Views) -> None:
    read, step = views.read, views.step
    fitted = fit_signs(read.signs[:2], read.outputs[:2], step.rows[:3], step.basis)
    c = fitted.coefficients[1, 2].clone().requires_grad_()
    with torch.enable_grad():
        margins = read.signs[1] * (read.outputs[1] - step.rows[2] - c @ step.basis) / WIDTHS[-1]
        missed = functional.softplus(-margins).sum() + c.square().sum() / 18
        (slope,) = torch.autograd.grad(missed, c, create_graph=True)
        hessian = torch.stack([torch.autograd.grad(s, c, retain_graph=True)[0] for s in slope])
    assert float(slope.detach().abs().max()) < 1e-6
    volume = torch.linalg.slogdet(9 * hessian).logabsdet / 2
    assert float(fitted.surprise[1, 2]) == pytest.approx(float(missed.detach() + volume), rel=1e-6)


def test_a_masked_patch_is_the_likeliest_with_its_signs() -> None:
    """Patches of four directions, 192 signs each: the spread of others brings one near."""
    generator = torch.Generator().manual_seed(0)
    like = torch.randn(30, 4, generator=generator, dtype=torch.float64) @ torch.randn(
        4, 192, generator=generator, dtype=torch.float64
    )
    thresholds = torch.randn(1, 192, generator=generator, dtype=torch.float64)
    found = likeliest((thresholds - like[:1]).sign(), thresholds, like[1:])
    assert float((found - like[:1]).norm() / like[:1].norm()) < 0.15


def test_both_views_come_back() -> None:
    known = step_on(photographs(32, 8)[7:])
    found = PixelHead(steps=150)([known.observation])
    assert found.diagnosis == ""
    assert found.details["masked"] == int(known.hidden.sum())
    order = (
        [0, 1]
        if float(psnr(found.images, known.fed).sum()) > float(psnr(found.images.flip(0), known.fed).sum())
        else [1, 0]
    )
    images, vouched = found.images[order], found.known[order].expand(-1, 3, -1, -1)
    assert float(vouched.float().mean()) == pytest.approx(1 - float(known.hidden.float().mean()))
    assert -10 * math.log10(float((images - known.fed)[vouched].square().mean())) > 40
    assert float(psnr(images, known.fed).min()) > 20  # masked patches by their signs alone


def other_head(objective: str, model: str, image: Tensor, **changes) -> Observation:
    return dataclasses.replace(observe_under(objective, model, image), **changes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: other_head(MST, "vit_mini_32", photographs(32, 1)),
            "a sum over 128 tokens, which must be fewer than its 48",
        ),
        (
            lambda: other_head(MST, "vit_micro8_32", photographs(32, 2), num_examples=4),
            "over 64 tokens, .* 64 channels",
        ),
        (lambda: other_head(MST, "vit_micro8_32", torch.full((1, 3, 32, 32), 0.9)), r"rank \d .*uniform patches"),
        (lambda: other_head("mp3:eta=0.5", "vit_micro8_32", photographs(32, 1)), "16 rows, .* 192 values of a patch"),
        (lambda: other_head(MST, "vit_micro8_32", photographs(32, 1), local_steps=2), "2 local steps"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(make, words: str) -> None:
    observation = make()
    assert re.search(words, PixelHead().obstacle([observation]))
    assert re.search(words, PixelHead()([observation]).diagnosis)


def test_another_loss_than_l1_is_refused() -> None:
    """The same rank, but derivatives that are not signs, as of a squared distance."""
    observation = observe_under(MST, "vit_micro8_32", photographs(32, 1))
    name = "pretext.decoder.predict.weight"
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.randn(32, n, generator=draws, dtype=torch.float64) for n in (192, 64))
    gradients = dict(observation.gradients) | {name: (left.T @ right).float()[..., None, None]}
    found = PixelHead()([dataclasses.replace(observation, gradients=gradients)])
    assert "vectors of signs span 0 of it: its loss is not an L1 distance" in found.diagnosis
