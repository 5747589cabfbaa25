"""The search for tokens: how many steps it takes, more tokens than small models have, and when its answer is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from attacks import ATTACKS, find_tokenizer
from attacks.mjp.known_attention import PatchSweeps, SweepSearch, Swept
from attacks.mjp.mlp_spans import FirstBlock, read_first_block
from attacks.mjp.mlp_tokens import TokenFamily, cone
from attacks.mjp.token_duals import Removed, normalised
from attacks.mjp.token_search import ATTRACTS, TokenSearch
from fedmjp.models import ViT, build_model
from tests.attacks.mjp.conftest import Nothing
from tests.attacks.mjp.test_unmix import masked_update, psnr
from tests.conftest import observe, photographs

WIDTH, GRID, PATCH = 256, 14, 8


@pytest.fixture(scope="module")
def many() -> tuple[FirstBlock, torch.Tensor]:
    """A block with the 197 tokens of a 224-pixel ViT in 256 channels, and its tokens at the second norm."""
    torch.manual_seed(0)
    vit = ViT(img_size=GRID * PATCH, patch_size=PATCH, embed_dim=WIDTH, depth=2, num_heads=4, num_classes=4)
    torch.nn.init.normal_(vit.head.weight, std=0.1)  # zero by default, which lets no gradient through
    model = dataclasses.replace(build_model("vit_mini_64", num_classes=4, weights="random"), module=vit.double())
    image = photographs(GRID * PATCH, 1).double()
    view = observe(model, image)
    tokenizer = find_tokenizer(vit, view.image_shape)
    block = read_first_block(view, tokenizer)
    patches = tokenizer.patchify(model.normalise(image))[0]
    with torch.no_grad():
        tokens = block.tokens(patches, torch.zeros(GRID**2, dtype=torch.bool))
        return block, normalised(tokens + block.attend(tokens))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_starts_outside_the_span_take_a_few_steps(many) -> None:
    block, truth = many
    generator = torch.Generator().manual_seed(0)
    starts = truth[1:41] + 0.02 * torch.randn(40, WIDTH, generator=generator, dtype=torch.float64)
    tokens = TokenSearch(rounds=0, steps=8)(block, starts)
    error = torch.cdist(truth[1:41], tokens.y).min(dim=1).values / WIDTH**0.5
    assert int((error < 1e-3).sum()) >= 38


@pytest.mark.long
def test_starts_crowd_at_a_token_whose_gradient_dominates(many) -> None:
    """The class token's residual does not certify it, so that what leads there would lead there again in each round."""
    block, truth = many
    whole, nothing = TokenFamily(block, cone(block)), Removed.of(block, truth[:0])
    noise = 0.01 * torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    optima, crowded = TokenSearch()._reached(whole, nothing, truth[:1] + noise)
    near = torch.cdist(optima.y, truth[:1])[:, 0] < 1e-3 * WIDTH**0.5
    assert int((near & crowded).sum()) == 1
    assert not optima.found[near & crowded].any()
    assert (optima.ratios[near & crowded] < ATTRACTS).all()
    optima, crowded = TokenSearch()._reached(whole, nothing, truth[10:190:15] + noise)
    assert int(optima.found.sum()) >= 8
    assert not crowded[~optima.found].any()


@pytest.mark.usefixtures("two_threads")
def test_many_tokens_are_refined_in_several_threads(many) -> None:
    """Some builds of MKL cannot factorise several general matrices of more than 150 rows in two threads."""
    block, truth = many
    family = TokenFamily(block, cone(block))
    start = family.draw(12, torch.Generator().manual_seed(0))
    assert (family.refine(start, 2).losses < family.losses(start)[0]).all()


class Uncertified(SweepSearch):
    """Sweeps that end with residuals too large for any patch, the first ones with the least."""

    def __call__(self, sweeps: PatchSweeps, c: torch.Tensor, fixed: torch.Tensor | None = None) -> Swept:
        return Swept(c, torch.full_like(c[:, 0], 100.0))

    def converged(self, sweeps: PatchSweeps, c: torch.Tensor, places: torch.Tensor) -> Swept:
        return Swept(c, torch.full_like(c[:, 0], 1000.0))


def test_tokens_are_taken_where_sweeps_certify_nothing() -> None:
    """They were dropped for sweeps of a lower residual: 14 dB with all 65 tokens found."""
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    model.module.double()
    image = photographs(64, 1).double()
    view, mask, _ = masked_update(model, image, gamma=0.1)
    attack = ATTACKS.get("unmix")(attend=Nothing(), sweep=Uncertified())
    found = attack([view])
    assert found.details["found"] > 0.8 * len(mask)
    assert psnr(found.images, image) > 30
