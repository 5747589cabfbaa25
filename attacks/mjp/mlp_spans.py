"""The spans of the first MLP's gradients: a condition on every token of the client's forward pass.

A linear layer's gradient is a sum of outer products over the tokens, dL/dW = sum_i d_i a_i^T, and dL/db = sum_i d_i. So
the rows of [dL/dW, dL/db] span the extended inputs [a_i, 1] of all N' = N + prefix tokens, whenever the d_i are
independent; with N' below the number of inputs this is a condition on each token that the server can test without
labels, loss or backward pass: [a_i, 1] (I - V^T V) = 0, V (N', inputs + 1) the leading right singular vectors of the
gradient, its rows weighed by their round-off (`attacks.linear.input_spans`). Likewise its columns span the d_i. (The
test is DAGER's, Petrov et al. 2024, there on the discrete tokens of language models; here tokens are continuous.)

Of the first block's four layers the two of the MLP single out tokens (`attacks.mjp.mlp_tokens`): their token gradients
differ from token to token, and the GELU between them separates tokens from their affine combinations. Those of patch
projection and attention output say which patches and attentions a token may be made of
(`attacks.mjp.token_patches`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import jvp

from attacks.attention import name_of_block
from attacks.layer_inputs import differs, layer_inputs, made_up_image, once_a_model
from attacks.linear.input_spans import layer_gradient, span_of_inputs
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

LAYERS = ("attn.proj", "mlp.fc1", "mlp.fc2")
# Hidden units, by tokens, whose conditions are enough for all but the last steps of a search.
UNITS = 3
NEEDED = ("norm1", "attn.qkv", "norm2", *LAYERS, "mlp.act")


@dataclass(frozen=True)
class GradientSpan:
    """Row and column space of a linear layer's gradient S = [dL/dW, dL/db], (R, n + 1).

    Attributes:
        directions: V, (N', n + 1) orthonormal rows by falling singular value: the span of the layer's inputs.
        sizes: (N',) squared singular values in units of the noise of an entry.
        columns: Q, (R, N') orthonormal: the span of the gradients of the layer's outputs.
        factor: F, (N', N') with S = Q F V.
        noise: of an entry of S in the unit of `sizes`.
        added: see `InputSpan`.
    """

    directions: Tensor
    sizes: Tensor
    columns: Tensor
    factor: Tensor
    noise: float
    added: bool

    def of_inputs(self, kept: Tensor) -> GradientSpan:
        """The span of some of the layer's inputs, by their indices (n',), and of the constant one."""
        columns = torch.cat([kept, kept.new_tensor([self.directions.shape[1] - 1])])
        singular = self.sizes.sqrt()[:, None]
        basis, rows = torch.linalg.qr(self.directions[:, columns].T)  # apart from the sizes, which differ by much
        left, values, directions = torch.linalg.svd(singular * rows.T)
        factor = self.factor / singular.T @ (left * values)
        return replace(self, directions=directions @ basis.T, sizes=values.square(), factor=factor)

    def of_outputs(self, kept: Tensor) -> GradientSpan:
        """The span of the layer with some of its outputs, by their indices (R',)."""
        columns, factor = torch.linalg.qr(self.columns[kept])
        return replace(self, columns=columns, factor=factor @ self.factor)

    def outside(self, inputs: Tensor, constant: float = 0.0) -> Tensor:
        """[inputs, constant] (I - V^T V), (S, n + 1), for inputs (S, n)."""
        extended = torch.cat([inputs, inputs.new_full((len(inputs), 1), constant)], dim=1)
        return extended - (extended @ self.directions.T) @ self.directions

    def error(self, inputs: Tensor) -> Tensor:
        """Variance (S,) of a condition that noise of the gradient causes at inputs (S, n): `InputSpan.error`."""
        along = inputs @ self.directions[:, :-1].T + self.directions[:, -1]
        return self.noise**2 * (along.square() / self.sizes.clamp(min=self.noise**2)).sum(dim=1)

    def error_gradient(self, inputs: Tensor) -> Tensor:
        """Half gradient (S, n) of `error` along the inputs (S, n)."""
        along = inputs @ self.directions[:, :-1].T + self.directions[:, -1]
        return self.noise**2 * (along / self.sizes.clamp(min=self.noise**2)) @ self.directions[:, :-1]


@dataclass(frozen=True)
class MLPBlock:
    """A block in float64, as the client ran it, and the spans of its MLP's gradients.

    Attributes:
        module: a timm pre-norm block.
        spans: of fc1 and fc2.
    """

    module: nn.Module
    spans: tuple[GradientSpan, GradientSpan]

    @property
    def count(self) -> int:
        """N', number of tokens."""
        return len(self.spans[0].directions)

    @property
    def noisy(self) -> bool:
        """Whether the gradients hold more than tokens and round-off."""
        return any(span.added for span in self.spans)

    @cached_property
    def thinned(self) -> MLPBlock:
        """The block with `UNITS` N' of the MLP's hidden units, evenly spread; itself, where it has not twice as many.

        Every condition that they put on a token holds in the whole block, too.
        """
        mlp, count = self.module.mlp, UNITS * self.count
        hidden = len(mlp.fc1.weight)
        if 2 * count > hidden:
            return self
        kept = torch.linspace(0, hidden - 1, count, device=mlp.fc1.weight.device).round().long()
        module = copy.deepcopy(self.module)
        module.mlp.fc1 = _linear(mlp.fc1.weight[kept], mlp.fc1.bias[kept])
        module.mlp.fc2 = _linear(mlp.fc2.weight[:, kept], mlp.fc2.bias)
        return MLPBlock(module, (self.spans[0].of_outputs(kept), self.spans[1].of_inputs(kept)))

    def activate(self, before: Tensor) -> tuple[Tensor, Tensor]:
        """The MLP's activation and its slope."""
        return jvp(self.module.mlp.act, (before,), (torch.ones_like(before),))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.T.shape, device="meta")
    layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    return layer


@dataclass(frozen=True)
class FirstBlock(MLPBlock):
    """The first block, with what its tokens are made of.

    Attributes:
        attention: span of the inputs of the attention's output projection.
        prefix: class and register tokens with their positions, (prefix, D).
        constant: what patch i's token is but for E x_i: bias and own position embedding, (N, D).
        unknown: the same for a masked position, (D,), or None where the model has no shared embedding.
        projection: E, (D, P).
    """

    attention: GradientSpan
    prefix: Tensor
    constant: Tensor
    unknown: Tensor | None
    projection: Tensor

    def tokens(self, patches: Tensor, masked: Tensor) -> Tensor:
        """Tokens (N', D) of patches (N, P), of which `masked` (N,) hide their position."""
        constant = self.constant if self.unknown is None else torch.where(masked[:, None], self.unknown, self.constant)
        return torch.cat([self.prefix, patches @ self.projection.T + constant])

    def attend(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """The block's attention branch at `tokens` (S, D), with keys and values of `context` (N', D) or their own."""
        return _optional(self.module, "ls1")(self.module.attn.proj(self.mix(tokens, context)))

    def mix(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """What the attention's output projection receives, (S, D); arguments as `attend` takes them."""
        query = self.heads(tokens)[0]
        _, key, value = self.heads(tokens if context is None else context)
        return ((query @ key.transpose(1, 2)).softmax(dim=-1) @ value).transpose(0, 1).flatten(1)

    def heads(self, tokens: Tensor) -> Tensor:
        """Scaled queries, keys and values of tokens (S, D), (3, heads, S, D / heads)."""
        attention = self.module.attn
        parts = attention.qkv(self.module.norm1(tokens)).reshape(len(tokens), 3, attention.num_heads, -1)
        query, key, value = parts.permute(1, 2, 0, 3)
        query, key = _optional(attention, "q_norm")(query), _optional(attention, "k_norm")(key)
        return torch.stack([query * attention.scale, key, value])

    def attention_branch(self, mixed: Tensor) -> Tensor:
        """What the attention's output projection, without its bias, and the layer scale make of inputs (S, D)."""
        return _optional(self.module, "ls1")(mixed @ self.module.attn.proj.weight.T)

    @property
    def attention_bias(self) -> Tensor:
        """(D,): what the bias of the attention's output projection adds to a token, behind the layer scale."""
        bias = self.module.attn.proj.bias
        return self.constant.new_zeros(self.constant.shape[1]) if bias is None else _optional(self.module, "ls1")(bias)


def _optional(module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """The submodule called `name`; the identity where the version of timm has none."""
    return getattr(module, name, nn.Identity())


def read_first_block(observation: Observation, tokenizer: Tokenizer, images: int = 1) -> FirstBlock:
    """Take the first block out of the model and the spans out of the update.

    Args:
        images: in the batch; prefix and constants are repeated for each of them.

    Raises:
        UsageError: the model is built otherwise, the update lacks a gradient, or the layers are too narrow for a span
            to be a condition.
    """
    module = pre_norm_block(observation.model, 0)
    parameters = {n: p.detach().to(torch.float64) for n, p in observation.model.named_parameters()}
    width, position = tokenizer.width, tokenizer.sent_positions(observation.model)
    extra = [parameters[n].reshape(-1, width) for n in tokenizer.prefix_tokens]
    prefix = torch.cat(extra) if extra else parameters[tokenizer.weight].new_zeros(0, width)
    count = images * (tokenizer.num_patches + len(prefix))
    check_spans(count, width)
    bias = parameters[tokenizer.bias] if tokenizer.bias else prefix.new_zeros(width)
    position = prefix.new_zeros(tokenizer.num_patches, width) if position is None else position.detach().to(prefix)
    shared, before = (
        tokenizer.shared_embedding(parameters),
        tokenizer.prefix if len(position) > tokenizer.num_patches else 0,
    )
    block = FirstBlock(
        module=module,
        spans=mlp_spans(observation, 0, count),
        attention=layer_span(observation, f"{name_of_block(observation.model, 0)}.{LAYERS[0]}", count),
        prefix=(prefix + position[:before] if before else prefix).repeat(images, 1),  # as many rows, or none
        constant=(position[before:] + bias).repeat(images, 1),
        unknown=None if shared is None else shared + bias,
        projection=parameters[tokenizer.weight].flatten(1),
    )
    if not observation.drops_patches:
        shape, model = observation.image_shape, observation.model
        reason = once_a_model(model, ("first block", shape), lambda: _otherwise_built(block, model, tokenizer, shape))
        if reason:
            raise UsageError(reason)
    return block


def _otherwise_built(
    block: FirstBlock, model: nn.Module, tokenizer: Tokenizer, image_shape: tuple[int, int, int]
) -> str:
    """Why the model's first block does not compute what `block` does, or "", by one made-up image.

    Where nothing tells patches their places, the weights of the attention are not compared: they serve to refine the
    patches only (with relative biases of deviation 0.5 all 16 of 16 patches are found without them).
    """
    image = made_up_image(image_shape, next(p for n, p in model.named_parameters() if n == tokenizer.weight))
    first = name_of_block(model, 0)
    proj, norm, last = names = [f"{first}.{name}" for name in ("attn.proj", "norm2", "mlp.fc2")]
    given = layer_inputs(model, names, image)
    if len(given) < len(names):
        return ""
    name, n = type(model).__name__, tokenizer.num_patches
    extra = block.prefix[: given[norm].shape[1] - n]
    tokens = torch.cat([extra, tokenizer.patchify(image)[0].double() @ block.projection.T + block.constant[:n]])
    mixed, behind = given[proj][0].double(), given[norm][0].double()
    if len(tokens) != len(behind) or differs(
        given[norm][0], tokens + block.attention_branch(mixed) + block.attention_bias
    ):
        return (
            f"the first block of {name} is not timm's pre-norm block: its second norm does not receive projection + "
            "position + attention (a norm before the block, as in CLIP, norms behind its branches, and a layer scale "
            "under another name, as in BEiT, are not supported)"
        )
    if differs(given[last][0], block.module.mlp.act(block.module.mlp.fc1(block.module.norm2(behind)))):
        return f"the first block of {name} is not timm's pre-norm block: its MLP is not linear, activation, linear"
    placed = tokenizer.positions is not None or tokenizer.fixed_positions is not None
    if placed and differs(given[proj][0], block.mix(tokens)):
        return (
            f"the attention of the first block of {name} is not the softmax of its queries and keys alone (relative "
            "position biases, as in BEiT, are not supported)"
        )
    return ""


def pre_norm_block(model: nn.Module, number: int) -> nn.Module:
    """A copy of a block in float64.

    Raises:
        UsageError: it is not built as timm's.
    """
    modules, name = dict(model.named_modules()), name_of_block(model, number)
    lacking = [layer for layer in NEEDED if f"{name}.{layer}" not in modules]
    if lacking:
        place = "first block" if number == 0 else f"block {number + 1}"
        raise UsageError(f"the {place} of {type(model).__name__} is not timm's pre-norm block (no {lacking[0]})")
    return copy.deepcopy(modules[name]).to(torch.float64).eval().requires_grad_(False)


def check_spans(tokens: int, width: int) -> None:
    """Raise `UsageError` where the layers of `width` channels are too narrow for a span to be a condition."""
    if tokens >= width:
        raise UsageError(
            f"{tokens} tokens in {width} channels: the gradients of a block do not single out a span "
            "(needs tokens < channels)"
        )


def mlp_spans(observation: Observation, number: int, tokens: int) -> tuple[GradientSpan, GradientSpan]:
    """Row and column spaces of the gradients of fc1 and fc2 of a block."""
    name = name_of_block(observation.model, number)
    first, second = (layer_span(observation, f"{name}.{layer}", tokens) for layer in LAYERS[1:])
    return first, second


def layer_span(observation: Observation, layer: str, tokens: int) -> GradientSpan:
    """Row and column space of [dL/dW, dL/db] of a layer."""
    names = f"{layer}.weight", f"{layer}.bias"
    gradients = {name: observation.gradient_of(name) for name in names}
    sent = gradients[names[0]].dtype
    gradient = layer_gradient(gradients, names[0])
    span = span_of_inputs(gradient, tokens, sent)
    directions = span.directions[:tokens]
    columns, factor = torch.linalg.qr(gradient.to(torch.float64) @ directions.T)
    return GradientSpan(directions, span.sizes[:tokens], columns, factor, span.noise, span.added)
