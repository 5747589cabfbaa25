"""The image where the patch projection's gradient is withheld: the tokens, through the projection that was sent.

Without the projection's gradient nothing says in which space the patches lie, and the first attention leaves D - N'
equations for the P values of a patch (`attacks.closed_form.token_span`): too few where patches are large. But the first
MLP singles out every token at the second norm (`attacks.mjp.mlp_tokens`), y = C (z + t) / s with z the token at the
first block, t = W o + bias what attention adds and s > 0 unknown, C = I - 1 1^T / D. Both summands lie in spans that
the message holds: that of the first attention's inputs n = gamma C z / sigma + beta, and that of its output
projection's inputs o. So

    y = a A + w B,      A the rows (v - v_c beta) / gamma, centred, for directions [v, v_c] of the first span,
                        B the rows C (W v + v_c bias) for those of the second, w v_c = 1 / s,

are D - 1 equations for 2 N' unknowns, linear, for every token alone: C z = s a A. With z = E x + b + e_i the patch is

    x = E^-1 (C z - b - e_i + m 1),

for a place i and a mean m that no equation holds: forward and backward pass know the token, and not what it is made of.
Natural images decide: a wrong place adds E^-1 (e_i - e_j), which is no picture. m is the one that makes the patch
smoothest, and places are assigned (Hungarian algorithm) by how smooth the patches are. Nothing is vouched for by this;
a certificate may say afterwards that the image reproduces the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import scipy.optimize
import torch
from torch import Tensor, nn

from attacks.attention import name_of_block
from attacks.base import Attack
from attacks.closed_form.token_equations import prefix_tokens
from attacks.linear.completion import render
from attacks.linear.position_rows import places_unknown, unmet_assumptions
from attacks.mjp.mlp_spans import LAYERS, FirstBlock, layer_span, read_first_block
from attacks.mjp.patch_search import NO_TOKEN
from attacks.mjp.token_search import TokenSearch
from attacks.mjp.unmix import QUERIES, layers_of, pixel_scales, seconds_of_search
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# A token is the class' or a register's where it is nearer to it than this, in lengths of the token.
SAME = 0.5


@dataclass(frozen=True, kw_only=True)
class TokenInverse(Attack):
    """Whole image from one update without the patch projection's gradient.

    Attributes:
        search: for the tokens.
    """

    search: TokenSearch = field(default_factory=TokenSearch)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """The layers of the first block whose spans are read."""
        return layers_of(model, (QUERIES, *LAYERS))

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        try:
            return "; ".join(self._reasons(observations[-1]))
        except UsageError as error:
            return str(error)

    def _reasons(self, target: Observation) -> list[str]:
        """Why the attack cannot work on this update, before anything is searched."""
        needed = self.linear_layers(target.model, 0)
        missing = [f"the update holds no gradient of {name}" for name in needed if name not in target.gradients]
        return [*_obstacles(target), *missing[:1]]

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: one search of all tokens."""
        tokenizer = find_tokenizer(observations[-1].model, observations[-1].image_shape)
        return seconds_of_search(observations[-1], tokenizer, 0)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; vouches for no pixel, because places and means are those of the smoothest image.

        `details` holds the tokens that were found, and the median share of them that the equations leave (residual).
        """
        observation = observations[-1]
        reasons = self._reasons(observation)
        if reasons:
            raise UsageError("; ".join(reasons))
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
        block = read_first_block(observation, tokenizer)
        tokens = self.search(block, block.constant[:0])
        if not len(tokens):
            raise UsageError(NO_TOKEN)
        centred, residual = first_tokens(observation, block, tokens.y)
        patches, found = _placed(block, tokenizer, _without_prefix(block, centred), observation)
        details = {"tokens": len(tokens), "found": int(found.sum()), "residual": float(residual.median())}
        if int(found.sum()) < len(found) / 2:
            reasons.append(f"for only {int(found.sum())} of {len(found)} patches a token was found")
        return render(observation, tokenizer, patches, torch.zeros_like(found), "; ".join(reasons), details)


def first_tokens(observation: Observation, block: FirstBlock, y: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at the first block without their means, C z (S, D), and the share of y that the equations leave (S,).

    Args:
        y: (S, D), tokens at the second norm, each of mean 0 and length D^1/2.

    Raises:
        UsageError: the update lacks the gradient of queries, keys and values.
    """
    layer = f"{name_of_block(observation.model, 0)}.{QUERIES}"
    queries, outputs = layer_span(observation, layer, block.count), block.attention
    norm = block.module.norm1
    first = (queries.directions[:, :-1] - queries.directions[:, -1:] * norm.bias) / norm.weight
    second = block.attention_branch(outputs.directions[:, :-1]) + outputs.directions[:, -1:] * block.attention_bias
    rows = torch.cat([first, second])
    rows = rows - rows.mean(dim=1, keepdim=True)  # (2 N', D)
    found = y @ torch.linalg.pinv(rows)  # (S, 2 N')
    residual = (found @ rows - y).norm(dim=1) / y.norm(dim=1)
    constant = found[:, len(first) :] @ outputs.directions[:, -1:]  # 1 / s, (S, 1)
    return found[:, : len(first)] @ rows[: len(first)] / constant, residual


