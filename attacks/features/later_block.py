"""The image from an update that lacks the first layers: from the MLP of the first block whose gradient was sent.

Clients often leave the first layers as they are: the patch projection (Chen, Xie and He 2021), the position embedding,
the first blocks, all but the last ones. The server sent those layers, so it knows what they make of an image. The
gradients of a block's MLP single out the tokens that it received (`attacks.mjp.mlp_tokens`: the rows of [dL/dW_1,
dL/db_1] and [dL/dW_2, dL/db_2] span its two layers' inputs, and of the points of the first span the tokens are those
that the activation takes into the second; nothing in this is particular to the first block). On trained `vit_mini_32`
the second block shows all 65 tokens, the fifth of six 47 to 56 (three photographs). They come without an order and up
to the factor and the constant that a norm takes away. Then the image is searched whose tokens they are
(`attacks.features.placed_tokens`), each place known by its embedding, which the server sent, too. Patches whose token
was not found are completed from their neighbours.

Of the patches nothing else is needed. Where the gradient of the patch projection was sent, they lie in the affine span
of its rows (`attacks.mjp.token_patches.known_span`), which tells places apart better. Where a patch has more values
than a token has channels, tokens do not determine it: the answer is the likeliest one by the spectrum of natural
images.

It cannot work on batches of several images, on sums of local steps, with as many tokens as channels or more, on models
without position embedding (nothing says which token is where) or with a shared one (MJP); nor from the last block of a
model that classifies by its class token, because no other token of that block's MLP reaches the loss.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.attention import name_of_block
from attacks.base import Attack
from attacks.closed_form.token_equations import prefix_tokens
from attacks.features.block_encoder import BlockEncoder
from attacks.features.noise_images import TOKENS, place_likelihood
from attacks.features.placed_tokens import NONE, PlacedTokens
from attacks.linear.completion import VOUCHED_DEVIATION, filled, render
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.intervals import COARSE, coarseness
from attacks.linear.position_rows import places_unknown, position_gradient, unmet_assumptions
from attacks.mjp.mlp_spans import LAYERS, MLPBlock, check_spans, mlp_spans, pre_norm_block
from attacks.mjp.mlp_tokens import TokenFamily, cone
from attacks.mjp.token_patches import known_span
from attacks.mjp.token_search import TokenSearch
from attacks.mjp.unmix import TOKEN_ERROR, pixel_scales, seconds_of_search
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

MLP = tuple(f"{layer}.{kind}" for layer in LAYERS[1:] for kind in ("weight", "bias"))
# Seconds of one CPU core for a weight and a token: forward in float32; forward and backward in float64.
SECONDS_FORWARD, SECONDS_EVALUATION = 3e-11, 3e-10
# Evaluations of a search, in the median; root of the residual of a place above which its patch is not vouched for.
USUAL_EVALUATIONS, LARGEST_RESIDUAL = 300, 3e-3


@dataclass(frozen=True, kw_only=True)
class LaterBlock(Attack):
    """Whole image from the gradients of one block's MLP and the layers before it as they were sent.

    Attributes:
        search: for the tokens.
        steps: evaluations of the model in the search for the image, at most.
        prior: of patches whose token is not found.
    """

    search: TokenSearch = field(default_factory=TokenSearch)
    steps: int = 2000
    prior: VectorialVariation = field(default_factory=VectorialVariation)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        target = observations[-1]
        try:
            tokenizer = find_tokenizer(target.model, target.image_shape)
            reasons = _obstacles(target, tokenizer)
            number = first_sent_block(target)
        except UsageError as error:
            return str(error)
        if tokenizer.weight in target.gradients and position_gradient(target, tokenizer) is not None:
            reasons.append(
                "the update holds the gradients of positions and patch projection: patch_embedding uses them"
            )
        elif number == 0 and tokenizer.weight in target.gradients:
            reasons.append(
                "the update holds the gradient of the patch projection and the first block's: unmix uses them"
            )
        return "; ".join(reasons)

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: the search of the tokens, that of the image, and noise images."""
        target = observations[-1]
        tokenizer = find_tokenizer(target.model, target.image_shape)
        before = [name_of_block(target.model, number) for number in range(first_sent_block(target) + 1)]
        weights = sum(p.numel() for name in before for p in target.model.get_submodule(name).parameters())
        passes = weights * (SECONDS_FORWARD * TOKENS + SECONDS_EVALUATION * USUAL_EVALUATIONS * tokenizer.num_patches)
        return passes + seconds_of_search(target, tokenizer, 0)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; vouches for patches whose token is met, where tokens determine patches.

        For none of them in noised or rounded messages, whose tokens have errors that nothing here measures well.

        `details` holds the block's number from 1, the tokens found, the dimensions known of the patches' span (span),
        evaluations of the model, exchanges of two tokens, and the root of the median residual of a place (residual).
        """
        observation = observations[-1]
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
        reasons = _obstacles(observation, tokenizer)
        if reasons:
            raise UsageError("; ".join(reasons))
        number = first_sent_block(observation)
        block = read_mlp_block(observation, tokenizer, number)
        found = self.search(block, block.spans[0].directions[:0, :-1])
        if 2 * len(found) <= block.count:
            raise UsageError(
                f"only {len(found)} of {block.count} tokens were found whose inputs of the MLP of block {number + 1} "
                "lie in its spans (in the last block nothing but the class token may reach the loss)"
            )
        origin, basis = known_patches(observation, tokenizer)
        encoders = (BlockEncoder(observation.model, tokenizer, number, t) for t in (torch.float32, torch.float64))
        likelihood = place_likelihood(next(encoders), observation, origin, basis)
        placed = PlacedTokens(next(encoders), likelihood, found.y)
        placed.run(self.steps)
        if (placed.places == NONE).any():
            directions = torch.eye(tokenizer.patch_dim).to(found.y) if basis is None else basis
            guess = filled(self.prior, placed.patches(), placed.places != NONE, directions, tokenizer, observation.std)
            placed.complete(guess)
        details = {
            "block": number + 1,
            "tokens": len(found),
            "span": len(likelihood.directions),
            "evaluations": placed.evaluations,
            "exchanged": placed.exchanged,
            "residual": float(placed.residuals[placed.places != NONE].median()) ** 0.5,
        }
        coarse = coarseness(observation, _layers(observation.model, number)) > COARSE
        errors = TokenFamily(block, cone(block)).errors(found)
        sure = _sure(placed, errors, pixel_scales(tokenizer, observation.std, found.y.device))
        sure = sure & torch.tensor(not (coarse or block.noisy), device=sure.device)
        return render(observation, tokenizer, placed.patches(), sure, _doubt(placed), details)


def first_sent_block(observation: Observation) -> int:
    """Number, from 0, of the first block whose MLP's gradients are all in the update.

    Raises:
        UsageError: there is none.
    """
    start = re.escape(name_of_block(observation.model, 0).removesuffix("0"))
    numbers = sorted({int(m[1]) for n in observation.gradients if (m := re.match(rf"{start}(\d+)\.mlp\.", n))})
    for number in numbers:
        if all(name in observation.gradients for name in _layers(observation.model, number)):
            return number
    raise UsageError(
        "the update holds the gradients of no block's whole MLP under timm's names (weights and biases of both layers "
        "of blocks.N.mlp)"
    )


def _layers(model: nn.Module, number: int) -> list[str]:
    """Names of the parameters of a block's MLP."""
    return [f"{name_of_block(model, number)}.{name}" for name in MLP]


