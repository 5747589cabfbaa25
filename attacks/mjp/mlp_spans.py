"""The spans of the first MLP's gradients: a condition on every token of the client's forward pass.

A linear layer's gradient is a sum of outer products over the tokens, dL/dW = sum_i d_i a_i^T, and dL/db = sum_i d_i. So
the rows of [dL/dW, dL/db] span the extended inputs [a_i, 1] of all N' = N + prefix tokens, whenever the d_i are
independent; with N' below the number of inputs this is a condition on each token that the server can test without
labels, loss or backward pass: [a_i, 1] (I - V^T V) = 0, V (N', inputs + 1) the leading right singular vectors. (The
test is DAGER's, Petrov et al. 2024, there on the discrete tokens of language models; here tokens are continuous, and
the residual is minimised.)

Of the first block's four layers the two of the MLP are used. Their token gradients d_i differ from token to token; in
the attention they are nearly equal where attention is nearly uniform, and half of the span sinks below float32's
round-off. The first layer's input is an affine function of the token but for its norm; the second's comes after the
GELU, and only that separates tokens from their affine combinations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jvp

from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

LAYERS = ("mlp.fc1", "mlp.fc2")
NEEDED = ("norm1", "attn.qkv", "attn.proj", "norm2", *LAYERS, "mlp.act")


@dataclass(frozen=True)
class FirstBlock:
    """The first block in float64, as the client ran it, and the spans of its MLP's inputs.

    Attributes:
        module: a timm pre-norm block.
        spans: V for fc1, (N', D + 1), and for fc2, (N', hidden + 1), with orthonormal rows.
        prefix: class and register tokens with their positions, (prefix, D).
        constant: what patch i's token is but for E x_i: bias and own position embedding, (N, D).
        unknown: the same for a masked position, (D,), or None where the model has no shared embedding.
        projection: E, (D, P).
    """

    module: nn.Module
    spans: tuple[Tensor, Tensor]
    prefix: Tensor
    constant: Tensor
    unknown: Tensor | None
    projection: Tensor

    def tokens(self, patches: Tensor, masked: Tensor) -> Tensor:
        """Tokens (N', D) of patches (N, P), of which `masked` (N,) hide their position."""
        constant = self.constant if self.unknown is None else torch.where(masked[:, None], self.unknown, self.constant)
        return torch.cat([self.prefix, patches @ self.projection.T + constant])

    def attend(self, tokens: Tensor, context: Tensor) -> Tensor:
        """The block's attention branch at `tokens` (S, D), with keys and values of `context` (N', D)."""
        attention, norm = self.module.attn, self.module.norm1
        query = self._heads(norm(tokens))[0]
        _, key, value = self._heads(norm(context))  # (heads, N', D / heads)
        query, key = _optional(attention, "q_norm")(query), _optional(attention, "k_norm")(key)
        weights = (query * attention.scale @ key.transpose(1, 2)).softmax(dim=-1)
        mixed = (weights @ value).transpose(0, 1).reshape(len(tokens), -1)  # (S, D)
        return _optional(self.module, "ls1")(attention.proj(mixed))

    def _heads(self, normed: Tensor) -> Tensor:
        """Queries, keys and values, (3, heads, S, D / heads)."""
        attention = self.module.attn
        return attention.qkv(normed).reshape(len(normed), 3, attention.num_heads, -1).permute(1, 2, 0, 3)

    def residuals(self, attended: Tensor) -> Tensor:
        """Parts of the MLP's inputs outside the spans, (S, D + hidden + 2), for tokens plus attention (S, D)."""
        mlp = self.module.mlp
        first = self.module.norm2(attended)
        return torch.cat([outside(first, self.spans[0]), outside(mlp.act(mlp.fc1(first)), self.spans[1])], dim=1)

    def curvature(self, attended: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Gauss-Newton matrix (S, k, k) and half gradient (S, k) of |residuals|^2 along `directions` (k, D)."""
        norm, mlp = self.module.norm2, self.module.mlp
        centred = attended - attended.mean(dim=1, keepdim=True)
        scale = (centred.square().mean(dim=1, keepdim=True) + norm.eps).sqrt()  # (S, 1)
        unit = centred / scale
        moved = directions - directions.mean(dim=1, keepdim=True)
        d_first = moved[None] - (unit @ moved.T / unit.shape[1])[:, :, None] * unit[:, None]  # (S, k, D)
        d_first = d_first / scale[:, None] * norm.weight
        first = norm(attended)
        before = mlp.fc1(first)
        hidden, slope = jvp(mlp.act, (before,), (torch.ones_like(before),))
        d_hidden = (d_first @ mlp.fc1.weight.T) * slope[:, None]
        matrix, gradient = 0.0, 0.0
        for value, change, span in ((first, d_first, self.spans[0]), (hidden, d_hidden, self.spans[1])):
            inside = change @ span[:, :-1].T  # (S, k, N')
            matrix = matrix + change @ change.transpose(1, 2) - inside @ inside.transpose(1, 2)
            gradient = gradient + (change @ outside(value, span)[:, :-1, None])[..., 0]
        return matrix, gradient


def _optional(module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """The submodule called `name`; the identity where the version of timm has none."""
    return getattr(module, name, nn.Identity())


def outside(inputs: Tensor, span: Tensor) -> Tensor:
    """[inputs, 1] (I - V^T V), (S, n + 1), for inputs (S, n) and V (N', n + 1)."""
    extended = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
    return extended - (extended @ span.T) @ span


def read_first_block(observation: Observation, tokenizer: Tokenizer) -> FirstBlock:
    """Take the first block out of the model and the spans out of the update.

    Raises:
        UsageError: the model is built otherwise, or its layers are too narrow for a span to be a condition.
    """
    blocks = getattr(observation.model, "blocks", None)
    names = dict(blocks[0].named_modules()) if blocks is not None else {}
    lacking = [name for name in NEEDED if name not in names]
    if lacking:
        raise UsageError(
            f"the first block of {type(observation.model).__name__} is not timm's pre-norm block (no {lacking[0]})"
        )
    parameters = {n: p.detach().to(torch.float64) for n, p in observation.model.named_parameters()}
    extra = [parameters[n].reshape(-1, tokenizer.width) for n in tokenizer.prefix_tokens]
    position = tokenizer.position_rows(parameters)  # (prefix + N, D)
    prefix = torch.cat(extra) if extra else position[:0]
    tokens = tokenizer.num_patches + len(prefix)
    if tokens >= tokenizer.width:
        raise UsageError(
            f"{tokens} tokens in {tokenizer.width} channels: the gradients of the first block do not single out a span "
            "(needs tokens < channels)"
        )
    bias = parameters[tokenizer.bias] if tokenizer.bias else position.new_zeros(tokenizer.width)
    shared = tokenizer.shared_embedding(parameters)
    return FirstBlock(
        module=copy.deepcopy(blocks[0]).to(torch.float64).eval().requires_grad_(False),
        spans=tuple(_span(observation, f"blocks.0.{layer}", tokens) for layer in LAYERS),
        prefix=prefix + position[: tokenizer.prefix] if tokenizer.prefix else prefix,  # as many rows, or none
        constant=position[tokenizer.prefix :] + bias,
        unknown=None if shared is None else shared + bias,
        projection=parameters[tokenizer.weight].flatten(1),
    )


def _span(observation: Observation, layer: str, tokens: int) -> Tensor:
    """Leading right singular vectors of [dL/dW, dL/db] of a layer, (tokens, inputs + 1)."""
    weight, bias = (observation.gradient_of(f"{layer}.{kind}").to(torch.float64) for kind in ("weight", "bias"))
    return torch.linalg.svd(torch.cat([weight, bias[:, None]], dim=1), full_matrices=False)[2][:tokens]
