"""Patches that agree are found as one token, and stand in as many places as the attention says."""

from __future__ import annotations

import pytest
import torch

from attacks import find_tokenizer
from attacks.mjp.mlp_spans import read_first_block
from attacks.mjp.patch_search import FARTHEST, near_guess
from attacks.mjp.token_duals import normalised
from attacks.mjp.token_patches import TokenPatches
from fedmjp.models import build_model
from tests.attacks.mjp.test_unmix import known_patches, masked_update
from tests.conftest import photographs


@pytest.mark.parametrize("side", [2, 5])
def test_hidden_patches_of_a_uniform_area_all_come_back(side: int) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    model.module.double()
    image = photographs(64, 1).double()
    image[:, :, -8 * side :, : 8 * side] = 0.6
    view, mask, moved = masked_update(model, image, gamma=0.9)
    tokenizer = find_tokenizer(view.model, view.image_shape)
    block = read_first_block(view, tokenizer)
    patches = tokenizer.patchify(model.normalise(moved))[0]
    uniform = (tokenizer.patchify(moved)[0] == 0.6).all(dim=1)
    tokens = block.tokens(patches, mask)
    tokens = normalised(tokens + block.attend(tokens))
    kept = torch.ones(len(tokens), dtype=torch.bool)
    copies = (uniform & mask).nonzero()[1:, 0] + len(tokens) - len(mask)
    kept[copies] = False
    assert len(copies) >= side**2 - 2
    known = known_patches(view)
    system = TokenPatches(block, known, torch.ones(patches.shape[1], dtype=torch.float64))
    placed = system.solve(tokens[kept], torch.full_like(tokens[kept][:, 0], 1e-12))
    assert int((~placed.found).sum()) == len(copies)
    kept_back = near_guess(placed, torch.zeros_like(patches), known.unseen, FARTHEST)
    torch.testing.assert_close(kept_back.patches, placed.patches)
    apart = torch.cdist(patches[uniform & mask], kept_back.patches[mask])
    assert int((apart.amin(dim=0) < 1e-2).sum()) == int((uniform & mask).sum())