def _without_prefix(block: FirstBlock, centred: Tensor) -> Tensor:
    """The tokens (S, D) that are neither the class token nor a register."""
    own = block.prefix - block.prefix.mean(dim=1, keepdim=True)
    kept = torch.ones(len(centred), dtype=torch.bool, device=centred.device)
    for token in own:
        distance = (centred - token).norm(dim=1) / token.norm()
        kept[distance.argmin()] &= bool(distance.min() > SAME)
    return centred[kept]


def _placed(block: FirstBlock, tokenizer: Tokenizer, tokens: Tensor, observation: Observation) -> tuple[Tensor, Tensor]:
    """(N, P) normalised patches in their places, the mean patch where no token was found; (N,) whether one was."""
    inverse = torch.linalg.pinv(block.projection)  # (P, D)
    level = inverse.sum(dim=1)  # E^-1 1, (P,)
    candidates = (tokens @ inverse.T)[:, None] - block.constant @ inverse.T  # (S, N, P)
    scales = pixel_scales(tokenizer, observation.std, candidates.device)
    rough, rougher = _steps(candidates * scales, tokenizer), _steps(level * scales, tokenizer)
    means = -(rough @ rougher) / rougher.square().sum()  # (S, N)
    cost = (rough + means[..., None] * rougher).square().sum(dim=2)
    rows, places = scipy.optimize.linear_sum_assignment(cost.log().cpu().numpy())
    rows, places = (torch.as_tensor(index, device=tokens.device) for index in (rows, places))
    chosen = candidates[rows, places] + means[rows, places][:, None] * level
    patches = chosen.mean(dim=0).repeat(tokenizer.num_patches, 1)
    patches[places] = chosen
    found = torch.zeros(tokenizer.num_patches, dtype=torch.bool, device=tokens.device)
    found[places] = True
    return patches, found


def _steps(patches: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Differences of neighbouring pixels within patches (..., P), (..., 2 C p (p - 1))."""
    side = tokenizer.patch_size
    pixels = patches.reshape(*patches.shape[:-1], tokenizer.channels, side, side)
    return torch.cat([pixels.diff(dim=dim).flatten(-3) for dim in (-1, -2)], dim=-1)


def _obstacles(observation: Observation) -> list[str]:
    """Why the equations do not hold, or are not needed.

    Raises:
        UsageError: the model has no patch projection.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    reasons = [*unmet_assumptions(observation.num_examples, observation.local_steps), *places_unknown(tokenizer)]
    tokens, width, values = tokenizer.num_patches + prefix_tokens(tokenizer), tokenizer.width, tokenizer.patch_dim
    if tokenizer.weight in observation.gradients:
        reasons.append("the update holds the patch projection's gradient: patch_embedding, token_span or unmix use it")
    elif width - tokens - 1 >= values:
        reasons.append("the first attention leaves an equation for every value of a patch: token_span solves them")
    if values > width:
        reasons.append(f"a patch has {values} values and a token {width} channels: the projection cannot be inverted")
    if 2 * tokens >= width:
        reasons.append(f"{tokens} tokens in {width} channels: too many (needs 2 x tokens < channels)")
    return reasons
