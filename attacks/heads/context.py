"""Which tokens gave keys and values to the first attention: a test of every token, from the gradient of its values.

MP3's tokens all ask, but only the context answers: keys and values come from K of N tokens, drawn anew for every image
and not sent. The rows of [dL/dW_v, dL/db_v] are combinations of the inputs [n_j, 1] of those K tokens, so that a token
belongs to the context where

    [n_j, 1] (I - V^T V) = 0,        V (K, D + 1) the rows' span (`attacks.linear.input_spans`),

which an image that is about right shows: tokens outside of the context miss by orders of magnitude more. K is the
largest rank over the attentions of all blocks, in any of which weak directions may drown in round-off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.attention import find_first_attention
from attacks.closed_form.span_refinement import Front
from attacks.linear.input_spans import InputSpan, count_inputs, layer_gradient, span_of_inputs
from attacks.observation import Observation
from attacks.tokenizer import Tokenizer


@dataclass(frozen=True)
class Context:
    """The tokens that give keys and values.

    Attributes:
        count: K.
        front: from patches to the first attention's inputs.
        span: of the inputs of its values.
    """

    count: int
    front: Front
    span: InputSpan

    def misses(self, patches: Tensor) -> Tensor:
        """(N,) how far each token of an image (N, P), normalised patches, is outside the span."""
        inputs = self.front.inputs(patches)[0][-len(patches) :]
        ones = inputs.new_ones(len(inputs), self.span.directions.shape[1] - inputs.shape[1])
        return (torch.cat([inputs, ones], dim=1) @ self.span.conditions.T).norm(dim=1)

    def members(self, patches: Tensor) -> Tensor:
        """(N,) bool, the K tokens that miss least."""
        misses = self.misses(patches)
        return misses <= misses.sort().values[self.count - 1]


def read_context(observation: Observation, tokenizer: Tokenizer) -> Context | None:
    """The context of an update of one image; None where all tokens give keys and values, or too many to tell.

    Raises:
        UsageError: the model's attention is not known, or the update lacks its gradient.
    """
    weights = find_first_attention(observation.model, tokenizer.width).weights
    pattern = re.sub(r"\d+", r"\\d+", re.escape(weights[-1]))
    values = [
        _values(observation, name, fused=len(weights) == 1)
        for name in observation.gradients
        if re.fullmatch(pattern, name) and observation.gradients[name].any()
    ]
    if not values:
        observation.gradient_of(weights[-1])
        return None
    count = max(count_inputs(gradient, gradient.dtype) for gradient in values)
    if count >= min(tokenizer.num_patches, tokenizer.width):
        return None
    front = Front(observation.model, tokenizer, weights[:1])
    return Context(count, front, span_of_inputs(values[0], count, values[0].dtype))


def _values(observation: Observation, name: str, *, fused: bool) -> Tensor:
    """[dL/dW_v, dL/db_v], (D, D + 1), of one attention."""
    gradient = layer_gradient(observation.gradients, name)
    return gradient[-len(gradient) // 3 :] if fused else gradient
