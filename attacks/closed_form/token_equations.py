"""The conditions that a first block's gradients put on the patches of an update, without the position gradient.

The server sent the position embedding e_i, so it knows it whether or not its gradient comes back. Rows of
[dL/dW_qkv, dL/db_qkv] span the normalised tokens [n_j, 1], n = gamma (z - mean z) / sigma + beta, and rows of
[dL/dE, dL/db] span the patches [x_j, 1] (`attacks.linear.input_spans`). At place i the token is z_i = E x_i + b + e_i:

    v_k [gamma C z_i + sigma_i beta, sigma_i] = 0    for every direction v_k that the attention's gradient has not,
    u_k [x_i, 1] = 0                                 for every direction u_k that the projection's gradient has not,

C = I - 1 1^T / D, and sigma_i an unknown number that is eliminated: one matrix for all places. A batch of k images has
k N' tokens, and every image's patch at a place fulfils the same conditions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.attention import FirstAttention, find_first_attention
from attacks.layer_inputs import differs, layer_inputs, made_up_image, once_a_model
from attacks.linear.input_spans import (
    InputEquations,
    InputSpan,
    attention_gradient,
    count_inputs,
    layer_gradient,
    span_of_inputs,
)
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Least eigenvalue of the normal equations: the variance of a normalised pixel along a direction is not above 100.
LEAST_PRECISION = 1e-2
# Eigenvalues below this share of the largest are directions that no condition reaches.
LEAST_EIGENVALUE = 1e-9
# Rounds of `weigh`.
ROUNDS = 6


@dataclass(frozen=True)
class Block:
    """What the sent model and the update say of the first block.

    Attributes:
        tokenizer, attention: where the parameters stand.
        weights: parameters and buffers by name, float64.
        offsets: b + e_i, (N, D).
        span: of the attention's inputs.
        biased: the gradient of the attention's bias is in the update.
        sent: type of the gradients.
        tokens, patches: of the batch, whose number is the dimension of a layer's inputs.
    """

    tokenizer: Tokenizer
    attention: FirstAttention
    weights: Mapping[str, Tensor]
    offsets: Tensor
    span: InputSpan
    biased: bool
    sent: torch.dtype
    tokens: int
    patches: int

    @property
    def projection(self) -> Tensor:
        """E, (D, P)."""
        return self.weights[self.tokenizer.weight].flatten(1)

    def normalised(self, norm: str) -> tuple[Tensor, Tensor]:
        """gamma and beta of a layer norm, (D,) each; ones and zeros where it has none."""
        ones = self.offsets.new_ones(self.tokenizer.width)
        return self.weights.get(f"{norm}.weight", ones), self.weights.get(f"{norm}.bias", 0 * ones)


def was_sent(observation: Observation, name: str | None) -> bool:
    """Whether the update holds a gradient of this parameter that is not zero."""
    gradient = observation.gradients.get(name)
    return gradient is not None and bool(gradient.any())


def prefix_tokens(tokenizer: Tokenizer) -> int:
    """Tokens of the first block that are no patches."""
    return max(tokenizer.prefix_rows, tokenizer.prefix)


def count_tokens(observation: Observation, images: int = 1) -> int:
    """Tokens in the first block: those of all patches, or of the patches that the model saw where it drops some.

    Dropped patches leave no trace but this number: the directions of the attention's inputs above the noise.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    every = images * (tokenizer.num_patches + prefix_tokens(tokenizer))
    if not observation.drops_patches:
        return every
    gradient = attention_gradient(observation, find_first_attention(observation.model, tokenizer.width))
    return min(every, count_inputs(gradient, gradient.dtype))


