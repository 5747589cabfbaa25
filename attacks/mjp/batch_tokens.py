"""Both images of a batch of two from one update: every token from the first MLP, its patch, and which image it is of.

Position rows and patch projection give each place an affine space that holds the patches of both images
(`attacks.closed_form.batch_step`): x = l_p + c B, B the N differences of the images, c unknown. With 2 N' tokens below
the number of channels, the first MLP's spans single them out as they do the tokens of one image
(`attacks.mjp.mlp_tokens`: nothing there couples a token to another), and the equations of `attacks.mjp.token_patches`
give each its place and its patch. Every place gets two.

*Which of the two is of which image* is not in these equations. Borders give a first answer: along the edges of the grid
where the two pairings differ most, strongest first (a maximum spanning tree), pieces are joined. The attention decides:
with the right image, what the first block makes of its patches lies in the spans of the MLP, with a wrong patch it does
not, so places are exchanged as long as that lowers the residual. A patch is vouched for if its token, computed from the
whole image, has a residual at the noise of the message.

Open: batches of three and more, where 3 N' tokens are seldom fewer than the channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.base import Attack
from attacks.closed_form.batch_step import Step, read_step
from attacks.linear.completion import VOUCHED_DEVIATION, filled
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.intervals import COARSE, coarseness
from attacks.mjp.jigsaw_solver import border_costs
from attacks.mjp.mlp_spans import FirstBlock, read_first_block
from attacks.mjp.mlp_tokens import TokenFamily, cone
from attacks.mjp.optima import FOUND
from attacks.mjp.token_duals import normalised
from attacks.mjp.token_patches import KnownPatches, PlacedPatches, TokenPatches
from attacks.mjp.token_search import TokenSearch
from attacks.mjp.unmix import layers_of, pixel_scales, seconds_of_search
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

IMAGES = 2
# Passes over all places of the exchange by attention, at most.
SWEEPS = 6
# Share of the patches below which too few tokens were found.
LEAST_FOUND = 0.5


@dataclass(frozen=True, kw_only=True)
class BatchTokens(Attack):
    """Separates a batch of two by the tokens of its first MLP.

    Attributes:
        search: for the tokens.
        prior: of patches whose token is not found.
    """

    search: TokenSearch = field(default_factory=TokenSearch)
    prior: VectorialVariation = field(default_factory=VectorialVariation)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """The layers of the first block whose spans are read."""
        return layers_of(model)

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        try:
            tokenizer = _tokenizer(observations[-1])
            _check(observations[-1])
            read_step(observations[-1])
            read_first_block(observations[-1], tokenizer, IMAGES)
        except UsageError as error:
            return str(error)
        return ""

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: one search of twice as many tokens as an image has."""
        try:
            tokenizer = _tokenizer(observations[-1])
        except UsageError:
            return super().estimated_seconds(observations)
        return IMAGES**2 * seconds_of_search(observations[-1], tokenizer, 0)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; vouches for nothing in noised or rounded messages.

        `details` holds the tokens that were found, the median of their squared residuals over what the noise of the
        message explains, patches found (found) and places exchanged by the attention (exchanged).
        """
        observation, tokenizer = observations[-1], _tokenizer(observations[-1])
        _check(observation)
        step = read_step(observation)
        if step.masked or step.own_masks:
            raise UsageError("positions are hidden: which image of the batch hides which cannot be read")
        block, rows = read_first_block(observation, tokenizer, IMAGES), step.rows.repeat(IMAGES, 1)
        nothing = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        scales = pixel_scales(tokenizer, observation.std, rows.device).to(rows.dtype)
        known = KnownPatches(rows, step.basis, nothing, nothing)
        tokens = self.search(block, block.prefix[:0])
        if not len(tokens):
            raise UsageError("no token was found whose inputs of the first MLP lie in the spans of its gradients")
        placed = TokenPatches(block, known, scales).solve(tokens.y, TokenFamily(block, cone(block)).errors(tokens))
        details = {"tokens": len(tokens), "residual": float((tokens.losses / tokens.explained).median())}
        pairs = _Pairs.of(placed, rows, tokenizer)
        order, details["found"] = by_borders(pairs, scales, tokenizer), int(pairs.found.sum())
        pairs = pairs.completed(order, step, self.prior, tokenizer, observation.std)
        sure, diagnosis = torch.zeros_like(pairs.found), ""
        if details["found"] < LEAST_FOUND * len(rows):
            diagnosis = (
                f"the batch holds {IMAGES} images, and for only {details['found']} of their {len(rows)} patches a "
                "token was found that the spans of the first MLP's gradients admit"
            )
        else:
            order, details["exchanged"], right = by_attention(pairs, order, block)
            exact = not block.noisy and coarseness(observation, layers_of(observation.model)) <= COARSE
            sure = right & pairs.sure_in(order) & torch.tensor(exact, device=right.device)
        images = observation.to_pixels(tokenizer.unpatchify(pairs.ordered(order))).float()
        known_pixels = sure.reshape(IMAGES, 1, *tokenizer.grid)
        for axis in (2, 3):
            known_pixels = known_pixels.repeat_interleave(tokenizer.patch_size, axis)
        return Reconstruction(images, known_pixels, diagnosis=diagnosis, details=details)


@dataclass(frozen=True)
class _Pairs:
    """The two patches of every place, in any order.

    Attributes:
        patches: (2, N, P) float64, the place's row where no token was found.
        found, sure: (2, N) bool, a token was found, and is known well.
    """

    patches: Tensor
    found: Tensor
    sure: Tensor

    @classmethod
    def of(cls, placed: PlacedPatches, rows: Tensor, tokenizer: Tokenizer) -> _Pairs:
        """Of the patches that were placed, (2 N, P), those of the first image before those of the second."""
        shape = (IMAGES, tokenizer.num_patches)
        patches = torch.where(placed.patches.isnan(), rows, placed.patches)
        sure = placed.found & (placed.deviation < VOUCHED_DEVIATION)
        return cls(patches.unflatten(0, shape), placed.found.unflatten(0, shape), sure.unflatten(0, shape))

    def ordered(self, exchanged: Tensor) -> Tensor:
        """The patches of each image, (2, N, P), those of places `exchanged` (N,) in the other order."""
        return torch.where(exchanged[:, None], self.patches.flip(0), self.patches)

    def completed(
        self, exchanged: Tensor, step: Step, prior: VectorialVariation, tokenizer: Tokenizer, std: tuple[float, ...]
    ) -> _Pairs:
        """With patches that were not found as their affine space and the prior of their image give them."""
        images = []
        for patches, found in zip(self.ordered(exchanged), self.found_in(exchanged), strict=True):
            images.append(filled(prior, patches, found, step.basis, tokenizer, std))
        whole = replace(self, patches=torch.stack(images))
        return replace(self, patches=whole.ordered(exchanged))

    def found_in(self, exchanged: Tensor) -> Tensor:
        """`found` in that order."""
        return torch.where(exchanged, self.found.flip(0), self.found)

    def sure_in(self, exchanged: Tensor) -> Tensor:
        """`sure` in that order."""
        return torch.where(exchanged, self.sure.flip(0), self.sure)


def _tokenizer(observation: Observation) -> Tokenizer:
    return find_tokenizer(observation.model, observation.image_shape)


def _check(observation: Observation) -> None:
    """Refuse what is no batch of two.

    Raises:
        UsageError: naming what it is.
    """
    if observation.num_examples * observation.local_steps == 1:
        raise UsageError("the batch holds one image, which needs no separation from others")
    if observation.num_examples != IMAGES or observation.local_steps > 1:
        raise UsageError(
            f"the update sums {observation.local_steps} local steps of {observation.num_examples} images: batches of "
            "two in one step are separated by their tokens"
        )


def by_borders(pairs: _Pairs, scales: Tensor, tokenizer: Tokenizer) -> Tensor:
    """(N,) bool, the places whose patches are exchanged, by which of two ways borders fit better.

    Neighbours are joined in the order of the difference that it makes, the largest first.
    """
    rows, columns = tokenizer.grid
    n = tokenizer.num_patches
    pieces = (pairs.patches * scales).flatten(0, 1).unflatten(1, (tokenizer.channels, tokenizer.patch_size, -1))
    borders = border_costs(pieces)
    whole = pairs.found.all(dim=0)
    edges = []
    for costs, step, last in ((borders.right, 1, columns - 1), (borders.below, columns, columns)):
        for p in range(n - step):
            if (step == 1 and p % columns == last) or not (whole[p] and whole[p + step]):
                continue
            same = costs[p, p + step] + costs[n + p, n + p + step]
            other = costs[p, n + p + step] + costs[n + p, p + step]
            edges.append((float(same - other), p, p + step))
    root, parity = list(range(n)), [False] * n
    for difference, p, q in sorted(edges, key=lambda edge: -abs(edge[0])):
        if root[p] == root[q]:
            continue
        turn = parity[p] ^ parity[q] ^ (difference > 0)
        old, new = root[q], root[p]
        for r in range(n):
            if root[r] == old:
                root[r], parity[r] = new, parity[r] ^ turn
    return torch.tensor(parity, device=pairs.patches.device)


def by_attention(pairs: _Pairs, exchanged: Tensor, block: FirstBlock) -> tuple[Tensor, int, Tensor]:
    """Exchange places as long as the tokens of the two images come nearer to the spans of the MLP.

    Returns:
        The places that are exchanged (N,), how many changed, and (2, N) bool, patches whose tokens have a residual at
        the noise of the message.
    """
    family, prefix = TokenFamily(block, cone(block)), len(block.prefix) // IMAGES
    single = replace(block, prefix=block.prefix[:prefix], constant=block.constant[: len(exchanged)])
    masked = torch.zeros_like(exchanged)

    def excess(order: Tensor) -> Tensor:
        """(2, N) residuals of the patches' tokens in units of what the noise explains."""
        found = []
        for patches in pairs.ordered(order):
            tokens = single.tokens(patches, masked)
            losses, explained = family.losses(normalised(tokens + single.attend(tokens)))
            found.append((losses / explained)[prefix:])
        return torch.stack(found)

    start, ratios = exchanged, excess(exchanged)
    for _ in range(SWEEPS):
        before = exchanged
        for p in range(len(exchanged)):
            trial = exchanged.clone()
            trial[p] = ~trial[p]
            tried = excess(trial)
            if tried.log().sum() < ratios.log().sum():
                exchanged, ratios = trial, tried
        if torch.equal(before, exchanged):
            break
    return exchanged, int((start ^ exchanged).sum()), ratios <= FOUND