def read_mlp_block(observation: Observation, tokenizer: Tokenizer, number: int) -> MLPBlock:
    """A block of the model and the spans of its MLP's gradients.

    Raises:
        UsageError: the model is built otherwise, or its layers are too narrow for a span to be a condition.
    """
    count = tokenizer.num_patches + prefix_tokens(tokenizer)
    check_spans(count, tokenizer.width)
    return MLPBlock(pre_norm_block(observation.model, number), mlp_spans(observation, number, count))


def known_patches(observation: Observation, tokenizer: Tokenizer) -> tuple[Tensor | None, Tensor | None]:
    """Origin (P,) and basis (k, P) of the patches' affine span, where the projection's gradient was sent; or None."""
    names = (tokenizer.weight, tokenizer.bias)
    if not all(n in observation.gradients and observation.gradients[n].any() for n in names):
        return None, None
    known = known_span(observation, tokenizer)
    return known.rows[0], known.basis


def _sure(placed: PlacedTokens, errors: Tensor, scales: Tensor) -> Tensor:
    """(N,) bool, patches to vouch for.

    Args:
        errors: (S,) mean squared error of an entry of each token that was found.
        scales: (P,) what a normalised pixel is in units of [0, 1].
    """
    met = (placed.places != NONE) & ~placed.suspects
    spread = (placed.likelihood.directions * scales).square().sum(dim=0).mean()  # of a pixel, for unit coefficients
    deviation = ((placed.residuals + TOKEN_ERROR**2 * errors[placed.places]) * spread).sqrt()
    return met & (deviation < VOUCHED_DEVIATION) if placed.likelihood.complete else torch.zeros_like(met)


def _doubt(placed: PlacedTokens) -> str:
    """Why not to trust the image, or ""."""
    likelihood, reasons = placed.likelihood, []
    left = float(placed.residuals[placed.places != NONE].median()) ** 0.5
    if left > LARGEST_RESIDUAL:
        reasons.append(
            f"the image found misses its tokens by {left:.1%} after {placed.evaluations} evaluations "
            "(--steps later_block=NUMBER for more)"
        )
    if not likelihood.complete:
        known, values = likelihood.directions.shape
        reasons.append(f"a token tells {known} of the {values} values of its patch; the others are the likeliest ones")
    return "; ".join(reasons)


def _obstacles(observation: Observation, tokenizer: Tokenizer) -> list[str]:
    """Why the attack cannot work on this model or update."""
    reasons = [*unmet_assumptions(observation.num_examples, observation.local_steps), *places_unknown(tokenizer)]
    if observation.drops_patches:
        reasons.append("the model did not see every patch, and which ones it saw is not looked for here")
    return reasons
