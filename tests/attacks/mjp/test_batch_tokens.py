"""Both images of a batch of two come back from one update, and what is not known is not vouched for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import permutations

import pytest
import torch

from attacks import ATTACKS, find_tokenizer
from attacks.mjp.batch_tokens import _Pairs, by_attention, by_borders
from attacks.mjp.mlp_spans import FirstBlock, read_first_block
from attacks.mjp.optima import Optima
from attacks.mjp.token_search import TokenSearch
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.conftest import observe, photographs


@pytest.fixture(scope="module")
def trained():
    return build_model("vit_mini_64", num_classes=8, weights="auto")


@pytest.fixture(scope="module")
def pairs(trained) -> _Pairs:
    """The true patches of two photographs, those of some places exchanged."""
    tokenizer = find_tokenizer(trained.module, (3, 64, 64))
    patches = tokenizer.patchify(trained.normalise(photographs(64, 2)).double())  # (2, N, P)
    everywhere = torch.ones(patches.shape[:2], dtype=torch.bool)
    return _Pairs(_Pairs(patches, everywhere, everywhere).ordered(turned()), everywhere, everywhere)


def turned() -> torch.Tensor:
    return torch.arange(64) % 3 == 0


def test_borders_tell_which_image_a_patch_is_of(trained, pairs) -> None:
    tokenizer = find_tokenizer(trained.module, (3, 64, 64))
    found = by_borders(pairs, torch.ones(tokenizer.patch_dim, dtype=torch.float64), tokenizer)
    wrong = (found ^ turned()).sum()
    assert min(wrong, 64 - wrong) <= 4


def test_attention_puts_right_what_borders_leave(trained, pairs) -> None:
    tokenizer = find_tokenizer(trained.module, (3, 64, 64))
    block = read_first_block(observe(trained, photographs(64, 2)), tokenizer, 2)
    assert block.count == 130
    start = turned()
    start[[5, 30]] = ~start[[5, 30]]
    found, exchanged, sure = by_attention(pairs, start, block)
    assert torch.equal(found, turned())
    assert exchanged == 2
    assert float(sure.double().mean()) > 0.9


@pytest.mark.parametrize(
    ("images", "changes", "words"),
    [
        (1, {}, "the batch holds one image"),
        (2, {"local_steps": 2}, "2 local steps of 2 images"),
        (3, {}, "1 local steps of 3 images"),
    ],
)
def test_says_why_it_has_nothing_to_add(trained, images: int, changes: dict, words: str) -> None:
    attack, view = ATTACKS.get("batch_tokens")(), observe(trained, photographs(64, images), **changes)
    assert words in attack.obstacle([view])
    assert words in attack([view]).diagnosis


def test_too_many_places_are_refused() -> None:
    small = build_model("vit_micro_32", num_classes=8, weights="random")
    view = observe(small, photographs(32, 2))
    assert "spans 64 directions a patch" in ATTACKS.get("batch_tokens")().obstacle([view])


def test_hidden_positions_are_refused() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    mask = (torch.arange(64) < 9).expand(2, -1)
    found = ATTACKS.get("batch_tokens")()([observe(model, photographs(64, 2), mask=mask)])
    assert "positions are hidden" in found.diagnosis


@dataclass(frozen=True)
class Kept(TokenSearch):
    """The tokens of the first search, for every search."""

    tokens: list[Optima] = field(default_factory=list)

    def __call__(self, block: FirstBlock, seen: torch.Tensor) -> Optima:
        if not self.tokens:
            self.tokens.append(super().__call__(block, seen))
        return self.tokens[0]


def test_a_batch_of_two_from_one_update(trained) -> None:
    images = photographs(64, 11)[9:]
    view, attack = observe(trained, images), ATTACKS.get("batch_tokens")(search=Kept())
    found = attack([view])
    rounded = dataclasses.replace(
        view, gradients={n: g.half().float() if ".mlp." in n else g for n, g in view.gradients.items()}
    )
    assert not attack([rounded]).known.any()
    assert found.diagnosis == ""
    order = max(permutations(range(2)), key=lambda o: float(psnr(found.images[list(o)], images).sum()))
    values = psnr(found.images[list(order)], images)
    assert float(values.min()) > 40, values
    known = found.known[list(order)]
    error = (found.images[list(order)] - images).square().mean(dim=1, keepdim=True)
    assert known.any()
    assert float((error[known] < 10**-2.5).double().mean()) > 0.98
