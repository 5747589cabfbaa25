"""Images of a batch whose patches the client has moved (MJP), put back by their borders.

An update of a batch does not say which patches of which image were moved: position rows are sums over its images. So
every place of an image may be wrong, a patch is as likely to have stayed as to have moved (`STAYS`), and the borders
decide (`attacks.mjp.placement`). Of a batch of one the position rows say which places were masked.

What comes back is a guess from natural images, and is never vouched for.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attacks.linear.position_rows import position_gradient
from attacks.mjp.jigsaw_solver import solve
from attacks.mjp.placement import Placement
from attacks.observation import Observation
from attacks.tokenizer import Tokenizer, find_tokenizer

STAYS = 0.5  # probability that a patch lies where it belongs
RESTARTS = 16  # most arrangements of an image that are proposed
SECONDS_OF_A_PLACE = 3e-4  # of one CPU core, by patches squared


def put_back(observation: Observation, images: Tensor) -> Tensor:
    """Images (n, C, H, W) in [0, 1] with their patches in other places, in the order in which their borders fit."""
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    patches = tokenizer.patchify(images)  # (n, N, P)
    return tokenizer.unpatchify(torch.stack([own[_order(observation, tokenizer, own)] for own in patches]))


def seconds(observation: Observation) -> float:
    """Time that `put_back` takes for all images of a batch on one CPU core."""
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    return SECONDS_OF_A_PLACE * tokenizer.num_patches**2 * observation.num_examples


def _order(observation: Observation, tokenizer: Tokenizer, patches: Tensor) -> Tensor:
    """(N,) int64: place i takes patch order[i], of patches (N, P)."""
    placement, count = Placement(solver="border", restarts=RESTARTS), len(patches)
    rows = position_gradient(observation, tokenizer)
    if observation.num_examples == 1 and rows is not None:
        return placement(tokenizer, patches, ~rows[tokenizer.prefix :].any(dim=1))
    pieces = patches.reshape(count, tokenizer.channels, tokenizer.patch_size, tokenizer.patch_size)
    everywhere = torch.ones(count, dtype=torch.bool, device=patches.device)
    at = torch.full((count, count), -math.log((1 - STAYS) / (count - 1))).fill_diagonal_(-math.log(STAYS))
    costs = placement.costs(tokenizer.grid, pieces, everywhere)
    return solve(tokenizer.grid, replace(costs, at=at.to(costs.right)), everywhere, RESTARTS)