def check_block(observation: Observation, images: int = 1) -> tuple[Tokenizer, Tensor, FirstAttention]:
    """Tokenizer, position embedding (prefix + N, D) and first attention of a model, after checks that take little time.

    Raises:
        UsageError: the model adds no position embedding, its attention or norm is not known, the update lacks the
            attention's gradient, there are too many tokens for the channels, or something stands between embedding and
            attention (a norm, say), so that its inputs are others.
    """
    model = observation.model
    tokenizer = find_tokenizer(model, observation.image_shape)
    positions = tokenizer.sent_positions(model)
    if positions is None:
        raise UsageError(
            "the model has no learnable position embedding and no fixed one: the spans show its patches, but not where "
            "each of them was"
        )
    attention = find_first_attention(model, tokenizer.width)
    if attention.norm and not isinstance(model.get_submodule(attention.norm), nn.LayerNorm):
        raise UsageError(f"{attention.norm} is no layer norm: the span of what it returns is not one of the tokens")
    for name in attention.weights:
        if not observation.gradient_of(name).any():
            raise UsageError(f"the gradient of {name} is zero everywhere, so there is nothing to solve with")
    tokens = observation.once(count_tokens, images)
    if tokens >= tokenizer.width:
        raise UsageError(
            f"{tokens} tokens in {tokenizer.width} channels: the gradient of the first attention spans everything and "
            f"leaves {max(tokenizer.width - tokens, 0)} equations a patch for "
            f"{min(tokenizer.num_patches, tokenizer.patch_dim + 1)} unknowns (needs tokens < channels)"
        )
    if not observation.drops_patches:
        shape = observation.image_shape
        reason = once_a_model(
            model, ("attention", shape), lambda: _other_tokens(model, tokenizer, attention, positions, shape)
        )
        if reason:
            raise UsageError(reason)
    return tokenizer, positions, attention


def _other_tokens(
    model: nn.Module,
    tokenizer: Tokenizer,
    attention: FirstAttention,
    positions: Tensor,
    image_shape: tuple[int, int, int],
) -> str:
    """Why the first attention does not receive the normalised projection + position of every patch, or "".

    Shown by one made-up image. A model that cannot be run, such as what is kept of earlier rounds, is taken at its
    names.
    """
    weights = dict(model.named_parameters())
    owner = attention.weights[0].rpartition(".")[0]
    image = made_up_image(image_shape, weights[tokenizer.weight])
    given = layer_inputs(model, (owner,), image)
    if not given and owner.rpartition(".")[0]:  # the layer's weights may be used without calling it
        owner = owner.rpartition(".")[0]
        given = layer_inputs(model, (owner,), image)
    if not given:
        return ""
    patches, n = tokenizer.patchify(image)[0].double(), tokenizer.num_patches
    bias = weights[tokenizer.bias].detach().double() if tokenizer.bias else 0.0
    projection = weights[tokenizer.weight].detach().double().flatten(1)
    tokens = patches @ projection.T + bias + positions.detach().double()[tokenizer.prefix :]  # (N, D)
    if attention.norm:
        norm = copy.deepcopy(model.get_submodule(attention.norm)).double()
        tokens = norm(tokens).detach()
    received = given[owner].reshape(-1, tokenizer.width)[-n:]
    if received.shape == tokens.shape and not differs(received, tokens):
        return ""
    return (
        f"{type(model).__name__} is not built as this attack assumes: its first attention does not receive layer norm "
        "(projection + position) of every patch (a norm before the first block, as in CLIP, or behind its branches, as "
        "in post-norm models, is not supported)"
    )


def read_block(observation: Observation, images: int = 1) -> Block:
    """The first block of a model and the span of its attention's inputs.

    Raises:
        UsageError: see `_parts`.
    """
    model, (tokenizer, positions, attention) = observation.model, check_block(observation, images)
    gradient = attention_gradient(observation, attention)
    biased = gradient.shape[1] > tokenizer.width
    weights = {
        n: t.detach().double()
        for n, t in (*model.named_parameters(), *model.named_buffers())
        if _first(n, attention, tokenizer)
    }
    offsets = positions.detach().double()[tokenizer.prefix :]
    if tokenizer.bias:
        offsets = offsets + weights[tokenizer.bias]
    tokens = observation.once(count_tokens, images)
    span, patches = span_of_inputs(gradient, tokens, gradient.dtype), tokens - images * prefix_tokens(tokenizer)
    return Block(tokenizer, attention, weights, offsets, span, biased, gradient.dtype, tokens, patches)


