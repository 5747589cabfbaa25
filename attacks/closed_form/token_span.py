"""Closed-form inversion without the gradient of the position embedding, by the span of the first attention's inputs.

The server sent the position embedding e_i, so it knows it whether or not its gradient comes back. Rows of
[dL/dW_qkv, dL/db_qkv] span the normalised tokens [n_j, 1], n = gamma (z - mean z) / sigma + beta, and rows of
[dL/dE, dL/db] span the patches [x_j, 1] (`attacks.linear.input_spans`). At place i the token is z_i = E x_i + b + e_i:

    v_k [gamma C z_i + sigma_i beta, sigma_i] = 0    for every direction v_k that the attention's gradient has not,
    u_k [x_i, 1] = 0                                 for every direction u_k that the projection's gradient has not,

C = I - 1 1^T / D, and sigma_i an unknown number that is eliminated: one matrix for all places. N' tokens (class and
register tokens counted) leave D - N' equations a place, and its patch has min(N, P + 1) - 1 unknowns, or P where the
projection's gradient is withheld too; what stays open is left to an image prior.

Where that is much, the spans of the block's MLP settle it too (`attacks.closed_form.span_refinement`), with the prior's
image for a start: twice as many equations in D channels, and those behind the activation.

It works on a message without position gradient, without the projection's gradient, or without both. Batches add their
spans up and stay undetermined; masked positions do not add the embedding that was sent for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.attention import find_first_attention
from attacks.base import Attack
from attacks.closed_form.span_refinement import Front, Refinement
from attacks.closed_form.token_equations import (
    LEAST_PRECISION,
    Block,
    attention_equations,
    check_block,
    patch_equations,
    prefix_tokens,
    read_block,
    was_sent,
)
from attacks.linear.completion import VOUCHED_DEVIATION, render
from attacks.linear.image_prior import Settled, VectorialVariation
from attacks.linear.input_spans import InputEquations, attention_gradient, count_inputs, layer_gradient, span_of_inputs
from attacks.linear.intervals import COARSE, coarseness
from attacks.linear.normal_equations import SETTLED, Estimate
from attacks.linear.position_rows import LARGEST_IMBALANCE, position_gradient, read_position_rows, unmet_assumptions
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# The weights are re-estimated until the variances of the conditions change by less, so often at least and at most.
CHANGE, FEWEST, MOST = 0.05, 3, 12
# Weight of the prior: of 10, 20, 40 and 80 the best on photographs with random DeiT-S and trained ViT-Ti together.
STRENGTH = 20.0
# Below this share of equations to unknowns the prior settles too much to be trusted.
LEAST_KNOWN = 0.8
# For the position rows to serve `patch_embedding`, the least singular value, relative to the largest, that counts as a
# direction of its own.
LEAST_SINGULAR = 1e-7
# Share of the tokens that may lie outside the span of the update; round-off leaves 1e-8 to 3e-2 at the right image.
LARGEST_RESIDUAL = 0.1
# Expected error of a pixel in [0, 1], on average, above which the positions are not those that were sent, or nearly so.
LARGEST_DEVIATION = 0.1
# Tokens were changed on their way into the first attention, as dropout does, where a residual above the first number is
# more than the second share of the residual of a flat image, or one above the third misses the conditions by more than
# the fourth factor of their errors. With dropout of 0.05 to 10 % of the tokens' entries answers of 7 to 33 dB were
# vouched for without that, with 14 to 20 images a rate none is (trained vit_mini_64, float32 and half precision). Of
# right answers one in 120 is lost (a message of float16; both mini models, DeiT-S, ViT-Ti).
LARGE_RESIDUAL, SHARE_OF_FLAT, SMALL_RESIDUAL, LARGEST_MISFIT = 1e-2, 0.2, 1e-3, 10.0
# The prior's deviation among fixed neighbours is too small, on visible patches of photographs by a factor of 1.5 to 3.
PRIOR_ERROR = 2.5
# In a message of float16 or bfloat16 the expected error is too small, on three photographs by a factor of 1.2 to 3.5,
# and of 5 to 10 where entries are rounded by more than this share: there nothing is vouched for.
ROUNDED_ERROR, LARGEST_ROUNDING = 4.0, 4e-3
# After the refinement it is too small by a factor of up to 4 where 50 to 200 directions are open (DeiT-S at 224 pixels
# with random weights, 24 photographs).
REFINED_ERROR = 4.0
# Seconds of one CPU core for a patch dimension cubed, and for an unknown that is refined (3e-5 with 192 channels, 8e-5
# with 384).
SECONDS_A_CUBE, SECONDS_AN_UNKNOWN = 4e-9, 5e-5


@dataclass(frozen=True)
class _Answer:
    """Patches, and how far they are expected to be off.

    Attributes:
        patches: (N, P) float64, normalised pixels.
        deviation: (N,) rms error of a pixel, in units of [0, 1].
    """

    patches: Tensor
    deviation: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenSpan(Attack):
    """Solve for patches whose tokens lie in the span of the first attention's inputs.

    Args:
        prior: settles what the equations leave open.
        steps: of the refinement by the spans of the MLP, where the equations leave something open; 0 for none.
        iterations: of conjugate gradients in a step.
        largest: most unknowns N P for which there is a refinement; its time grows with them.
    """

    prior: VectorialVariation = field(default_factory=lambda: VectorialVariation(strength=STRENGTH))
    steps: int = 3
    iterations: int = 60
    largest: int = 200_000

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: with the position gradient at hand `patch_embedding` needs no span."""
        target = observations[-1]
        try:
            tokenizer = find_tokenizer(target.model, target.image_shape)
            if target.drops_patches:
                return "the model did not see every patch: mjp_rounds finds out which, and solves for them"
            if _positions_serve(target, tokenizer):
                return "the update holds the position gradient: patch_embedding solves with it and needs no span"
            check_block(target)
        except UsageError as error:
            return str(error)
        return ""

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: eigenvalues of a matrix of the patches' size, and the refinement."""
        target = observations[-1]
        tokenizer = find_tokenizer(target.model, target.image_shape)
        unknowns = tokenizer.num_patches * tokenizer.patch_dim
        refined = unknowns if unknowns <= self.largest and self.steps else 0
        return SECONDS_A_CUBE * max(tokenizer.width, tokenizer.patch_dim) ** 3 + SECONDS_AN_UNKNOWN * refined

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """Query, key and value of the first attention, and the MLP after it."""
        try:
            attention = find_first_attention(model, width)
        except UsageError:
            return ()
        return (*attention.weights, *attention.mlp)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`.

        `details` holds equations and unknowns of a patch, the directions that were left to the prior (open), the share
        of the tokens outside the span (residual), the rms of the attention's conditions over what their errors make it
        (misfit), the expected rms error of a pixel in [0, 1] (deviation), and the steps of the refinement.
        """
        target = observations[-1]
        block = read_block(target)
        reasons = unmet_assumptions(target.num_examples, target.local_steps) + _masked(target, block.tokenizer)
        patches = patch_equations(target, block)
        unknowns = block.tokenizer.patch_dim if patches is None else min(patches.span.rank, block.tokenizer.patch_dim)
        equations = block.span.directions.shape[0] - block.span.rank - 1
        if equations < LEAST_KNOWN * unknowns:
            reasons.append(
                f"the first attention leaves {equations} equations a patch for {unknowns} unknowns: what they leave "
                "open is the image prior's guess"
            )
        estimate, hessian, attention = _solve(block, patches)
        settled = _expected(self.prior.settle(estimate, block.tokenizer, target.std), estimate, target.std)
        details = {"equations": equations, "unknowns": unknowns, "open": len(estimate.open), "steps": 0}
        if len(estimate.open) and not reasons:
            settled, details["steps"] = self._refined(
                target, block, hessian, _linear(block, patches), estimate, settled
            )
        details |= {"residual": _residual(block, settled.patches), "deviation": float(settled.deviation.mean())}
        details["misfit"] = attention.misfit(settled.patches)
        if not reasons and (details["residual"] > LARGEST_RESIDUAL or details["deviation"] > LARGEST_DEVIATION):
            reasons.append(
                f"{details['residual']:.2g} of the tokens lie outside the span of the first attention's gradient and "
                f"pixels are expected to be off by {details['deviation']:.2g} of 1: too much noise, or the update is "
                "not the gradient of one image with the positions that were sent (hidden positions, a defence)"
            )
        coarse = coarseness(target, block.attention.weights)
        if not reasons and coarse > LARGEST_ROUNDING:
            reasons.append(
                f"entries of the first attention's gradient are rounded by {coarse:.1%}: the error of the pixels "
                "cannot be estimated"
            )
        if not reasons and coarse <= COARSE and block.span.added:
            reasons.append(
                "the first attention's gradient holds more than its tokens and round-off (noise that the client added, "
                "or several local steps): the error of the pixels cannot be estimated"
            )
        if not reasons and _tokens_changed(block, settled.patches, details):
            reasons.append(
                f"{details['residual']:.2g} of the tokens lie outside the span of the first attention's gradient, more "
                "than noise explains: what the first attention read is not the tokens that the patches make (dropout)"
            )
        slack = (ROUNDED_ERROR if coarse > COARSE else 1.0) * (REFINED_ERROR if details["steps"] else 1.0)
        sure = settled.deviation * slack < VOUCHED_DEVIATION
        return render(target, block.tokenizer, settled.patches, sure, "; ".join(reasons), details)

    def _refined(
        self,
        target: Observation,
        block: Block,
        hessian: Tensor,
        linear: tuple[Tensor, Tensor],
        estimate: Estimate,
        settled: _Answer,
    ) -> tuple[_Answer, int]:
        """The patches that the MLP's spans single out and the number of steps; the ones given where that gains
        nothing."""
        layers = tuple(name for name in block.attention.mlp if was_sent(target, name))
        if not layers or not self.steps or settled.patches.numel() > self.largest:
            return settled, 0
        tokens = block.tokenizer.num_patches + prefix_tokens(block.tokenizer)
        spans = [span_of_inputs(layer_gradient(target.gradients, name), tokens, block.sent) for name in layers]
        front = Front(target.model, block.tokenizer, (block.attention.weights[0], *layers))
        own = _behind_attention(block, settled.patches)
        refinement = Refinement(front, [block.span, *spans], own, hessian, linear)
        found = refinement.run(settled.patches, _spread(estimate), self.steps, self.iterations)
        deviation = found.deviation * sum(target.std) / len(target.std)
        if not deviation.mean() < settled.deviation.mean():
            return settled, 0
        return _Answer(found.patches, deviation), found.steps


def _positions_serve(observation: Observation, tokenizer: Tokenizer) -> bool:
    """Whether the update holds position rows that tell as much as the first attention's gradient does.

    Rows that were noised, shuffled or averaged by themselves say nothing of the patches: they miss the projection's
    bias, or do not differ. Where the attention's gradient shows more directions than there are tokens, the whole update
    was noised or rounded, and its spans are no better than its rows.
    """
    if position_gradient(observation, tokenizer) is None or not was_sent(observation, tokenizer.weight):
        return False
    read = read_position_rows(observation)
    visible = read.rows[~read.masked]
    if not read.imbalance > LARGEST_IMBALANCE:
        least = LEAST_KNOWN * min(visible.shape)
        if int(torch.linalg.matrix_rank(visible, rtol=LEAST_SINGULAR)) >= least:
            return True
    tokens = observation.num_examples * (tokenizer.num_patches + prefix_tokens(tokenizer))
    try:
        gradient = attention_gradient(observation, find_first_attention(observation.model, tokenizer.width))
    except (KeyError, UsageError):
        return True  # it cannot be read at all
    return count_inputs(gradient, gradient.dtype) > tokens


def _masked(observation: Observation, tokenizer: Tokenizer) -> list[str]:
    """What zero rows of the position gradient say, in words, if the update has one."""
    rows = position_gradient(observation, tokenizer)
    masked = 0 if rows is None else int((rows[tokenizer.prefix :] == 0).all(dim=1).sum())
    if not tokenizer.hides_positions and coarseness(observation, (tokenizer.positions,)) > COARSE:
        return []  # rows too small for the message's precision
    if not masked:
        return []
    return [
        f"{masked} of {tokenizer.num_patches} position rows are exactly zero: those tokens hold a shared position "
        "embedding (MJP) instead of the one that was sent for their place"
    ]


def _linear(block: Block, patches: InputEquations | None) -> tuple[Tensor, Tensor]:
    """H (P, P) and r (N, P) of what is known without the attention: the projection's span, or a pixel's variance."""
    if patches is not None:
        return patches.normal()
    identity = torch.eye(block.tokenizer.patch_dim).to(block.offsets)
    return identity, identity.new_zeros(block.tokenizer.num_patches, block.tokenizer.patch_dim)


def _solve(block: Block, patches: InputEquations | None) -> tuple[Estimate, Tensor, InputEquations]:
    """All patches, by one eigendecomposition for each set of weights, the last normal equations, (P, P), and the
    attention's conditions."""
    attention = attention_equations(block)
    groups = [attention] if patches is None else [attention, patches]
    for number in range(1, MOST + 1):
        (h, r), (other, pull) = attention.normal(), _linear(block, patches)
        hessian = h + other
        values, vectors = torch.linalg.eigh(hessian)
        values = values.clamp(min=LEAST_PRECISION)
        centre = (r + pull) @ vectors / values  # (N, P)
        before = [equations.unsure for equations in groups]
        for equations in groups:
            equations.reweigh(centre @ vectors.T, vectors / values.sqrt())
        if number >= FEWEST and all(abs(e.unsure / old - 1) < CHANGE for e, old in zip(groups, before, strict=True)):
            break
    open_ = values < SETTLED**-2
    noise = float((1 / values[~open_]).mean().sqrt()) if (~open_).any() else 1.0
    rows = centre[:, ~open_] @ vectors[:, ~open_].T
    estimate = Estimate(rows, vectors[:, open_].T.contiguous(), centre[:, open_], values[open_], noise, 0.0)
    return estimate, hessian, attention


def _spread(estimate: Estimate) -> Tensor:
    """A square root of the covariance of a patch, (P, k), along the open directions."""
    return estimate.open.T / estimate.precision.sqrt()


def _expected(settled: Settled, estimate: Estimate, std: tuple[float, ...]) -> _Answer:
    """With the error that the equations leave and the prior's."""
    own = estimate.noise * sum(std) / len(std)
    return _Answer(settled.patches, ((PRIOR_ERROR * settled.deviation).square() + own**2).sqrt())


def _behind_attention(block: Block, patches: Tensor) -> Tensor | None:
    """Derivative of the MLP's input with respect to a patch with attention held fixed, up to a token's own scale."""
    if block.attention.mlp_norm is None:
        return None
    e = block.projection
    size = (patches @ e.T + block.offsets).std(dim=1).mean()
    return block.normalised(block.attention.mlp_norm)[0][:, None] * (e - e.mean(dim=0)) / size


def _tokens_changed(block: Block, patches: Tensor, details: dict[str, float]) -> bool:
    """Whether the attention read other tokens than `patches` make: its span holds these hardly better than those of a
    flat image, or worse than its errors explain."""
    flat = patches.mean(dim=0, keepdim=True).expand_as(patches)
    return (details["residual"] > LARGE_RESIDUAL and details["residual"] > SHARE_OF_FLAT * _residual(block, flat)) or (
        details["residual"] > SMALL_RESIDUAL and details["misfit"] > LARGEST_MISFIT
    )


def _residual(block: Block, patches: Tensor) -> float:
    """Share of the patches' normalised tokens outside the span of the attention's inputs."""
    tokens = patches @ block.projection.T + block.offsets
    if block.attention.norm:
        gamma, beta = block.normalised(block.attention.norm)
        tokens = gamma * torch.nn.functional.layer_norm(tokens, tokens.shape[1:]) + beta
    if block.biased:
        tokens = torch.cat([tokens, tokens.new_ones(len(tokens), 1)], dim=1)
    return float((tokens @ block.span.conditions.T).norm() / tokens.norm())
