"""Several updates of one image from a client that trains low-rank factors alone (LoRA), by the span of dL/dA.

With y = W x + b + s B A x in the first attention (s = alpha / r; Hu et al. 2022, arXiv:2106.09685) and g_t the gradient
of token t's output, x_t its input (both rows of G and X, N' tokens), one update holds

    dL/dB = s sum_t g_t (A x_t)^T = s G^T X A^T,     (out, r)
    dL/dA = s sum_t (B^T g_t) x_t^T = s (G B)^T X.   (r, D)

B is zero at the start: the first update has dL/dA = 0, and its dL/dB holds r projections of the inputs, mixed by G^T,
which is not known: out x r equations for N' (out + D) numbers. From the second update on, every row of dL/dA lies in
the span of the inputs. One update shows r directions of it at most. But everything before the first attention is
frozen, so that the same image has the same inputs in every update, while B and G move with the training: K updates show
up to K r directions, and at K r >= N' the span is known. It is that of `token_span` without the gradients of positions,
projection and biases, whose conditions then give the patches: D - N' for the P values of each.

The rows of successive updates are nearly parallel. What keeps them apart is how much B and G change between two
updates, so that high rates and other clients' images (they move B, too) help; directions below the noise of the message
are left to the prior. All updates must be of the same image alone: an image whose own update differs much from the one
received is not vouched for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attacks.attention import find_first_attention, input_factor
from attacks.base import Attack
from attacks.certificate import certify
from attacks.closed_form.token_equations import prefix_tokens, was_sent
from attacks.closed_form.token_span import TokenSpan
from attacks.linear.input_spans import bias_of, count_inputs
from attacks.linear.position_rows import unmet_assumptions
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

# Relative difference of the update of the image found from the one received, above which nothing is vouched for: on 6
# photographs 0.03 to 2.4 at the right image (19 to 29 dB), 1.2 to 1,000 where two images were mixed.
LARGEST_DIFFERENCE = 0.5
# Share of the tokens found outside the span that the updates show, above which directions are missing and the expected
# error is too small, in some patches by a factor of 12. Above it 1,130 of 9,216 patches were vouched for and below
# 25 dB, up to it none of 5,824 (trained vit_mini_32, ranks 4 to 16, 7 to 23 updates, rates of 0.02 to 0.3, 40 images:
# photographs and CIFAR-10).
LARGEST_SHARE_OUTSIDE = 2e-3


@dataclass(frozen=True, kw_only=True)
class LoRASpan(Attack):
    """Collect the rows of dL/dA of the first attention over a client's updates, and solve as `token_span` does."""

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS, Capability.SEVERAL_ROUNDS})
    updates_wanted: ClassVar[int] = 24  # of rank 4 on 65 tokens: 96 directions, which are nearly parallel

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        try:
            _collected(observations)
        except UsageError as error:
            return str(error)
        return ""

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`.

        `details` are those of `token_span`, with the number of updates that gave rows (updates) and the directions that
        they show above the noise (directions), and by how much the update of the image found differs from the one
        received, relative to its size (difference).
        """
        target = observations[-1]
        rows = _collected(observations)
        tokens, stacked = _tokens(target), torch.cat(rows)
        found = TokenSpan(steps=0).reconstruct([_as_whole_layer(target, stacked)])
        directions, residual = count_inputs(stacked, stacked.dtype), certify(target, found)[1]
        reasons = _incomplete(target, found, directions, tokens)
        if not reasons and found.diagnosis:
            reasons.append(found.diagnosis)
        if directions > tokens:
            reasons.append(
                f"the updates span {directions} directions, and one image has {tokens} tokens: they are of several "
                "images"
            )
        elif math.isnan(residual):
            reasons.append(
                "whether the image found gives this update could not be checked: grant labels, or send the "
                "classifier's gradient"
            )
        elif not residual < LARGEST_DIFFERENCE:
            reasons.append(
                f"the update of the image found differs from the one received by {residual:.1f} times its size: the "
                "updates show too little of the span, or are of several images"
            )
        details = {**found.details, "updates": len(rows), "directions": directions, "difference": residual}
        known = found.known if not reasons or found.known is None else torch.zeros_like(found.known)
        return replace(found, known=known, diagnosis="; ".join(reasons), details=details)


def _incomplete(target: Observation, found: Reconstruction, directions: int, tokens: int) -> list[str]:
    """Why the expected errors of `found` do not hold where the updates show too few directions; empty where they do.

    `token_span` would take the missing directions for tokens that were changed (dropout), and say so.
    """
    outside = found.details["residual"]
    if directions >= tokens or outside <= LARGEST_SHARE_OUTSIDE:
        return []
    return [
        *unmet_assumptions(target.num_examples, target.local_steps),
        f"{outside:.2g} of the tokens lie outside the {directions} directions that the updates show of the {tokens} "
        "tokens: the error of the pixels cannot be estimated",
    ]


def _factors(observation: Observation) -> list[str]:
    """Names of the factors A beside the first attention's weights.

    Raises:
        UsageError: there is none.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    weights = find_first_attention(observation.model, tokenizer.width).weights
    found = [name for name in (input_factor(observation.model, weight) for weight in weights) if name]
    if not found:
        raise UsageError("the first attention has no low-rank factors (LoRA), whose gradients are collected here")
    return found


def _as_whole_layer(observation: Observation, rows: Tensor) -> Observation:
    """The update as if the rows were the gradient of the first attention's weights, without biases.

    Where there are several weights each has a part of them: rows that occur twice would count as twice the equations.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    weights = find_first_attention(observation.model, tokenizer.width).weights
    biases = {bias_of(weight) for weight in weights}
    others = {n: g for n, g in observation.gradients.items() if n not in biases}
    return replace(observation, gradients=others | dict(zip(weights, rows.tensor_split(len(weights)), strict=True)))


def _tokens(observation: Observation) -> int:
    """Tokens of an image in the first attention."""
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    return tokenizer.num_patches + prefix_tokens(tokenizer)


def _collected(observations: Sequence[Observation]) -> list[Tensor]:
    """dL/dA (r, D) of every update in which it is not zero, and whose inputs are those of the last one's model.

    Raises:
        UsageError: there is none, or they have fewer rows than an image has tokens.
    """
    target = observations[-1]
    factors, tokens = _factors(target), _tokens(target)
    before = _before_attention(target)
    found = [
        torch.cat([o.gradients[name] for name in factors if was_sent(o, name)])
        for o in observations
        if any(was_sent(o, name) for name in factors)
        and all(torch.equal(t, before[n]) for n, t in _before_attention(o).items())
    ]
    if not found:
        raise UsageError(
            f"the gradient of {factors[0]} is zero or not sent: the factor B starts at zero, so that a client's first "
            "update holds nothing of it; attack later ones"
        )
    if sum(map(len, found)) <= tokens:
        raise UsageError(
            f"{len(found)} updates of rank {len(found[0])} show at most {sum(map(len, found))} directions of the "
            f"{tokens} tokens of an image; attack when there are more than {tokens // len(found[0])}"
        )
    return found


def _before_attention(observation: Observation) -> dict[str, Tensor]:
    """The parameters that make the first attention's inputs of an image, by name."""
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    norm = find_first_attention(observation.model, tokenizer.width).norm
    names = {tokenizer.weight, tokenizer.bias, tokenizer.positions, f"{norm}.weight", f"{norm}.bias"}
    return {n: p for n, p in observation.model.named_parameters() if n in names}