def _first(name: str, attention: FirstAttention, tokenizer: Tokenizer) -> bool:
    """Whether a parameter is one that the equations use."""
    norms = tuple(f"{norm}." for norm in (attention.norm, attention.mlp_norm) if norm)
    return name in (tokenizer.weight, tokenizer.bias) or name.startswith(norms)


def attention_equations(block: Block, offsets: Tensor | None = None) -> InputEquations:
    """The conditions of the first attention on every patch.

    Args:
        offsets: (N, D), bias and embedding at each place; by default those that were sent for it.
    """
    e, z = block.projection, block.offsets if offsets is None else offsets
    scale, free = float(z.var(dim=1).mean() * z.shape[1]), None
    if block.attention.norm:
        gamma, beta = block.normalised(block.attention.norm)
        e, z = gamma[:, None] * (e - e.mean(dim=0)), gamma * (z - z.mean(dim=1, keepdim=True))
        free = torch.cat([beta, beta.new_ones(1)]) if block.biased else beta
    last = 0.0 if block.attention.norm else 1.0
    if block.biased:
        e = torch.cat([e, e.new_zeros(1, e.shape[1])])
        z = torch.cat([z, z.new_full((len(z), 1), last)], dim=1)
    free = None if free is None or not free.any() else free
    return InputEquations(block.span, e, z, scale, free=free, normal_within=False)


def patch_equations(observation: Observation, block: Block) -> InputEquations | None:
    """The conditions of the patch projection on every patch; None where its gradient is withheld."""
    tokenizer = block.tokenizer
    if not was_sent(observation, tokenizer.weight):
        return None
    gradient = layer_gradient(observation.gradients, tokenizer.weight)
    span = span_of_inputs(gradient, block.patches, gradient.dtype)
    values = gradient.shape[1]
    matrix = torch.eye(values, tokenizer.patch_dim).to(block.offsets)
    constants = matrix.new_zeros(tokenizer.num_patches, values)
    constants[:, tokenizer.patch_dim :] = 1.0
    return InputEquations(span, matrix, constants, float(values))


@dataclass(frozen=True)
class SpanSums:
    """What the conditions of one update say of every patch: x H x - 2 r x + q, in units of their own variance.

    Attributes:
        matrix, targets, squares: H (P, P), r (N, P), q (N,).
    """

    matrix: Tensor
    targets: Tensor
    squares: Tensor

    @classmethod
    def of(cls, *equations: InputEquations) -> SpanSums:
        """The conditions of several layers."""
        return cls(*(sum(parts) for parts in zip(*(one.conditions() for one in equations), strict=True)))

    def least(self) -> Tensor:
        """(N,) x H x - 2 r x + q at its least."""
        values, vectors = torch.linalg.eigh(self.matrix)
        reached = values > LEAST_EIGENVALUE * values[-1]
        along = (self.targets @ vectors)[:, reached]
        return (self.squares - (along.square() / values[reached]).sum(dim=1)).clamp(min=0)


def weigh(attention: InputEquations, patches: InputEquations | None, rounds: int = ROUNDS) -> None:
    """Re-estimate the variances of the conditions from the patches that they give (as `token_span` does)."""
    groups = [attention] if patches is None else [attention, patches]
    for _ in range(rounds):
        normal = [one.normal() for one in groups]
        h, r = (sum(parts) for parts in zip(*normal, strict=True))
        values, vectors = torch.linalg.eigh(h)
        values = values.clamp(min=LEAST_PRECISION)
        centre = (r @ vectors / values) @ vectors.T
        for one in groups:
            one.reweigh(centre, vectors / values.sqrt())
