"""MST replaces patches after the projection: what the update of one view holds of them."""

from __future__ import annotations

from functools import partial

import torch

from attacks import ATTACKS, find_tokenizer
from fedmjp.objectives.crop_encoder import encode_crops
from fedmjp.objectives.token_masks import replace_patches
from tests.conftest import observe, photographs


def test_visible_patches_come_back_and_replaced_ones_are_the_mean_colour(mini) -> None:
    image, generator = photographs(64, 1), torch.Generator().manual_seed(0)
    mask = torch.rand(1, 64, generator=generator) < 0.2
    token = torch.nn.Parameter(torch.randn(192, generator=generator))
    replace = partial(replace_patches, mask=mask, token=token, style="token", generator=generator)
    tokens = encode_crops(mini.module, mini.normalise(image), None, replace)
    loss = (tokens * torch.randn(tokens.shape, generator=generator)).sum()
    names, parameters = zip(*mini.module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}
    answer = ATTACKS.get("patch_embedding")()([observe(mini, image, gradients=gradients)])
    tokenizer = find_tokenizer(mini.module, (3, 64, 64))
    patches, truth = tokenizer.patchify(answer.images)[0], tokenizer.patchify(image)[0]
    errors = (patches - truth).square().mean(dim=1)
    assert float(-10 * errors[~mask[0]].max().log10()) > 60
    mean = torch.tensor(mini.mean).repeat_interleave(64)
    torch.testing.assert_close(patches[mask[0]], mean.expand(int(mask.sum()), -1), atol=1e-3, rtol=0)
