"""Patches that were not found, completed between the others."""

from __future__ import annotations

import torch

from attacks.linear.completion import filled
from attacks.linear.image_prior import VectorialVariation
from attacks.tokenizer import Tokenizer, find_tokenizer
from fedmjp.models import build_model
from tests.conftest import photographs

STD = (1.0, 1.0, 1.0)


def tokenizer_of_sixteen() -> Tokenizer:
    """Sixteen patches of 8 x 8 pixels."""
    return find_tokenizer(build_model("vit_micro8_32", num_classes=2, weights="random").module, (3, 32, 32))


def test_missing_patches_come_from_their_neighbours_and_found_ones_stay() -> None:
    """Each patch in turn: nearer than the mean of the others."""
    tokenizer = tokenizer_of_sixteen()
    patches = tokenizer.patchify(photographs(32, 1).double())[0]
    errors = torch.zeros(2)
    for place in range(16):
        found = torch.arange(16) != place
        wild = torch.where(found[:, None], patches, 7.0)
        completed = filled(VectorialVariation(), wild, found, torch.eye(192).double(), tokenizer, STD)
        assert torch.equal(completed[found], patches[found])
        guesses = torch.stack([completed[place], patches[found].mean().expand(192)])
        errors += (guesses - patches[place]).square().mean(dim=1)
    assert errors[0] < 0.6 * errors[1], errors


def test_a_missing_patch_moves_along_the_basis_alone() -> None:
    """Along one direction the answer of least variation is between those of two steps beside it."""
    tokenizer = tokenizer_of_sixteen()
    patches = tokenizer.patchify(photographs(32, 1).double())[0]
    basis = torch.full((1, 192), 192**-0.5).double()
    found = torch.arange(16) != 5
    shifted = patches + torch.where(found, 0.0, 3.0)[:, None]
    completed = filled(VectorialVariation(), shifted, found, basis, tokenizer, STD)
    moved = (completed - shifted)[5]
    torch.testing.assert_close(moved, moved.mean().expand(192))
    assert (completed - patches)[5].abs().max() < 0.2


def test_nothing_is_missing() -> None:
    patches = torch.rand(16, 192).double()
    tokenizer = tokenizer_of_sixteen()
    everything = torch.ones(16, dtype=torch.bool)
    assert filled(VectorialVariation(), patches, everything, torch.eye(192).double(), tokenizer, STD) is patches
